"""Scenes: the observed points, padded to one row for each part."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int

from models.errors import InputError
from models.numerics.arrays import AnyArray


class Layout(NamedTuple):
    """Shapes and optional fields of all scenes of a batch: enough to compile a method for them."""

    num_rows: int
    num_features: int
    has_types: bool
    num_objects: int | None
    """The number of objects if the scenes have `presence`, else None."""

    def blank(self) -> "Scene":
        """A scene of zeros with this layout, to trace a program with."""
        return Scene(
            np.zeros((self.num_rows, self.num_features)),
            np.ones(self.num_rows, bool),
            point_type=np.zeros(self.num_rows, int) if self.has_types else None,
            presence=None if self.num_objects is None else np.ones(self.num_objects, bool),
        )


class Scene(NamedTuple):
    """One scene or, with a leading axis, a batch of them.

    Rows that are not `present` are dummies: they make the match square and their values are
    ignored. `object` is the true object of each row, if known, and -1 for a dummy. `point_type` is
    the part type of each point, if points have types (faces). `presence` says which objects are
    present (and in which state), if that is known and the program has a site for it.
    """

    points: Float[AnyArray, "*batch N d"]
    present: Bool[AnyArray, "*batch N"]
    object: Int[AnyArray, "*batch N"] | None = None
    point_type: Int[AnyArray, "*batch N"] | None = None
    presence: Bool[AnyArray, "*batch K"] | Int[AnyArray, "*batch K"] | None = None

    @property
    def observed(self) -> dict[str, AnyArray]:
        """The arguments for a program: all fields that are set, except the truth."""
        inputs = self._replace(object=None)._asdict()
        return {name: value for name, value in inputs.items() if value is not None}

    @property
    def layout(self) -> Layout:
        """The layout that all scenes of a batch share."""
        num_rows, num_features = np.shape(self.points)[-2:]
        num_objects = None if self.presence is None else np.shape(self.presence)[-1]
        return Layout(num_rows, num_features, self.point_type is not None, num_objects)

    @property
    def is_batch(self) -> bool:
        """Whether it has a leading axis of scenes."""
        return np.ndim(self.points) == 3

    def take(self, index: Any) -> "Scene":
        """Scenes of a batch, by number, slice or mask."""
        return Scene(*(None if field is None else field[index] for field in self))

    def batch(self) -> "Scene":
        """A single scene as a batch of one; a batch as it is."""
        return self if self.is_batch else self.take(None)


def join(scenes: Sequence[Scene]) -> Scene:
    """Join scenes and batches of scenes, all of one layout, into one batch."""
    fields = zip(*(scene.batch() for scene in scenes), strict=True)
    return Scene(*(None if field[0] is None else np.concatenate(field) for field in fields))


def make_scene(points: ArrayLike, num_parts: int) -> Scene:
    """Make a scene from its points, (M, d), padded to `num_parts` rows."""
    array = np.asarray(points, float)
    if array.ndim != 2:
        raise InputError(
            f"the points of a scene must be an array (points, features), got shape {array.shape}; "
            "give one row for each point"
        )
    if len(array) > num_parts:
        raise InputError(
            f"the scene has {len(array)} points but the program has only {num_parts} parts; add "
            "templates to the program or remove points"
        )
    padding = num_parts - len(array)
    padded = np.pad(array, [(0, padding), (0, 0)])
    return check_scene(Scene(padded, np.arange(num_parts) < len(array)))


def points_first(
    present: Bool[np.ndarray, "scenes N"],
) -> tuple[Int[np.ndarray, "scenes N"], Int[np.ndarray, " scenes"]]:
    """Orders of the rows that put points before dummies, and how many points each scene has."""
    return np.argsort(~present, axis=1, kind="stable"), present.sum(axis=1)


def check_layout(shape: tuple[int, ...], num_parts: int, num_features: int) -> None:
    """Raise an InputError if points of shape (..., rows, features) do not fit a program's parts."""
    *_, rows, features = (0, *shape)
    if features != num_features:
        raise InputError(
            f"the points have {features} features but the program's parts have {num_features}; "
            "give points of that dimension or choose another pose design"
        )
    if rows != num_parts:
        raise InputError(
            f"the scene has {rows} rows but the program has {num_parts} parts; pad the scene to "
            f"{num_parts} rows (models.make_scene) or choose other templates"
        )


def check_scene(scene: Scene) -> Scene:
    """Return the scene as arrays, zero in dummy rows; raise an InputError if it cannot be used."""
    scene = checked_arrays(scene)
    points, present = scene.points, scene.present
    if not np.isfinite(points[present]).all():
        raise InputError(
            "some points are NaN or infinite, but must be finite; mark missing points by "
            "present = false"
        )
    empty = ~present.any(axis=-1)
    if empty.any():
        raise InputError(
            f"{np.sum(empty)} of {empty.size} scenes have no points, but each must have at least "
            "one; drop empty scenes first"
        )
    for name in ("object", "point_type"):
        labels = getattr(scene, name)
        if labels is not None and (labels[present] < 0).any():
            raise InputError(
                f"{name} must be 0 or more where there is a point, got {labels[present].min()}; "
                "use -1 only for rows without one"
            )
    return scene._replace(points=np.where(present[..., None], points, 0.0))


def checked_arrays(scene: Scene) -> Scene:
    """The fields as numpy arrays whose shapes and types fit each other."""
    points, present = np.asarray(scene.points, float), np.asarray(scene.present)
    if points.ndim not in (2, 3) or points.shape[:-1] != present.shape:
        raise InputError(
            f"a scene requires points (..., rows, features) and present (..., rows), got "
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
                f"{name} must be an integer for each row, shape {present.shape}, got "
                f"{array.shape} of type {array.dtype}; give each point one, dummy rows -1"
            )
        whole[name] = array
    presence = None if scene.presence is None else np.asarray(scene.presence)
    if presence is not None and (
        presence.dtype.kind not in "biu" or presence.shape[:-1] != present.shape[:-1]
    ):
        raise InputError(
            "presence must be true or false, or an integer, for each object, (..., objects), got "
            f"{presence.shape} of type {presence.dtype}; leave it out if it is not known"
        )
    return Scene(points, present, **whole, presence=presence)
