"""A minute of mixed work: memory stays flat, and nothing is compiled again.

The work is that of `benchmarks.measurements.endurance`, which takes as long as it is told.
"""

from collections.abc import Iterator

from benchmarks.measurements.endurance import watch
from benchmarks.report import Pieces, Table

MINUTES = 1.0


def pieces() -> Pieces:
    """Rounds, compilations and memory after the warm-up."""
    yield Table("endurance", ("after the warm-up", ""), rows())


def rows() -> Iterator[list[str]]:
    """What was seen."""
    found = watch(MINUTES)
    yield ["rounds of mixed work", str(found.rounds)]
    yield ["functions compiled", str(len(found.compiled))]
    yield ["median resident memory, first half", f"{found.early:,.0f} MiB"]
    yield ["median resident memory, second half", f"{found.late:,.0f} MiB"]
    yield ["peak, warm-up included", f"{found.peak:,.0f} MiB"]
