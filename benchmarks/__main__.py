"""Run benchmarks and print their tables: `python -m benchmarks [--out FOLDER] [NAME ...]`."""

import argparse
import sys
from pathlib import Path

from benchmarks.measurements import MEASUREMENTS
from benchmarks.report import show
from benchmarks.studies import STUDIES


def main(words: list[str]) -> int:
    """Run the named benchmarks, by default all that measure speed or memory.

    A name stands for all that begin with it: `learning` for `learning-time` and so on.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write tables and pictures")
    asked = parser.parse_args(words)
    known = MEASUREMENTS | {name: study.run for name, study in STUDIES.items()}
    chosen: list[str] = []
    for name in asked.names or MEASUREMENTS:
        found = [one for one in known if one == name or one.startswith(f"{name}-")]
        if not found:
            print(f"there is no benchmark {name!r}; choose from {', '.join(known)}")
            return 2
        chosen += found
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        show(known[name](), asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
