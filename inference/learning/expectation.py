"""The E-step: the posterior of match and poses of each scene, at the current parameters."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from inference.conditions.combine import weigh
from inference.conditions.listing import Conditions
from inference.conditions.problem import Problem, read_problem, solve_scenes
from inference.conditions.solve import Runs, Solve
from inference.exact.pairs import pair_moments
from inference.exact.permutations import Moments, make_plan, sum_over_matches
from inference.exact.solutions import in_chunks, ordered
from inference.learning.statistics import Statistics
from inference.proposals import map_parse
from inference.proposals.states import solve_likely_states
from inference.result import Result, partition
from inference.variational import cavi
from inference.variational.ascent import Schedule
from inference.variational.pool import Restarts
from models.distributions.match import MixtureMatch
from models.errors import InputError
from models.numerics.arrays import AnyArray
from models.numerics.devices import compiled
from models.program.batches import Skeleton
from models.program.reading import LinearGaussianModel
from models.program.sites import Program
from models.scenes import Scene, points_first

EStep = Literal["exact", "ds", "map"]

_NEGLIGIBLE = 1e-12  # runs of a smaller weight within their scene are dropped

_PARSES = 4  # parses of a scene with which coordinate ascent begins

_SCHEDULE = Schedule(beta_start=1.0)
"""No annealing: parses and the last match probabilities are good starting points."""

_PRECISE = _SCHEDULE._replace(tolerance=1e-8)


class Expectations(NamedTuple):
    """The posterior of some scenes, as runs; a run is a scene at a value of its conditions."""

    scene: Int[np.ndarray, " runs"]
    given: dict[str, np.ndarray]
    """The conditions of each run."""
    weight: Float[np.ndarray, " runs"]
    """Posterior weight of the run within its scene; the weights of a scene sum to one."""
    log_volume: Float[np.ndarray, " runs"]
    """Log volume of the lattice cell of continuous conditions; zero without such conditions."""
    statistics: Statistics
    value: Float[np.ndarray, " scenes"]
    """Log evidence or ELBO of each scene."""

    def first_given(self) -> dict[str, np.ndarray]:
        """The conditions of the first run."""
        return {name: x[0] for name, x in self.given.items()}


def join_expectations(found: Sequence[Expectations], batches: Sequence[Scene]) -> Expectations:
    """Join the expectations of several batches; batches that were not inferred yet are left out."""
    if len(batches) == 1:
        return found[0]
    ends = np.cumsum([0, *(len(batch.points) for batch in batches)])
    moved = [x._replace(scene=x.scene + end) for x, end in zip(found, ends[:-1], strict=False)]
    return jax.tree.map(lambda *x: np.concatenate(x), *moved)


def expect(
    program: Program,
    scenes: Scene,
    method: EStep,
    rng_key: Array,
    last: Expectations | None = None,
    precisely: bool = False,
) -> Expectations:
    """Infer every scene, and keep what the M-step needs.

    Args:
        program: the program at the current values of its parameters.
        method: exact inference, coordinate ascent, or the best parse alone.
        last: the E-step at nearby parameters. Only the conditions that had weight there are solved,
            and coordinate ascent starts from the match probabilities there instead of searching.
        precisely: use a tolerance for coordinate ascent that allows differences of E-steps.
    """
    if method not in ("exact", "ds", "map"):
        raise InputError(f"there is no E-step {method!r}; choose from exact, ds, map")
    if last is not None:
        return _again(program, scenes, method, rng_key, last, _PRECISE if precisely else _SCHEDULE)
    solve: Solve = _solve_exactly
    ways: dict[str, Any] = {}
    if method != "exact":
        solve = map_parse.solver()
        if method == "ds":
            solve = cavi.solver(rng_key, Restarts(_PARSES, 2.0), schedule=_SCHEDULE)
        ways = {"or_bound": True, "search": solve_likely_states, "max_values": 1}
    recorder = _Recorder()
    whole = solve_scenes(
        program,
        scenes,
        lambda *problem: _with_statistics(solve(*problem)),
        factors=frozenset(),
        finish=recorder,
        **ways,
    )
    return recorder.expectations(whole)


def _again(
    program: Program,
    scenes: Scene,
    method: EStep,
    rng_key: Array,
    last: Expectations,
    schedule: Schedule,
) -> Expectations:
    """Solve the same runs again; coordinate ascent starts where it ended."""
    runs = scenes.take(last.scene)
    problem = read_problem(
        program, runs, last.given, factors=frozenset(), or_bound=method != "exact"
    )
    assert isinstance(problem, Problem)
    solve: Solve = _solve_exactly
    if method == "map":
        solve = map_parse.solver()
    elif method == "ds":
        logits = np.log(np.maximum(last.statistics.match_probs, _TINY))
        solve = cavi.solver(rng_key, Restarts(1, 0.0), lambda _: logits, schedule=schedule)
    result = _with_statistics(solve(problem._replace(is_conditional=True)))
    value, weight = weigh(result.log_value + last.log_volume, last.scene, len(scenes.points))
    return last._replace(weight=weight, statistics=result.details["statistics"], value=value)


_TINY = 1e-30  # lower bound on match probabilities, for a finite logarithm


def _with_statistics(result: Result) -> Result:
    if "statistics" in result.details:
        return result
    q = Statistics(result.match_probs, result.pose_mean, result.pose_covariance)
    return replace(result, details={"statistics": q})


class _Recorder:
    """A `finish` for `solve_scenes` that stores the runs instead of mixing them."""

    def __init__(self) -> None:
        self.parts: list[Expectations] = []
        self.finished = 0

    def __call__(self, runs: Runs, scenes: Scene, given: Conditions, even: np.ndarray) -> Result:
        value, weight = weigh(runs.log_weight, runs.scene, len(scenes.points))
        values, _ = given.given(runs.value, runs.node)
        volume = runs.log_weight - runs.result.log_value
        statistics = runs.result.details["statistics"]
        kept = np.flatnonzero(weight > _NEGLIGIBLE)
        every = Expectations(runs.scene + self.finished, values, weight, volume, statistics, weight)
        found = jax.tree.map(lambda x: x[kept], every)
        self.parts.append(found._replace(value=value))
        self.finished += len(scenes.points)
        firsts = np.unique(runs.scene, return_index=True)[1]
        return replace(runs.result, details={}).take(firsts)

    def expectations(self, result: Result) -> Expectations:
        """The stored runs or, for a program without open conditions, `result` as runs."""
        if self.parts:
            return jax.tree.map(lambda *x: np.concatenate(x), *self.parts)
        value = np.asarray(result.log_value)
        one, every = np.ones(len(value)), np.arange(len(value))
        return Expectations(every, {}, one, 0 * one, result.details["statistics"], value)


# --- exact inference ----------------------------------------------------------------------------


class _Sums(NamedTuple):
    """Exact results for scenes with the same number of points; points are the first rows."""

    log_sum: Float[AnyArray, " scenes"]
    moments: Moments
    shift: Float[AnyArray, "M N p scenes"]
    spread: Float[AnyArray, "N p p scenes"]
    fits: Bool[AnyArray, " scenes"]
    reach: Float[AnyArray, " scenes"]


def _solve_exactly(problem: Problem) -> Result:
    """Exact inference with the moments of each pair, and without lists of partitions."""
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
    shift = np.zeros((num_scenes, rows, rows, size))
    spread = np.zeros((num_scenes, rows, features, size, size))
    q = Statistics(
        np.zeros((num_scenes, rows, rows)),
        np.zeros((num_scenes, objects, size)),
        np.zeros((num_scenes, objects, size, size)),
        shift,
        spread,
    )
    solver_of = functools.partial(_sums, problem.skeleton)
    for some, plan, sums in in_chunks(problem, order, sizes, np.arange(num_scenes), solver_of):
        first = jax.tree.map(lambda x: np.moveaxis(x, -1, 0), sums)
        log_sum[some] = first.log_sum
        q.match_probs[some[:, None], order[some]] = _with_dummies(first.moments.match_probs)
        q.pose_mean[some] = first.moments.pose_mean
        q.pose_covariance[some] = first.moments.pose_covariance
        shift[some[:, None], order[some, : plan.num_points]] = first.shift
        spread[some] = first.spread[:, :, None]
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
    """Add dummy rows, which share equally the parts that the points leave."""
    num_points, rows = match_probs.shape[1:]
    left = 1.0 - match_probs.sum(axis=1, keepdims=True)
    dummies = np.repeat(left / max(rows - num_points, 1), rows - num_points, axis=1)
    return np.concatenate([match_probs, dummies], axis=1)
