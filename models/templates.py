"""Templates: the parts of all objects, stacked, and the six shapes of the experiments."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from models.errors import InputError
from models.geometry import PoseDesign, similarity
from models.numerics.arrays import AnyArray

CLUTTER = -1
"""The type of a slot for a point that belongs to no object."""


class Parts(NamedTuple):
    """Every part of every object: x = F y + offset + noise, with y the pose of the part's owner.

    Parts of different length are padded to the longest with masked features (`feature_mask` false).
    `owner` is the object that a part belongs to. `type` matters only to match priors built from
    types, under which points match only parts of their own type.

    Slots for clutter, points that belong to no object, are columns beside the parts. They have
    F = 0, a broad density of their own and the type `CLUTTER`. Their owner is the background,
    number K, which is not an object and has no pose.
    """

    F: Float[AnyArray, "parts features pose"]
    offset: Float[AnyArray, "parts features"]
    variance: Float[AnyArray, "parts features"]
    owner: Int[AnyArray, " parts"]
    type: Int[AnyArray, " parts"]
    feature_mask: Bool[AnyArray, "parts features"]

    @property
    def num_parts(self) -> int:
        """N, over all objects."""
        return self.F.shape[0]

    @property
    def num_features(self) -> int:
        """d, of the longest part."""
        return self.F.shape[1]

    @property
    def pose_dim(self) -> int:
        """p, dimensions of a pose."""
        return self.F.shape[2]

    @property
    def num_objects(self) -> int:
        """K. Owners and types are part of a program's structure and never traced."""
        return int(np.max(np.asarray(self.owner)[~np.asarray(self.is_clutter)])) + 1

    @property
    def is_clutter(self) -> Bool[AnyArray, " parts"]:
        """Which columns are slots for clutter."""
        return self.type == CLUTTER

    @jax.jit
    def predict(self, pose: Float[Array, "*batch K p"]) -> Float[Array, "*batch parts features"]:
        """Place all parts given the pose of each object: F y + offset."""
        owner = pose_of_part(self.owner, pose.shape[-2])
        return jnp.einsum("ndp,...np->...nd", self.F, pose[..., owner, :]) + self.offset

    @jax.jit
    def variance_at(
        self, precision: Float[Array, "*batch"]
    ) -> Float[Array, "*batch parts features"]:
        """The variance of each feature at a noise precision; that of clutter does not change."""
        of_parts = jnp.where(self.is_clutter, 1.0, jnp.asarray(precision)[..., None])
        return self.variance / of_parts[..., None]


def pose_of_part(owner: Int[AnyArray, "*batch"], num_objects: int) -> Int[AnyArray, "*batch"]:
    """The index of each part's pose; clutter has none and gets that of the last object."""
    return owner.clip(max=num_objects - 1)


SHAPES: dict[str, np.ndarray] = {
    "square": np.array([[3, 3], [1, 1], [3, 1], [1, 3]]),
    "triangle": np.array([[1, 2], [3, 1], [3, 3]]),
    "trapezoid": np.array([[0, 0], [4, 0], [3, 2], [1, 2]]),
    "pentagon": np.array([[np.sin(a), np.cos(a)] for a in 2 * np.pi * np.arange(5) / 5]),
    "L": np.array([[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [2, 0]]),
    "plane": np.array([[0, 2], [0, -2], [-2, 0], [2, 0], [-1, -2], [1, -2]]),
}
"""Vertices of the six shapes; square and triangle are the paper's (side 2; base and height 2)."""


def normalise(coordinates: ArrayLike, name: str = "template") -> Float[AnyArray, "parts c"]:
    """Centre a template and scale it to mean square norm 1 per part."""
    array = _checked_template(coordinates, name)
    if len(array) < 2:
        raise InputError(
            f"{name} has a single part, but scaling requires two or more; add parts, or stack it "
            "without `normalise`"
        )
    centred = array - array.mean(axis=0)
    return centred / (centred**2).sum(axis=1).mean() ** 0.5


def shapes(*names: str) -> list[Float[np.ndarray, "parts 2"]]:
    """The named shapes, centred and scaled, e.g. `shapes("square", "triangle", "square")`."""
    for name in names:
        if name not in SHAPES:
            raise InputError(
                f"there is no shape {name!r}; give some of {', '.join(SHAPES)}, as in "
                "square,triangle,square"
            )
    return [normalise(SHAPES[name], name) for name in names]


def stack(
    templates: Sequence[ArrayLike],
    design: PoseDesign = similarity,
    variance: float = 1.0,
    *,
    clutter: int = 0,
    clutter_mean: ArrayLike = 0.0,
    clutter_scale: ArrayLike = 1.0,
) -> Parts:
    """Stack the parts of several geometric templates under one pose design.

    Args:
        templates: for each object the coordinates of its parts, (parts, coordinates). They may be
            learnt: the value of a `numpyro.param`, put through `normalise`.
        design: a pose design of `models.geometry`.
        variance: noise variance of each feature; a program's precision divides it.
        clutter: the largest number of points in a scene that belong to no object.
        clutter_mean, clutter_scale: mean and standard deviation of each feature of such a point,
            one number or one for each feature. The precision does not change them.
    """
    if not templates:
        raise InputError("at least one template is required, got none; give the parts of an object")
    arrays = [_checked_template(t, f"template {k}") for k, t in enumerate(templates)]
    if not np.isfinite(variance) or variance <= 0:
        raise InputError(f"the variance of a part must be positive, got {variance}; try 1.0")
    maps = [design(a) for a in arrays]
    numpy = jnp if any(isinstance(a, jax.Array) for a in arrays) else np
    F, offset = (numpy.concatenate(x) for x in zip(*maps, strict=True))
    parts, features = offset.shape
    stacked = Parts(
        F=F,
        offset=offset,
        variance=np.full((parts, features), float(variance)),
        owner=np.repeat(np.arange(len(arrays)), [len(a) for a in arrays]),
        type=np.zeros(parts, int),
        feature_mask=np.ones((parts, features), bool),
    )
    if clutter:
        slots = _clutter_slots(stacked, clutter, clutter_mean, clutter_scale)
        pairs = zip(stacked, slots, strict=True)
        stacked = Parts(*((numpy if i < 3 else np).concatenate(x) for i, x in enumerate(pairs)))
    numbers = jax.device_put(stacked[:3])  # compiles nothing, as jnp.asarray may
    return stacked._replace(F=numbers[0], offset=numbers[1], variance=numbers[2])


def with_clutter(parts: Parts, slots: int, mean: ArrayLike = 0.0, scale: ArrayLike = 1.0) -> Parts:
    """Add slots for points that belong to no object; see `stack`."""
    background = _clutter_slots(parts, slots, mean, scale)
    numbers = (jnp.concatenate(x) for x in zip(parts[:3], background[:3], strict=True))
    structure = (np.concatenate(x) for x in zip(parts[3:], background[3:], strict=True))
    return Parts(*numbers, *structure)


def _clutter_slots(parts: Parts, slots: int, mean: ArrayLike, scale: ArrayLike) -> Parts:
    """Slots for clutter beside some parts, in numpy."""
    if slots < 1:
        raise InputError(f"the number of clutter slots must be at least 1, got {slots}")
    shape = (slots, parts.num_features)
    mean, scale = (np.asarray(x, float) for x in (mean, scale))
    if not (np.isfinite(mean).all() and np.isfinite(scale).all() and (scale > 0).all()):
        raise InputError(
            f"clutter must have a finite mean and a positive scale, got {mean} and {scale}; for "
            "points between -1 and 1, try 0 and 1"
        )
    return Parts(
        F=np.zeros((*shape, parts.pose_dim)),
        offset=np.broadcast_to(mean, shape),
        variance=np.broadcast_to(scale**2, shape),
        owner=np.full(slots, parts.num_objects),
        type=np.full(slots, CLUTTER),
        feature_mask=np.ones(shape, bool),
    )


def template_kinds(parts: Parts) -> Int[np.ndarray, " K"]:
    """For each object the first one with the same template, possibly itself."""
    owner = np.asarray(parts.owner)
    numbers = [np.asarray(field) for field in parts if field is not parts.owner]

    def same(first: int, second: int) -> bool:
        pairs = ((x[owner == first], x[owner == second]) for x in numbers)
        return all(a.shape == b.shape and np.allclose(a, b) for a, b in pairs)

    objects = range(parts.num_objects)
    return np.array([next(j for j in objects if same(j, k)) for k in objects])


def shape_names(text: str) -> list[str]:
    """Split a list of shape names such as "square,triangle,square"."""
    names = [name.strip() for name in text.split(",")]
    shapes(*dict.fromkeys(names))  # raises an InputError for an unknown name
    return names


def object_names(shapes: Sequence[str]) -> list[str]:
    """Shape names, numbered if a shape occurs more than once: square 1, triangle, square 2."""
    how_many, seen = Counter(shapes), Counter[str]()
    names = []
    for shape in shapes:
        seen[shape] += 1
        names.append(f"{shape} {seen[shape]}" if how_many[shape] > 1 else shape)
    return names


def _checked_template(coordinates: ArrayLike, name: str) -> Float[AnyArray, "parts c"]:
    is_traced = isinstance(coordinates, jax.core.Tracer)
    array = jnp.asarray(coordinates) if is_traced else np.asarray(coordinates, float)
    if array.ndim != 2 or array.shape[0] == 0:
        raise InputError(
            f"{name} has no parts (an array of shape {array.shape}), but must have the shape "
            "(parts, coordinates) with at least one part; add parts or leave the template out"
        )
    if is_traced:  # it has no numbers yet
        return array
    if not np.isfinite(array).all():
        raise InputError(f"{name} has coordinates that are not finite; give finite numbers")
    if len(array) > 1 and np.ptp(array, axis=0).max() <= 1e-12 * max(1.0, np.abs(array).max()):
        raise InputError(
            f"all parts of {name} lie in one place, {array[0].tolist()}, so it determines no pose; "
            "give at least two different places"
        )
    return array
