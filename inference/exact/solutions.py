"""The sums of exact inference, compiled, for all scenes with the same number of points together.

Scenes are solved in chunks of bounded memory. The next chunk is launched before the results of the
last one are fetched.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from inference.conditions.combine import NUM_PARTITIONS
from inference.conditions.problem import Problem
from inference.exact import assignments
from inference.exact.assignments import Listing
from inference.exact.parses import best_match, best_parses, group_labels
from inference.exact.permutations import Moments, Plan, make_plan, moments, sum_over_matches
from inference.result import Report
from models.distributions.match import MixtureMatch
from models.errors import InputError
from models.numerics.arrays import AnyArray
from models.numerics.devices import compiled
from models.numerics.linalg import total
from models.program.batches import Skeleton
from models.program.reading import LinearGaussianModel
from models.templates import pose_of_part

MAX_PARSES = 512
"""Largest number of parses listed in search of the most probable partition of a scene."""

MAX_REACH = 1e10
"""Largest number in a scene, in standard deviations of the noise. Beyond it, double precision does
not give the log evidence to one part in a million."""

_CELLS = 1 << 19  # grid cells of an object, times scenes, that are in memory at once
_WIDTHS = (1, 8, 32)  # batch sizes: few, because each is compiled
_PARSE = 256  # memory of a parse, in grid cells, roughly


class Solution(NamedTuple):
    """Exact results for scenes with the same number of points; points are the first rows."""

    log_sum: Float[AnyArray, " scenes"]
    """Log of the sum over the matches of all rows, including dummy rows."""
    moments: Moments
    labels: Int[AnyArray, "M best scenes"]
    """The object of each point in the most probable partitions; a partition may appear twice."""
    label_probs: Float[AnyArray, "best scenes"]
    unlisted: Float[AnyArray, " scenes"]
    """Upper bound on the probability of any partition that is not in `labels`."""
    best_match: Int[AnyArray, "M scenes"]
    fits: Bool[AnyArray, " scenes"]
    """Whether points are seen whole and, unless the prior is a mixture, dummy rows are alike."""
    reach: Float[AnyArray, " scenes"]
    """The largest number of each scene, in standard deviations of the noise."""


Solved = tuple[Int[np.ndarray, " some"], Plan | Listing, Solution]
"""Indices of scenes that were solved together, their plan, and their solution."""


def solutions(
    problem: Problem,
    order: Int[np.ndarray, "scenes N"],
    sizes: Int[np.ndarray, " scenes"],
    num_parses: tuple[int, ...],
    report: Report,
) -> Iterator[Solved]:
    """Solve all scenes, and solve again those whose most probable partition may be unlisted.

    Args:
        num_parses: how many parses to list, at the first and at further attempts.
    """
    left, finished = np.arange(len(sizes)), 0
    for breadth in num_parses:
        doubtful = [left[:0]]
        for some, plan, solution in _solutions_of(problem, order, sizes, left, breadth):
            sure = solution.label_probs.max(axis=0) >= solution.unlisted
            doubtful.append(some[~sure])
            yield some, plan, solution
            finished += len(some) if breadth == num_parses[-1] else int(sure.sum())
            report(finished, len(sizes))
        left = np.concatenate(doubtful)


def _solutions_of(
    problem: Problem,
    order: Int[np.ndarray, "scenes N"],
    sizes: Int[np.ndarray, " scenes"],
    which: Int[np.ndarray, " which"],
    num_parses: int,
) -> Iterator[Solved]:
    """Solve some scenes."""
    solver_of = functools.partial(_solver, problem.skeleton, num_parses=num_parses)
    return in_chunks(problem, order, sizes, which, solver_of, num_parses * _PARSE)


def in_chunks(
    problem: Problem,
    order: Int[np.ndarray, "scenes N"],
    sizes: Int[np.ndarray, " scenes"],
    which: Int[np.ndarray, " which"],
    solver_of: Callable[[int], Callable[..., Any]],
    cells: int = 0,
) -> Iterator[tuple[Int[np.ndarray, " some"], Plan | Listing, Any]]:
    """Solve scenes in chunks with the same number of points.

    Each chunk is launched before the results of the last one are fetched.

    Args:
        solver_of: returns compiled code for a number of points. The result of this code has the
            scene axis last, and `fits` and `reach` as in a `Solution`.
        cells: lower bound on the memory of a scene, in grid cells.
    """
    waiting: Any = None
    for num_points in np.unique(sizes[which]):
        plan = plan_of(problem.skeleton, int(num_points))
        solve = solver_of(int(num_points))
        chosen = which[sizes[which] == num_points]
        most = max(1, _CELLS // max(plan.num_cells, cells))
        chunk = next(w for w in _WIDTHS if w >= min(len(chosen), most, _WIDTHS[-1]))
        for start in range(0, len(chosen), chunk):
            some = chosen[start : start + chunk]
            padded = np.resize(some, chunk)
            launched = solve(problem.reading.take(padded), order[padded])
            if waiting is not None:
                yield _finished(*waiting)
            waiting = some, plan, launched
    if waiting is not None:
        yield _finished(*waiting)


def _finished(
    some: Int[np.ndarray, " some"], plan: Plan | Listing, solution: Any
) -> tuple[Int[np.ndarray, " some"], Plan | Listing, Any]:
    """Check a chunk and convert it to numpy, without the scenes that only pad it."""
    refuse_if_unfit(solution.fits, solution.reach)
    return some, plan, jax.tree.map(lambda x: np.asarray(x)[..., : len(some)], solution)


def refuse_if_unfit(fits: Bool[AnyArray, " scenes"], reach: Float[AnyArray, " scenes"]) -> None:
    """Raise an error for rows that the sums cannot treat, or for numbers that are too large."""
    if not np.asarray(fits).all():
        raise InputError(
            "exact inference requires points that are seen whole or not at all, and dummy rows "
            "that are all alike in the match prior, but here single features are missing or dummy "
            "rows differ; use the method ds"
        )
    if not (np.asarray(reach) <= MAX_REACH).all():
        raise InputError(
            f"exact inference got numbers of {np.max(reach):.1e} standard deviations of the noise; "
            "points, part offsets and poses under the prior must be within "
            f"{MAX_REACH:.0e} of them for double precision to suffice; lower the precision, "
            "narrow the pose prior, or centre the points; if the noise is unknown, give it a prior "
            "that keeps away from zero, such as a LogNormal, or use gibbs"
        )


@functools.lru_cache(maxsize=64)
def plan_of(skeleton: Skeleton, num_points: int) -> Plan | Listing:
    """List what exact inference sums over: placements or, for a mixture prior, assignments."""
    is_mixture = skeleton.match_family is MixtureMatch
    return (assignments.make_listing if is_mixture else make_plan)(skeleton, num_points)


@functools.lru_cache(maxsize=64)
def _solver(
    skeleton: Skeleton, num_points: int, num_parses: int
) -> Callable[[LinearGaussianModel, Int[AnyArray, "scenes N"]], Solution]:
    """Compiled once for each number of points."""
    plan = plan_of(skeleton, num_points)
    alike = skeleton.alike
    swaps = math.prod(math.factorial(alike.count(first)) for first in set(alike))

    @compiled
    def solve(pieces: LinearGaussianModel, order: Int[AnyArray, "scenes N"]) -> Solution:
        model, fits, reach = ordered(pieces, plan, order)
        if isinstance(plan, Listing):
            return _solve_mixture(model, plan, num_parses, fits, reach)
        num_ways = num_parses * min(swaps, NUM_PARTITIONS)
        return _solve_permutations(model, plan, num_ways, fits, reach)

    return solve


def _solve_permutations(
    model: LinearGaussianModel,
    plan: Plan,
    num_parses: int,
    fits: Bool[Array, " scenes"],
    reach: Float[Array, " scenes"],
) -> Solution:
    tables = sum_over_matches(model, plan)
    found = moments(plan, tables)
    num_dummies = len(model.points) - plan.num_points
    left = 1.0 - found.match_probs.sum(axis=0, keepdims=True)  # the dummies are all alike
    dummies = jnp.repeat(left / max(num_dummies, 1), num_dummies, axis=0)
    parses = best_parses(plan, tables, num_parses)
    return Solution(
        tables.evidence + math.lgamma(num_dummies + 1),
        found._replace(match_probs=jnp.concatenate([found.match_probs, dummies])),
        jnp.moveaxis(group_labels(plan, parses.position), -1, 0),
        jnp.exp(parses.log_weight - tables.evidence),
        jnp.exp(parses.log_unlisted - tables.evidence),
        best_match(plan, tables),
        fits,
        reach,
    )


def _solve_mixture(
    model: LinearGaussianModel,
    listing: Listing,
    num_partitions: int,
    fits: Bool[Array, " scenes"],
    reach: Float[Array, " scenes"],
) -> Solution:
    sums = assignments.sum_over_assignments(model, listing)
    dummies = logsumexp(model.match_logits[listing.num_points :], axis=1).sum(axis=0)
    labels, probs = assignments.best_partitions(listing, sums, num_partitions)
    return Solution(
        sums.evidence + dummies,
        assignments.moments(model, listing, sums),
        jnp.moveaxis(labels, -1, 0),
        probs,
        jnp.zeros_like(sums.evidence),  # all partitions are listed
        assignments.best_match(listing, sums),
        fits,
        reach,
    )


def ordered(
    model: LinearGaussianModel,
    plan: Plan | Listing,
    order: Int[AnyArray, "scenes N"],
) -> tuple[LinearGaussianModel, Bool[Array, " scenes"], Float[Array, " scenes"]]:
    """Reorder the rows of a model, points first; also return `fits` and `reach` of `Solution`."""

    def reorder(x: Array) -> Array:
        wide = jnp.broadcast_to(x, (*x.shape[:-1], len(order)))
        return jnp.take_along_axis(wide, order.T[:, None], axis=0)

    model = replace(
        model,
        points=reorder(model.points),
        seen=reorder(model.seen),
        match_logits=reorder(model.match_logits),
    )
    is_point = np.arange(order.shape[1])[:, None, None] < plan.num_points
    fits = jnp.all(model.seen == is_point, axis=(0, 1))
    if isinstance(plan, Plan):
        dummies = model.match_logits[plan.num_points :]
        fits &= jnp.all(dummies == model.match_logits[-1:], axis=(0, 1))
    return model, fits, _reach(model, plan.owner)


def _reach(model: LinearGaussianModel, owner: Int[np.ndarray, " N"]) -> Float[Array, " scenes"]:
    """The largest of points, offsets and predictions under the pose prior, in units of the noise.

    The numbers that exact inference subtracts from each other are at most about this large, so the
    rounding error of a residual is about this times the machine epsilon.
    """
    F, offset, variance = model.parts.F, model.parts.offset, model.parts.variance
    spread = jnp.sqrt(jnp.diagonal(model.pose_covariance, axis1=1, axis2=2))  # (K, scenes, p)
    pose = jnp.abs(model.pose_mean) + jnp.moveaxis(spread, 2, 1)
    of_part = pose[pose_of_part(owner, len(pose)), None]
    predicted = total(jnp.abs(F) * of_part, axis=2) + jnp.abs(offset)
    size = jnp.abs(model.points).max(axis=0) + predicted
    reach = (model.parts.feature_mask * size / jnp.sqrt(variance)).max(axis=(0, 1))
    return jnp.broadcast_to(reach, model.points.shape[-1:])
