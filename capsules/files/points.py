"""Reading one scene from whatever holds points: an npz scene file, a CSV or a JSON file."""

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.scenes import Scene


MAX_BYTES = 1 << 26
"""Size of a text file beyond which it cannot be one scene."""


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

    A CSV file has a point on each line, after a heading if it likes. A JSON file is a list of
    points, or an object with such a list under "points".
    """
    from models.scenes import make_scene

    readers = {".csv": _from_csv, ".json": _from_json}
    if path.suffix.lower() not in readers:
        return stored_scene(path, index)
    return make_scene(_numbers(path, readers[path.suffix.lower()](path)), num_parts)


def _from_csv(path: Path) -> Any:
    from models.errors import InputError

    try:
        rows = [row for row in csv.reader(_text(path).splitlines()) if any(map(str.strip, row))]
    except csv.Error as error:
        raise InputError(
            f"{path} is not CSV ({error}); give a line `x,y` for each point"
        ) from error
    if rows and not all(map(_is_number, rows[0])):
        rows = rows[1:]
    return rows


def _from_json(path: Path) -> Any:
    from models.errors import InputError

    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError) as error:  # too many digits and brackets are among them
        raise InputError(
            f"{path} is not JSON ({error}); give a list of points, as in [[0.1, 0.2], [0.3, 0.4]]"
        ) from error
    return content.get("points") if isinstance(content, dict) else content


def _text(path: Path) -> str:
    from models.errors import InputError

    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no ordinary file")
        if path.exists() and path.stat().st_size > MAX_BYTES:
            raise OSError(f"it has more than {MAX_BYTES >> 20} MiB")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} ({error}); give a file of points") from error


def _numbers(path: Path, rows: Any) -> Any:
    import numpy as np

    from models.errors import InputError

    try:
        array = np.array(rows, float)
        if array.ndim != 2 or not array.size:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise InputError(
            f"{path} does not hold points, wanted the same number of coordinates for each of them; "
            "give a CSV with a line `x,y` for each point, or JSON as [[x, y], ...]"
        ) from None
    return array


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
