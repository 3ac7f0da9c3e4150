"""Input files: ordinary files, npz files of arrays, and the scenes in them.

Arrays are read some rows at a time, because a file may be far larger than memory. Sizes and
checksums are checked before any value is read: a file that unpacks to far more than its size is
refused, headers must state the true size, and every member must match its checksum. Pickled objects
are never opened.
"""

import contextlib
import csv
import errno
import functools
import hashlib
import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.lib import format as npy

from capsules.files.points import READERS
from models.errors import InputError
from models.scenes import Scene, check_scene, checked_arrays, join, make_scene

LONGEST_REASON = 300
"""Largest number of characters of a library's message that is shown."""

MAX_UNPACKED, MAX_RATIO = 1 << 28, 100
"""Bytes that a file may unpack to, unless its compression ratio is below the limit."""

SCENES = "an npz file of plain arrays `points`, `present`, `object`, as `capsules sample` writes it"

MAX_BYTES, MAX_SCENE_BYTES = 1 << 29, 1 << 18
"""Largest size of what `load_scenes` reads, and of one scene: a few copies fit into 2 GiB."""

MAX_TEXT_BYTES = 1 << 26
"""Largest size of a text file; a larger one cannot be one scene."""

KINDS = {"points": "fiu", "present": "b", "object": "iu", "point_type": "iu"}
"""The arrays of a scene file, and the kinds of numbers that they may hold."""

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def reason_of(error: BaseException) -> str:
    """Why something failed, on one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:LONGEST_REASON]


def check_ordinary(path: Path) -> None:
    """Raise `OSError` for a folder, a device or a pipe, which may have no end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not an ordinary file")


def check_input(path: Path, what: str, max_bytes: int | None = None) -> None:
    """Raise an InputError if a file, which should be `what`, is not ordinary or is too large."""
    try:
        exists = path.exists()
        check_ordinary(path)
        if exists and max_bytes is not None and path.stat().st_size > max_bytes:
            raise OSError(f"it has more than {max_bytes >> 20} MiB")
    except OSError as error:
        raise InputError(
            f"cannot read {path} as {what} ({reason_of(error)}); give another file"
        ) from error
    if not exists:
        raise InputError(f"there is no file {path}; `capsules sample` writes one")


class Header(NamedTuple):
    """The header of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin: int
    """The position at which its numbers begin."""
    column_major: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class ArrayFile:
    """An open npz file: the headers of its arrays, and their rows by number."""

    def __init__(self, path: Path, what: str, wanted: str = SCENES) -> None:
        """Open a file; errors say `what` it should be, "a scene file", and what to give."""
        self.path, self.what, self.wanted = path, what, wanted
        self._streams: dict[str, IO[bytes]] = {}
        check_input(path, what)
        try:
            self._zip = zipfile.ZipFile(path)
        except Exception as error:  # a damaged file makes zipfile raise nearly anything
            raise self._unreadable(error) from error
        members = self._zip.infolist()
        self._members = {info.filename.removesuffix(".npy"): info for info in members}
        try:
            if len(self._members) < len(members):
                raise ValueError("two of its arrays have the same name")
            if any(info.compress_type not in _METHODS for info in members):
                raise ValueError("it is compressed in a way that numpy does not use")
            self._checked = self._state()
            self._check_size(sum(info.file_size for info in members))
            if (damaged := self._zip.testzip()) is not None:
                raise ValueError(f"the checksum of {damaged} is wrong")
        except Exception as error:
            self._zip.close()
            raise self._unreadable(error) from error

    def __enter__(self) -> "ArrayFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for stream in self._streams.values():
            stream.close()
        self._zip.close()

    @property
    def names(self) -> list[str]:
        """Names of its arrays."""
        return list(self._members)

    def digest(self) -> str:
        """A digest of the content of the file."""
        assert self._zip.fp is not None
        self._zip.fp.seek(0)
        return hashlib.file_digest(self._zip.fp, "sha256").hexdigest()  # type: ignore[arg-type]

    def header(self, name: str) -> Header:
        """The header of an array; an InputError unless it has plain numbers of the stated size."""
        info = self._members[name]
        try:
            stream = self._stream(name)
            stream.seek(0)
            version = npy.read_magic(stream)
            shape, column_major, dtype = _HEADERS[version](stream)
            begin = stream.tell()
            if dtype.kind not in "biuf":
                what = "pickled objects" if dtype.hasobject else f"values of type {dtype}"
                raise ValueError(f"{name} holds {what}, and only plain numbers are read")
            stated = math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or begin + stated != info.file_size:
                raise ValueError(
                    f"the header of {name} says {shape} of type {dtype}, {stated:,} bytes, but "
                    f"there are {info.file_size - begin:,}"
                )
        except Exception as error:
            raise self._unreadable(error) from error
        return Header(shape, dtype, begin, column_major and len(shape) > 1)

    def rows(self, name: str, header: Header, start: int, stop: int) -> np.ndarray:
        """Rows of an array; the others are skipped and not kept in memory."""
        if header.column_major:
            return self._whole(name, header)[start:stop]
        shape = (stop - start, *header.shape[1:])
        raw = self._read(name, header.begin + start * header.row_bytes, shape, header)
        return raw.reshape(shape)

    def array(self, name: str) -> np.ndarray:
        """A whole array."""
        header = self.header(name)
        if header.column_major:
            return self._whole(name, header)
        return self._read(name, header.begin, header.shape, header).reshape(header.shape)

    def _whole(self, name: str, header: Header) -> np.ndarray:
        """An array that is stored column by column; it is read whole, so it must be small."""
        if math.prod(header.shape) * header.dtype.itemsize > 1 << 28:
            raise InputError(
                f"{name} of {self.path} is large and stored column by column; write it with "
                "numpy.ascontiguousarray, so that scenes can be read one after another"
            )
        return self._read(name, header.begin, header.shape, header).reshape(header.shape, order="F")

    def _read(self, name: str, begin: int, shape: tuple[int, ...], header: Header) -> np.ndarray:
        size = math.prod(shape) * header.dtype.itemsize
        try:
            stream = self._stream(name)
            stream.seek(begin)
            content = stream.read(size)
            if len(content) != size:
                raise EOFError(f"{name} ends too early")
            if self._state() != self._checked:  # rows are read long after their checksum
                raise ValueError("it was changed while it was read")
        except Exception as error:
            raise self._unreadable(error) from error
        return np.frombuffer(content, header.dtype)

    def _state(self) -> tuple[int, int]:
        """Time of the last change and size, which tell whether the file was written to."""
        assert self._zip.fp is not None
        state = os.fstat(self._zip.fp.fileno())
        return state.st_mtime_ns, state.st_size

    def _stream(self, name: str) -> IO[bytes]:
        if name not in self._streams:
            self._streams[name] = self._zip.open(self._members[name])
        return self._streams[name]

    def _check_size(self, unpacked: int) -> None:
        most = max(MAX_UNPACKED, MAX_RATIO * self.path.stat().st_size)
        if unpacked > most:
            raise ValueError(
                f"it unpacks to {unpacked / 2**20:,.0f} MiB, more than {MAX_RATIO} times its size "
                f"and than {MAX_UNPACKED >> 20} MiB"
            )

    def _unreadable(self, error: Exception) -> InputError:
        return InputError(
            f"cannot read {self.path} as {self.what} ({reason_of(error)}); give {self.wanted}"
        )


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

    A scene file has a scene for each index, a text file (`capsules.files.points`) has one.
    """
    if path.suffix.lower() not in READERS:
        return stored_scene(path, index)
    try:
        check_input(path, "points", MAX_TEXT_BYTES)
        points = READERS[path.suffix.lower()](path.read_text(encoding="utf-8-sig"))
        if not points or not points[0] or len({len(point) for point in points}) > 1:
            raise ValueError("points need the same number of coordinates, one or more")
    except (ValueError, RecursionError, OverflowError, csv.Error) as error:
        reason = "numbers too large" if isinstance(error, OverflowError) else error
        raise InputError(
            f"{path} does not hold points ({reason}); give a CSV with a line `x,y` for each point, "
            "or JSON as in [[0.1, 0.2], [0.3, 0.4]]"
        ) from error
    return make_scene(np.array(points), num_parts)
