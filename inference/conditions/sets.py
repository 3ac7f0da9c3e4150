"""Sum a program's density over its discrete latent sites.

Such sites say, for example, which objects are present, their kinds, or the component of a mixture
prior. Given their values a program has only continuous latent sites. Methods that work on the
density sum over a *table* of the joint values that are possible for a scene.
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
from models.distributions.likelihood import MarginalParts
from models.program.batches import Open
from models.program.marginal import marginal
from models.program.reading import conditions as conditions_of
from models.program.reading import refuse_moving_supports
from models.program.sites import (
    Program,
    Unknown,
    is_traced,
    log_prob_of,
    trace_sites,
    with_unknown,
)
from models.scenes import Scene

Observed = dict[str, Any]
"""The observed arguments of a program."""

Table = dict[str, Any]
"""Joint values of the discrete latent sites, (values, ...) each; empty without such sites."""

_PROBES = 4  # draws of the continuous sites at which each value is tried
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
    """The joint values that can explain one scene; an error if there are none or too many.

    Left out are values that no value of the continuous sites makes possible: those of density zero
    at a site that depends on no continuous one, and those under which the prior forbids every
    match. The first ones are possible at one of several draws of the continuous sites.
    """
    left_open = discrete_sites(program, scene)
    if not left_open:
        return {}
    table = list_conditions(left_open).values
    keys = jax.random.split(jax.random.key(0), _PROBES)
    apart = _apart_from_continuous(program, scene, left_open, at_first(table))
    found = _are_possible(program, apart)(table, scene.observed, keys)
    possible, excluded = (np.asarray(x) for x in found)
    refuse_impossible(scene.batch(), np.array([possible.any()]))
    order = np.concatenate([np.flatnonzero(x) for x in (possible, ~possible & ~excluded)])
    return {name: x[order] for name, x in table.items()}


def _apart_from_continuous(
    program: Program, scene: Scene, left_open: Open, given: Table
) -> frozenset[str]:
    """Observed sites whose density depends on no continuous site; of the points, the match prior's.

    Args:
        given: values of the discrete sites.
    """
    apart: list[str] = []

    def look(zero: Array) -> None:
        latent = trace_sites(marginal(program), scene, given)
        unknown = Unknown(zero, [n for n in latent if n not in left_open])
        for name, site in trace_sites(marginal(program), scene, given, unknown).items():
            if not site["is_observed"] and name not in left_open:
                continue
            is_match = isinstance(site["fn"], MarginalParts)
            if not is_traced(site["fn"].match_prior if is_match else log_prob_of(site)):
                apart.append(name)

    with_unknown(look)
    return frozenset(apart)


@functools.lru_cache(maxsize=32)
def _are_possible(program: Program, apart: frozenset[str]) -> Callable[..., tuple[Array, Array]]:
    """A test of joint values, compiled once for each program and shape of scene.

    It says which values are possible at a draw of the continuous sites, and which at no values.

    Args:
        apart: sites whose density depends on no continuous site.
    """

    @jax.jit
    def are_possible(table: Table, observed: Observed, keys: Array) -> tuple[Array, Array]:
        def at(values: Table) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
            def at_draw(key: Array) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
                given = seed(conditioned(marginal(program), values), key)
                log_probs, sites = compute_log_probs(given, (), observed, {})
                possible = jnp.isfinite(sum(log_probs.values(), jnp.zeros(())))
                known = {name: log_probs[name] for name in apart}
                if "points" in known:
                    prior = sites["points"]["fn"].match_prior
                    known["points"] = prior.tilt(jnp.zeros(prior.event_shape)).log_normalizer
                return possible, jnp.isneginf(jnp.stack([jnp.zeros(()), *known.values()])).any()

            possible, excluded = jax.vmap(at_draw)(keys)
            return possible.any(), excluded.any()

        return jax.lax.map(at, table, batch_size=_TOGETHER)

    return are_possible


def conditioned(program: Program, values: Table) -> Program:
    """Condition a program on values of discrete sites; their log probability still counts."""
    return condition(program, data=values) if values else program


def at_first(table: Table) -> Table:
    """The first joint value, for quantities that do not depend on the value."""
    return {name: x[0] for name, x in table.items()}


def continuous(values: Table) -> Table:
    """The values of the continuous sites, those of a floating type."""
    return {n: x for n, x in values.items() if jnp.issubdtype(jnp.result_type(x), jnp.floating)}


def discrete(values: Table) -> Table:
    """The values of the discrete sites."""
    return {name: x for name, x in values.items() if name not in continuous(values)}


def potential(
    program: Program, observed: Observed, table: Table, z: dict[str, Array]
) -> Float[Array, ""]:
    """Potential energy at unconstrained values, with the discrete sites summed out.

    It is -log sum_s p(s) p(pose | s) p(data | s) p(points | pose, s), where each term is the
    density of the program given the value s.

    Args:
        program: one whose match is summed out, `models.marginal(...)`.
    """
    if not table:
        return potential_energy(program, (), observed, z)

    def at(values: Table) -> Float[Array, ""]:
        given = conditioned(program, values)
        energy, slope = jax.value_and_grad(lambda z: potential_energy(given, (), observed, z))(
            jax.lax.stop_gradient(z)
        )
        # A value of density zero has no weight, but its slope is NaN.
        slope = jax.tree.map(lambda x: jnp.where(jnp.isfinite(energy), x, 0.0), slope)
        rises = jax.tree.map(lambda x, y: jnp.sum(x * (y - jax.lax.stop_gradient(y))), slope, z)
        return energy + sum(jax.tree.leaves(rises))

    return -logsumexp(-jax.vmap(at)(table))
