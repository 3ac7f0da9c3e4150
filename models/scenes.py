"""Scenes: the observed points, padded to one row for each part, and the files that hold them."""

import contextlib
import errno
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

from models import AnyArray
from models.errors import InputError
from models.npz import ArrayFile, Header

MAX_BYTES = 2 << 30
"""What `load_scenes` reads into memory at most."""


class Layout(NamedTuple):
    """What all scenes of a batch have in common: enough to compile a method for them."""

    num_rows: int
    num_features: int
    has_types: bool
    num_objects: int | None
    """Where it is known which objects are present, of how many."""

    def blank(self) -> "Scene":
        """A scene of this layout with nothing in it, as something to trace a program with."""
        return Scene(
            np.zeros((self.num_rows, self.num_features)),
            np.ones(self.num_rows, bool),
            point_type=np.zeros(self.num_rows, int) if self.has_types else None,
            presence=None if self.num_objects is None else np.ones(self.num_objects, bool),
        )


class Scene(NamedTuple):
    """One scene or, with a leading axis, a batch of them.

    Rows that are not `present` are dummies: they make the match square and their values do not
    count. `object` is the truth where it is known: the object of each row, -1 for a dummy.
    `point_type` is what kind of part each point is, where points have kinds (faces). `presence`
    says which objects are there (and in which state, see `inference.presence`), where that is known
    and the program has a site for it.
    """

    points: Float[AnyArray, "*batch N d"]
    present: Bool[AnyArray, "*batch N"]
    object: Int[AnyArray, "*batch N"] | None = None
    point_type: Int[AnyArray, "*batch N"] | None = None
    presence: Bool[AnyArray, "*batch K"] | Int[AnyArray, "*batch K"] | None = None

    @property
    def observed(self) -> dict[str, AnyArray]:
        """The arguments that a program takes: all that is known but the truth."""
        inputs = self._replace(object=None)._asdict()
        return {name: value for name, value in inputs.items() if value is not None}

    @property
    def layout(self) -> Layout:
        num_rows, num_features = np.shape(self.points)[-2:]
        num_objects = None if self.presence is None else np.shape(self.presence)[-1]
        return Layout(num_rows, num_features, self.point_type is not None, num_objects)

    @property
    def is_batch(self) -> bool:
        return np.ndim(self.points) == 3

    def take(self, index: Any) -> "Scene":
        """Scenes of a batch, by number, slice or mask."""
        return Scene(*(None if field is None else field[index] for field in self))

    def batch(self) -> "Scene":
        """A single scene as a batch of one; a batch as it is."""
        return self if self.is_batch else self.take(None)


def join(scenes: Sequence[Scene]) -> Scene:
    """Scenes and batches of scenes, all of one layout, as one batch."""
    fields = zip(*(scene.batch() for scene in scenes), strict=True)
    return Scene(*(None if field[0] is None else np.concatenate(field) for field in fields))


def make_scene(points: ArrayLike, num_parts: int) -> Scene:
    """A scene from just its points, (M, d), padded to `num_parts` rows."""
    array = np.asarray(points, float)
    if array.ndim != 2:
        raise InputError(
            f"a scene wants its points as an array (points, features), got shape {array.shape}; "
            "give one row for each point"
        )
    if len(array) > num_parts:
        raise InputError(
            f"the scene has {len(array)} points but the program only {num_parts} parts; add "
            "templates to the program or remove points"
        )
    padding = num_parts - len(array)
    padded = np.pad(array, [(0, padding), (0, 0)])
    return check_scene(Scene(padded, np.arange(num_parts) < len(array)))


def check_scene(
    scene: Scene, num_parts: int | None = None, num_features: int | None = None
) -> Scene:
    """Return the scene as arrays, or say in a sentence what is wrong with it."""
    scene = _checked_arrays(scene)
    points, present = scene.points, scene.present
    if num_parts is not None and points.shape[-2] != num_parts:
        raise InputError(
            f"the scene has {points.shape[-2]} rows but the program {num_parts} parts; pad the "
            f"scene to {num_parts} rows (models.scenes.make_scene) or choose other templates"
        )
    if num_features is not None and points.shape[-1] != num_features:
        raise InputError(
            f"the points have {points.shape[-1]} features but the program's parts {num_features}; "
            "give points of that dimension or choose another pose design"
        )
    if not np.isfinite(points[present]).all():
        raise InputError(
            "some points are NaN or infinite, wanted finite numbers; mark missing points by "
            "present = false"
        )
    empty = ~present.any(axis=-1)
    if empty.any():
        raise InputError(
            f"{np.sum(empty)} of {empty.size} scenes have no points, wanted at least one; drop "
            "empty scenes first"
        )
    return scene._replace(points=np.where(present[..., None], points, 0.0))


def _checked_arrays(scene: Scene) -> Scene:
    """The fields as numpy arrays whose shapes and types fit each other."""
    points, present = np.asarray(scene.points, float), np.asarray(scene.present)
    if points.ndim not in (2, 3) or points.shape[:-1] != present.shape:
        raise InputError(
            f"a scene wants points (..., rows, features) and present (..., rows), got "
            f"{points.shape} and {present.shape}; give both one row for each part"
        )
    if present.dtype != bool:
        raise InputError(
            f"present must be true or false for each row, got numbers of type {present.dtype}; "
            "convert it with astype(bool)"
        )
    whole = {}
    for name in ("object", "point_type"):
        value = getattr(scene, name)
        array = None if value is None else np.asarray(value)
        if array is not None and (array.shape != present.shape or array.dtype.kind not in "iu"):
            raise InputError(
                f"{name} wants a whole number for each row, shape {present.shape}, got "
                f"{array.shape} of type {array.dtype}; give each point one, missing ones -1"
            )
        whole[name] = array
    presence = None if scene.presence is None else np.asarray(scene.presence)
    if presence is not None and (
        presence.dtype.kind not in "biu" or presence.shape[:-1] != present.shape[:-1]
    ):
        raise InputError(
            "presence wants true or false, or a whole number, for each object, (..., objects), got "
            f"{presence.shape} of type {presence.dtype}; leave it out if it is not known"
        )
    return Scene(points, present, **whole, presence=presence)


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
            return _checked_arrays(Scene(**arrays))

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
                "models.scenes.save_scenes"
            )
        stand_ins = {name: np.broadcast_to(h.dtype.type(), h.shape) for name, h in headers.items()}
        stand_ins["points"] = np.broadcast_to(0.0, points.shape)
        with self._named():
            _checked_arrays(Scene(**stand_ins))  # shapes and types, in no memory at all
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
