"""NUTS on the program with its match summed out, for any prior that has a density.

`models.reading.marginal` leaves continuous sites only, whatever their priors; all chains are run at
once, and a match for each draw is recovered exactly afterwards. NUTS does not cross from mode to
mode: where a scene has several, every chain tells of its own, and R-hat of the poses shows it.
Gibbs sampling with tempering crosses.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import block_diag
from jaxtyping import Array, Float
from numpyro.infer.hmc import HMCState, hmc
from numpyro.infer.util import constrain_fn, unconstrain_fn

from inference.chains import Beginnings, beginnings, check_budget, run_chains
from inference.draws import as_chains, recover_match, recover_presence, result_of_draws
from inference.presence_sets import at_first_set, has_presence, potential, with_sets
from inference.result import Result
from models.conjugacy import check_program
from models.errors import InputError
from models.marginal import marginal
from models.reading import Program
from models.scenes import Scene

Observed = dict[str, Array]


class Sampler(NamedTuple):
    """The compiled parts of NUTS for one program and one choice of settings."""

    begin: Callable[[Array, Beginnings, Observed], HMCState]
    advance: Callable[[HMCState, Observed, int], tuple[HMCState, dict[str, Any]]]


def run(
    program: Program,
    scene: Scene,
    key: Array | int = 0,
    *,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_draws: int = 500,
    start: Literal["vi", "prior"] = "vi",
    target_accept: float = 0.8,
    max_tree_depth: int = 10,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Draws from the posterior of one scene, all chains at once.

    Args:
        program: any NumPyro program of sites `pose`, `match` and `points`, further continuous sites
            welcome. A gradient costs 2^N N sums, so N = 11 parts are quick and 20 the limit. A
            `presence` is summed out, at as many times the cost as there are possible sets of
            present objects, and drawn afterwards.
        start: begin at restarts of coordinate ascent, with the mass matrix that they suggest, or at
            draws of the prior. At a precision of 1e4 few chains find their way from the prior.
        target_accept: of the step size's adaptation. Closer to 1 means smaller steps and fewer
            divergent ones.
    """
    began = time.perf_counter()
    scene = check_budget(program, scene, num_chains, num_warmup, num_draws)
    check_program(program, scene)
    if not 0 < target_accept < 1:
        raise InputError(
            f"the acceptance aimed at must lie between 0 and 1, got {target_accept}; try 0.8"
        )
    base_key = jax.random.key(key) if isinstance(key, int) else key
    begin_key, chain_key, match_key = jax.random.split(base_key, 3)
    sampler = _sampler(program, num_warmup, target_accept, max_tree_depth)
    begins = beginnings(program, scene, begin_key, num_chains, start)
    observed = {name: jnp.asarray(x) for name, x in with_sets(program, scene).observed.items()}
    state = sampler.begin(jax.random.split(chain_key, num_chains), begins, observed)
    collected = run_chains(
        lambda state, length: sampler.advance(state, observed, length),
        state,
        num_warmup,
        num_draws,
        progress,
    )
    draws = as_chains(collected.pop("values"))
    stats = as_chains(collected)
    stats["tree_depth"] = np.ceil(np.log2(stats["n_steps"] + 1)).astype(int)
    if has_presence(program, scene):
        draws["presence"] = recover_presence(program, scene, draws, match_key)
    draws["match"], match_probs = recover_match(program, scene, draws, match_key)
    steps = num_warmup + num_draws
    result = result_of_draws("nuts", program, scene, draws, match_probs, stats, steps)
    return replace(result, seconds=time.perf_counter() - began)


@functools.lru_cache(maxsize=32)
def _sampler(
    program: Program, num_warmup: int, target_accept: float, max_tree_depth: int
) -> Sampler:
    """Compiled once for each program and shape of its scenes."""

    def potential_of(**observed: Array) -> Callable[[dict[str, Array]], Float[Array, ""]]:
        return lambda z: potential(program, observed, z)

    init_kernel, sample_kernel = hmc(potential_fn_gen=potential_of, algo="NUTS")

    @jax.jit
    def begin(keys: Array, begins: Beginnings, observed: Observed) -> HMCState:
        def chain(key: Array, begins: Beginnings) -> HMCState:
            z = unconstrain_fn(marginal(program), (), at_first_set(observed), begins.values)
            return init_kernel(
                z,
                num_warmup,
                inverse_mass_matrix=_inverse_mass(z, begins.pose_covariance),
                dense_mass=True,
                target_accept_prob=target_accept,
                max_tree_depth=max_tree_depth,
                model_kwargs=observed,
                rng_key=key,
            )

        return jax.vmap(chain)(keys, begins)

    @functools.partial(jax.jit, static_argnames="length")
    def advance(
        state: HMCState, observed: Observed, length: int
    ) -> tuple[HMCState, dict[str, Any]]:
        def chain(state: HMCState) -> tuple[HMCState, dict[str, Any]]:
            state = sample_kernel(state, (), observed)
            return state, {
                "values": constrain_fn(marginal(program), (), at_first_set(observed), state.z),
                "lp": -state.potential_energy,
                "energy": state.energy,
                "diverging": state.diverging,
                "acceptance_rate": state.accept_prob,
                "n_steps": state.num_steps,
                "step_size": state.adapt_state.step_size,
            }

        return jax.lax.scan(lambda state, _: jax.vmap(chain)(state), state, length=length)

    return Sampler(begin, advance)


def _inverse_mass(
    z: dict[str, Array], pose_covariance: Float[Array, "K p p"]
) -> Float[Array, "sites sites"]:
    """The covariance of q's poses, and the identity for all other sites, in the order of `z`."""
    blocks = [
        block_diag(*pose_covariance) if name == "pose" else jnp.eye(ravel_pytree(z[name])[0].size)
        for name in sorted(z)
    ]
    return block_diag(*blocks)
