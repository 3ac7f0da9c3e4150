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

from inference.chains import beginnings, check_budget, run_chains
from inference.conditionals import (
    Sites,
    draw_match,
    draw_part_probs,
    draw_pose,
    draw_precision,
    prior_draw,
)
from inference.draws import as_chains, one_hot, owner_of, recover_match, result_of_draws
from inference.result import Result
from inference.tempering import bridge, exchange, ladder
from models.conjugacy import check_conjugate, check_program
from models.errors import InputError
from models.reading import Conjugate, Program, read
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
                "inference.tempering.ladder"
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
        if rng_key.ndim == (0 if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key) else 1):
            return self._init_chain(rng_key, init_params, Scene(*model_args, **model_kwargs))
        chains = functools.partial(self._init_chain, scene=Scene(*model_args, **model_kwargs))
        return jax.vmap(chains, in_axes=(0, None if init_params is None else 0))(
            rng_key, init_params
        )

    def sample(
        self, state: GibbsState, model_args: tuple[Any, ...], model_kwargs: dict[str, Any]
    ) -> GibbsState:
        """One sweep of every chain, if the state has several."""
        step = functools.partial(self._sweep, scene=Scene(*model_args, **model_kwargs))
        return step(state) if state.i.ndim == 0 else jax.vmap(step)(state)

    def _init_chain(self, key: Array, values: Sites | None, scene: Scene) -> GibbsState:
        model = read(self.program, scene)
        betas = jnp.asarray(self.betas)
        rungs = len(betas)
        key, prior_key = jax.random.split(key)
        sites = prior_draw(prior_key, model) | (values or {})
        sites["match"] = jnp.arange(len(model.points))
        replicas = {name: jnp.broadcast_to(x, (rungs, *x.shape)) for name, x in sites.items()}
        ratio = jnp.full((rungs - 1, 2), jnp.nan, float)
        drawn = _visible(replicas, model)
        return GibbsState(jnp.zeros((), int), betas, drawn, replicas, ratio, ratio[:, 0], key)

    def _sweep(self, state: GibbsState, scene: Scene) -> GibbsState:
        single = read(self.program, scene)
        owner = owner_of(self.program, scene)
        model = jax.tree.map(lambda x: x[..., None], single)  # replicas are its axis of scenes
        betas = state.betas
        key, match_key, swap_key, *keys = jax.random.split(state.rng_key, 6)
        replicas = dict(state.replicas)
        replicas["match"] = draw_match(match_key, model, owner, replicas, betas)
        replicas, pose, swap = exchange(swap_key, model, owner, replicas, betas, state.i)
        replicas["pose"] = draw_pose(keys[0], pose)
        if single.precision_prior is not None:
            replicas["precision"] = draw_precision(keys[1], model, owner, replicas, betas)
        if single.part_prior is not None:
            replicas["part_probs"] = draw_part_probs(keys[2], single, replicas["match"])
        drawn = _visible(replicas, single)
        return GibbsState(
            state.i + 1, betas, drawn, replicas, swap.log_ratio, swap.accept_prob, key
        )


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
            mixture, a Gamma `precision` and Dirichlet `part_probs` are welcome.
        rungs: replicas of each chain; 1 for no tempering.
        start: begin at restarts of coordinate ascent, or at draws of the prior.
    """
    began = time.perf_counter()
    scene = check_budget(program, scene, num_chains, num_warmup, num_draws)
    check_program(program, scene)
    check_conjugate(program, scene)
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
            lp = jax.vmap(log_joint)({name: x[:, -1] for name, x in state.replicas.items()})
            names = ("z", "log_ratio", "accept_prob")
            return state, {name: getattr(state, name) for name in names} | {"lp": lp}

        return jax.lax.scan(step, state, length=length)

    return advance


def _visible(replicas: Sites, model: Conjugate) -> Sites:
    """What is collected: the last replica."""
    last = {name: x[-1] for name, x in replicas.items()}
    return last | {"match": jnp.where(model.seen.any(axis=1), last["match"], -1)}
