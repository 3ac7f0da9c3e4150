"""Run the benchmarks and print one table: `python -m benchmarks [cavi] [exact] [methods] ...`."""

import sys

from rich.console import Console
from rich.table import Table

from benchmarks import cavi, exact, memory, methods, quality

BENCHMARKS = {
    "cavi": cavi.rows,
    "exact": exact.rows,
    "memory": memory.rows,
    "methods": methods.rows,
    "quality": quality.rows,
}


def main(names: list[str]) -> int:
    """Run the named benchmarks, all of them by default."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"there is no benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}")
        return 2
    table = Table("what", "reference", "this project", "ratio", title="Benchmarks")
    for name in names or BENCHMARKS:
        for row in BENCHMARKS[name]():
            table.add_row(*row)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
