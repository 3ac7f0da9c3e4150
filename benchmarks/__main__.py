"""Run the benchmarks and print a table: `python -m benchmarks [cavi] [exact] [methods] ...`."""

import sys

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
    **{f"learning-{name}": rows for name, rows in learning.PIECES.items()},
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
"""These redraw a picture of the documentation, and run only when they are named."""


def main(names: list[str]) -> int:
    """Run the named benchmarks, by default all but those that draw a picture.

    A name stands for all that begin with it: `learning` for `learning-time` and so on. Rows are
    printed as they come.
    """
    known = BENCHMARKS | FIGURES
    chosen: list[str] = []
    for name in names:
        found = [one for one in known if one == name or one.startswith(f"{name}-")]
        if not found:
            print(f"there is no benchmark {name!r}; choose from {', '.join(known)}")
            return 2
        chosen += found
    print("| what | reference | this project | ratio |\n| --- | --- | --- | --- |", flush=True)
    for name in chosen or BENCHMARKS:
        for row in known[name]():
            print("|", " | ".join(row), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
