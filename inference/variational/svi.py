"""Stochastic variational inference: gradient steps on the ELBO of the program.

The guide "mean_field" maximises the same ELBO as coordinate ascent, from the same starts, but by
noisy gradients; this checks the hand-derived updates. NumPyro's automatic guides take any prior, on
the program with its match summed out. `inference.variational.families` has the two kinds of guide.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from inference.conditions.sets import discrete_sites
from inference.posterior.draws import owner_of, recover_match, result_of_draws, with_computed
from inference.posterior.poses import pose_sites
from inference.result import Report, Result, method, partition, reporter
from inference.variational.ascent import LARGEST_ERROR
from inference.variational.families import (
    AUTOMATIC,
    Family,
    Frame,
    Params,
    automatic,
    match_probs_of,
    mean_field,
)
from models.errors import InputError
from models.program.batches import check_conjugate
from models.program.marginal import check_table
from models.program.reading import refuse_moving_supports
from models.program.sites import Program, Unknown, trace_sites
from models.program.versions import as_it_stands
from models.program.witness import check_program
from models.scenes import Scene

if TYPE_CHECKING:  # slow to import, and only this method needs it
    import optax

Guide = Literal["mean_field", "AutoMultivariateNormal", "AutoNormal", "AutoIAFNormal"]

LOOK = 100
"""Steps between evaluations of the ELBO."""


class Fit(NamedTuple):
    """The state of the runs; one entry for each run."""

    params: Params
    optimizer: Any
    keys: Array


class Best(NamedTuple):
    """The best run of each scene, scenes first."""

    params: Params
    frame: Frame
    fields: dict[str, Any]
    """Fields of a `Result`."""

    def draws(self, family: Family, key: Array, num_samples: int) -> dict[str, np.ndarray]:
        """Draws from q for the first scene, as one chain."""
        params, frame = jax.tree.map(lambda x: x[0], (self.params, self.frame))
        drawn = family.draw(key, params, frame, num_samples)
        return {name: np.asarray(x)[None] for name, x in drawn.items()}


@method
def run(
    program: Program,
    scene: Scene,
    rng_key: Array,
    *,
    guide: Guide = "mean_field",
    num_restarts: int = 4,
    init_strategy: Literal["parses", "uniform", "vi", "prior"] | None = None,
    optimizer: "optax.GradientTransformation | None" = None,
    num_particles: int = 8,
    tolerance: float = 1e-3,
    num_steps: int = 3000,
    num_samples: int = 1000,
    history: bool = False,
    progress_bar: bool | Report = False,
) -> Result:
    """Fit a guide to one scene, or with "mean_field" to each scene of a batch; keep the best run.

    The ELBO is evaluated every 100 steps. All runs step together and end together, when the ELBO of
    every run has changed by less than the tolerance at the last two evaluations. For the mean-field
    guide the ELBO is the closed form of `cavi.run`; for an automatic guide it is estimated, with
    the same draws every time. Results for single scenes have draws from q, as one chain.

    Args:
        program: for "mean_field" a program for which the closed forms hold, as for coordinate
            ascent; for an automatic guide any NumPyro program that nuts takes.
        num_restarts: number of runs per scene; the one with the highest ELBO is kept.
        init_strategy: for "mean_field" "parses" or "uniform", with the same starts as `cavi.run`
            for the same key; for an automatic guide "vi", poses after coordinate ascent, or
            "prior".
        optimizer: any optax optimizer; by default Adam with a decaying step size. Poses are
            measured in standard deviations.
        num_particles: number of draws from q for each gradient.
        tolerance: a run has converged if its ELBO changes by less than this, in nats.
        history: keep the ELBO and the mean loss at each evaluation of the best run.
    """
    scenes = scene.batch()
    program = _checked(program, scenes.take(0), num_restarts, num_particles, num_steps)
    family = _family(program, scene, guide, init_strategy, num_particles)
    attempt, scene_of = np.divmod(np.arange(len(scenes.points) * num_restarts), len(scenes.points))
    params, frame = family.begin(scenes, rng_key, np.c_[scene_of, attempt])
    fit, elbo, losses = climb(
        family,
        params,
        frame,
        Scene(**scenes.take(scene_of).observed),
        jax.random.fold_in(rng_key, 1),
        optimizer or default_optimizer(is_flow=guide == "AutoIAFNormal"),
        tolerance,
        num_steps,
        reporter(progress_bar),
    )
    elbo = elbo + family.constant(scenes)[scene_of]
    order = np.lexsort((attempt, -np.nan_to_num(elbo[-1], nan=-np.inf), scene_of))
    fields = _fields(elbo, losses, tolerance, history)
    best = jax.tree.map(lambda x: x[order[::num_restarts]], (fit.params, frame, fields))
    result_of = _mean_field_result if guide == "mean_field" else _automatic_result
    draw_key = jax.random.fold_in(rng_key, 2)
    return result_of(program, family, scene, Best(*best), draw_key, num_samples)


@functools.cache  # runs are compiled once for each optimizer
def default_optimizer(*, is_flow: bool) -> "optax.GradientTransformation":
    """Adam with a step size that is halved every 200 steps after 500, to average out noise.

    Its second moment averages about the last 20 gradients (optax's default of 0.999: the last
    1000). Gradients shrink by orders of magnitude, so with a longer memory the last steps would be
    too small to converge.

    The parameters of a flow are weights of networks. Its steps are smaller, its gradients are
    clipped, and steps are halved every 150 after 1000. Halved every 500, the ELBO would still vary
    by 0.01 nats or more between evaluations after 3000 steps, and no run would settle.
    """
    import optax

    if is_flow:
        steps = optax.exponential_decay(0.01, 150, 0.5, transition_begin=1000)
        return optax.chain(optax.clip_by_global_norm(10.0), optax.adam(steps))
    steps = optax.exponential_decay(0.5, 200, 0.5, transition_begin=500)
    return optax.adam(steps, b2=0.95)


def _fields(
    elbo: Float[np.ndarray, "looks+1 runs"],
    losses: Float[np.ndarray, "looks runs"],
    tolerance: float,
    history: bool,
) -> dict[str, Any]:
    """Fields of a `Result`; the axis of runs is first."""
    return {
        "elbo": elbo[-1],
        "converged": _settled(elbo, tolerance),
        "steps": np.full(elbo.shape[1], LOOK * len(losses)),
        "history": {"elbo": elbo[1:].T, "loss": losses.T} if history else None,
    }


def _checked(
    program: Program, scene: Scene, num_restarts: int, num_particles: int, num_steps: int
) -> Program:
    """The program as it stands, if it and the numbers of runs, draws and steps are possible."""
    check_program(program, scene)
    if num_restarts < 1 or num_particles < 1 or num_steps < LOOK:
        raise InputError(
            f"num_restarts and num_particles must be at least 1 and num_steps at least {LOOK}, got "
            f"{num_restarts}, {num_particles} and {num_steps}"
        )
    return as_it_stands(program, scene)


def climb(
    family: Family,
    params: Params,
    frame: Frame,
    scenes: Scene,
    key: Array,
    optimizer: "optax.GradientTransformation",
    tolerance: float,
    num_steps: int,
    report: Report,
) -> tuple[Fit, Float[np.ndarray, "looks+1 runs"], Float[np.ndarray, "looks runs"]]:
    """Take steps until the ELBO of every run has settled.

    Returns the final state of the runs, their ELBO at the start and at each evaluation, and their
    mean loss between evaluations.
    """
    advance, judge = _compiled(family, optimizer)
    num_runs = len(jax.tree.leaves(frame)[0])
    fit = Fit(params, jax.vmap(optimizer.init)(params), jax.random.split(key, num_runs))
    elbo, losses = [np.asarray(judge(params, frame, scenes))], []
    for done in range(LOOK, num_steps + 1, LOOK):
        fit, loss = advance(fit, frame, scenes)
        elbo.append(np.asarray(judge(fit.params, frame, scenes)))
        losses.append(np.asarray(loss))
        report(done, num_steps)
        if _settled(np.stack(elbo), tolerance).all():
            break
    return fit, np.stack(elbo), np.stack(losses)


@functools.lru_cache(maxsize=32)
def _compiled(
    family: Family, optimizer: "optax.GradientTransformation"
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`LOOK` steps of all runs, and their ELBO; compiled once for each family and optimizer."""
    import optax

    update = optax.with_extra_args_support(optimizer).update

    @jax.jit
    @jax.vmap
    def advance(fit: Fit, frame: Frame, scene: Scene) -> tuple[Fit, Float[Array, ""]]:
        def step(fit: Fit, _: None) -> tuple[Fit, Float[Array, ""]]:
            key, loss_key = jax.random.split(fit.keys)
            loss, gradient = jax.value_and_grad(family.loss, argnums=1)(
                loss_key, fit.params, frame, scene
            )
            change, state = update(gradient, fit.optimizer, fit.params, value=loss, grad=gradient)
            return Fit(optax.apply_updates(fit.params, change), state, key), loss

        fit, losses = jax.lax.scan(step, fit, length=LOOK)
        return fit, losses.mean()

    return advance, jax.jit(jax.vmap(family.elbo))


@functools.lru_cache(maxsize=32)
def _constrained(family: Family) -> Callable[[Params, Frame], Params]:
    """`family.constrained`, compiled once for each family and not for each scene."""
    return jax.jit(jax.vmap(family.constrained))


def _settled(elbo: Float[np.ndarray, "looks+1 runs"], tolerance: float) -> Any:
    """Which runs changed by less than the tolerance at each of the last two evaluations."""
    if len(elbo) < 3:
        return np.zeros(elbo.shape[1], bool)
    return (np.abs(np.diff(elbo[-3:], axis=0)) < tolerance).all(axis=0)


def _family(
    program: Program, scene: Scene, guide: str, start: str | None, particles: int
) -> Family:
    choices = ("parses", "uniform") if guide == "mean_field" else ("vi", "prior")
    start = choices[0] if start is None else start
    if start not in choices:
        raise InputError(
            f"the guide {guide!r} cannot start from {start!r}; choose {' or '.join(choices)}"
        )
    if guide == "mean_field":
        check_conjugate(program, scene.batch().take(0))
        return mean_field(program, start, particles, scene.layout)
    if guide not in AUTOMATIC:
        raise InputError(f"there is no guide {guide!r}; choose mean_field, {', '.join(AUTOMATIC)}")
    if scene.is_batch:
        raise InputError(
            "automatic guides are fitted to one scene, got a batch; use scene.take(i), or the "
            "guide mean_field"
        )
    if discrete := discrete_sites(program, scene):
        raise InputError(
            f"site {next(iter(discrete))!r} is discrete, but automatic guides require continuous "
            "sites; use nuts or exact, which sum over it, or gibbs"
        )
    check_table(program, scene)
    _refuse_moving_supports(program, scene)
    names = pose_sites(program, scene)
    return automatic(program, names, guide, start, particles, scene.layout)


def _refuse_moving_supports(program: Program, scene: Scene) -> None:
    """An automatic guide has the supports that it was made with, whatever else changes."""

    def look(zero: Array, observed: dict[str, Array]) -> Array:
        sites = trace_sites(program, Scene(**observed), None, Unknown(zero))
        refuse_moving_supports({n: s["fn"] for n, s in sites.items() if not s["is_observed"]})
        return zero

    jax.vmap(look)(jax.device_put(np.zeros(1)), scene.batch().observed)


def _mean_field_result(
    program: Program, family: Family, scene: Scene, best: Best, key: Array, num_samples: int
) -> Result:
    """Make a result from the parameters of q; a single scene also has draws."""
    scenes = scene.batch()
    q = _constrained(family)(best.params, best.frame)
    factor = np.asarray(q["pose_scale_tril"])
    match_probs = np.asarray(match_probs_of(q))
    owner = owner_of(program, scenes.take(0))
    fields = best.fields
    if "match_probs" in q:
        off = np.abs(match_probs.sum(axis=-2) - 1.0).max(axis=-1)
        fields = fields | {"converged": fields["converged"] & (off <= LARGEST_ERROR)}
    result = Result(
        method="svi",
        scene=scenes,
        match_probs=match_probs,
        pose_mean=np.asarray(q["pose_mean"]),
        pose_covariance=factor @ factor.swapaxes(-1, -2),
        labels=partition(match_probs, owner, scenes.present),
        owner=owner,
        **fields,
    )
    if scene.is_batch:
        return result
    draws = best.draws(family, key, num_samples)
    draws["match"] = np.where(scene.present, draws["match"], -1)
    return replace(result.take(0), draws=draws)


def _automatic_result(
    program: Program, family: Family, scene: Scene, best: Best, key: Array, num_samples: int
) -> Result:
    """Make a result from draws from q for one scene, with a match for each draw."""
    draws = best.draws(family, key, num_samples)
    draws["match"], match_probs = recover_match(program, scene, draws, key)
    draws = with_computed(program, scene, draws)
    fields = jax.tree.map(lambda x: x[0], best.fields)
    steps = int(fields.pop("steps"))
    return result_of_draws("svi", program, scene, draws, match_probs, {}, steps, **fields)
