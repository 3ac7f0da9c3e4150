"""Covers: choose hypotheses that together explain the points of a scene, at most one per object.

A hypothesis claims some points. Its value is what it adds to the cost of the explanation, negative
if it saves more for the points that it explains than its misfit. Functions treat one scene and are
mapped over a batch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

WIDTH = 128
"""Number of partial explanations that are kept while objects are added one by one."""


class Candidates(NamedTuple):
    """The remaining hypotheses of each kind of template, best first."""

    value: Float[Array, "kinds some"]
    claims: Bool[Array, "kinds some N"]


def best_cover(
    candidates: Candidates,
    kind: Int[np.ndarray, " K"],
    present: Bool[Array, " N"],
    promise: Float[np.ndarray, "K free"],
    width: int = WIDTH,
) -> Int[Array, " K"]:
    """The candidate of each object, -1 for none, in the cheapest set of disjoint candidates.

    Objects are added in turn, and the explanations that can still become the cheapest are kept. The
    answer is exact as long as fewer than `width` of them compete. Objects of one kind are
    exchangeable: the first of them gets the earlier candidate, or none if there is only one.

    Args:
        promise: lower bound on the cost added by the objects after each one, by free points.
    """
    some, rows = candidates.claims.shape[1:]
    num_objects = len(kind)
    nothing = num_objects  # a column of `choice` for objects that are the first of their kind
    before = [max(np.flatnonzero(kind[:k] == j), default=nothing) for k, j in enumerate(kind)]
    candidates = jax.tree.map(jnp.asarray, candidates)

    def add(
        state: tuple[Array, Array, Array], step: Any
    ) -> tuple[tuple[Array, Array, Array], None]:
        total, free, choice = state
        k, j, twin, promise = step
        value, claims = candidates.value[j], candidates.claims[j]
        fits = ~(claims[None] & ~free[:, None]).any(axis=-1)
        fits = fits & (jnp.arange(some) > choice[:, twin, None])
        totals = jnp.where(fits, total[:, None] + value, jnp.inf)
        totals = jnp.concatenate([totals, total[:, None]], axis=1)  # the last: no candidate
        num_free = free.sum(axis=1)[:, None] - jnp.append(claims.sum(axis=1), 0)
        _, place = jax.lax.top_k(-(totals + promise[num_free]).ravel(), len(total))
        parent, chosen = jnp.divmod(place, some + 1)
        taken = (chosen < some)[:, None] & claims[jnp.minimum(chosen, some - 1)]
        new = (totals.ravel()[place], free[parent] & ~taken, choice[parent].at[:, k].set(chosen))
        return new, None

    empty = jnp.arange(width) == 0
    start = (
        jnp.where(empty, 0.0, jnp.inf),
        jnp.broadcast_to(present, (width, rows)),
        jnp.full((width, num_objects + 1), -1),
    )
    steps: Any = (np.arange(num_objects), np.asarray(kind), np.array(before), promise)
    (_, _, choice), _ = jax.lax.scan(add, start, steps)
    return jnp.where(choice[0, :-1] < some, choice[0, :-1], -1)


def promises(
    sizes: Int[np.ndarray, " K"],
    fewest: int,
    lack: float,
    num_points: int,
    stray: float | None = None,
) -> Float[np.ndarray, "K free"]:
    """Lower bounds for `best_cover`: cost added by the objects after each one, by free points.

    An object of n parts that explains e points adds lack (n - e) for its missing parts and saves
    stray e. It explains at least `fewest` points, or all of its parts if they are fewer.

    Args:
        stray: cost of an unexplained point; by default `lack`.
    """
    stray = lack if stray is None else stray
    least = np.zeros((len(sizes), num_points + 1))
    for k in range(len(sizes) - 1, 0, -1):
        for free in range(num_points + 1):
            explained = range(min(fewest, sizes[k]), min(sizes[k], free) + 1)
            adds = (lack * (sizes[k] - e) - stray * e + least[k, free - e] for e in explained)
            least[k - 1, free] = min(least[k, free], *adds, 0.0)
    return least


def sequential_cover(
    candidates: Candidates, kind: Int[np.ndarray, " K"], limit: float = 0.0
) -> Int[Array, " K"]:
    """Sequential RANSAC: take the best candidate, then the best among the remaining points, etc.

    Args:
        limit: only candidates with a value below it are taken.
    """
    num_kinds, some, rows = candidates.claims.shape
    candidates = jax.tree.map(jnp.asarray, candidates)
    of_kind = np.arange(num_kinds)[:, None] == kind

    def take(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        free, choice = state
        unused = of_kind & (choice < 0)
        fits = ~(candidates.claims & ~free).any(axis=-1) & unused.any(axis=1)[:, None]
        value = jnp.where(fits, candidates.value, jnp.inf).ravel()
        best = jnp.argmin(value)
        j, chosen = jnp.divmod(best, some)
        k = jnp.argmax(unused[j])
        new = (free & ~candidates.claims[j, chosen], choice.at[k].set(chosen))
        better = value[best] < limit
        return jax.tree.map(lambda old, new: jnp.where(better, new, old), state, new), None

    start = (jnp.ones(rows, bool), jnp.full(len(kind), -1))
    (_, choice), _ = jax.lax.scan(take, start, None, length=len(kind))
    return choice
