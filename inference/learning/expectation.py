"""The E-step: what each scene says of its match and poses, at the present parameters."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from inference.conditions import solve as conditions
from inference.conditions.combine import weigh
from inference.conditions.listing import Conditions
from inference.conditions.problem import Problem
from inference.conditions.solve import Runs, mixed
from inference.exact.pairs import pair_moments
from inference.exact.permutations import Moments, make_plan, sum_over_matches
from inference.exact.solutions import in_chunks, ordered, points_first
from inference.learning.statistics import Statistics, independent
from inference.proposals import map_parse
from inference.proposals.states import solve_likely_states
from inference.result import Result, partition
from inference.variational import cavi
from inference.variational.restarts import Restarts
from models.distributions.match import MixtureMatch
from models.errors import InputError
from models.numerics.arrays import AnyArray
from models.numerics.devices import compiled
from models.program.batches import Skeleton
from models.program.reading import LinearGaussianModel
from models.program.sites import Program
from models.scenes import Scene

EStep = Literal["exact", "ds", "map"]

_NEGLIGIBLE = 1e-12  # of a run's weight within its scene


class Expectations(NamedTuple):
    """The posterior of some scenes, in runs: a scene at a value of its conditions."""

    scene: Int[np.ndarray, " runs"]
    given: dict[str, np.ndarray]
    """The conditions of each run."""
    weight: Float[np.ndarray, " runs"]
    """Of the run within its scene; the weights of a scene sum to one."""
    statistics: Statistics
    value: Float[np.ndarray, " scenes"]
    """Log evidence or ELBO of each scene."""


def expect(program: Program, scenes: Scene, method: EStep, rng_key: Array) -> Expectations:
    """Infer every scene, and keep what the M-step needs.

    Args:
        program: with its parameters at their present values.
        method: exact inference, coordinate ascent, or the best parse alone.
    """
    recorder = _Recorder(len(scenes.points))
    found: dict[EStep, tuple[conditions.Solve, dict[str, Any]]] = {
        "exact": (_solve_exactly, {}),
        "ds": (cavi.solver(rng_key, Restarts(16, 2.0)), _SEARCHED),
        "map": (map_parse.solver(), _SEARCHED),
    }
    if method not in found:
        raise InputError(f"there is no E-step {method!r}; choose from {', '.join(found)}")
    solve, ways = found[method]

    def with_statistics(problem: Problem, *others: Any) -> Result:
        result = solve(problem, *others)
        if "statistics" in result.details:
            return result
        seen = np.moveaxis(np.broadcast_to(problem.reading.model.seen, _seen_shape(problem)), -1, 0)
        q = independent(
            result.match_probs, result.pose_mean, result.pose_covariance, seen, problem.owner
        )
        return replace(result, details={"statistics": q})

    whole = conditions.solve(
        program, scenes, with_statistics, factors=frozenset(), finish=recorder, **ways
    )
    return recorder.expectations(whole)


_SEARCHED: dict[str, Any] = {"or_bound": True, "search": solve_likely_states, "max_values": 1}


def _seen_shape(problem: Problem) -> tuple[int, ...]:
    return (*problem.reading.model.seen.shape[:-1], problem.num_scenes)


class _Recorder:
    """Keeps the runs that are put together."""

    def __init__(self, num_scenes: int) -> None:
        self.num_scenes = num_scenes
        self.finished = 0
        self.parts: list[tuple[np.ndarray, dict[str, np.ndarray], np.ndarray, Statistics]] = []

    def __call__(self, runs: Runs, scenes: Scene, given: Conditions, even: np.ndarray) -> Result:
        _, weight = weigh(runs.log_weight, runs.scene, len(scenes.points))
        values, _ = given.given(runs.value, runs.node)
        kept = np.flatnonzero(weight > _NEGLIGIBLE)
        some = jax.tree.map(lambda x: x[kept], (runs.scene, values, weight, runs.result.details))
        scene, values, weight, details = some
        self.parts.append((scene + self.finished, values, weight, details["statistics"]))
        self.finished += len(scenes.points)
        return mixed(runs._replace(result=replace(runs.result, details={})), scenes, given, even)

    def expectations(self, result: Result) -> Expectations:
        """All that was kept, or the result itself where a program leaves no condition open."""
        if not self.parts:
            every = np.arange(self.num_scenes)
            weight = np.ones(self.num_scenes)
            self.parts = [(every, {}, weight, result.details["statistics"])]
        scene, given, weight, q = jax.tree.map(lambda *x: np.concatenate(x), *self.parts)
        return Expectations(scene, given, weight, q, np.asarray(result.log_value))


# --- exact inference ----------------------------------------------------------------------------


class _Sums(NamedTuple):
    """What exact inference gives for scenes of the same number of points, which come first."""

    log_sum: Float[AnyArray, " scenes"]
    moments: Moments
    shift: Float[AnyArray, "M N p scenes"]
    spread: Float[AnyArray, "N p p scenes"]
    fits: Bool[AnyArray, " scenes"]
    reach: Float[AnyArray, " scenes"]


def _solve_exactly(problem: Problem) -> Result:
    """Exact inference with the moments of every pair, and without lists of partitions."""
    if problem.skeleton.match_family is MixtureMatch:
        raise InputError(
            "site 'match': a MixtureMatch has no exact E-step; use the E-step 'ds', or a prior "
            "over permutations"
        )
    scenes, model = problem.scenes, problem.reading.model
    order, sizes = points_first(scenes.present)
    num_scenes, rows = scenes.present.shape
    objects, size = model.pose_mean.shape[:2]
    features = model.points.shape[1]
    log_sum = np.zeros(num_scenes)
    q = Statistics(
        np.zeros((num_scenes, rows, rows)),
        np.zeros((num_scenes, objects, size)),
        np.zeros((num_scenes, objects, size, size)),
        np.zeros((num_scenes, rows, rows, size)),
        np.zeros((num_scenes, rows, features, size, size)),
    )
    solver_of = functools.partial(_sums, problem.skeleton)
    for some, plan, sums in in_chunks(problem, order, sizes, np.arange(num_scenes), solver_of):
        first = jax.tree.map(lambda x: np.moveaxis(x, -1, 0), sums)
        log_sum[some] = first.log_sum
        q.match_probs[some[:, None], order[some]] = _with_dummies(first.moments.match_probs)
        q.pose_mean[some] = first.moments.pose_mean
        q.pose_covariance[some] = first.moments.pose_covariance
        q.shift[some[:, None], order[some, : plan.num_points]] = first.shift
        q.spread[some] = first.spread[:, :, None]
    return Result(
        method="exact",
        scene=scenes,
        match_probs=q.match_probs,
        pose_mean=q.pose_mean,
        pose_covariance=q.pose_covariance,
        labels=partition(q.match_probs, problem.owner, scenes.present),
        owner=problem.owner,
        converged=np.ones(num_scenes, bool),
        steps=np.ones(num_scenes, int),
        log_evidence=log_sum + problem.log_constant,
        details={"statistics": q},
    )


@functools.lru_cache(maxsize=64)
def _sums(
    skeleton: Skeleton, num_points: int
) -> Callable[[LinearGaussianModel, Int[AnyArray, "scenes N"]], _Sums]:
    """Compiled once for each number of points."""
    plan = make_plan(skeleton, num_points)

    @compiled
    def solve(pieces: LinearGaussianModel, order: Int[AnyArray, "scenes N"]) -> _Sums:
        model, fits, reach = ordered(pieces, plan, order)
        tables = sum_over_matches(model, plan)
        found, pairs = pair_moments(plan, tables)
        dummies = jax.scipy.special.gammaln(len(model.points) - plan.num_points + 1.0)
        return _Sums(
            tables.evidence + dummies, found, pairs.shift, pairs.spread.sum(axis=0), fits, reach
        )

    return solve


def _with_dummies(match_probs: Float[np.ndarray, "some M N"]) -> Float[np.ndarray, "some N N"]:
    """Dummy rows, which are all alike, share the parts that the points leave."""
    num_points, rows = match_probs.shape[1:]
    left = 1.0 - match_probs.sum(axis=1, keepdims=True)
    dummies = np.repeat(left / max(rows - num_points, 1), rows - num_points, axis=1)
    return np.concatenate([match_probs, dummies], axis=1)
