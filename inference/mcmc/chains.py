"""Run Markov chains: the code that Gibbs sampling and NUTS share, from the checks to the result.

A sampler has a State (what its next step needs), an Info (diagnostics of a step), a Target (what no
step changes) and two functions of one chain, `init(begins, target) -> state` and
`step(rng_key, state, target) -> (state, info)`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from inference.conditions.sets import Table, possible_values
from inference.mcmc.tempering import bridge, check_rungs
from inference.posterior.draws import (
    recover_discrete,
    recover_match,
    result_of_draws,
    with_computed,
)
from inference.result import Report, Result, reporter
from inference.variational.beginnings import Beginnings, beginnings
from models.errors import InputError
from models.numerics.devices import compiled
from models.program.sites import Program
from models.scenes import Scene

Values = dict[str, Any]
"""Values by site."""

MAX_DIVERGING = 0.01
"""With a larger share of divergent steps there is no estimate of the evidence."""

_CHUNK = 100  # largest number of steps between reports of progress


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Target:
    """The tempered densities p(sites) p(points | sites)^beta of a chain, at a ladder of betas."""

    program: Program = field(metadata={"static": True})
    scene: Scene
    """The program's arguments, as JAX arrays."""
    betas: Float[Array, " rungs"]
    """Increasing to 1; a single 1 without tempering."""
    table: Table
    """Possible joint values of the discrete sites."""


class Sampler(NamedTuple):
    """A method for `run_chains`; `init`, `step` and `draw` are functions of one chain."""

    name: str
    init: Callable[[Beginnings, Any], Any]
    step: Callable[[Array, Any, Any], tuple[Any, Any]]
    draw: Callable[[Any, Any], Values]
    """From a state and a target to the values of the sites at beta = 1."""
    ladder: Callable[[Values], Float[np.ndarray, " rungs"]]
    """From the values at which the first chain begins to the betas."""
    target: Callable[..., Target]
    """From a program, a scene, betas and a table to a target."""
    log_data: Callable[[], float] = lambda: 0.0
    """Log of the integral of the density at beta = 0."""


class Budget(NamedTuple):
    """The settings that all samplers share."""

    num_chains: int
    num_warmup: int
    num_samples: int
    num_temperatures: int
    init_strategy: Literal["vi", "prior"]
    progress_bar: bool | Report

    def check(self, scene: Scene) -> None:
        """Raise an error for a batch of scenes and for impossible settings."""
        if scene.is_batch:
            raise InputError("chains require one scene, got a batch; use scene.take(i)")
        if self.num_chains < 1 or self.num_warmup < 0 or self.num_samples < 4:
            raise InputError(
                "num_chains must be at least 1, num_warmup at least 0 and num_samples at least 4, "
                f"got {self.num_chains}, {self.num_warmup} and {self.num_samples}"
            )
        check_rungs(self.num_temperatures)


def run_chains(
    sampler: Sampler, program: Program, scene: Scene, rng_key: Array, budget: Budget
) -> Result:
    """Run all chains at once and make a result of their draws.

    With tempering the result has `log_evidence` and its standard error, estimated by bridging
    between neighbours, unless more than `MAX_DIVERGING` of the steps diverge. `details` has the
    betas and the rate of exchanges between neighbours.
    """
    begin_key, chain_key, match_key = jax.random.split(rng_key, 3)
    begins = beginnings(program, scene, begin_key, budget.num_chains, budget.init_strategy)
    betas = sampler.ladder({name: x[0] for name, x in begins.values.items()})
    given = jax.tree.map(jnp.asarray, Scene(**scene.observed))
    table = jax.tree.map(jnp.asarray, possible_values(program, scene))
    target = sampler.target(program, given, jnp.asarray(betas), table)
    draws, info = _collect(sampler, target, begins, chain_key, budget)
    stats, swap = info._asdict(), info.swap
    del stats["swap"]
    details: dict[str, Any] = {"betas": betas}
    evidence = error = None
    if len(betas) > 1:
        if is_followed(stats):
            evidence, error = bridge(swap.log_ratio)
            evidence = evidence + sampler.log_data()
        details["swap_rate"] = np.nanmean(swap.accept_prob, axis=(0, 1))
        stats.setdefault("acceptance_rate", np.nanmean(swap.accept_prob, axis=-1))
    if not table.keys() <= draws.keys():  # the sampler summed them out
        draws |= recover_discrete(program, scene, draws, match_key)
    others = {name: x for name, x in draws.items() if name != "match"}
    match, match_probs = recover_match(program, scene, others, match_key)
    draws["match"] = np.where(scene.present, draws.get("match", match), -1)
    draws = with_computed(program, scene, draws)
    return result_of_draws(
        sampler.name,
        program,
        scene,
        draws,
        match_probs,
        stats,
        budget.num_warmup + budget.num_samples,
        log_evidence=evidence,
        log_evidence_error=error,
        details=details,
    )


def is_followed(stats: Mapping[str, np.ndarray]) -> bool:
    """Whether few enough steps diverge for the draws and the evidence to be reliable.

    It looks at the replica at beta = 1. The evidence also depends on the hotter replicas, but these
    cover the same regions and wider ones.
    """
    return bool(np.mean(stats.get("diverging", 0.0)) <= MAX_DIVERGING)


def _collect(
    sampler: Sampler, target: Target, begins: Beginnings, rng_key: Array, budget: Budget
) -> tuple[dict[str, np.ndarray], Any]:
    """Draws after the warm-up and the Info of their steps, (chains, draws, ...)."""
    init, advance = _compiled(sampler.init, sampler.step, sampler.draw, target.program)
    report, num_warmup = reporter(budget.progress_bar), budget.num_warmup
    common = math.gcd(num_warmup, budget.num_samples)
    length = max(n for n in range(1, _CHUNK + 1) if common % n == 0)
    total, kept = num_warmup + budget.num_samples, []
    states = init(begins, target)
    for done in range(0, total, length):
        keys = jax.random.split(jax.random.fold_in(rng_key, done), (length, budget.num_chains))
        states, collected = advance(keys, states, target)
        if done >= num_warmup:
            kept.append(jax.tree.map(np.asarray, collected))
        jax.block_until_ready(states)
        report(done + length, total)
    return jax.tree.map(lambda *pieces: np.swapaxes(np.concatenate(pieces), 0, 1), *kept)


@functools.lru_cache(maxsize=32)  # programs are distinguished by identity
def _compiled(
    init: Callable[..., Any],
    step: Callable[..., tuple[Any, Any]],
    draw: Callable[..., Values],
    program: Program,
) -> tuple[Callable[..., Any], Callable[..., tuple[Any, Any]]]:
    """Compile `init` for all chains, and several steps that also return draws and Infos."""

    def advance(keys: Array, states: Any, target: Target) -> tuple[Any, Any]:
        def chain(key: Array, state: Any) -> tuple[Any, Any]:
            state, info = step(key, state, target)
            return state, (draw(state, target), info)

        return jax.lax.scan(lambda states, keys: jax.vmap(chain)(keys, states), states, keys)

    return compiled(jax.vmap(init, in_axes=(0, None))), compiled(advance)
