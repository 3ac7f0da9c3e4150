"""Reading one scene from whatever holds points: an npz scene file, a CSV or a JSON file."""

import csv
import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.scenes import Scene


MAX_BYTES = 1 << 26
"""Size of a text file beyond which it cannot be one scene."""

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity)", re.A | re.I)


def stored_scene(path: Path, index: int) -> "Scene":
    from capsules.files.scenes import SceneFile
    from models.errors import InputError

    with SceneFile(path) as file:
        numbers = file.occupied()
        if not 0 <= index < len(numbers):
            raise InputError(
                f"{path} has {len(numbers)} scenes with points, so there is no scene {index}; give "
                f"an index from 0 to {len(numbers) - 1}"
            )
        return file.take(numbers[index : index + 1]).take(0)


def read_scene(path: Path, index: int, num_parts: int) -> "Scene":
    """A single scene, padded to the parts of the program.

    A CSV file has a point on each line, after a heading of names if it likes. A JSON file is a list
    of points, or an object with such a list under "points".
    """
    import numpy as np

    from models.errors import InputError
    from models.scenes import make_scene

    readers = {".csv": _from_csv, ".json": _from_json}
    if path.suffix.lower() not in readers:
        return stored_scene(path, index)
    try:
        points = readers[path.suffix.lower()](_text(path))
        if not points or not points[0] or len({len(point) for point in points}) > 1:
            raise ValueError("points need the same number of coordinates, one or more")
    except (ValueError, RecursionError, OverflowError, csv.Error) as error:
        reason = "numbers too large" if isinstance(error, OverflowError) else error
        raise InputError(
            f"{path} does not hold points ({reason}); give a CSV with a line `x,y` for each point, "
            "or JSON as in [[0.1, 0.2], [0.3, 0.4]]"
        ) from error
    return make_scene(np.array(points), num_parts)


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
        raise ValueError("it is no list of lists")
    for x in (x for point in points for x in point):
        if type(x) not in (int, float):  # a bool is an int
            raise ValueError(f"{json.dumps(x)[:40]} is not a number")
    return [[float(x) for x in point] for point in points]


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _text(path: Path) -> str:
    from capsules.files.paths import check_input

    check_input(path, "points", MAX_BYTES)
    return path.read_text(encoding="utf-8-sig")
