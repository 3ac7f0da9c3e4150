"""Parameters of match priors: by type, and by which objects are present."""

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int
from numpyro.distributions import Binomial, CategoricalLogits, Distribution

from models.numerics.arrays import AnyArray


def typed_probs(
    point_type: Int[Array, " N"], present: Bool[Array, " N"], part_type: Int[Array, " N"]
) -> Float[Array, "N N"]:
    """A prior under which points only meet parts of their own type, all of them equally.

    A point of a type that has K parts meets each with 1/K. Dummy rows share out what the points
    leave: they are alike, so each takes the same share of a column.
    """
    same = (point_type[:, None] == part_type) & present[:, None]
    parts_of_type = (part_type[:, None] == part_type).sum(axis=0)
    points = same / parts_of_type
    num_dummies = jnp.maximum((~present).sum(), 1)
    # Counted in whole numbers: nothing is left of a full column, not even a rounding error.
    dummy = (parts_of_type - same.sum(axis=0)) / (parts_of_type * num_dummies)
    return jnp.where(present[:, None], points, dummy)


def presence_logits(
    presence: Bool[Array, " K"] | Int[Array, " K"],
    visibility: ArrayLike,
    present: Bool[Array, " N"],
    owner: Int[AnyArray, " N"],
    clutter_prob: ArrayLike = 0.5,
) -> Float[Array, "N N"]:
    """Log weights of a match prior under which points are parts of present objects, or clutter.

    A part of a present object is seen with probability `visibility`, and a slot for clutter is used
    with probability `clutter_prob`; the dummy rows have the parts that are not seen, all those of
    absent objects, and the slots that are not used.
    """
    here = jnp.append(jnp.asarray(presence, bool), True)[owner]  # the background always is
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
    """How many points a scene has: parts of present objects that are seen, and slots in use.

        Binomial(parts of present objects, visibility) + Binomial(slots, clutter_prob)

    With `presence_logits` it makes every part and every slot independent of the others.
    """
    num_objects = len(presence)
    there = jnp.append(jnp.asarray(presence) > 0, False)[owner].sum()
    seen = Binomial(there, visibility)
    slots = int(np.sum(np.asarray(owner) == num_objects))
    if not slots:
        return seen
    used = jnp.arange(slots + 1)
    rest = jnp.arange(len(owner) + 1)[:, None] - used
    possible = (rest >= 0) & (rest <= there)
    log_prob = seen.log_prob(jnp.where(possible, rest, there))
    log_prob = jnp.where(possible, log_prob, -jnp.inf) + Binomial(slots, clutter_prob).log_prob(
        used
    )
    # A count that is impossible has log probability -inf, of which there must be no slope.
    some = possible.any(axis=1)
    logits = logsumexp(jnp.where(some[:, None], log_prob, 0.0), axis=1)
    # NumPyro's check of logits refuses counts that are impossible.
    return CategoricalLogits(jnp.where(some, logits, -jnp.inf), validate_args=False)
