"""A store of answers: files addressed by all that they depend on, and checked at every read.

The address of an entry is a digest of the project's source (and with it of the version, the
programs and the templates), of the settings and of the data. An edit of any of them leads to
another entry, so no entry is ever stale. An entry is a plain npz file; its zip comment is a digest
of its address and its bytes. An entry that is damaged, or has another address, is reported on
standard error, removed, and computed again.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import json
import os
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import capsules
import guides
import inference
import models
from capsules.files.inputs import check_ordinary, reason_of
from capsules.files.outputs import remove_parts, whole_file
from models.errors import InputError

FOLDERS = [Path(package.__path__[0]) for package in (models, guides, inference, capsules)]
SHOWN = ("commands", "plots")
"""Folders of the source, and subfolders that only show answers and do not count."""

SEAL = hashlib.sha256().digest_size * 2
"""Characters of the digest at the end of an entry."""


MAX_BYTES = 1 << 31
"""Largest size of an entry; the answers of a block are smaller."""


class Entry(NamedTuple):
    """Where an answer is kept, and the digest of all that it depends on."""

    path: Path
    address: str


class Store:
    """A folder of entries. Several commands may read it; `alone` keeps a second writer out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entry(self, name: str, **depends: Any) -> Entry:
        """The entry of this name for these settings and data, and for the present source."""
        content = json.dumps([source(), name, depends], sort_keys=True, default=repr)
        address = hashlib.sha256(content.encode()).hexdigest()
        return Entry(self.folder / f"{name}-{address[:16]}.npz", address)

    def has(self, entry: Entry) -> bool:
        """Whether the entry exists and is sound."""
        return self._content(entry) is not None

    def read(self, entry: Entry) -> dict[str, np.ndarray] | None:
        """The arrays of an entry; None if it is not there, or was damaged."""
        content = self._content(entry)
        if content is None:
            return None
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays)

    def write(self, entry: Entry, content: bytes) -> None:
        """Write an entry; its content comes from `sealed`."""
        with whole_file(entry.path) as file:
            file.write(content)

    def forget(self, entries: Iterable[Entry]) -> None:
        """Remove entries, so that they are computed again."""
        for entry in entries:
            entry.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Make the folder and lock it, so that a second run is refused.

        The lock is the system's own, on the folder; it ends with the process and leaves no file.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise InputError(
                f"cannot write to {self.folder} ({reason_of(error)}); choose another --out"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                os.close(descriptor)
                raise InputError(
                    f"another run is at work in {self.folder}; wait for it, or choose another --out"
                ) from error
            # a network file system without locks: entries are written whole all the same
        try:
            remove_parts(self.folder)
            yield
        finally:
            os.close(descriptor)

    def _content(self, entry: Entry) -> bytes | None:
        try:
            check_ordinary(entry.path)
            if entry.path.stat().st_size <= MAX_BYTES:
                content = entry.path.read_bytes()
                if content[-SEAL:] == _seal(entry.address, content[:-SEAL]):
                    return content
            print(f"{entry.path} is damaged or foreign; it is computed again.", file=sys.stderr)
            entry.path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise InputError(
                f"cannot read {entry.path} ({reason_of(error)}); choose another --out"
            ) from error
        return None


def sealed(entry: Entry, arrays: dict[str, np.ndarray]) -> bytes:
    """The content of an entry: an npz whose zip comment is the digest of its address and bytes."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    with zipfile.ZipFile(buffer, "a") as file:
        file.comment = b"0" * SEAL
    content = buffer.getvalue()[:-SEAL]
    return content + _seal(entry.address, content)


def digest(*arrays: np.ndarray | None) -> str:
    """A digest of data: of shapes, types and values."""
    total = hashlib.sha256()
    for array in arrays:
        if array is not None:
            total.update(f"{array.shape} {array.dtype}".encode())
            total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


@functools.cache
def source() -> str:
    """A digest of the source of models, guides, inference and the application."""
    total = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder.parent)
            if not set(SHOWN) & set(name.parts):
                total.update(f"{name}\0".encode() + path.read_bytes())
    return total.hexdigest()


def _seal(address: str, content: bytes) -> bytes:
    return hashlib.sha256(address.encode() + content).hexdigest().encode()
