"""Run the benchmarks and print one table: `python -m benchmarks [cavi] [exact] [methods] ...`."""

import sys

from rich.console import Console
from rich.table import Table

from benchmarks import (
    calibration,
    cavi,
    clutter,
    endurance,
    errors,
    exact,
    faces,
    growing,
    growth,
    latency,
    learning,
    memory,
    methods,
    missing,
    quality,
    throughput,
    walk,
)

BENCHMARKS = {
    "cavi": cavi.rows,
    "clutter": clutter.rows,
    "endurance": endurance.rows,
    "exact": exact.rows,
    "faces": faces.rows,
    "latency": latency.rows,
    "learning": learning.rows,
    "memory": memory.rows,
    "methods": methods.rows,
    "missing": missing.rows,
    "quality": quality.rows,
    "throughput": throughput.rows,
    "walk": walk.rows,
}
FIGURES = {
    "calibration": calibration.rows,
    "errors": errors.rows,
    "growing": growing.rows,
    "growth": growth.rows,
}
"""These draw a picture of the documentation anew, and only run when they are named."""


def main(names: list[str]) -> int:
    """Run the named benchmarks, by default all but those that draw a picture."""
    known = BENCHMARKS | FIGURES
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"there is no benchmark {unknown[0]!r}; choose from {', '.join(known)}")
        return 2
    table = Table("what", "reference", "this project", "ratio", title="Benchmarks")
    for name in names or BENCHMARKS:
        for row in known[name]():
            table.add_row(*row)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
