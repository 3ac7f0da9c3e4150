"""Points of a single scene as text: CSV or JSON.

A CSV file has a point on each line, after an optional heading of names. A JSON file is a list of
points, or an object with such a list under "points".
"""

import csv
import io
import json
import re
from typing import Any

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity)", re.A | re.I)


def _from_csv(text: str) -> list[list[float]]:
    rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    lines = [(n, [x.strip() for x in row]) for n, row in enumerate(rows, start=1)]
    lines = [(number, row) for number, row in lines if any(row)]
    if lines and all(x.isidentifier() and not NUMBER.fullmatch(x) for x in lines[0][1]):
        lines = lines[1:]  # a heading
    for number, row in lines:
        if wrong := [x for x in row if not NUMBER.fullmatch(x)]:
            raise ValueError(f"{wrong[0][:40]!r} in line {number} is not a number")
    return [[float(x) for x in row] for _, row in lines]


def _from_json(text: str) -> list[list[float]]:
    content = json.loads(text, object_pairs_hook=_distinct)
    points = content.get("points") if isinstance(content, dict) else content
    if not isinstance(points, list) or not all(isinstance(point, list) for point in points):
        raise ValueError("it is not a list of lists")
    for x in (x for point in points for x in point):
        if type(x) not in (int, float):  # a bool is an int
            raise ValueError(f"{json.dumps(x)[:40]} is not a number")
    return [[float(x) for x in point] for point in points]


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


READERS = {".csv": _from_csv, ".json": _from_json}
"""What reads the points from a text, by the end of the file's name; wrong text is a ValueError."""
