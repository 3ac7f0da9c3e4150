"""Reading a program at many scenes at once, and the structure that compiled code depends on.

Compiled code is cached by a program's `Skeleton` and takes the program's numbers as arrays, so an
edited prior costs no compilation. A program is traced again at each call, so that edits count.
Methods share work between identical objects; the functions here find out which ones are.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Float, Int
from numpyro.distributions import Distribution

from models.errors import ConjugacyError, InputError
from models.numerics.arrays import padded
from models.program.reading import (
    FACTORS,
    LinearGaussianModel,
    look,
    look_closely,
    refuse_moving_supports,
)
from models.program.sites import Program, Values, described
from models.program.witness import testify
from models.scenes import Scene

Seen = TypeVar("Seen")


class Skeleton(NamedTuple):
    """The structure of a program, whatever its numbers are; hashable."""

    owner: tuple[int, ...]
    """The object of each part; K for clutter."""
    alike: tuple[int, ...]
    """For each object the first one that has the same template and the same pose prior."""
    exchangeable: tuple[int, ...]
    """For each object the first one that is alike and has the same match prior."""
    pose_dim: int
    num_features: int
    match_family: type[Distribution]

    @property
    def num_objects(self) -> int:
        """K, the number of objects."""
        return len(self.alike)

    @property
    def has_clutter(self) -> bool:
        """Whether there are slots for points that belong to no object."""
        return len(self.groups) > self.num_objects

    @property
    def parts(self) -> list[np.ndarray]:
        """The parts of each object."""
        return self.groups[: self.num_objects]

    @property
    def groups(self) -> list[np.ndarray]:
        """The parts of each object and, if there is clutter, the slots of the background."""
        return [np.flatnonzero(np.array(self.owner) == k) for k in range(max(self.owner) + 1)]


class Reading(NamedTuple):
    """A program read at each scene of a batch."""

    model: LinearGaussianModel
    """In numpy, scene axis last; of length one for pieces that do not depend on the scene."""
    varies: Any
    """A `LinearGaussianModel` of flags: whether each piece depends on the scene."""
    skeleton: Skeleton

    def take(self, which: Any) -> LinearGaussianModel:
        """The pieces at some scenes, by number, slice or mask."""
        return jax.tree.map(lambda flag, x: x[..., which] if flag else x, self.varies, self.model)

    def at(self, scene: int) -> LinearGaussianModel:
        """The pieces at one scene, without a scene axis."""
        return jax.tree.map(lambda flag, x: x[..., scene if flag else 0], self.varies, self.model)

    def some(self, which: Any) -> "Reading":
        """The reading at some scenes."""
        return self._replace(model=self.take(which))

    def at_prior_mean(self) -> "Reading":
        """The reading with an unknown precision at the mean of its prior."""
        model = self.model
        if model.precision_prior is None:
            return self
        concentration, rate = model.precision_prior
        scale = np.where(model.parts.is_clutter, 1.0, rate / concentration)[:, None]
        parts = model.parts._replace(variance=model.parts.variance * scale)
        return self._replace(model=replace(model, parts=parts))


Open = dict[str, Distribution]
"""Conditions that a program leaves open, by name."""


def read_scenes(
    program: Program,
    scenes: Scene,
    given: Values | None = None,
    factors: frozenset[str] = FACTORS,
) -> Reading | Open:
    """Read a program at a batch of scenes, or return the conditions that it leaves open.

    The first reading of a program at scenes of one layout is checked against the density of the
    program itself (`models.program.witness`). Each reading is checked for pieces that depend on a
    site that is integrated over: a program may refer to things outside of it, which change.

    Args:
        given: values of conditions, one for each scene, with the scene axis first.
        factors: as in `models.program.reading.read`.
    """
    given = dict(given or {})
    name = (program, scenes.layout, tuple(sorted(given)), factors)
    known = _KNOWN.get(name)
    if known is not None and len(scenes.points) == 1:
        found = _trace_single(program, scenes, given, factors, known)
    else:
        found = _trace_batch(program, scenes, given, factors)
    if isinstance(found, Reading):
        _refuse_points_that_are_not_there(found, scenes)
    if known is None and isinstance(found, Reading):
        if _testify(program, scenes, given, found):
            _KNOWN[name] = found.varies
        while len(_KNOWN) > _REMEMBERED:
            _KNOWN.popitem(last=False)
    if known is None or len(scenes.points) > 1:
        for s in _sound(found)[:1] if isinstance(found, Reading) else [0]:
            own = {name: x[s] for name, x in given.items()}
            look_closely(program, Scene(**scenes.take(s).observed), own, factors)
    return found


_KNOWN: OrderedDict[Any, LinearGaussianModel] = OrderedDict()
"""Which pieces vary, for programs and layouts of scenes that the witness has confirmed."""

_REMEMBERED = 512


def _trace_batch(
    program: Program, scenes: Scene, given: dict[str, Any], factors: frozenset[str]
) -> Reading | Open:
    """Trace a program once for all scenes.

    Pieces that depend on the scene are traced, all others stay concrete. Templates and priors
    seldom depend on the scene, and repeating them for each one would dominate the memory traffic.
    """
    kept: list[Any] = []

    def read_one(scene: Scene, given: dict[str, Any]) -> list[Any]:
        found = look(program, scene, given, factors)
        if not isinstance(found, LinearGaussianModel):
            refuse_moving_supports(found)
            kept.append(found)
            return []
        leaves, structure = jax.tree.flatten(found)
        kept.extend([structure, leaves, skeleton_of(found)])
        return [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]

    count = len(scenes.points)
    some, given = jax.tree.map(
        lambda x: np.asarray(x)[padded(count)], (Scene(**scenes.observed), given)
    )
    varying = iter(jax.vmap(read_one, out_axes=-1)(some, given))
    if isinstance(kept[0], dict):
        return kept[0]
    structure, leaves, skeleton = kept
    flags = [isinstance(leaf, jax.core.Tracer) for leaf in leaves]
    model = [
        np.asarray(next(varying))[..., :count] if flag else np.asarray(leaf)[..., None]
        for flag, leaf in zip(flags, leaves, strict=True)
    ]
    return Reading(
        jax.tree.unflatten(structure, model), jax.tree.unflatten(structure, flags), skeleton
    )


def _trace_single(
    program: Program,
    scenes: Scene,
    given: dict[str, Any],
    factors: frozenset[str],
    varies: LinearGaussianModel,
) -> Reading | Open:
    """Read a program at a batch of one, without the cost of `_trace_batch`.

    Args:
        varies: which pieces are known to depend on the scene.
    """
    given = {name: x[0] for name, x in given.items()}
    scene = Scene(**scenes.take(0).observed)
    looked = look_closely(program, scene, given, factors) or look(program, scene, given, factors)
    if not isinstance(looked, LinearGaussianModel):
        return looked
    found = jax.tree.map(np.asarray, looked)
    if hash(jax.tree.structure(found)) != hash(jax.tree.structure(varies)):
        given = {name: x[None] for name, x in given.items()}
        return _trace_batch(program, scenes, given, factors)
    model = jax.tree.map(lambda x: x[..., None], found)
    return Reading(model, varies, skeleton_of(found, varies))


def _refuse_points_that_are_not_there(reading: Reading, scenes: Scene) -> None:
    """Refuse a program that takes rows for points where the scene has none."""
    extra = reading.model.seen.any(axis=1) & ~scenes.present.T
    if extra.any():
        raise InputError(
            f"site 'points': its MatchedParts takes row {np.argwhere(extra)[0, 0]} for a point, "
            "but the scene's `present` is false there, so the row is padding; pass the program's "
            "`present` on to MatchedParts"
        )


def _testify(program: Program, scenes: Scene, given: Values, reading: Reading) -> bool:
    """Let the witness check the first and the last scene whose conditions are possible.

    Returns False if there is no such scene.
    """
    sound = _sound(reading)
    if not len(sound):
        return False  # all conditions are impossible: the methods report that
    ends = [int(sound[0]), int(sound[-1])]
    testify(
        program,
        [scenes.take(s) for s in ends],
        [{name: x[s] for name, x in given.items()} for s in ends],
        [reading.at(s) for s in ends],
    )
    return True


def _sound(reading: Reading) -> Int[np.ndarray, " sound"]:
    """Scenes at which the conditions have a possible value, or the first where all are alike."""
    return np.flatnonzero(np.isfinite(reading.model.log_constant))


def read_conjugate(program: Program, scenes: Scene, given: Values | None = None) -> Reading:
    """Read a program for a method without conditions; a ConjugacyError if one is left open."""
    found = read_scenes(program, scenes, given)
    if not isinstance(found, Reading):
        name, prior = next(iter(found.items()))
        raise ConjugacyError(name, f"a further latent site, {described(prior)}", "no such site")
    return found


def check_conjugate(program: Program, scene: Scene, given: Values | None = None) -> None:
    """Raise a ConjugacyError if the closed forms do not hold for this program at this scene."""
    read_conjugate(program, scene.batch(), {n: x[None] for n, x in (given or {}).items()})


def skeleton_of(found: LinearGaussianModel, varies: LinearGaussianModel | None = None) -> Skeleton:
    """The skeleton of pieces. If they depend on the scene, all objects count as different.

    Args:
        varies: which pieces depend on the scene; by default those that are traced.
    """
    if varies is None:
        varies = jax.tree.map(lambda x: isinstance(x, jax.core.Tracer), found)
    owner = np.asarray(found.parts.owner)
    parts = [np.flatnonzero(owner == k) for k in range(found.num_objects)]
    of_parts = varies.parts._replace(owner=False)
    changes = any((*of_parts, varies.pose_mean, varies.pose_covariance))
    alike = (lambda j, k: False) if changes else _alike(found, parts)
    logits = None if varies.match_logits else np.asarray(found.match_logits)

    def exchangeable(j: int, k: int) -> bool:
        return (
            alike(j, k)
            and logits is not None
            and np.array_equal(logits[:, parts[j]], logits[:, parts[k]])
        )

    return Skeleton(
        tuple(owner.tolist()),
        _firsts(len(parts), alike),
        _firsts(len(parts), exchangeable),
        found.pose_mean.shape[-1],
        found.parts.num_features,
        found.match_family,
    )


def kinds(readings: Sequence[Reading]) -> Int[np.ndarray, " K"]:
    """For each object the first one with the same template and pose prior, at every scene.

    Args:
        readings: one for each state that an object may have, at the same scenes.
    """
    groups = readings[0].skeleton.parts
    alike = [_alike(reading.model, groups) for reading in readings]
    return np.array(_firsts(len(groups), lambda j, k: all(same(j, k) for same in alike)))


def twins(
    readings: Sequence[Reading], log_prior: Float[np.ndarray, "S K"]
) -> Int[np.ndarray, " K"]:
    """For each object the first one that is identical, including its match prior.

    Args:
        readings: as in `kinds`.
        log_prior: log probability of each state.
    """
    groups, kind = readings[0].skeleton.parts, kinds(readings)

    def same(j: int, k: int) -> bool:
        return (
            kind[j] == kind[k]
            and np.array_equal(log_prior[:, j], log_prior[:, k])
            and all(
                np.array_equal(*(reading.model.match_logits[:, groups[i]] for i in (j, k)))
                for reading in readings
            )
        )

    return np.array(_firsts(len(groups), same))


def with_points(readings: Sequence[Reading]) -> tuple[int, ...]:
    """The states in which some object may have a point."""

    def may_have(model: LinearGaussianModel) -> bool:
        of_objects = ~np.asarray(model.parts.is_clutter)[:, 0]
        of_points = model.seen.any(axis=1)[:, None]
        return bool((np.isfinite(model.match_logits[:, of_objects]) & of_points).any())

    return tuple(s for s, reading in enumerate(readings) if may_have(reading.model))


def _alike(model: LinearGaussianModel, parts: Sequence[np.ndarray]) -> Callable[[int, int], bool]:
    """Whether two objects have the same template and pose prior."""
    owned = [np.asarray(x) for x in model.parts._replace(owner=np.zeros_like(model.parts.owner))]
    poses = [np.asarray(x) for x in (model.pose_mean, model.pose_covariance)]

    def same(j: int, k: int) -> bool:
        return (
            len(parts[j]) == len(parts[k])
            and all(np.array_equal(x[parts[j]], x[parts[k]]) for x in owned)
            and all(np.array_equal(x[j], x[k]) for x in poses)
        )

    return same


def _firsts(count: int, same: Callable[[int, int], bool]) -> tuple[int, ...]:
    """For each object the first one that is the same."""
    return tuple(next(j for j in range(k + 1) if j == k or same(j, k)) for k in range(count))


def map_scenes(
    function: Callable[..., Seen], model: LinearGaussianModel, *others: Any, axis: int = 0
) -> Seen:
    """Map a function of one scene's pieces over a batch, as `Reading.take` gives it.

    Args:
        others: further arguments, with the scene axis first.
        axis: the scene axis of the result.
    """
    width = model.points.shape[-1]
    axes = jax.tree.map(lambda x: -1 if x.shape[-1] == width else None, model)
    single = jax.tree.map(lambda x: x if x.shape[-1] == width else x[..., 0], model)
    return jax.vmap(function, (axes, *(0 for _ in others)), axis)(single, *others)
