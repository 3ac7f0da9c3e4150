"""A beam search for parses: one object after another, largest first, has a candidate or none."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from inference.proposals.candidates import best_few
from inference.proposals.plan import Plan


def beam_search(
    gain: Float[Array, "K C"],
    claims: Bool[Array, "kinds N C"],
    present: Bool[Array, " N"],
    plan: Plan,
    width: int,
) -> Int[Array, "W K"]:
    """The candidate of each object, or C for none, in the parses that are kept.

    Where they are fewer than `width`, the rest is -1.

    Args:
        gain: what each candidate of each object adds to the value of a parse.
        claims: the points of each candidate.
        present: which rows are points.
        width: how many parses are kept after each object.
    """
    (num_objects, some), num_points = gain.shape, len(present)
    order = np.argsort(-plan.sizes, kind="stable")
    before = np.full(num_objects, num_objects)  # the last of its twins that has been placed
    for i, k in enumerate(order):
        twins = [j for j in order[:i] if plan.twin[j] == plan.twin[k]]
        before[k] = twins[-1] if twins else num_objects
    promise = _promises(gain, claims[plan.kind])[order]
    # What the objects that are yet to come can add for a point, at most.
    later = jnp.append(promise[1:], jnp.zeros((1, num_points)), axis=0)
    later = jax.lax.cummax(later, reverse=True)

    def place(
        beam: tuple[Array, Array, Array], step: tuple[Array, Array, Array, Array]
    ) -> tuple[tuple[Array, Array, Array], None]:
        value, free, choice = beam
        k, twin, kind, later = step
        claimed = claims[kind]  # (N, C)
        wanted = claimed.astype(jnp.float32)
        fits = (1.0 - free.astype(jnp.float32)) @ wanted == 0  # (W, C)
        fits &= jnp.arange(some) > choice[:, twin, None]
        values = jnp.where(fits, value[:, None] + gain[k], -jnp.inf)
        values = jnp.concatenate([values, value[:, None]], axis=1)  # the last is: none
        hopes = jnp.append(later @ claimed, 0.0)  # of the points that a candidate takes
        hoped = values + (free @ later)[:, None] - hopes
        _, cell = best_few(hoped.ravel(), width)
        parent, chosen = jnp.divmod(cell, some + 1)
        taken = claimed[:, jnp.minimum(chosen, some - 1)].T & (chosen < some)[:, None]
        choice = choice[parent].at[:, k].set(chosen)
        return (values.ravel()[cell], free[parent] & ~taken, choice), None

    start = (
        jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf),
        jnp.broadcast_to(present, (width, num_points)),
        jnp.full((width, num_objects + 1), -1),
    )
    steps: Any = tuple(map(jnp.asarray, (order, before[order], plan.kind[order], later)))
    (value, _, choice), _ = jax.lax.scan(place, start, steps)
    return jnp.where(jnp.isfinite(value)[:, None], choice[:, :-1], -1)


def _promises(gain: Float[Array, "K C"], claims: Bool[Array, "K N C"]) -> Float[Array, "K N"]:
    """What each object can add for a point, at most: the best share of a candidate's gain."""
    share = gain / jnp.maximum(claims.sum(axis=1), 1)
    return jnp.max(jnp.where(claims, share[:, None], 0.0), axis=2, initial=0.0)
