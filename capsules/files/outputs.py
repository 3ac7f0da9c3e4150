"""Output files, written whole or not at all."""

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from capsules.files.inputs import check_ordinary, reason_of
from models.errors import InputError
from models.scenes import Scene


def check_output(path: Path, *others: Path | None) -> None:
    """Raise an InputError if a path cannot be written, or is another file of the same command."""
    try:
        if path.is_dir():
            raise OSError(errno.EISDIR, "it is a folder")
        check_ordinary(path)  # a device would be replaced by a file
        if not path.parent.is_dir():
            raise OSError(errno.ENOENT, f"there is no folder {path.parent}")
        if not os.access(path.parent, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(path, error) from error
    if any(other is not None and path.resolve() == other.resolve() for other in others):
        raise InputError(f"{path} is named twice, to be read or written; choose another output")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A buffer that becomes the file when the block ends, and nothing if the block fails."""
    check_output(path)
    buffer = io.BytesIO()
    yield buffer
    try:
        _replace(path, buffer.getbuffer())
    except OSError as error:
        raise _unwritable(path, error) from error


def save_scenes(path: str | Path, scene: Scene) -> None:
    """Write a batch of scenes to an npz file, whole or not at all."""
    arrays = {"points": scene.points, "present": scene.present}
    for name in ("object", "point_type"):
        if getattr(scene, name) is not None:
            arrays[name] = getattr(scene, name)
    path = Path(path)
    with whole_file(path) as file:
        np.savez_compressed(file, **arrays)


def remove_parts(folder: Path) -> None:
    """Remove only the files that a killed process may have left in `whole_file`."""
    for left in folder.glob(".*.part"):
        if left.name[1:-5].isdigit() and left.is_file():
            left.unlink(missing_ok=True)


def _replace(path: Path, content: memoryview) -> None:
    """Write a file without a name, so that a kill leaves nothing behind, then give it its name.

    An existing file can only be replaced by a file with a name, which exists for that moment only.
    """
    named = path.with_name(f".{os.getpid()}.part")
    try:
        try:
            descriptor = os.open(path.parent, os.O_WRONLY | os.O_TMPFILE, 0o666)
            nameless = True
        except (AttributeError, OSError):  # another system, or a network file system
            descriptor = os.open(named, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            nameless = False
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if nameless:  # a folder's descriptor makes Python call linkat, which follows the link
                source = f"/proc/self/fd/{descriptor}"
                with contextlib.suppress(FileExistsError):
                    os.link(source, path, src_dir_fd=descriptor)
                    return
                os.link(source, named, src_dir_fd=descriptor)
        os.replace(named, path)
    finally:
        with contextlib.suppress(OSError):
            named.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot write {path} ({reason_of(error)}); choose a folder that exists and is writable"
    )
