"""Coordinate ascent on the mean-field ELBO: the paper's Algorithm 1 with restarts, on the program.

`inference.variational.ascent` has one step, `inference.variational.pool` makes many runs at once,
and this module has `run`.
"""

from dataclasses import replace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from inference.conditions.problem import Problem, solve_scenes
from inference.conditions.solve import Solve
from inference.proposals.parses import Parses
from inference.proposals.propose import drawn, propose_whole
from inference.proposals.states import solve_likely_states
from inference.result import Report, Result, method, partition, reporter
from inference.variational.amortised import Logits, logits_of
from inference.variational.ascent import Schedule
from inference.variational.pool import (
    Ended,
    Engine,
    Given,
    Guess,
    Restarts,
    begins_of,
    best_of_restarts,
    run_keys,
)
from inference.variational.pool import engine as make_engine
from models.distributions.match import MixtureMatch
from models.errors import InputError
from models.program.sites import Program
from models.scenes import Scene

_DEFAULT = Schedule()

InitStrategy = Literal["parses", "draws", "uniform"] | Logits

MAX_TRIED = 256
"""If there are more sets of present objects, they are searched among instead of all tried."""

PUBLISHED_GMM: dict[str, Any] = {
    "init_strategy": "uniform",
    "projection": "softmax",
    "num_restarts": 5,
    "schedule": Schedule(beta_max=0.05, max_steps=500),
    "fewest_points": 0.0,
}
"""Settings of `run` that follow the code published with the paper for GCM-GMM, on the program
`published_mixture`: no annealing, and sparse solutions are accepted. For GCM-DS see
`inference.variational.published`."""


@method
def run(
    program: Program,
    scene: Scene,
    rng_key: Array,
    *,
    num_restarts: int = 16,
    init_strategy: InitStrategy = "parses",
    projection: Literal["auto", "sinkhorn", "bethe", "softmax"] = "auto",
    schedule: Schedule = _DEFAULT,
    fewest_points: float = 2.0,
    history: bool = False,
    devices: int = 1,
    progress_bar: bool | Report = False,
) -> Result:
    """Fit q(Z) q(Y) to one scene or each scene of a batch, and keep the best of several restarts.

    Args:
        program: a NumPyro program with a Normal pose prior, one of the three match priors, and
            `MatchedParts`; optionally a Gamma `precision`, for a mixture Dirichlet `part_probs`.
        rng_key: a scene's result depends on the key and on the scene's place in the batch.
        num_restarts: number of runs per scene. With parses it is an upper limit: only parses that
            could still win are run.
        init_strategy: the best "parses" of the scene; "draws" of them, in proportion to their
            weights; the paper's "uniform" random R; or the `match_logits` of an amortised guide for
            the first run of a scene, and the best parses for the others.
        projection: how R is found: "sinkhorn" (GCM-DS), "softmax" (GCM-GMM) or "bethe"; "auto"
            takes the one that fits the match prior of the program.
        fewest_points: a run is sparse if an object surely has a point but fewer than this many in
            total. Non-sparse runs are preferred, and sparse random starts are retried, up to four
            times per restart. Zero disables the rule.
        history: keep the ELBO and its terms, beta, R and poses of each step of the best run.
        devices: number of local devices for the runs.
        progress_bar: show one, or call a function with (runs finished, runs in total).
    """
    if num_restarts < 1:
        raise InputError(f"num_restarts must be at least 1, got {num_restarts}")
    by_parses = init_strategy in ("parses", "draws")
    if not (by_parses or init_strategy == "uniform" or callable(init_strategy)):
        raise InputError(
            f"there is no start {init_strategy!r}; choose 'parses', 'draws' or 'uniform'"
        )
    number = Restarts(num_restarts, fewest_points)
    solve = solver(
        rng_key, number, init_strategy, projection, schedule, history, devices, progress_bar
    )
    return solve_scenes(
        program,
        scene.batch(),
        solve,
        or_bound=True,
        tolerance=10 * schedule.tolerance,
        search=solve_likely_states,
        max_values=1 if by_parses else MAX_TRIED,
    )


def solver(
    rng_key: Array,
    number: Restarts,
    init_strategy: InitStrategy = "parses",
    projection: str = "auto",
    schedule: Schedule = _DEFAULT,
    history: bool = False,
    devices: int = 1,
    progress_bar: bool | Report = False,
) -> Solve:
    """A function that fits the scenes of a problem; the arguments are those of `run`."""
    report = reporter(progress_bar)
    by_parses = init_strategy in ("parses", "draws")

    def solve(problem: Problem, parses: Parses | None = None) -> Result:
        name = _projection(problem, projection)
        engine = make_engine(problem.skeleton, name, schedule, devices)
        if parses is None and (by_parses or (callable(init_strategy) and number.most > 1)):
            parses = propose_whole(problem.reading)
        if parses is not None and init_strategy == "draws":
            parses = drawn(parses, rng_key, number.most, problem.skeleton)
        begins: Given = parses if by_parses else None
        if callable(init_strategy):
            others = parses if number.most > 1 else None
            begins = Guess(logits_of(problem, init_strategy), others)
        best = best_of_restarts(engine, problem, rng_key, number, report, begins)
        constant = problem.log_constant + engine.log_bound
        result = _result(problem, best, name, constant)
        if history and not problem.is_conditional:
            alone = make_engine(problem.skeleton, name, schedule)
            trace = _history(alone, problem, rng_key, best, begins)
            trace |= {name: trace[name] + constant[:, None] for name in ("elbo", "match")}
            result = replace(result, history=trace)
        return result

    return solve


def _projection(problem: Problem, name: str) -> str:
    """The projection for "auto", or the given one if it fits the match prior."""
    family = problem.skeleton.match_family
    is_mixture = family is MixtureMatch
    if name == "auto":
        return "softmax" if is_mixture else "sinkhorn"
    if (name == "softmax") != is_mixture:
        raise InputError(
            f"the projection {name!r} does not fit the match prior {family.__name__}; a "
            "MixtureMatch requires 'softmax', the other priors 'sinkhorn' or 'bethe'"
        )
    return name


def _result(problem: Problem, best: Ended, projection: str, constant: np.ndarray) -> Result:
    scenes, owner = problem.scenes, problem.owner
    return Result(
        method={"softmax": "gmm", "bethe": "bethe"}.get(projection, "ds"),
        scene=scenes,
        match_probs=best.match_probs,
        pose_mean=best.pose_mean,
        pose_covariance=best.pose_covariance,
        labels=partition(best.match_probs, owner, scenes.present),
        owner=owner,
        converged=best.converged,
        steps=best.steps,
        elbo=best.elbo + constant,
        details={"sparse": best.sparse, "attempt": best.attempt},
    )


def _history(
    engine: Engine, problem: Problem, rng_key: Array, best: Ended, given: Given
) -> dict[str, np.ndarray]:
    """Repeat the best runs one step at a time, and record each step."""
    runs = np.c_[np.arange(len(best.attempt)), best.attempt]
    keys = run_keys(rng_key, runs)
    pool = engine.start(problem.reading.model, keys, *begins_of(given, runs))
    steps = []
    while not np.asarray(pool.state.done).all():
        pool = engine.advance(pool)
        state = pool.state
        steps.append(
            {
                "elbo": state.terms.elbo,
                "log_likelihood": state.terms.log_likelihood,
                "pose": state.terms.pose,
                "match": state.terms.match,
                "beta": state.beta,
                "match_probs": jnp.moveaxis(state.match_probs, -1, 0),
                "pose_mean": jnp.moveaxis(state.pose.mean, (0, 1, 2), (2, 1, 0)),
            }
        )
    return {name: np.stack([np.asarray(s[name]) for s in steps], axis=1) for name in steps[0]}
