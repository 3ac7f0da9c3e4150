"""Match priors that depend on part types, or on which objects are present.

Each function is jitted as a whole; single operations would be compiled for every number of scenes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int
from numpyro.distributions import Binomial, CategoricalLogits, Distribution

from models.numerics.arrays import AnyArray


@jax.jit
def typed_probs(
    point_type: Int[Array, " N"], present: Bool[Array, " N"], part_type: Int[Array, " N"]
) -> Float[Array, "N N"]:
    """Match probabilities under which points match only parts of their own type, all equally.

    A point whose type has n parts matches each with probability 1/n. Dummy rows share what is left
    of each column equally.
    """
    same = (point_type[:, None] == part_type) & present[:, None]
    parts_of_type = (part_type[:, None] == part_type).sum(axis=0)
    points = same / parts_of_type
    num_dummies = jnp.maximum((~present).sum(), 1)
    # Counted in integers, so that exactly nothing is left of a full column.
    dummy = (parts_of_type - same.sum(axis=0)) / (parts_of_type * num_dummies)
    return jnp.where(present[:, None], points, dummy)


@jax.jit
def presence_logits(
    presence: Bool[Array, " K"] | Int[Array, " K"],
    visibility: ArrayLike,
    present: Bool[Array, " N"],
    owner: Int[AnyArray, " N"],
    clutter_prob: ArrayLike = 0.5,
) -> Float[Array, "N N"]:
    """Log weights of a match prior under which points are parts of present objects, or clutter.

    A part of a present object is seen with probability `visibility`, and a slot for clutter is used
    with probability `clutter_prob`. Dummy rows take the unseen parts, all parts of absent objects,
    and the unused slots.
    """
    here = jnp.append(jnp.asarray(presence, bool), True)[owner]  # the background is always present
    prob = jnp.append(jnp.full(len(presence), visibility), clutter_prob)[owner]
    seen = jnp.where(here, jnp.log(prob), -jnp.inf)
    unseen = jnp.where(here, jnp.log1p(-prob), 0.0)
    return jnp.where(present[:, None], seen, unseen)


def point_count(
    presence: Bool[Array, " K"] | Int[Array, " K"],
    visibility: ArrayLike,
    owner: Int[AnyArray, " N"],
    clutter_prob: ArrayLike = 0.5,
) -> Distribution:
    """Distribution of the number of points: seen parts of present objects, and used slots.

        Binomial(parts of present objects, visibility) + Binomial(slots, clutter_prob)

    With `presence_logits` it makes every part and every slot independent of the others.
    """
    slots = int(np.sum(np.asarray(owner) == len(presence)))
    seen = Binomial(_parts_there(presence, owner), visibility)
    if not slots:
        return seen
    used = Binomial(slots, clutter_prob)
    logits = _sum_logits(seen.total_count, seen.probs, used.probs, slots, len(owner))
    # NumPyro's validation rejects the logits of impossible counts, -inf.
    return CategoricalLogits(logits, validate_args=False)


@jax.jit
def _parts_there(
    presence: Bool[Array, " K"] | Int[Array, " K"], owner: Int[AnyArray, " N"]
) -> Int[Array, ""]:
    """Number of parts of present objects."""
    return jnp.append(jnp.asarray(presence) > 0, False)[owner].sum()


@functools.partial(jax.jit, static_argnames=("slots", "most"))
def _sum_logits(
    there: Int[Array, ""],
    visibility: Float[Array, ""],
    clutter_prob: Float[Array, ""],
    slots: int,
    most: int,
) -> Float[Array, " counts"]:
    """Log probabilities of 0 to `most` points: a convolution of two binomials."""
    used = jnp.arange(slots + 1)
    rest = jnp.arange(most + 1)[:, None] - used
    possible = (rest >= 0) & (rest <= there)
    log_prob = Binomial(there, visibility).log_prob(jnp.where(possible, rest, there))
    log_prob = jnp.where(possible, log_prob, -jnp.inf) + Binomial(slots, clutter_prob).log_prob(
        used
    )
    # An impossible count has log probability -inf, whose gradient must not become NaN.
    some = possible.any(axis=1)
    logits = logsumexp(jnp.where(some[:, None], log_prob, 0.0), axis=1)
    return jnp.where(some, logits, -jnp.inf)
