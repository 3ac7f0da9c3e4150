"""Discrete latent sites of any name: their joint values that are possible at a scene, and sums.

Which objects are present, of which kind they are, which component a prior has: given a value of
each such site, a program has continuous latent sites only. Methods that work on its density sum
over a *table* of the joint values.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float
from numpyro.handlers import condition, seed
from numpyro.infer.util import compute_log_probs, potential_energy

from inference.conditions.listing import list_conditions
from inference.conditions.solve import refuse_impossible
from models.program.batches import Open
from models.program.marginal import marginal
from models.program.reading import conditions as conditions_of
from models.program.reading import refuse_moving_supports
from models.program.sites import Program, Unknown, trace_sites, with_unknown
from models.scenes import Scene

Observed = dict[str, Any]
"""What a program is given."""

Table = dict[str, Any]
"""Joint values of the discrete latent sites, (values, ...) each; empty where there are none."""

_PROBES = 4  # draws of the continuous sites at which a value is tried
_TOGETHER = 64  # values that are tried at once


def discrete_sites(program: Program, scene: Scene) -> Open:
    """The discrete latent sites of a program other than the match."""
    left_open = conditions_of(trace_sites(program, scene))
    found = {
        name: prior
        for name, prior in left_open.items()
        if prior.support is not None and prior.support.is_discrete
    }
    if found:

        def look(zero: Array) -> None:
            sites = trace_sites(program, scene, None, Unknown(zero, found))
            refuse_moving_supports({n: s["fn"] for n, s in sites.items() if not s["is_observed"]})

        with_unknown(look)
    return found


def possible_values(program: Program, scene: Scene) -> Table:
    """The joint values that can explain one scene; refused where there are none, or too many.

    A value is possible if the program's own density, with the match summed out, is positive at one
    of several draws of its continuous sites.
    """
    left_open = discrete_sites(program, scene)
    if not left_open:
        return {}
    table = list_conditions(left_open).values
    keys = jax.random.split(jax.random.key(0), _PROBES)
    possible = np.asarray(_are_possible(program)(table, scene.observed, keys))
    refuse_impossible(scene.batch(), np.array([possible.any()]))
    return {name: x[possible] for name, x in table.items()}


@functools.lru_cache(maxsize=32)
def _are_possible(program: Program) -> Callable[[Table, Observed, Array], Bool[Array, " values"]]:
    """Compiled once for each program and shape of its scenes."""

    @jax.jit
    def are_possible(table: Table, observed: Observed, keys: Array) -> Bool[Array, " values"]:
        def at(values: Table) -> Bool[Array, ""]:
            def log_density(key: Array) -> Float[Array, ""]:
                given = seed(conditioned(marginal(program), values), key)
                log_probs, _ = compute_log_probs(given, (), observed, {})
                return sum(log_probs.values(), jnp.zeros(()))

            return jnp.isfinite(jax.vmap(log_density)(keys)).any()

        return jax.lax.map(at, table, batch_size=_TOGETHER)

    return are_possible


def conditioned(program: Program, values: Table) -> Program:
    """The program given values of discrete sites, which still count with their log probability."""
    return condition(program, data=values) if values else program


def at_first(table: Table) -> Table:
    """The first of the joint values: for what none of them changes."""
    return {name: x[0] for name, x in table.items()}


def continuous(values: Table) -> Table:
    """Of values by site those of continuous sites, which are real numbers."""
    return {n: x for n, x in values.items() if jnp.issubdtype(jnp.result_type(x), jnp.floating)}


def discrete(values: Table) -> Table:
    """Of values by site those of discrete sites."""
    return {name: x for name, x in values.items() if name not in continuous(values)}


def potential(
    program: Program, observed: Observed, table: Table, z: dict[str, Array]
) -> Float[Array, ""]:
    """Potential energy at unconstrained values, with the discrete sites summed out.

    -log sum_s p(s) p(pose | s) p(data | s) p(points | pose, s), each term the density of the
    program itself given the value s.

    Args:
        program: one whose match is summed out, `models.marginal(...)`.
    """
    if not table:
        return potential_energy(program, (), observed, z)

    def at(values: Table) -> Float[Array, ""]:
        return potential_energy(conditioned(program, values), (), observed, z)

    return -logsumexp(-jax.vmap(at)(table))
