"""Scene files: batches of scenes in npz files, and single scenes as text (CSV, JSON).

The npz files are read some scenes at a time, and written whole.
"""

import contextlib
import csv
import functools
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from capsules.files.inputs import ArrayFile, Header, check_input
from capsules.files.outputs import whole_file
from models.errors import InputError
from models.scenes import Scene, check_scene, checked_arrays, join, make_scene

MAX_BYTES, MAX_SCENE_BYTES = 1 << 29, 1 << 18
"""Largest size of what `load_scenes` reads, and of one scene: a few copies fit into 2 GiB."""

MAX_TEXT_BYTES = 1 << 26
"""Largest size of a text file; a larger one cannot be one scene."""

KINDS = {"points": "fiu", "present": "b", "object": "iu", "point_type": "iu"}
"""The arrays of a scene file, and the kinds of numbers that they may hold."""

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(nan|inf|infinity)", re.A | re.I)


class SceneFile:
    """An open scene file, read some scenes at a time; numbers of scenes count empty ones."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = ArrayFile(self.path, "a scene file")
        try:
            self._headers = self._checked_headers()
        except BaseException:
            self._file.__exit__(None, None, None)
            raise

    def __enter__(self) -> "SceneFile":
        return self

    def __exit__(self, *reason: Any) -> None:
        self._file.__exit__(*reason)

    def __len__(self) -> int:
        return self._headers["points"].shape[0]

    @property
    def has_truth(self) -> bool:
        """Whether it says which object each point belongs to."""
        return "object" in self._headers

    @property
    def scene_bytes(self) -> int:
        """Bytes of memory for one scene."""
        return 8 * sum(math.prod(header.shape[1:]) for header in self._headers.values())

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the file's content."""
        return self._file.digest()

    def read(self, start: int, stop: int) -> Scene:
        """Scenes as they are in the file; their points are not checked yet."""
        arrays = {
            name: self._file.rows(name, header, start, stop)
            for name, header in self._headers.items()
        }
        with self._named():
            return checked_arrays(Scene(**arrays))

    def occupied(self, limit: int | None = None) -> Int[np.ndarray, " scenes"]:
        """The numbers of the non-empty scenes among the first `limit`."""
        if limit is not None and limit < 1:
            raise InputError(
                f"the limit must be 1 or more, got {limit}; leave it out for all scenes"
            )
        count = len(self) if limit is None else min(limit, len(self))
        header = self._headers["present"]
        at_a_time = (1 << 24) // header.row_bytes
        found = []
        for start in range(0, count, at_a_time):
            present = self._file.rows("present", header, start, min(start + at_a_time, count))
            found.append(start + np.flatnonzero(present.any(axis=1)))
        with self._named():
            if not sum(map(len, found)):
                raise InputError("it holds no scene with points; draw some: `capsules sample`")
        return np.concatenate(found)

    def take(self, numbers: Int[np.ndarray, " scenes"]) -> Scene:
        """The scenes with these ascending numbers, checked."""
        at_a_time = 2 * len(numbers)
        pieces = []
        while len(numbers):
            some = numbers[numbers < numbers[0] + at_a_time]
            pieces.append(self.read(some[0], some[-1] + 1).take(some - some[0]))
            numbers = numbers[len(some) :]
        with self._named():
            return check_scene(join(pieces))

    def _checked_headers(self) -> dict[str, Header]:
        names, path = self._file.names, self.path
        for name in ("points", "present"):
            if name not in names:
                raise InputError(
                    f"{path} has no array {name!r}, only {', '.join(map(repr, names[:9]))}; a "
                    "scene file has `points`, `present` and, if known, `object`"
                )
        headers = {name: self._file.header(name) for name in KINDS if name in names}
        points = headers["points"].shape
        for name, header in headers.items():
            wanted = points if name == "points" else points[:-1]
            if header.dtype.kind not in KINDS[name] or len(points) != 3 or header.shape != wanted:
                raise InputError(
                    f"the array {name!r} of {path} has shape {header.shape} and type "
                    f"{header.dtype}, but a scene file has numbers `points` (scenes, rows, "
                    "features), true or false `present` (scenes, rows) and whole numbers `object` "
                    "(scenes, rows); write it with `capsules sample`"
                )
        if 0 in points:
            raise InputError(f"{path} holds no scene with points; draw some: `capsules sample`")
        if (size := 8 * math.prod(points[1:])) > MAX_SCENE_BYTES:
            raise InputError(
                f"a scene of {path} has {points[1]:,} rows of {points[2]:,} features, "
                f"{size >> 10:,} KiB, more than {MAX_SCENE_BYTES >> 10}; cut it into smaller scenes"
            )
        return headers

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from error


def load_scenes(path: str | Path, *, limit: int | None = None) -> Scene:
    """Read a batch of scenes from an npz file with `points`, `present` and, if known, `object`.

    Empty scenes are dropped, as the paper does; `limit` counts scenes before that. All of them come
    into memory at once: `SceneFile` reads some at a time.
    """
    with SceneFile(path) as file:
        numbers = file.occupied(limit)
        size = (numbers[-1] + 1) * file.scene_bytes
        if size > MAX_BYTES:
            raise InputError(
                f"the scenes of {path} take {size / 2**30:.1f} GiB, more than the "
                f"{MAX_BYTES / 2**30:.0f} GiB that are read at once; `capsules infer --all` and "
                "`capsules evaluate` read them some at a time"
            )
        return file.take(numbers)


def save_scenes(path: str | Path, scene: Scene) -> None:
    """Write a batch of scenes to an npz file, whole or not at all."""
    arrays = {"points": scene.points, "present": scene.present}
    for name in ("object", "point_type"):
        if getattr(scene, name) is not None:
            arrays[name] = getattr(scene, name)
    path = Path(path)
    with whole_file(path) as file:
        np.savez_compressed(file, **arrays)


def stored_scene(path: Path, index: int) -> Scene:
    """The non-empty scene with this number; its points are checked by the method."""
    with SceneFile(path) as file:
        numbers = file.occupied()
        if not 0 <= index < len(numbers):
            raise InputError(
                f"{path} has {len(numbers)} scenes with points, so there is no scene {index}; give "
                f"an index from 0 to {len(numbers) - 1}"
            )
        return file.read(numbers[index], numbers[index] + 1).take(0)


def read_scene(path: Path, index: int, num_parts: int) -> Scene:
    """Read a single scene, padded to the parts of the program.

    A CSV file has a point on each line, after an optional heading of names. A JSON file is a list
    of points, or an object with such a list under "points".
    """
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
        raise ValueError("it is not a list of lists")
    for x in (x for point in points for x in point):
        if type(x) not in (int, float):  # a bool is an int
            raise ValueError(f"{json.dumps(x)[:40]} is not a number")
    return [[float(x) for x in point] for point in points]


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _text(path: Path) -> str:
    check_input(path, "points", MAX_TEXT_BYTES)
    return path.read_text(encoding="utf-8-sig")
