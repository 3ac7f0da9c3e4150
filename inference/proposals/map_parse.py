"""The best parse of a scene, and the poses given it: a point estimate of the match.

This is the fastest method. It returns a single match, so it has no measure of uncertainty. The
`elbo` is log p(points, match) with the poses integrated out. It is the ELBO of a q(Z) that puts all
mass on this match, and so a lower bound on the log evidence.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, logsumexp
from jaxtyping import Array, Bool, Float, Int
from scipy.optimize import linear_sum_assignment

from inference.conditions.problem import Problem, solve_scenes
from inference.conditions.solve import Solve
from inference.exact.parses import poses_given
from inference.proposals.candidates import log_marginal
from inference.proposals.parses import Parses, pair_log_density
from inference.proposals.propose import propose_whole
from inference.proposals.starts import structure
from inference.proposals.states import solve_likely_states
from inference.result import Report, Result, certain, method, partition, reporter
from models.distributions.match import MixtureMatch
from models.numerics.arrays import AnyArray
from models.numerics.devices import compiled
from models.numerics.linalg import covariance_of
from models.program.batches import Skeleton, map_scenes
from models.program.reading import LinearGaussianModel
from models.program.sites import Program
from models.scenes import Scene

WIDTHS = (1, 32, 512)
"""Batch sizes for evaluating matches; each is compiled."""

_IMPOSSIBLE = -1e9  # a finite log weight, because the assignment solver requires it


@method
def run(program: Program, scene: Scene, *, progress_bar: bool | Report = False) -> Result:
    """Find the best parse of one scene or of each scene of a batch.

    It is the first parse that `inference.proposals` finds: the one of the highest density or, if a
    missing part costs nothing under the program, one that prefers whole objects. So this is an
    approximation to the most probable match: with clutter under a uniform match prior, a match that
    breaks objects apart may be more probable by tens of nats, but is right less often. No two
    points share a part, also under a mixture, where the most probable match may have such points.
    The `elbo` is that of the parse, a lower bound in any case. `exact` finds the most probable
    match; a program with a presence prior has costs for missing parts. If the program has
    unknown states of objects, such as present or absent, the match is averaged over the states that
    were tried, each with its best parse, as in `cavi.run`. Other latent sites are summed or
    integrated over.

    `converged` says that the parse explains every point as clutter or as a part of an object that
    the search found. Any other point is put on its most probable free part.

    Args:
        program: a program as for coordinate ascent.
        progress_bar: show one, or call a function with (scenes done, scenes in total).
    """
    return solve_scenes(
        program,
        scene.batch(),
        solver(progress_bar),
        factors=frozenset(),
        or_bound=True,
        search=solve_likely_states,
        max_values=1,
    )


def solver(progress_bar: bool | Report = False) -> Solve:
    """A function that finds the best parses of the scenes of a problem."""
    report = reporter(progress_bar)

    def solve(problem: Problem, parses: Parses | None = None) -> Result:
        parses = propose_whole(problem.reading) if parses is None else parses
        match = completed(problem, np.asarray(parses.match[:, 0]))
        found = judged(problem, match)
        lost = np.flatnonzero(~np.isfinite(found.log_density))
        if len(lost):  # the best parse is impossible: place each point by itself
            some = problem.take(lost)
            match[lost] = completed(some, np.full_like(match[lost], -1))
            again = judged(some, match[lost])
            for old, new in zip(found, again, strict=True):
                old[lost] = new
        num_slots = np.sum(problem.owner == problem.skeleton.num_objects)
        explained = np.array(parses.left_over[:, 0] <= num_slots)
        explained[lost] = False
        match_probs = certain(np.argsort(match, axis=1), problem.scenes.present)
        report(problem.num_scenes, problem.num_scenes)
        return Result(
            method="map",
            scene=problem.scenes,
            match_probs=match_probs,
            pose_mean=found.pose_mean,
            pose_covariance=found.pose_covariance,
            labels=partition(match_probs, problem.owner, problem.scenes.present),
            owner=problem.owner,
            converged=explained,
            steps=np.ones(problem.num_scenes, int),
            elbo=found.log_density + problem.log_constant,
        )

    return solve


class Judged(NamedTuple):
    """Poses and log density given a match."""

    pose_mean: Float[AnyArray, "scenes K p"]
    pose_covariance: Float[AnyArray, "scenes K p p"]
    log_density: Float[AnyArray, " scenes"]
    """log p(points, match), without the constant of the problem."""


def completed(problem: Problem, match: Int[np.ndarray, "scenes N"]) -> Int[np.ndarray, "scenes N"]:
    """Complete a match: the row of each part, from the point of each part or -1 for none.

    Remaining rows are assigned to remaining parts by their log density given the objects, each
    point by itself. If only alike dummy rows remain, their order does not matter.
    """
    taken = (match[..., None] == np.arange(match.shape[-1])).any(axis=-2)
    order, free = (np.argsort(x, axis=-1, kind="stable") for x in (match >= 0, taken))
    met = np.take_along_axis(match, order, axis=-1)
    whole = match.copy()
    np.put_along_axis(whole, order, np.where(met < 0, free, met), axis=-1)
    present = problem.scenes.present
    logits = np.moveaxis(problem.reading.model.match_logits, -1, 0)
    differ = ~np.asarray(_dummies_alike(logits, present))
    left = np.flatnonzero((present & ~taken).any(axis=-1) | differ)
    weights = _in_blocks(_expected(problem.skeleton), problem, left, match[left])
    for s, weight in zip(left, weights, strict=True):
        rows, parts = np.flatnonzero(~taken[s]), np.flatnonzero(match[s] < 0)
        possible = np.maximum(weight[np.ix_(rows, parts)], _IMPOSSIBLE)
        row, part = linear_sum_assignment(possible, maximize=True)
        whole[s, parts[part]] = rows[row]
    return whole


def judged(problem: Problem, match: Int[np.ndarray, "scenes N"]) -> Judged:
    """Poses and log density of each scene, given the row of each part."""
    every = np.arange(problem.num_scenes)
    return _in_blocks(_judge(problem.skeleton), problem, every, match)


def _dummies_alike(
    logits: Float[AnyArray, "*batch N N"], present: Bool[AnyArray, "*batch N"]
) -> Bool[AnyArray, "*batch"]:
    """Whether the match prior treats all dummy rows in the same way."""
    first = present.argmin(axis=-1)[..., None, None]
    same = logits == jnp.take_along_axis(logits, first, axis=-2)
    return (same | present[..., None]).all(axis=(-2, -1))


def _in_blocks(
    function: Callable[..., Any],
    problem: Problem,
    scene: Int[np.ndarray, " runs"],
    match: Int[np.ndarray, "runs N"],
) -> Any:
    """Call a compiled function of the pieces of a scene and a match on all runs, in batches."""
    if not len(scene):
        return ()
    width = next((w for w in WIDTHS if w >= len(scene)), WIDTHS[-1])
    found = []
    for start in range(0, len(scene), width):
        some = np.resize(np.arange(start, min(start + width, len(scene))), width)
        own = scene[some]
        found.append(function(problem.reading.take(own), match[some], problem.scenes.present[own]))
    return jax.tree.map(lambda *x: np.concatenate(x)[: len(scene)], *found)


@functools.lru_cache(maxsize=32)
def _expected(skeleton: Skeleton) -> Callable[..., Float[np.ndarray, "runs N N"]]:
    """A compiled function: log weight of each row on each part, given the matched points."""
    owner = np.array(skeleton.owner)

    def of_run(
        model: LinearGaussianModel, match: Int[Array, " N"], present: Bool[Array, " N"]
    ) -> Float[Array, "N N"]:
        mean, covariance = _poses(model, owner, match, present)
        density = pair_log_density(replace(model, pose_mean=mean, pose_covariance=covariance))
        return density + model.match_logits

    return _mapped(of_run)


@functools.lru_cache(maxsize=32)
def _judge(skeleton: Skeleton) -> Callable[..., Any]:
    """A compiled function: poses given a match of all rows, and `Judged.log_density`."""
    owner, parts = np.array(skeleton.owner), structure(skeleton)
    slots = np.flatnonzero(owner == skeleton.num_objects)
    is_mixture = skeleton.match_family is MixtureMatch

    def of_run(
        model: LinearGaussianModel, match: Int[Array, " N"], present: Bool[Array, " N"]
    ) -> Judged:
        point = jnp.where(present[match], match, -1)

        def of_object(k: Any, members: Any, valid: Any) -> Float[Array, ""]:
            own = jnp.where(valid, point[members], -1)
            return log_marginal(model, k, members, own[:, None])[0][0]

        objects = jnp.arange(skeleton.num_objects)
        density = jax.vmap(of_object)(objects, jnp.asarray(parts.members), parts.valid).sum()
        if len(slots):
            density += log_marginal(model, objects[0], jnp.asarray(slots), point[slots][:, None])[
                0
            ][0]
        weight = model.match_logits[match, jnp.arange(len(owner))]
        if is_mixture:  # dummy rows may be any part
            others = jnp.where(present, 0.0, logsumexp(model.match_logits, axis=1)).sum()
            prior = jnp.where(present[match], weight, 0.0).sum() + others
        else:
            ways = gammaln((~present).sum() + 1.0)
            prior = weight.sum() + jnp.where(_dummies_alike(model.match_logits, present), ways, 0.0)
        return Judged(*_poses(model, owner, point, present), density + prior)

    return _mapped(of_run)


def _poses(
    model: LinearGaussianModel,
    owner: Int[np.ndarray, " N"],
    match: Int[Array, " N"],
    present: Bool[Array, " N"],
) -> tuple[Float[Array, "K p"], Float[Array, "K p p"]]:
    """Mean and covariance of each pose given the point of each part, -1 for none."""
    is_pair = match[None] == jnp.arange(len(owner))[:, None]
    part = jnp.where(is_pair.any(axis=1) & present, is_pair.argmax(axis=1), -1)
    mean, factor = poses_given(model, owner, part[None])
    return mean[..., 0].T, jnp.moveaxis(covariance_of(factor)[..., 0], 2, 0)


def _mapped(of_run: Callable[..., Any]) -> Callable[..., Any]:
    @compiled
    def mapped(model: LinearGaussianModel, *others: Array) -> Any:
        return map_scenes(of_run, model, *others)

    return mapped
