"""Scene files: batches of scenes in npz files, read some at a time and written whole."""

import contextlib
import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int

from capsules.files.npz import ArrayFile, Header
from models.errors import InputError
from models.scenes import Scene, check_scene, checked_arrays, join

MAX_BYTES = 2 << 30
"""What `load_scenes` reads into memory at most."""


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

    @property
    def fingerprint(self) -> str:
        """What tells the scenes of this file from others, without reading them."""
        return self._file.fingerprint(list(self._headers))

    def read(self, start: int, stop: int) -> Scene:
        """Some scenes as they stand in the file; their points are not looked at yet."""
        arrays = {
            name: self._file.rows(name, header, start, stop)
            for name, header in self._headers.items()
        }
        with self._named():
            return checked_arrays(Scene(**arrays))

    def occupied(self, limit: int | None = None) -> Int[np.ndarray, " scenes"]:
        """The numbers of the scenes that have points, among the first so many."""
        count, at_a_time = len(self) if limit is None else min(limit, len(self)), 1 << 16
        header = self._headers["present"]
        found = []
        for start in range(0, count, at_a_time):
            present = self._file.rows("present", header, start, min(start + at_a_time, count))
            found.append(start + np.flatnonzero(present.any(axis=1)))
        with self._named():
            if not sum(map(len, found)):
                raise InputError("it holds no scene with points; draw some with `capsules sample`")
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
                    f"{path} has no array {name!r}, only {', '.join(names) or 'nothing'}; a scene "
                    "file wants `points`, `present` and, if known, `object`"
                )
        fields = (n for n in ("points", "present", "object", "point_type") if n in names)
        headers: dict[str, Header] = {name: self._file.header(name) for name in fields}
        points = headers["points"]
        if len(points.shape) != 3 or points.dtype.kind not in "fiu":
            raise InputError(
                f"the points of {path} have shape {points.shape} and type {points.dtype}, wanted "
                "numbers (scenes, rows, features); write the file with `capsules sample` or "
                "capsules.files.scenes.save_scenes"
            )
        stand_ins = {name: np.broadcast_to(h.dtype.type(), h.shape) for name, h in headers.items()}
        stand_ins["points"] = np.broadcast_to(0.0, points.shape)
        with self._named():
            checked_arrays(Scene(**stand_ins))  # shapes and types, in no memory at all
            if 0 in points.shape:
                raise InputError("it holds no scene with points; draw some with `capsules sample`")
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


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that appears under its name when it is complete, and never before."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if path.exists() and not path.is_file():  # a device would be replaced by a file
            raise OSError(errno.EINVAL, "it is no ordinary file")
        with part.open("wb") as file:
            yield file
        os.replace(part, path)
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror}); choose a folder that exists and is writable"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # the folder may not even exist
            part.unlink(missing_ok=True)
