"""Scene files: batches of scenes in npz files, read some at a time and written whole."""

import contextlib
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from capsules.files.npz import ArrayFile, Header
from capsules.files.paths import whole_file
from models.errors import InputError
from models.scenes import Scene, check_scene, checked_arrays, join

MAX_BYTES, MAX_SCENE_BYTES = 1 << 29, 1 << 18
"""Scenes that `load_scenes` reads at most, and a single scene: a few copies fit into 2 GiB."""

KINDS = {"points": "fiu", "present": "b", "object": "iu", "point_type": "iu"}
"""The arrays of a scene file, and the kinds of numbers that they may hold."""


class SceneFile:
    """A scene file that is open, to be read some scenes at a time; empty scenes count here."""

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
        return "object" in self._headers

    @property
    def scene_bytes(self) -> int:
        """Memory that a scene takes."""
        return 8 * sum(math.prod(header.shape[1:]) for header in self._headers.values())

    @functools.cached_property
    def digest(self) -> str:
        """What tells this file from others."""
        return self._file.digest()

    def read(self, start: int, stop: int) -> Scene:
        """Some scenes as they stand in the file; their points are not looked at yet."""
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
        """The scenes with these numbers, ascending, checked."""
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
