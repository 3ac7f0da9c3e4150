"""Parallel tempering: the ladder of betas, exchanges between neighbours, and the log evidence.

Replicas of a chain sample p(sites) p(points | sites)^beta at a ladder of betas, from 0, the prior,
to 1, the posterior. In Gibbs sampling the match is one of the sites and poses are integrated out of
an exchange; in NUTS the match is summed out. Everything else is the same for both.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpyro.infer.hmc_util import IntegratorState
from numpyro.infer.util import log_density
from scipy.optimize import brentq
from scipy.special import expit

from guides.meanfield import PoseFactor
from inference.mcmc.conditionals import Sites, integrated
from inference.posterior.arviz_api import mcse
from inference.posterior.densities import marginal_prior_draws
from models.errors import InputError
from models.program.marginal import marginal, tempered
from models.program.reading import FACTORS, LinearGaussianModel, read
from models.program.sites import Program, Values
from models.scenes import Scene
from models.templates import pose_of_part

_PRIOR_DRAWS = 512
_BETAS = np.geomspace(1e-10, 1.0, 101)  # candidates for the lowest positive rung


def ladder(
    program: Program,
    scene: Scene,
    rungs: int = 16,
    given: Values | None = None,
    factors: frozenset[str] = FACTORS,
) -> Float[np.ndarray, " rungs"]:
    """Betas for tempering: 0, then a geometric ladder to 1 from where points begin to matter.

    A single rung, beta = 1, is no tempering.

    Args:
        given: likely values of the program's conditions.
        factors: as in `models.program.reading.read`.
    """
    if rungs == 1:
        return np.ones(1)
    model = read(program, scene, given, factors)
    F, owner = model.parts.F, pose_of_part(model.parts.owner, model.num_objects)
    precision: Any = 1.0
    if model.precision_prior is not None:
        precision = model.precision_prior[0] / model.precision_prior[1]
    spread = jnp.einsum("ndp,npq,ndq->nd", F, model.pose_covariance[owner], F)
    signal = jnp.where(model.parts.feature_mask, precision * spread / model.parts.variance, 0.0)
    smallest = 1.0 / max(float(signal.max()), 10.0)
    return np.concatenate([[0.0], np.geomspace(smallest, 1.0, rungs - 1)])


def prior_ladder(program: Program, scene: Scene, rungs: int) -> Float[np.ndarray, " rungs"]:
    """Betas for any program: 0, then a geometric ladder to 1 from where points begin to matter.

    This is the largest beta at which prior draws, weighted by their tempered likelihood, still have
    an effective sample size of half their number.
    """
    if rungs == 1:
        return np.ones(1)
    draws = marginal_prior_draws(program, scene, jax.random.key(0), _PRIOR_DRAWS)
    observed = {name: jnp.asarray(x) for name, x in scene.observed.items()}
    log_weight = np.asarray(_log_weights(program)(draws, jnp.asarray(_BETAS), observed))
    weight = np.exp(log_weight - log_weight.max(axis=1, keepdims=True))
    effective = weight.sum(axis=1) ** 2 / (weight**2).sum(axis=1)
    smallest = _BETAS[np.flatnonzero(effective > _PRIOR_DRAWS / 2).max(initial=0)]
    return np.concatenate([[0.0], np.geomspace(min(smallest, 0.1), 1.0, rungs - 1)])


@functools.lru_cache(maxsize=32)
def _log_weights(program: Program) -> Callable[..., Float[Array, "betas draws"]]:
    """A compiled function: the tempered log likelihood of each prior draw at each beta."""

    @jax.jit
    def log_weights(
        draws: dict[str, Array], betas: Float[Array, " betas"], observed: dict[str, Array]
    ) -> Float[Array, "betas draws"]:
        def at(beta: Float[Array, ""], values: dict[str, Array]) -> Float[Array, ""]:
            return log_density(tempered(marginal(program), beta), (), observed, values)[0]

        def of(beta: Float[Array, ""]) -> Float[Array, " draws"]:
            return jax.vmap(at, in_axes=(None, 0))(beta, draws)

        return jax.lax.map(of, betas) - of(jnp.zeros(()))

    return log_weights


def check_rungs(rungs: int) -> None:
    """Raise an error for a ladder without a rung between prior and posterior."""
    if rungs < 1 or rungs == 2:
        raise InputError(
            f"num_temperatures must be at least 3, or 1 for no tempering, got {rungs}; try 16"
        )


class Swap(NamedTuple):
    """The outcome of the exchanges of one turn."""

    chosen: Int[Array, " rungs"]
    """Index into `trials` of the new state of each rung."""
    log_ratio: Float[Array, "rungs-1 2"]
    """Log density at the upper of two neighbouring betas minus that at the lower, for the lower
    and the upper replica; the input of `bridge`."""
    accept_prob: Float[Array, " rungs-1"]
    """Probability of each exchange; NaN for pairs whose turn it was not."""


def trials(rungs: int) -> tuple[Int[np.ndarray, " trials"], Int[np.ndarray, " trials"]]:
    """The pairs of a replica and a beta that an exchange has to evaluate.

    First every replica at its own beta, then all but the last at the beta above, then all but the
    first at the beta below. The rungs after an exchange are among these.
    """
    all_of_them, steps = np.arange(rungs), np.arange(rungs - 1)
    return (
        np.concatenate([all_of_them, steps, steps + 1]),
        np.concatenate([all_of_them, steps + 1, steps]),
    )


def propose(key: Array, log_densities: Float[Array, " trials"], turn: Int[Array, ""]) -> Swap:
    """Swap neighbours with the Metropolis probability, even and odd pairs in turn.

    The probability is min(1, f_i(j) f_j(i) / (f_i(i) f_j(j))), with f_i(j) the density of replica j
    at beta_i. It leaves the distribution of every rung invariant.
    """
    rungs = (len(log_densities) + 2) // 3
    own, above, below = jnp.split(log_densities, (rungs, 2 * rungs - 1))
    log_accept = jnp.minimum(above + below - own[:-1] - own[1:], 0.0)
    steps, place = np.arange(rungs - 1), np.arange(rungs)
    its_turn = steps % 2 == turn % 2
    swap = its_turn & (jnp.log(jax.random.uniform(key, steps.shape)) < log_accept)
    from_above, from_below = jnp.append(swap, False), jnp.append(False, swap)
    chosen = jnp.where(from_above, 2 * rungs - 1 + place, place)
    return Swap(
        chosen=jnp.where(from_below, rungs + place - 1, chosen),
        log_ratio=jnp.stack([above - own[:-1], own[1:] - below], axis=1),
        accept_prob=jnp.where(its_turn, jnp.exp(log_accept), jnp.nan),
    )


def exchange(
    key: Array,
    model: LinearGaussianModel,
    owner: Int[np.ndarray, " N"],
    replicas: Sites,
    betas: Float[Array, " rungs"],
    turn: Int[Array, ""],
) -> tuple[Sites, PoseFactor, Swap]:
    """Exchange all sites but the poses between neighbours; also return the poses given the match.

    Poses are integrated out, so they do not lower the acceptance rate and a dozen rungs are enough.
    """
    which, where = trials(len(betas))
    every = jax.tree.map(lambda x: x[which], replicas)
    if model.points.shape[-1] > 1:  # each replica has its own arrays
        model = jax.tree.map(lambda x: x[..., which], model)
    log_integral, pose = integrated(model, owner, every, betas[where])
    swap = propose(key, log_integral, turn)
    moved = jax.tree.map(lambda x: x[swap.chosen], every)
    return moved, jax.tree.map(lambda x: x[..., swap.chosen], pose), swap


def exchange_places(
    key: Array,
    potential: Callable[[dict[str, Array], Float[Array, ""]], Float[Array, ""]],
    place: IntegratorState,
    betas: Float[Array, " rungs"],
    turn: Int[Array, ""],
) -> tuple[IntegratorState, Swap]:
    """Exchange positions between neighbours.

    Args:
        potential: potential energy of a position at a beta.
        place: positions of all replicas of a chain, rungs first.
    """
    which, where = trials(len(betas))
    every = jax.tree.map(lambda x: x[which], place.z)
    energy, gradient = jax.vmap(jax.value_and_grad(potential))(every, betas[where])
    swap = propose(key, -energy, turn)
    z, z_grad, energy = jax.tree.map(lambda x: x[swap.chosen], (every, gradient, energy))
    return IntegratorState(z=z, z_grad=z_grad, potential_energy=energy), swap


def bridge(
    log_ratio: Float[np.ndarray, "chains draws rungs-1 2"],
) -> tuple[Float[np.ndarray, ""], Float[np.ndarray, ""]]:
    """Log evidence and its standard error, by Bennett's acceptance ratio between neighbours.

    Let f be the log ratio of the upper density to the lower at draws of the lower one, and r the
    same at draws of the upper one. The log ratio c of their normalisers solves
    E[s(f - c)] = E[s(c - r)], with s the logistic function. At beta = 0 the normaliser is one.

    The standard error is that of the sum over rungs, to first order. The contributions of a sweep
    are added up over rungs into one series before its Monte Carlo error is taken, because states
    move between rungs, which makes the errors of rungs dependent.
    """
    evidence, influence = 0.0, np.zeros(log_ratio.shape[:2])
    for rung in range(log_ratio.shape[2]):
        lower, upper = log_ratio[:, :, rung, 0], log_ratio[:, :, rung, 1]

        def balance(c: float, lower: Any = lower, upper: Any = upper) -> float:
            return float(expit(lower - c).mean() - expit(c - upper).mean())

        ends = (min(lower.min(), upper.min()) - 1.0, max(lower.max(), upper.max()) + 1.0)
        c = float(brentq(balance, *ends))
        evidence += c
        up, down = expit(lower - c), expit(c - upper)
        slope = (up * (1 - up) + down * (1 - down)).mean()
        influence += (up - down) / slope
    error = 0.0 if np.ptp(influence) == 0 else mcse(influence)
    return np.asarray(evidence), np.asarray(error)
