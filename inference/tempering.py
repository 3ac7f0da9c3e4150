"""Parallel tempering: the ladder of betas, exchanges between neighbours, and the log evidence.

Poses are integrated out of an exchange, so that neighbours need to agree about discrete things only
and a ladder of a dozen rungs is enough.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.optimize import brentq
from scipy.special import expit

from guides.meanfield import PoseFactor
from inference.conditionals import Sites, integrated
from models.errors import InputError
from models.reading import Conjugate, Program, read
from models.scenes import Scene


def ladder(program: Program, scene: Scene, rungs: int = 16) -> Float[np.ndarray, " rungs"]:
    """Betas for tempering: 0, and then from where the points begin to tell, geometrically to 1."""
    if rungs < 3:
        raise InputError(f"a ladder wants at least 3 rungs, got {rungs}; try 16")
    model = read(program, scene)
    F, owner = model.parts.F, np.asarray(model.parts.owner)
    precision: Any = 1.0
    if model.precision_prior is not None:
        precision = model.precision_prior[0] / model.precision_prior[1]
    spread = jnp.einsum("ndp,npq,ndq->nd", F, model.pose_covariance[owner], F)
    signal = jnp.where(model.parts.feature_mask, precision * spread / model.parts.variance, 0.0)
    smallest = 1.0 / max(float(signal.max()), 10.0)
    return np.concatenate([[0.0], np.geomspace(smallest, 1.0, rungs - 1)])


def exchange(
    key: Array,
    model: Conjugate,
    owner: Int[np.ndarray, " N"],
    replicas: Sites,
    betas: Float[Array, " rungs"],
    turn: Int[Array, ""],
) -> tuple[Sites, PoseFactor, Float[Array, "rungs-1 2"], Float[Array, " rungs-1"]]:
    """Neighbours swap all but their poses, even pairs and odd pairs in turn.

    Returns the replicas, their poses given the match, and what `GibbsState` says of the exchange.
    """
    rungs = len(betas)
    steps = np.arange(rungs - 1)
    # Every replica at its own beta, then all but the last at the beta above, all but the first at
    # the beta below; the poses after the exchange are among these.
    which = np.concatenate([np.arange(rungs), steps, steps + 1])
    where = np.concatenate([np.arange(rungs), steps + 1, steps])
    every = jax.tree.map(lambda x: x[which], replicas)
    if model.points.shape[-1] > 1:  # each replica has its own
        model = jax.tree.map(lambda x: x[..., which], model)
    log_integral, pose = integrated(model, owner, every, betas[where])
    own, above, below = jnp.split(log_integral, (rungs, 2 * rungs - 1))
    log_accept = jnp.minimum(above + below - own[:-1] - own[1:], 0.0)
    its_turn = steps % 2 == turn % 2
    swap = its_turn & (jnp.log(jax.random.uniform(key, steps.shape)) < log_accept)
    from_above, from_below = jnp.append(swap, False), jnp.append(False, swap)
    place = jnp.arange(rungs)
    source = place + from_above - from_below
    evaluated = jnp.where(from_above, 2 * rungs - 1 + place, place)
    evaluated = jnp.where(from_below, rungs + place - 1, evaluated)
    moved = jax.tree.map(lambda x: x[source], replicas)
    pose = jax.tree.map(lambda x: x[..., evaluated], pose)
    accept_prob = jnp.where(its_turn, jnp.exp(log_accept), jnp.nan)
    log_ratio = jnp.stack([above - own[:-1], own[1:] - below], axis=1)
    return moved, pose, log_ratio, accept_prob


def bridge(
    log_ratio: Float[np.ndarray, "chains draws rungs-1 2"],
) -> tuple[Float[np.ndarray, ""], float]:
    """Log evidence and its standard error, by Bennett's acceptance ratio between neighbours.

    With f the log ratio of the upper density to the lower at draws of the lower one, and r at draws
    of the upper one, the log ratio c of their normalisers solves E[s(f - c)] = E[s(c - r)], s the
    logistic function. At beta = 0 the normaliser is one.

    The error is that of the sum over rungs, to first order: what each sweep adds to it is one
    series, all rungs together, since matches wander from rung to rung and their errors go together.
    Its effective sample size, over chains, says how many sweeps are worth an independent one.
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
    import arviz as az  # slow to import, and the commands start without it

    error = 0.0 if np.ptp(influence) == 0 else float(az.mcse(influence, method="mean"))
    return np.asarray(evidence), error
