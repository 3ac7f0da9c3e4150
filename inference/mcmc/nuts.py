"""NUTS on the program with its match summed out, for any prior that has a density.

`models.marginal` leaves continuous sites only, whatever their priors. All chains are run
at once, and a match for each draw is recovered exactly afterwards. NUTS alone does not cross from
mode to mode: where a scene has several, every chain tells of its own, and R-hat of the poses shows
it. With tempering (`inference.mcmc.tempering`) it does, and gives the log evidence too.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import block_diag
from jaxtyping import Array, Float
from numpyro.infer.hmc import HMCState, hmc
from numpyro.infer.util import constrain_fn, unconstrain_fn

from inference.conditions.sets import (
    Table,
    at_first,
    conditioned,
    continuous,
    possible_values,
    potential,
)
from inference.mcmc.chains import check_budget, run_chains
from inference.mcmc.tempering import bridge, exchange_states, prior_ladder
from inference.method import Report, method, reporter
from inference.posterior.draws import (
    as_chains,
    recover_discrete,
    recover_match,
    result_of_draws,
    with_computed,
)
from inference.posterior.poses import pose_sites
from inference.result import Result
from inference.variational.beginnings import Beginnings, beginnings
from models.errors import InputError
from models.program.marginal import check_table, marginal, tempered
from models.program.reading import Program
from models.program.witness import check_program
from models.scenes import Scene

Observed = dict[str, Array]
Betas = Float[Array, " rungs"]


class Replicas(NamedTuple):
    """Where all chains stand."""

    states: HMCState
    """Of every replica, chains first, then rungs."""
    keys: Array
    """For the exchanges of each chain."""


class Sampler(NamedTuple):
    """The compiled parts of NUTS for one program and one choice of settings."""

    begin: Callable[[Array, Beginnings, Betas, Observed, Table], Replicas]
    advance: Callable[[Replicas, Betas, Observed, Table, int], tuple[Replicas, dict[str, Any]]]


@method
def run(
    program: Program,
    scene: Scene,
    rng_key: Array,
    *,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_samples: int = 500,
    num_temperatures: int = 1,
    init_strategy: Literal["vi", "prior"] = "vi",
    target_accept_prob: float = 0.8,
    max_tree_depth: int | None = None,
    progress_bar: bool | Report = False,
) -> Result:
    """Draws from the posterior of one scene, all chains at once.

    With tempering the result has `log_evidence`, by bridging between neighbours, with its
    standard error; `details` has the betas and how often neighbours exchanged their states.

    Args:
        program: any NumPyro program of sites `match` and `points`, with poses that are a site
            `pose` or computed from others (`inference.posterior.poses`), further continuous sites
            welcome. A gradient costs 2^N N sums, so N = 11 parts are quick and 20 the limit.
            Discrete sites, such as a `presence`, are summed out, at as many times the cost as they
            have possible joint values, and drawn afterwards.
        num_temperatures: replicas of each chain for tempering; 1 for none. Whole states are
            exchanged, which takes more of them than Gibbs sampling: 12 to 16 for two objects, more
            by the root of the number of pose dimensions and by the logarithm of the precision. If
            a `swap_rate` in `details` is below 0.2, there are too few.
        init_strategy: begin at restarts of coordinate ascent, with the mass matrix that they
            suggest, or at draws of the prior. At a precision of 1e4 few chains find their way from
            the prior.
        target_accept_prob: of the step size's adaptation. Closer to 1 means smaller steps and fewer
            divergent ones.
        max_tree_depth: of a trajectory; by default 10, and 6 with tempering. Between prior and
            posterior a replica has wide and narrow places, and would spend all its time in crossing
            the wide ones in steps that fit the narrow ones. Exchanges get it there sooner.
    """
    scene = check_budget(program, scene, num_chains, num_warmup, num_samples)
    check_program(program, scene)
    table = possible_values(program, scene)
    check_table(program, scene, at_first(table))
    if not 0 < target_accept_prob < 1:
        raise InputError(
            f"the acceptance aimed at must lie between 0 and 1, got {target_accept_prob}; try 0.8"
        )
    if num_temperatures > 1 and table:
        raise InputError(
            f"site {next(iter(table))!r}: it is discrete, and NUTS sums over it at beta = 1 only, "
            f"got {num_temperatures} temperatures; take 1, or the method gibbs"
        )
    begin_key, chain_key, match_key = jax.random.split(rng_key, 3)
    betas = prior_ladder(program, scene, num_temperatures)
    depth = (10 if num_temperatures == 1 else 6) if max_tree_depth is None else max_tree_depth
    sampler = _sampler(program, pose_sites(program, scene), num_warmup, target_accept_prob, depth)
    begins = beginnings(program, scene, begin_key, num_chains, init_strategy)
    observed = {name: jnp.asarray(x) for name, x in scene.observed.items()}
    keys = jax.random.split(chain_key, num_chains)
    replicas = sampler.begin(keys, begins, jnp.asarray(betas), observed, table)
    collected = run_chains(
        lambda replicas, length: sampler.advance(
            replicas, jnp.asarray(betas), observed, table, length
        ),
        replicas,
        num_warmup,
        num_samples,
        reporter(progress_bar),
    )
    draws = as_chains(collected.pop("values"))
    stats = as_chains(collected)
    stats["tree_depth"] = np.ceil(np.log2(stats["n_steps"] + 1)).astype(int)
    details: dict[str, Any] = {"betas": betas}
    evidence = error = None
    if len(betas) > 1:
        evidence, error = bridge(stats.pop("log_ratio"))
        swap_rate = np.nanmean(stats.pop("swap_prob"), axis=(0, 1))
        details |= {"swap_rate": swap_rate}
    draws |= recover_discrete(program, scene, draws, match_key)
    draws["match"], match_probs = recover_match(program, scene, draws, match_key)
    draws = with_computed(program, scene, draws)
    return result_of_draws(
        "nuts",
        program,
        scene,
        draws,
        match_probs,
        stats,
        num_warmup + num_samples,
        log_evidence=evidence,
        log_evidence_error=error,
        details=details,
    )


@functools.lru_cache(maxsize=32)
def _sampler(
    program: Program,
    names: tuple[str, ...],
    num_warmup: int,
    target_accept_prob: float,
    max_tree_depth: int,
) -> Sampler:
    """Compiled once for each program and shape of its scenes."""

    def potential_of(
        beta: Float[Array, ""], table: Table, **observed: Array
    ) -> Callable[[dict[str, Array]], Float[Array, ""]]:
        return lambda z: potential(tempered(marginal(program), beta), observed, table, z)

    init_kernel, sample_kernel = hmc(potential_fn_gen=potential_of, algo="NUTS")

    @jax.jit
    def begin(
        keys: Array, begins: Beginnings, betas: Betas, observed: Observed, table: Table
    ) -> Replicas:
        given = conditioned(marginal(program), at_first(table))

        def replica(key: Array, beta: Float[Array, ""], begins: Beginnings) -> HMCState:
            z = unconstrain_fn(given, (), observed, continuous(begins.values))
            return init_kernel(
                z,
                num_warmup,
                inverse_mass_matrix=_inverse_mass(z, names, begins.covariance, beta),
                dense_mass=True,
                target_accept_prob=target_accept_prob,
                max_tree_depth=max_tree_depth,
                model_args=(beta, table),
                model_kwargs=observed,
                rng_key=key,
            )

        def chain(key: Array, begins: Beginnings) -> Replicas:
            key, *keys = jax.random.split(key, 1 + len(betas))
            return Replicas(
                jax.vmap(replica, in_axes=(0, 0, None))(jnp.stack(keys), betas, begins), key
            )

        return jax.vmap(chain)(keys, begins)

    @functools.partial(jax.jit, static_argnames="length")
    def advance(
        replicas: Replicas, betas: Betas, observed: Observed, table: Table, length: int
    ) -> tuple[Replicas, dict[str, Any]]:
        given = conditioned(marginal(program), at_first(table))

        def chain(replicas: Replicas) -> tuple[Replicas, dict[str, Any]]:
            states, key = replicas
            states = jax.vmap(lambda state, beta: sample_kernel(state, (beta, table), observed))(
                states, betas
            )
            last = jax.tree.map(lambda x: x[-1], states)
            told = {
                "values": constrain_fn(given, (), observed, last.z),
                "lp": -last.potential_energy,
                "energy": last.energy,
                "diverging": last.diverging,
                "acceptance_rate": last.accept_prob,
                "n_steps": last.num_steps,
                "step_size": last.adapt_state.step_size,
            }
            if len(betas) > 1:
                key, swap_key = jax.random.split(key)
                states, swap = exchange_states(
                    swap_key,
                    lambda z, beta: potential_of(beta, table, **observed)(z),
                    states,
                    betas,
                )
                told |= {"log_ratio": swap.log_ratio, "swap_prob": swap.accept_prob}
            return Replicas(states, key), told

        return jax.lax.scan(lambda state, _: jax.vmap(chain)(state), replicas, length=length)

    return Sampler(begin, advance)


def _inverse_mass(
    z: dict[str, Array],
    names: tuple[str, ...],
    covariance: Float[Array, "blocks size size"],
    beta: Float[Array, ""],
) -> Float[Array, "sites sites"]:
    """The covariance of the sites of the pose, and the identity for all others, as `z` is raveled.

    Below beta = 1 it is wider, and of unit scale at beta = 0.
    """
    scale = jnp.trace(covariance, axis1=1, axis2=2)[:, None, None] / covariance.shape[-1]
    wider = covariance / (beta + (1 - beta) * scale)
    owner = np.repeat(sorted(z), [z[name].size for name in sorted(z)])
    place = np.flatnonzero(np.isin(owner, names))
    return jnp.eye(len(owner)).at[np.ix_(place, place)].set(block_diag(*wider))
