"""Exact inference: every match is summed over, on the program itself.

`inference.enumeration` sums over permutations, `inference.assignments` over those of a mixture.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int
from scipy.stats import gamma

from inference import assignments, presence
from inference.assignments import Listing
from inference.enumeration import (
    Moments,
    Plan,
    make_plan,
    moments,
    sum_over_matches,
)
from inference.mixture import NUM_PARTITIONS, average, mix
from inference.normalizer import data_log_prob, log_prior_normalizer
from inference.parses import Draws, best_match, best_parses, draw, group_labels
from inference.result import Result
from models import AnyArray
from models.errors import InputError
from models.match import MixtureMatch
from models.permanent import MAX_ROWS
from models.reading import (
    Conjugate,
    Program,
    check_conjugate,
    check_program,
    read,
    read_batch,
    templates_alike,
    trace_pieces,
    what_varies,
)
from models.scenes import Layout, Scene, check_scene

NUM_GIVEN_PRESENCE = 16
"""Partitions that are listed where it is given which objects are present: their probabilities are
added up over the sets of present objects, so no set should leave out one of weight."""

_TAIL, _SPACING = 1e-6, 0.25  # of the grid over the log precision

_CELLS = 1 << 19  # grid cells of an object, times scenes, that are worked on at a time


class Solution(NamedTuple):
    """What the sum gives for scenes with the same number of points, which come first."""

    log_sum: Float[AnyArray, " scenes"]
    """Over the matches of all rows, dummies too."""
    moments: Moments
    labels: Int[AnyArray, "M best scenes"]
    """The object of each point in the most probable partitions; some may be there twice."""
    label_probs: Float[AnyArray, "best scenes"]
    best_match: Int[AnyArray, "M scenes"]
    fits: Bool[AnyArray, " scenes"]
    """Whether the rows are what the sum takes them for."""


def run(
    program: Program,
    scene: Scene,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """The exact posterior of one scene or of each scene of a batch.

    The result has `log_evidence`, exact match marginals, pose moments (of the mixture over matches
    that the pose posterior is) and, in `details`: `partitions`, the most probable partitions of the
    points with their probabilities, and `best_match`, the part of each row in the best match. The
    best match need not have the most probable partition, which sums over many matches, and where
    identical objects tie the two may name them differently.
    """
    began = time.perf_counter()
    scenes = check_scene(scene).batch()
    check_program(program, scenes.take(0))
    if presence.has_presence(program, scenes.take(0)):
        solve = functools.partial(run, progress=progress)
        result = presence.run(solve, program, scenes)
        result = result if scene.is_batch else result.take(0)
        return replace(result, seconds=time.perf_counter() - began)
    example = _checked(program, scenes.take(0))
    if example.precision_prior is None:
        result = _solved(program, scenes, example, None, progress)
    else:
        result = _over_precisions(program, scenes, example, progress)
    result = result if scene.is_batch else result.take(0)
    return replace(result, seconds=time.perf_counter() - began)


def _over_precisions(
    program: Program,
    scenes: Scene,
    example: Conjugate,
    progress: Callable[[int, int], None] | None,
) -> Result:
    """An unknown precision is summed over too, on a grid of its logarithm.

    The integrand is smooth and vanishes at both ends, where the trapezoid rule is exponentially
    accurate; its width is that of a log-gamma with some ten degrees of freedom or more.
    """
    assert example.precision_prior is not None
    prior = gamma(float(example.precision_prior[0]), scale=1 / float(example.precision_prior[1]))
    low, high = np.log(prior.ppf(_TAIL)), np.log(prior.isf(_TAIL))
    nodes = np.linspace(low, high, 1 + max(8, math.ceil((high - low) / _SPACING)))
    log_prior = prior.logpdf(np.exp(nodes)) + nodes + np.log(nodes[1] - nodes[0])
    scene_of, node = np.divmod(np.arange(len(scenes.points) * len(nodes)), len(nodes))
    precision = np.exp(nodes)[node]
    found = _solved(program, scenes.take(scene_of), example, precision, progress)
    assert found.log_evidence is not None
    result, weight = mix(found, scenes, scene_of, found.log_evidence + log_prior[node])
    mean = average(precision, scene_of, weight, len(scenes.points))
    return replace(result, details=result.details | {"precision": mean})


def _solved(
    program: Program,
    scenes: Scene,
    example: Conjugate,
    precision: Float[np.ndarray, " scenes"] | None,
    progress: Callable[[int, int], None] | None,
) -> Result:
    """Every scene of a batch, each at its own precision where the program leaves it open."""
    owner = np.asarray(example.parts.owner)
    num_scenes, num_rows = scenes.present.shape
    order, sizes = _points_first(scenes.present)
    log_sum = np.zeros(num_scenes)
    match_probs = np.zeros((num_scenes, num_rows, num_rows))
    pose_mean = np.zeros((num_scenes, *example.pose_mean.shape))
    pose_covariance = np.zeros((num_scenes, *example.pose_covariance.shape))
    parts = np.full((num_scenes, num_rows), -1)
    partitions: list[list[tuple[np.ndarray, float]]] = [[] for _ in sizes]
    finished = 0
    for some, plan, solution in _solutions(program, scenes, order, sizes, precision):
        points = order[some, : plan.num_points]
        match_probs[some[:, None], order[some]] = np.moveaxis(solution.moments.match_probs, -1, 0)
        parts[some[:, None], points] = solution.best_match.T
        pose_mean[some] = np.moveaxis(solution.moments.pose_mean, -1, 0)
        pose_covariance[some] = np.moveaxis(solution.moments.pose_covariance, -1, 0)
        log_sum[some] = solution.log_sum
        listed = _partitions(solution, points, num_rows, _num_listed(scenes.layout))
        for s, found in zip(some, listed, strict=True):
            partitions[s] = found
        finished += len(some)
        if progress is not None:
            progress(finished, num_scenes)
    return Result(
        method="exact",
        scene=scenes,
        match_probs=match_probs,
        pose_mean=pose_mean,
        pose_covariance=pose_covariance,
        object=np.stack([found[0][0] for found in partitions]),
        owner=owner,
        converged=np.ones(num_scenes, bool),
        steps=np.ones(num_scenes, int),
        log_evidence=log_sum - _known_normalizer(program, scenes) + data_log_prob(program, scenes),
        details={"partitions": partitions, "best_match": parts},
    )


def sample(program: Program, scene: Scene, key: Array | int = 0, num_draws: int = 1000) -> Draws:
    """Independent draws of (match, pose) from the exact posterior of one scene.

    Returns numpy arrays: the part of each row, (draws, N), -1 in dummy rows, and the poses.
    """
    if scene.is_batch:
        raise InputError("exact draws are for one scene, got a batch; use scene.take(i)")
    scenes = check_scene(scene).batch()
    if presence.has_presence(program, scenes.take(0)):
        raise InputError(
            "exact draws want a program without a latent 'presence'; say which objects are there "
            "with scene._replace(presence=...), for example the most probable set that exact.run "
            "finds (details['presence_sets'])"
        )
    if _checked(program, scenes.take(0)).precision_prior is not None:
        raise InputError(
            "exact draws want a fixed precision, but the program has a site 'precision' with a "
            "Gamma prior; fix it in the program, or draw with the method gibbs"
        )
    order, sizes = _points_first(scenes.present)
    layout = scenes.layout
    sampler = _sampler(program, int(sizes[0]), layout, num_draws)
    base_key = jax.random.key(key) if isinstance(key, int) else key
    drawn = jax.tree.map(np.asarray, sampler(base_key, Scene(**scenes.observed), order))
    match = np.full((num_draws, scenes.points.shape[1]), -1)
    match[:, order[0, : sizes[0]]] = drawn.match
    return Draws(match, drawn.pose)


def _checked(program: Program, scene: Scene) -> Conjugate:
    """The pieces at a scene, once it is clear that they can be summed over."""
    check_program(program, scene)
    check_conjugate(program, scene)
    example = read(program, scene)
    if example.part_prior is not None:
        raise InputError(
            "exact inference wants fixed part probabilities, but the program has a site "
            "'part_probs' with a Dirichlet prior; fix them in the program, or use the method gmm"
        )
    return example


def _points_first(
    present: Bool[np.ndarray, "scenes N"],
) -> tuple[Int[np.ndarray, "scenes N"], Int[np.ndarray, " scenes"]]:
    """An order of the rows with the points before the dummies, and the numbers of points."""
    return np.argsort(~present, axis=1, kind="stable"), present.sum(axis=1)


def _solutions(
    program: Program,
    scenes: Scene,
    order: Int[np.ndarray, "scenes N"],
    sizes: Int[np.ndarray, " scenes"],
    precision: Float[np.ndarray, " scenes"] | None,
) -> Iterator[tuple[Int[np.ndarray, " some"], Plan | Listing, Solution]]:
    """Solve scenes of the same number of points together, some at a time.

    The next ones are under way while the last ones are put in their places.
    """
    layout = scenes.layout
    waiting: tuple[Int[np.ndarray, " some"], Plan | Listing, Solution] | None = None
    for num_points in np.unique(sizes):
        plan = _plan(program, int(num_points), layout)
        solve = _solver(program, int(num_points), layout)
        chosen = np.flatnonzero(sizes == num_points)
        chunk = 1 << max(0, min(32, len(chosen), _CELLS // plan.num_cells) - 1).bit_length()
        for start in range(0, len(chosen), chunk):
            some = chosen[start : start + chunk]
            padded = np.resize(some, chunk)
            given = None if precision is None else precision[padded]
            launched = solve(Scene(**scenes.take(padded).observed), order[padded], given)
            if waiting is not None:
                yield _finished(*waiting)
            waiting = some, plan, launched
    if waiting is not None:
        yield _finished(*waiting)


def _finished(
    some: Int[np.ndarray, " some"], plan: Plan | Listing, solution: Solution
) -> tuple[Int[np.ndarray, " some"], Plan | Listing, Solution]:
    """In numpy, without the scenes that only fill a chunk, once it is clear that all fit."""
    if not np.asarray(solution.fits).all():
        raise InputError(
            "exact inference wants points that are seen whole or not at all, as `present` says, "
            "and dummy rows that are all alike in the match prior, but this program treats single "
            "features or dummies on their own; use the method ds"
        )
    return some, plan, jax.tree.map(lambda x: np.asarray(x)[..., : len(some)], solution)


@functools.lru_cache(maxsize=64)
def _plan(program: Program, num_points: int, layout: Layout) -> Plan | Listing:
    def plan(pieces: Conjugate) -> Plan | Listing:
        is_mixture = pieces.match_family is MixtureMatch
        return (assignments.make_listing if is_mixture else make_plan)(pieces, num_points)

    return trace_pieces(program, layout, plan)


@functools.lru_cache(maxsize=64)
def _solver(
    program: Program, num_points: int, layout: Layout
) -> Callable[[Scene, Int[AnyArray, "scenes N"], AnyArray | None], Solution]:
    """Compiled once for each number of points."""
    plan = _plan(program, num_points, layout)
    template = trace_pieces(program, layout, templates_alike)
    swaps = math.prod(math.factorial(template.count(first)) for first in set(template))
    num_listed = _num_listed(layout)

    @jax.jit
    def solve(
        scenes: Scene, order: Int[AnyArray, "scenes N"], precision: AnyArray | None
    ) -> Solution:
        model, fits = _ordered(program, plan, layout, scenes, order, precision)
        if isinstance(plan, Listing):
            return _solve_mixture(model, plan, num_listed, fits)
        return _solve_permutations(model, plan, num_listed * min(swaps, NUM_PARTITIONS), fits)

    return solve


def _solve_permutations(
    model: Conjugate, plan: Plan, num_parses: int, fits: Bool[Array, " scenes"]
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
        best_match(plan, tables),
        fits,
    )


def _solve_mixture(
    model: Conjugate, listing: Listing, num_partitions: int, fits: Bool[Array, " scenes"]
) -> Solution:
    sums = assignments.sum_over_assignments(model, listing)
    dummies = logsumexp(model.match_logits[listing.num_points :], axis=1).sum(axis=0)
    labels, probs = assignments.best_partitions(listing, sums, num_partitions)
    return Solution(
        sums.evidence + dummies,
        assignments.moments(model, listing, sums),
        jnp.moveaxis(labels, -1, 0),
        probs,
        assignments.best_match(listing, sums),
        fits,
    )


@functools.lru_cache(maxsize=64)
def _sampler(
    program: Program, num_points: int, layout: Layout, num_draws: int
) -> Callable[[Array, Scene, Int[AnyArray, "1 N"]], Draws]:
    plan = _plan(program, num_points, layout)

    @jax.jit
    def sampler(key: Array, scenes: Scene, order: Int[AnyArray, "1 N"]) -> Draws:
        model, _ = _ordered(program, plan, layout, scenes, order, None)
        if isinstance(plan, Listing):
            sums = assignments.sum_over_assignments(model, plan)
            return assignments.draw(key, model, plan, sums, num_draws)
        return draw(key, model, plan, sum_over_matches(model, plan), num_draws)

    return sampler


def _ordered(
    program: Program,
    plan: Plan | Listing,
    layout: Layout,
    scenes: Scene,
    order: Int[AnyArray, "scenes N"],
    precision: AnyArray | None,
) -> tuple[Conjugate, Bool[Array, " scenes"]]:
    """The model with its points first, and whether its rows are what the sum takes them for."""
    model = read_batch(program, scenes, what_varies(program, layout))

    def reorder(x: Array) -> Array:
        wide = jnp.broadcast_to(x, (*x.shape[:-1], len(order)))
        return jnp.take_along_axis(wide, order.T[:, None], axis=0)

    model = replace(
        model,
        points=reorder(model.points),
        seen=reorder(model.seen),
        match_logits=reorder(model.match_logits),
    )
    if precision is not None:
        variance = model.parts.variance / precision
        model = replace(model, parts=model.parts._replace(variance=variance))
    is_point = np.arange(layout.num_rows)[:, None, None] < plan.num_points
    fits = jnp.all(model.seen == is_point, axis=(0, 1))
    if isinstance(plan, Plan):
        dummies = model.match_logits[plan.num_points :]
        fits &= jnp.all(dummies == model.match_logits[-1:], axis=(0, 1))
    return model, fits


def _known_normalizer(program: Program, scenes: Scene) -> Float[np.ndarray, " scenes"]:
    values = log_prior_normalizer(program, scenes)
    if np.isnan(values).any():
        raise InputError(
            f"the normaliser of a match prior that is not uniform wants at most {MAX_ROWS} points "
            "that can meet the same parts, and this scene has more; use a uniform prior or the "
            "method ds"
        )
    return values


def _num_listed(layout: Layout) -> int:
    return NUM_PARTITIONS if layout.num_objects is None else NUM_GIVEN_PRESENCE


def _partitions(
    solution: Solution, points: Int[np.ndarray, "some M"], num_rows: int, num_listed: int
) -> Iterator[list[tuple[Int[np.ndarray, " N"], float]]]:
    """Most probable partitions of each scene: the object of each row, and the probability.

    Ways that group the points alike, such as two identical objects swapped, are one partition.
    """
    labels = solution.labels.T  # (scenes, best, M)
    probability = solution.label_probs.T
    together = labels[..., :, None] == labels[..., None, :]
    for i, rows in enumerate(points):
        found: dict[bytes, tuple[np.ndarray, float]] = {}
        for j in np.argsort(-probability[i], kind="stable"):
            name = together[i, j].tobytes()
            if name not in found and probability[i, j] > 0:
                full = np.full(num_rows, -1)
                full[rows] = labels[i, j]
                found[name] = (full, float(min(probability[i, j], 1.0)))
        yield list(found.values())[:num_listed]
