"""Parses of a scene: the best few sets of candidates that share no point.

An object has at most one candidate, and points may be left over. The value of a parse is the log
density of the points, their match and the states of the objects, relative to explaining each point
alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.special import chdtri

from inference.proposals.candidates import Candidates
from inference.proposals.frames import OUTSIDE
from inference.proposals.plan import Plan
from models.numerics.arrays import AnyArray
from models.program.reading import LinearGaussianModel
from models.templates import pose_of_part

NUM_PARSES = 16
"""Number of parses of a scene that are kept."""

EDGE = float(0.5 * chdtri(2, OUTSIDE))
"""Misfit in nats of a point at the edge of a gate, if the noise is that of the gate."""

_NEVER = 1e3  # cost in nats of a missing part that the program does not allow to be missing


class Odds(NamedTuple):
    """Log weights of matches and states, and log densities of single points.

    The first axis is that of the states that an object may have, such as absent and present.
    """

    pair: Float[Array, "S N N"]
    """Log weight of each pair of a point and a part, relative to the part being missing."""
    state: Float[Array, "S K"]
    """Log weight of each state with all parts missing, relative to the best one."""
    single: Float[Array, "S N N"]
    """Log weight and density of each pair if the object has no other point."""
    alone: Float[Array, " N"]
    """Largest `single` of each point, over states and over parts and slots for clutter."""
    may_miss: Bool[Array, "S N"]
    """Whether a part may be missing at all."""
    outside: Float[Array, ""]
    """Smallest cost of a point outside the gate."""
    lack: Float[Array, ""]
    """Additional cost of a missing part of an object that has points."""


class Parses(NamedTuple):
    """The best parses of a scene, best first."""

    match: Int[AnyArray, "W N"]
    """The point of each part, -1 for none."""
    state: Int[AnyArray, "W K"]
    """The index of the state of each object."""
    value: Float[AnyArray, " W"]
    misfit: Float[AnyArray, " W"]
    """Half the sum of squared residuals, in units of the cost of a point outside the gate."""
    left_over: Int[AnyArray, " W"]
    """Number of points that are part of no object."""
    missing: Int[AnyArray, " W"]
    """Number of missing parts of objects that have points."""
    is_clear: Bool[AnyArray, " W"]
    """Whether every object with points has more points than fix a pose and lacks only parts that
    may be missing, and every point left over has a slot for clutter."""


class Pass(NamedTuple):
    """A search for the parses of some scenes."""

    gate: float
    """Gate variance in units of the noise; zero for the tightest gate."""
    block: int
    """Largest number of scenes that are searched together."""
    group: Int[np.ndarray, " scenes"]
    """The group of each scene; only scenes of one group are searched together."""
    search: Callable[[Int[np.ndarray, " block"]], Parses]
    """Takes scene indices."""


def judged_at(model: LinearGaussianModel, gate: Float[Array, "N d"]) -> LinearGaussianModel:
    """Set the noise of the objects in the pieces of a program to the variance of a gate."""
    is_clutter = model.parts.is_clutter[:, None]
    variance = jnp.where(is_clutter, model.parts.variance, gate)
    return replace(model, parts=model.parts._replace(variance=variance))


def odds(
    models: Sequence[LinearGaussianModel],
    log_prior: Float[Array, "S K"],
    owner: Int[np.ndarray, " N"],
    outside: float,
    lack: float,
) -> Odds:
    """Compute the odds from the pieces of a program at each state of its objects."""
    num_objects = models[0].num_objects
    of_object = jnp.asarray(owner[:, None] == np.arange(num_objects))
    # Without dummy rows no part is missing; then objects that may be absent are present.
    never = -jnp.inf if len(models) > 1 else 0.0
    weight = jnp.stack([_missing(model, never) for model in models])
    missing = jnp.maximum(weight, -_NEVER)
    state = log_prior + missing @ of_object
    state = state - state.max(axis=0)
    pair = jnp.stack([jnp.asarray(model.match_logits) for model in models]) - missing[:, None]
    opened = jnp.append(state, jnp.zeros((len(models), 1)), axis=1)[:, owner]  # 0 for clutter
    single = jnp.stack([pair_log_density(model) for model in models]) + pair + opened[:, None]
    others = (jnp.isfinite(weight), jnp.asarray(outside), jnp.asarray(lack))
    return Odds(pair, state, single, single.max(axis=(0, 2)), *others)


def _missing(model: LinearGaussianModel, never: float) -> Float[Array, " N"]:
    """Log weight of each part being missing: that of a dummy row, or `never` without dummy rows."""
    seen = model.seen.any(axis=1)
    dummy = jnp.argmin(seen)  # the first, if there is any
    return jnp.where(seen.all(), never, jnp.asarray(model.match_logits)[dummy])


def pair_log_density(model: LinearGaussianModel) -> Float[Array, "N N"]:
    """Log density of each point as each part or slot for clutter, with the pose integrated out."""
    parts = model.parts
    of = pose_of_part(parts.owner, model.num_objects)
    mean = parts.offset + jnp.einsum("ndp,np->nd", parts.F, model.pose_mean[of])
    variance = parts.variance + jnp.einsum(
        "ndp,npq,ndq->nd", parts.F, model.pose_covariance[of], parts.F
    )
    counted = model.seen[:, None] & parts.feature_mask
    energy = (model.points[:, None] - mean) ** 2 / variance + jnp.log(2 * jnp.pi * variance)
    return -0.5 * jnp.where(counted, energy, 0.0).sum(axis=-1)


def gains(
    odds: Odds, plan: Plan, candidates: Candidates, states: tuple[int, ...]
) -> Float[Array, "K SC"]:
    """The gain of each candidate of each object in each state: what it adds to a parse's value."""

    def of_object(k: Any, kind: Any, members: Any, valid: Any) -> Float[Array, " SC"]:
        match, score = candidates.match[:, kind], candidates.score[:, kind]  # (S, most, C)
        pair = odds.pair[np.array(states)[:, None, None], match, members[:, None]]
        met = jnp.where(match >= 0, pair - odds.alone[match], 0.0).sum(axis=1)
        lacks = (valid[:, None] & (match < 0)).sum(axis=1)
        opened = odds.state[np.array(states), k, None]
        return (opened + score + met - odds.lack * lacks).ravel()

    objects = np.arange(len(plan.kind))
    return jax.vmap(of_object)(
        objects, plan.kind, jnp.asarray(plan.members), jnp.asarray(plan.valid)
    )
