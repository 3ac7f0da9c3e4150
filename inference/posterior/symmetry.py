"""Symmetries of a program: changes of the poses that leave its density invariant.

Two squares can be swapped, and a square can be turned by 90 degrees. With the match renamed
accordingly, every point is explained as before, so the posterior of a scene with two squares has
2 x 4 x 4 = 32 copies of each mode. `find` looks for all affine maps of poses that put the parts of
one object where those of another (or its own) were. It keeps those under which the density of the
program does not change, so an edited prior that breaks a symmetry is noticed.

If a program computes its poses from other sites, its density cannot be evaluated at a changed pose.
No symmetry is used then, so chains in modes that are images of each other count as different.
"""

import copy
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from numpyro.primitives import Messenger

from inference.conditions.sets import possible_values
from inference.posterior.densities import Draws, likelihood_at, log_joint, marginal_prior_draws
from inference.posterior.poses import is_site
from models.distributions.likelihood import MatchedParts
from models.program.sites import Program
from models.scenes import Scene
from models.templates import Parts

_PROBES = 2  # prior draws at which the density is compared
_VALUES = 16  # joint values of the discrete sites at which it is compared, for each draw


class Turn(NamedTuple):
    """A source at pose y and a target at `matrix` y + `shift` have parts in the same places."""

    matrix: Float[np.ndarray, "p p"]
    shift: Float[np.ndarray, " p"]
    part: Int[np.ndarray, " n"]
    """For each part of the source, the part of the target that is in the same place."""

    def __call__(self, pose: Float[np.ndarray, "*draws p"]) -> Float[np.ndarray, "*draws p"]:
        return pose @ self.matrix.T + self.shift

    @property
    def is_identity(self) -> bool:
        """Whether it leaves all poses as they are."""
        return np.array_equal(self.matrix, np.eye(len(self.shift))) and not self.shift.any()

    def inverse(self, pose: Float[np.ndarray, "*draws p"]) -> Float[np.ndarray, "*draws p"]:
        """The poses that the turn maps to the given ones."""
        return np.linalg.solve(self.matrix, (pose - self.shift)[..., None])[..., 0]


class Symmetry(NamedTuple):
    """All turns between objects, `turns[source, target]`; from an object to itself, identity first.

    The group consists of all permutations of objects of one kind, combined with any turns.
    """

    turns: dict[tuple[int, int], tuple[Turn, ...]]
    owner: Int[np.ndarray, " N"]
    sites: tuple[str, ...] = ()
    """Discrete sites whose entries are swapped with the objects; others stay as they are."""

    @property
    def kinds(self) -> Int[np.ndarray, " K"]:
        """For each object, the first one with which it can be swapped."""
        return np.array(
            [min(j for j in range(self.num_objects) if (k, j) in self.turns) for k in self._all]
        )

    @property
    def num_objects(self) -> int:
        """Number of objects, K."""
        return 1 + max(source for source, _ in self.turns)  # each has its identity

    @property
    def order(self) -> int:
        """Number of elements of the group, which is that of copies of each posterior mode."""
        swaps = math.prod(math.factorial(int(n)) for n in np.bincount(self.kinds))
        return swaps * math.prod(len(self.turns[k, k]) for k in self._all)

    @property
    def _all(self) -> range:
        return range(self.num_objects)


def find(program: Program, scene: Scene) -> Symmetry:
    """Find the symmetries of a program at a scene."""
    parts = likelihood_at(program, scene, {}).parts
    parts = jax.tree.map(np.asarray, parts)
    candidates = [
        (source, target, turn)
        for source in range(parts.num_objects)
        for target in range(source, parts.num_objects)
        for turn in _template_turns(parts, source, target)
    ]
    sites: tuple[str, ...] = ()
    if is_site(program, scene):
        kept, sites = _density_preserving(program, scene, candidates)
    else:
        kept = [(j, k, turn) for j, k, turn in candidates if j == k and turn.is_identity]
    turns: dict[tuple[int, int], list[Turn]] = {}
    for source, target, turn in kept:
        turns.setdefault((source, target), []).append(turn)
        if source != target:
            back = Turn(
                turn.inverse(np.eye(len(turn.shift)) + turn.shift).T,
                turn.inverse(np.zeros_like(turn.shift)),
                np.argsort(turn.part),
            )
            turns.setdefault((target, source), []).append(back)
    return Symmetry({pair: tuple(found) for pair, found in turns.items()}, parts.owner, sites)


def _template_turns(parts: Parts, source: int, target: int) -> Iterator[Turn]:
    """All affine maps of poses under which two templates have the same parts in the same places.

    A few parts of the target, a basis, determine the map. They are put on every choice of parts of
    the source, and the resulting map is kept if all other parts have a counterpart too.
    """
    first, second = (_template(parts, k) for k in (source, target))
    if first.places.shape != second.places.shape:
        return
    size, pose_dim = len(first.F), first.F.shape[-1]
    basis = _basis(second.F)
    inverse = np.linalg.pinv(second.F[basis].reshape(-1, pose_dim))
    identity = np.arange(size)
    chosen = sorted(
        itertools.permutations(range(size), len(basis)), key=lambda c: c != tuple(identity[basis])
    )
    seen: list[np.ndarray] = []
    for laid_on in map(list, chosen):
        matrix = inverse @ first.F[laid_on].reshape(-1, pose_dim)
        shift = inverse @ (first.offset[laid_on] - second.offset[basis]).ravel()
        if tuple(laid_on) == tuple(identity[basis]) and np.allclose(first.places, second.places):
            matrix, shift = np.eye(pose_dim), np.zeros(pose_dim)  # even if the basis is deficient
        moved = second.moved(matrix, shift)
        gaps = np.abs(first.places[:, None] - moved[None]).max(axis=-1)
        part = gaps.argmin(axis=1)
        fits = gaps.min(axis=1).max() < 1e-8 and len(np.unique(part)) == size
        new = not any(np.allclose(matrix, other) for other in seen)
        if fits and new and abs(np.linalg.det(matrix)) > 1e-8:
            seen.append(matrix)
            yield Turn(matrix, shift, part)


class _Template(NamedTuple):
    F: Float[np.ndarray, "n d p"]
    offset: Float[np.ndarray, "n d"]
    kind: Float[np.ndarray, "n f"]
    """Further properties that distinguish parts: noise, type, which features they have."""

    @property
    def places(self) -> Float[np.ndarray, "n f"]:
        return np.c_[self.F.reshape(len(self.F), -1), self.offset, self.kind]

    def moved(
        self, matrix: Float[np.ndarray, "p p"], shift: Float[np.ndarray, " p"]
    ) -> Float[np.ndarray, "n f"]:
        """The places as functions of the pose of the source."""
        return self._replace(F=self.F @ matrix, offset=self.F @ shift + self.offset).places


def _template(parts: Parts, k: int) -> _Template:
    own = parts.owner == k
    mask = parts.feature_mask[own]
    kind = np.c_[mask, np.where(mask, parts.variance[own], 0.0), parts.type[own]]
    return _Template(
        parts.F[own] * mask[..., None], np.where(mask, parts.offset[own], 0.0), kind.astype(float)
    )


def _basis(F: Float[np.ndarray, "n d p"]) -> list[int]:
    """The first parts, in order, whose places determine the places of all parts."""
    rank = np.linalg.matrix_rank
    basis: list[int] = []
    for n in range(len(F)):
        tried = [*basis, n]
        if rank(np.concatenate(F[tried])) > (rank(np.concatenate(F[basis])) if basis else 0):
            basis = tried
    return basis


def _density_preserving(
    program: Program, scene: Scene, candidates: list[tuple[int, int, Turn]]
) -> tuple[list[tuple[int, int, Turn]], tuple[str, ...]]:
    """Keep the turns that do not change the program's density at some prior draws.

    A discrete site with an entry for each object may belong to the objects, as a presence does, or
    have nothing to do with them. The sites that must be swapped with the objects are the fewest
    with which the most turns are kept.

    Points far from the parts of a prior draw hide most of the match prior: a few matches are all of
    the sum. So the density with wide noise, under which every match counts, must not change either.
    """
    draws = marginal_prior_draws(program, scene, jax.random.key(0), num_samples=_PROBES)
    table = possible_values(program, scene)
    if table:  # each draw at some of the values
        count = len(next(iter(table.values())))
        some = np.random.default_rng(0).permutation(count)[:_VALUES]
        draws = {name: np.repeat(x, len(some), axis=0) for name, x in draws.items()}
        draws |= {name: np.concatenate([x[some]] * _PROBES) for name, x in table.items()}
    num_objects, size = draws["pose"].shape[1], len(draws["pose"])
    own = [name for name, x in table.items() if x.shape[1:2] == (num_objects,)]
    kept: list[tuple[int, int, Turn]] = []
    moved: tuple[str, ...] = ()
    for sites in itertools.chain(*(itertools.combinations(own, n) for n in range(len(own) + 1))):
        turned = [draws, *(_turned(draws, candidate, sites) for candidate in candidates)]
        joined = {name: np.concatenate([x[name] for x in turned]) for name in draws}
        both = [log_joint(of, scene, joined) for of in (program, _blurred(program))]
        density = np.nan_to_num(np.stack(both), nan=-np.inf, neginf=-np.inf)
        before, *after = np.moveaxis(density.reshape(2, len(turned), size), 1, 0)
        same = [np.allclose(before, value, rtol=1e-9, atol=1e-6) for value in after]
        if sum(same) > len(kept):
            kept, moved = list(itertools.compress(candidates, same)), sites
    return kept, moved


def _turned(draws: Draws, candidate: tuple[int, int, Turn], sites: tuple[str, ...]) -> Draws:
    """Draws with a turn applied; between two objects, it swaps them and their entries of sites."""
    source, target, turn = candidate
    pose = draws["pose"].copy()
    pose[:, target] = turn(draws["pose"][:, source])
    if source == target:
        return {**draws, "pose": pose}
    pose[:, source] = turn.inverse(draws["pose"][:, target])
    order = np.arange(pose.shape[1])
    order[[source, target]] = target, source
    return {**draws, **{name: draws[name][:, order] for name in sites}, "pose": pose}


class _Blurred(Messenger):
    """Effect handler: noise as wide as the distances of points from parts."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and isinstance(msg["fn"], MatchedParts):
            blurred = copy.copy(msg["fn"])
            apart = jnp.asarray(msg["value"])[:, None] - blurred.parts.predict(blurred.pose)
            apart = jnp.where(blurred.seen[:, None] & blurred.parts.feature_mask, apart, 0.0)
            blurred.beta = blurred.beta * blurred.noise_variance.min() / jnp.mean(apart**2)
            msg["fn"] = blurred


_blurred = functools.lru_cache(maxsize=64)(_Blurred)  # densities compile once for each program
