"""Exact inference: the posterior of a program by a sum over all matches.

`inference.exact.permutations` sums over permutations, `inference.exact.assignments` over the
assignments of a mixture prior, and `inference.exact.solutions` compiles both.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import numpy as np
from jaxtyping import Array, Int

from inference.conditions.combine import NUM_PARTITIONS
from inference.conditions.listing import list_conditions
from inference.conditions.problem import Problem, read_problem, solve_scenes
from inference.conditions.solve import refuse_impossible
from inference.exact import assignments
from inference.exact.assignments import Listing
from inference.exact.parses import Draws, draw
from inference.exact.permutations import sum_over_matches
from inference.exact.solutions import (
    MAX_PARSES,
    Solution,
    ordered,
    plan_of,
    refuse_if_unfit,
    solutions,
)
from inference.result import Report, Result, grouping_of, method, reporter
from models.errors import InputError
from models.numerics.arrays import AnyArray
from models.numerics.devices import compiled
from models.numerics.permanent import MAX_ROWS
from models.program.batches import Skeleton
from models.program.reading import LinearGaussianModel
from models.program.sites import Program
from models.scenes import Scene, check_scene, points_first

NUM_GIVEN = 16
"""How many partitions are listed at each value of the conditions. Their probabilities are added up
over conditions, so the list should leave out little probability."""


@method
def run(
    program: Program,
    scene: Scene,
    *,
    progress_bar: bool | Report = False,
) -> Result:
    """The exact posterior of one scene or of each scene of a batch.

    The result has `log_evidence`, exact match marginals, and pose moments (the pose posterior is a
    mixture over matches). `partitions` lists the most probable partitions of the points with their
    probabilities; `best_match` is the part of each row in the most probable match. The best match
    need not have the most probable partition, which sums over many matches, and the two may name
    identical objects differently. Without further latent sites, `partitions` has the first and
    those proven to be more probable than all unlisted ones; `details["proven"]` says whether the
    first is proven.
    """
    report = reporter(progress_bar)
    return solve_scenes(
        program, scene.batch(), functools.partial(_solved, report=report), factors=frozenset()
    )


def _solved(problem: Problem, report: Report) -> Result:
    """Every scene of a problem."""
    scenes = problem.scenes
    _check_normalizer(problem)
    num_scenes, num_rows = scenes.present.shape
    pose_mean, pose_covariance = (
        np.zeros((num_scenes, *x.shape[:-1]))
        for x in (problem.reading.model.pose_mean, problem.reading.model.pose_covariance)
    )
    order, sizes = points_first(scenes.present)
    log_sum = np.zeros(num_scenes)
    match_probs = np.zeros((num_scenes, num_rows, num_rows))
    parts = np.full((num_scenes, num_rows), -1)
    partitions: list[list[tuple[np.ndarray, float]]] = [[] for _ in sizes]
    unlisted = np.zeros(num_scenes)
    num_parses = (NUM_GIVEN,) if problem.is_conditional else (NUM_PARTITIONS, MAX_PARSES)
    for some, plan, solution in solutions(problem, order, sizes, num_parses, report):
        points = order[some, : plan.num_points]
        match_probs[some[:, None], order[some]] = np.moveaxis(solution.moments.match_probs, -1, 0)
        parts[some[:, None], points] = solution.best_match.T
        pose_mean[some] = np.moveaxis(solution.moments.pose_mean, -1, 0)
        pose_covariance[some] = np.moveaxis(solution.moments.pose_covariance, -1, 0)
        log_sum[some], unlisted[some] = solution.log_sum, solution.unlisted
        listed = _partitions(solution, points, num_rows, num_parses[0])
        for s, found in zip(some, listed, strict=True):
            partitions[s] = found
    nothing = np.full(num_rows, -1)  # for numbers so extreme that every weight is zero
    result = Result(
        method="exact",
        scene=scenes,
        match_probs=match_probs,
        pose_mean=pose_mean,
        pose_covariance=pose_covariance,
        labels=np.stack([found[0][0] if found else nothing for found in partitions]),
        owner=problem.owner,
        converged=np.ones(num_scenes, bool),
        steps=np.ones(num_scenes, int),
        log_evidence=log_sum + problem.log_constant,
        best_match=parts,
        partitions=partitions,
        details={"unlisted": unlisted},
    )
    return result if problem.is_conditional else _proven_only(result)


def _proven_only(result: Result) -> Result:
    """Drop partitions that might be less probable than an unlisted one, except the first."""
    assert result.partitions is not None
    unlisted = result.details["unlisted"]
    proven = [
        listed[:1] + [found for found in listed[1:] if found[1] >= least]
        for listed, least in zip(result.partitions, unlisted, strict=True)
    ]
    first = np.array([listed[0][1] for listed in proven])
    return replace(result, partitions=proven, details={"proven": first >= unlisted})


def sample(program: Program, scene: Scene, rng_key: Array, num_samples: int = 1000) -> Draws:
    """Independent draws of match and poses from the exact posterior of one scene.

    Returns numpy arrays: the part of each row (draws, N), -1 in dummy rows; the poses; and the
    values of the program's discrete conditions.
    """
    if scene.is_batch:
        raise InputError("exact draws require one scene, got a batch; use scene.take(i)")
    scenes = check_scene(scene).batch()
    found = read_problem(program, scenes, factors=frozenset())
    if isinstance(found, Problem):
        return _sample(found, rng_key, num_samples)
    listed = list_conditions(found)
    if listed.continuous:
        name = next(iter(listed.continuous))
        raise InputError(
            f"exact draws require fixed continuous sites, but {name!r} has a prior; fix it in the "
            "program, or draw with the method gibbs or nuts"
        )
    copies = scenes.take(np.zeros(listed.num_values, int))
    problem = read_problem(program, copies, listed.values, factors=frozenset())
    assert isinstance(problem, Problem)
    possible = np.flatnonzero(np.isfinite(problem.log_constant))
    refuse_impossible(scenes, np.array([len(possible) > 0]))
    problem = problem._replace(is_conditional=True).take(possible)
    log_evidence = _solved(problem, reporter(False)).log_value
    choice = np.asarray(jax.random.categorical(rng_key, log_evidence, shape=(num_samples,)))
    drawn = {
        s: _sample(problem.take(np.array([s])), jax.random.fold_in(rng_key, s), num_samples)
        for s in np.unique(choice).tolist()
    }
    match = np.stack([drawn[s].match[i] for i, s in enumerate(choice)])
    pose = np.stack([drawn[s].pose[i] for i, s in enumerate(choice)])
    values = {name: x[possible][choice] for name, x in listed.values.items()}
    return Draws(match, pose, values)


def _sample(problem: Problem, key: Array, num_samples: int) -> Draws:
    """Draws of match and poses for a problem of one scene."""
    scenes = problem.scenes
    order, sizes = points_first(scenes.present)
    sampler = _sampler(problem.skeleton, int(sizes[0]), num_samples)
    drawn, fits, reach = jax.tree.map(np.asarray, sampler(key, problem.reading.model, order))
    refuse_if_unfit(fits, reach)
    match = np.full((num_samples, scenes.points.shape[1]), -1)
    match[:, order[0, : sizes[0]]] = drawn.match
    return Draws(match, drawn.pose)


@functools.lru_cache(maxsize=64)
def _sampler(
    skeleton: Skeleton, num_points: int, num_samples: int
) -> Callable[[Array, LinearGaussianModel, Int[AnyArray, "1 N"]], tuple[Draws, Array, Array]]:
    """A compiled sampler; it also returns what `refuse_if_unfit` checks."""
    plan = plan_of(skeleton, num_points)

    @compiled
    def sampler(
        key: Array, pieces: LinearGaussianModel, order: Int[AnyArray, "1 N"]
    ) -> tuple[Draws, Array, Array]:
        model, fits, reach = ordered(pieces, plan, order)
        if isinstance(plan, Listing):
            sums = assignments.sum_over_assignments(model, plan)
            drawn = assignments.draw(key, model, plan, sums, num_samples)
        else:
            drawn = draw(key, model, plan, sum_over_matches(model, plan), num_samples)
        return drawn, fits, reach

    return sampler


def _check_normalizer(problem: Problem) -> None:
    if np.isnan(problem.log_constant).any():
        raise InputError(
            f"a match prior that is not uniform can be normalised only if at most {MAX_ROWS} "
            "points compete for the same parts, but this scene has more; use a uniform prior or "
            "the method ds"
        )


def _partitions(
    solution: Solution, points: Int[np.ndarray, "some M"], num_rows: int, num_listed: int
) -> Iterator[list[tuple[Int[np.ndarray, " N"], float]]]:
    """The most probable partitions of each scene: the object of each row, and the probability.

    Labellings that group the points alike, such as two identical objects swapped, are merged.
    """
    labels = solution.labels.T  # (scenes, best, M)
    probability = solution.label_probs.T
    together = grouping_of(labels, solution.moments.pose_mean.shape[0])
    for i, rows in enumerate(points):
        found: dict[bytes, tuple[np.ndarray, float]] = {}
        for j in np.argsort(-probability[i], kind="stable"):
            name = together[i, j].tobytes()
            if name not in found and probability[i, j] > 0:
                full = np.full(num_rows, -1)
                full[rows] = labels[i, j]
                found[name] = (full, float(min(probability[i, j], 1.0)))
        yield list(found.values())[:num_listed]
