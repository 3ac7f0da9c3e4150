"""Gibbs sampling with exact blocks, and parallel tempering because the posterior has many modes.

Given the poses the match is drawn exactly (by the permanent's dynamic program, or row by row for a
mixture); given the match the poses are Normal, an unknown precision is Gamma and unknown part
probabilities are Dirichlet. Alone this seldom leaves a mode. With tempering, replicas of the chain
sample

    p(pose) p(match) p(points | pose, match)^beta

at a ladder of betas from 0, the prior, to 1, the posterior, and neighbours exchange their matches.
Poses are integrated out of the exchange and drawn anew after it, so that neighbours need to agree
about discrete things only and a ladder of a dozen rungs is enough. The ladder gives the log
evidence too.

Which objects are present, where the program leaves it open, is drawn together with the match: first
the set of them with the match summed out, then the match given the set, and the poses of absent
objects from the prior. An object whose pose is a draw of the prior has hardly a point near it, so
at beta = 1 sets seldom change; at beta = 0 they are drawn anew, and neighbours exchange sets with
matches.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import log_density
from scipy.special import logsumexp

from inference.conditions.sets import Sets, has_presence, possible_sets
from inference.mcmc.chains import check_budget, run_chains
from inference.mcmc.conditionals import (
    Sites,
    draw_match,
    draw_part_probs,
    draw_pose,
    draw_precision,
    draw_presence,
    prior_draw,
)
from inference.mcmc.tempering import bridge, exchange, ladder
from inference.posterior.draws import as_chains, one_hot, owner_of, recover_match, result_of_draws
from inference.result import Result
from inference.variational.beginnings import beginnings
from models.errors import InputError
from models.program.batches import check_conjugate
from models.program.reading import Conjugate, Program, read
from models.scenes import Scene


class GibbsState(NamedTuple):
    """Where a chain stands."""

    i: Int[Array, ""]
    betas: Float[Array, " rungs"]
    """The ladder."""
    z: Sites
    """The draw: the replica at beta = 1, with a match of -1 in dummy rows."""
    replicas: Sites
    """Every replica, rungs first."""
    log_ratio: Float[Array, "rungs-1 2"]
    """Log density at the upper of two neighbouring betas less that at the lower, of the match of
    the lower replica and of that of the upper one; poses integrated out."""
    accept_prob: Float[Array, " rungs-1"]
    """Probability of each exchange; NaN where it was not its turn."""
    rng_key: Array
    sets: Sets | None = None
    """The possible sets of present objects, where the program leaves them open."""


class GibbsKernel(MCMCKernel):
    """A NumPyro kernel: `MCMC(GibbsKernel(program), ...).run(key, **scene.observed)`.

    Args:
        program: a NumPyro program that the closed forms hold for, as coordinate ascent wants it.
        betas: the ladder, rising, and 1 at last.
    """

    sample_field = "z"

    def __init__(
        self, program: Program, betas: Sequence[float] | Float[np.ndarray, " rungs"] = (1.0,)
    ) -> None:
        self.program = program
        self.betas = np.asarray(betas, float)
        rising = len(self.betas) and (np.diff(self.betas) > 0).all() and self.betas[0] >= 0
        if not rising or self.betas[-1] != 1:
            raise InputError(
                f"the betas of a ladder must rise from 0 or more to 1, got {list(betas)}; try "
                "inference.mcmc.tempering.ladder"
            )

    @property
    def model(self) -> Program:
        return self.program

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Sites | None,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any],
    ) -> GibbsState:
        """Chains that begin at `init_params`, values of sites, or at draws of the prior."""
        scene = Scene(*model_args, **model_kwargs)
        sets = possible_sets(self.program, scene) if has_presence(self.program, scene) else None
        sets = jax.tree.map(jnp.asarray, sets)
        if rng_key.ndim == (0 if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key) else 1):
            return self._init_chain(rng_key, init_params, scene, sets)
        chains = functools.partial(self._init_chain, scene=scene, sets=sets)
        return jax.vmap(chains, in_axes=(0, None if init_params is None else 0))(
            rng_key, init_params
        )

    def sample(
        self, state: GibbsState, model_args: tuple[Any, ...], model_kwargs: dict[str, Any]
    ) -> GibbsState:
        """One sweep of every chain, if the state has several."""
        step = functools.partial(self._sweep, scene=Scene(*model_args, **model_kwargs))
        return step(state) if state.i.ndim == 0 else jax.vmap(step)(state)

    def _init_chain(
        self, key: Array, values: Sites | None, scene: Scene, sets: Sets | None
    ) -> GibbsState:
        model = read(self.program, scene)
        betas = jnp.asarray(self.betas)
        rungs = len(betas)
        key, prior_key = jax.random.split(key)
        sites = prior_draw(prior_key, model) | (values or {})
        sites["match"] = jnp.arange(len(model.points))
        if sets is not None:
            sites["presence"] = jnp.zeros((), int)  # the first sweep draws it, given the poses
        replicas = {name: jnp.broadcast_to(x, (rungs, *x.shape)) for name, x in sites.items()}
        ratio = jnp.full((rungs - 1, 2), jnp.nan, float)
        drawn = _visible(replicas, model, sets)
        i = jnp.zeros((), int)
        return GibbsState(i, betas, drawn, replicas, ratio, ratio[:, 0], key, sets)

    def _sweep(self, state: GibbsState, scene: Scene) -> GibbsState:
        single = read(self.program, scene)
        owner = owner_of(self.program, scene)
        model = jax.tree.map(lambda x: x[..., None], single)  # replicas are its axis of scenes
        betas, sets = state.betas, state.sets
        key, match_key, swap_key, *keys = jax.random.split(state.rng_key, 6)
        replicas = dict(state.replicas)
        if sets is not None:
            models = jax.vmap(
                lambda flags: read(self.program, scene._replace(presence=flags)), out_axes=-1
            )(sets.flags)
            set_key = jax.random.fold_in(match_key, 1)
            replicas["presence"] = draw_presence(set_key, models, owner, replicas, betas, sets)
            model = _of_replicas(models, replicas)
        replicas["match"] = draw_match(match_key, model, owner, replicas, betas)
        replicas, pose, swap = exchange(swap_key, model, owner, replicas, betas, state.i)
        replicas["pose"] = draw_pose(keys[0], pose)
        model = model if sets is None else _of_replicas(models, replicas)  # they were exchanged
        if single.precision_prior is not None:
            replicas["precision"] = draw_precision(keys[1], model, owner, replicas, betas)
        if single.part_prior is not None:
            replicas["part_probs"] = draw_part_probs(keys[2], single, replicas["match"])
        drawn = _visible(replicas, single, sets)
        told = (swap.log_ratio, swap.accept_prob)
        return GibbsState(state.i + 1, betas, drawn, replicas, *told, key, sets)


def run(
    program: Program,
    scene: Scene,
    key: Array | int = 0,
    *,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_draws: int = 1000,
    rungs: int = 16,
    start: Literal["vi", "prior"] = "vi",
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Draws from the posterior of one scene, all chains at once.

    With tempering the result has `log_evidence`, by bridging between neighbours, with its
    standard error in `details`, beside the betas and how often neighbours exchanged their matches.

    Args:
        program: a NumPyro program that the closed forms hold for, as coordinate ascent wants it; a
            mixture, a Gamma `precision`, Dirichlet `part_probs` and a `presence` are welcome.
        rungs: replicas of each chain; 1 for no tempering.
        start: begin at restarts of coordinate ascent, or at draws of the prior.
    """
    began = time.perf_counter()
    scene = check_budget(program, scene, num_chains, num_warmup, num_draws)
    sets = possible_sets(program, scene) if has_presence(program, scene) else None
    check_conjugate(program, scene if sets is None else scene._replace(presence=sets.flags[0]))
    base_key = jax.random.key(key) if isinstance(key, int) else key
    begin_key, chain_key, match_key = jax.random.split(base_key, 3)
    betas = ladder(program, scene, rungs)
    values = beginnings(program, scene, begin_key, num_chains, start).values
    observed = scene.observed
    keys = jax.random.split(chain_key, num_chains)
    state = GibbsKernel(program, betas).init(keys, num_warmup, values, (), observed)
    advance = _compiled(program)
    collected = run_chains(
        lambda state, length: advance(state, observed, length),
        state,
        num_warmup,
        num_draws,
        progress,
    )
    draws = as_chains(collected.pop("z"))
    stats = as_chains(collected)
    log_ratio, accept_prob = stats.pop("log_ratio"), stats.pop("accept_prob")
    others = {name: x for name, x in draws.items() if name != "match"}
    _, match_probs = recover_match(program, scene, others, match_key)
    details: dict[str, Any] = {"betas": betas}
    evidence = None
    if len(betas) > 1:
        evidence, error = bridge(log_ratio)
        # What the ladder starts from, at beta = 0, is the probability of all data but the points.
        data = (
            float(read(program, scene).log_constant) if sets is None else logsumexp(sets.log_prior)
        )
        evidence = evidence + data
        details |= {"log_evidence_error": error}
        details |= {"swap_rate": np.nanmean(accept_prob, axis=(0, 1))}
        stats["acceptance_rate"] = np.nanmean(accept_prob, axis=-1)
    result = result_of_draws(
        "gibbs",
        program,
        scene,
        draws,
        match_probs,
        stats,
        num_warmup + num_draws,
        log_evidence=evidence,
        details=details,
    )
    return replace(result, seconds=time.perf_counter() - began)


@functools.lru_cache(maxsize=32)
def _compiled(program: Program) -> Callable[..., tuple[GibbsState, Any]]:
    """So many steps of all chains and what they collect, compiled once for each program."""
    kernel = GibbsKernel(program)

    @functools.partial(jax.jit, static_argnames="length")
    def advance(state: GibbsState, observed: dict[str, Array], length: int) -> tuple[Any, Any]:
        def log_joint(z: Sites) -> Float[Array, ""]:
            rows = len(z["match"])
            whole = z | {"match": one_hot(z["match"], rows)}
            return log_density(program, (), observed, whole)[0]

        def step(state: GibbsState, _: None) -> tuple[GibbsState, Any]:
            state = kernel.sample(state, (), observed)
            # The replica and not the draw: a dummy row has a part there, as the prior wants it.
            last = state.z | {"match": state.replicas["match"][:, -1]}
            lp = jax.vmap(log_joint)(last)
            names = ("z", "log_ratio", "accept_prob")
            return state, {name: getattr(state, name) for name in names} | {"lp": lp}

        return jax.lax.scan(step, state, length=length)

    return advance


def _of_replicas(models: Conjugate, replicas: Sites) -> Conjugate:
    """The pieces of the program for the set that each replica has, replicas last."""
    return jax.tree.map(lambda x: x[..., replicas["presence"]], models)


def _visible(replicas: Sites, model: Conjugate, sets: Sets | None) -> Sites:
    """What is collected: the last replica."""
    last = {name: x[-1] for name, x in replicas.items()}
    if sets is not None:
        last["presence"] = sets.flags[last["presence"]]
    return last | {"match": jnp.where(model.seen.any(axis=1), last["match"], -1)}
