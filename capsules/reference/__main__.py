"""Compute reference posteriors again: `python -m capsules.reference [NAME ...]`."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from capsules.files.outputs import whole_file
from capsules.reference.problems import DEFINITIONS
from capsules.reference.registry import FILE, make_entry


def main() -> None:
    """Solve the named problems and write their posteriors."""
    parser = argparse.ArgumentParser(prog="python -m capsules.reference", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="problems; all by default")
    parser.add_argument("--out", type=Path, default=FILE, help="the file to write")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in DEFINITIONS]:
        parser.error(f"there is no problem {unknown[0]!r}; choose from {', '.join(DEFINITIONS)}")
    before = json.loads(FILE.read_text())["posteriors"] if FILE.exists() else {}
    entries = {}
    for name in DEFINITIONS:
        if given.names and name not in given.names and name in before:
            entries[name] = before[name]
        elif not given.names or name in given.names:
            entries[name] = make_entry(name)
            value = entries[name]["posterior"]["log_evidence"]
            print(f"{name}: log evidence {value:.6f}{_change(entries[name], before.get(name))}")
    text = json.dumps({"$schema": "schema.json", "posteriors": entries}, indent=1)
    with whole_file(given.out) as file:
        file.write(_compact(text).encode())
    print(f"Wrote {given.out}.")


def _change(entry: dict[str, Any], before: dict[str, Any] | None) -> str:
    """In words, the largest change of a number from the old file."""
    if before is None:
        return ", new"
    largest = max(
        np.abs(np.subtract(entry["posterior"][key], before["posterior"][key])).max()
        for key in ("log_evidence", "match_probs", "pose_mean", "pose_covariance")
    )
    return f", largest change {largest:.1g}"


def _compact(text: str) -> str:
    """JSON with the numbers of a row on one line."""
    row = re.compile(r"\[\s+([^][{}]*?)\s+\]")
    return row.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text) + "\n"


if __name__ == "__main__":
    main()
