"""Assignments: the best permutation of a score matrix, and random ones with a given mean."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def best_assignment(scores: Float[Array, "*batch M N"]) -> Int[Array, "*batch M"]:
    """The column of each of M <= N rows in the match with the highest total score."""
    import optax  # not needed for a first answer, and slow to import

    finite = jnp.isfinite(scores)
    low = jnp.where(finite, scores, jnp.inf).min(axis=(-2, -1), keepdims=True)
    high = jnp.where(finite, scores, -jnp.inf).max(axis=(-2, -1), keepdims=True)
    # A forbidden pair costs more than any permutation of allowed ones.
    forbidden = low - scores.shape[-1] * (high - low + 1.0)
    cost = -jnp.where(finite, scores, forbidden)
    flat = cost.reshape(-1, *cost.shape[-2:])
    rows, columns = jax.vmap(optax.assignment.hungarian_algorithm)(flat)
    by_row = jnp.take_along_axis(columns, jnp.argsort(rows, axis=-1), axis=-1)
    return by_row.reshape(scores.shape[:-1])


def birkhoff_draw(key: Array, probs: Float[Array, "N N"]) -> Int[Array, " N"]:
    """A permutation (the column of each row) drawn with mean `probs`.

    The decomposition A = sum_i w_i P_i subtracts one permutation after another from A, each found
    by an assignment with randomly perturbed scores. The draw is the P_i at which the cumulative
    weight passes a uniform number. The mean is A for any perturbation.
    """
    size = len(probs)
    rows = jnp.arange(size)
    start_key, loop_key = jax.random.split(key)

    def unfinished(state: tuple[Any, ...]) -> Bool[Array, ""]:
        _, _, threshold, _, step = state
        return (threshold > 0) & (step < size * size)  # each step empties an entry

    def take(state: tuple[Any, ...]) -> tuple[Any, ...]:
        key, left, threshold, _, step = state
        key, noise_key = jax.random.split(key)
        noise = jax.random.gumbel(noise_key, left.shape)
        columns = best_assignment(jnp.log(left) + noise)
        weight = left[rows, columns].min()
        left = left.at[rows, columns].add(-weight)
        return key, jnp.where(left < 1e-12, 0.0, left), threshold - weight, columns, step + 1

    threshold = jax.random.uniform(start_key)
    state = (loop_key, jnp.asarray(probs), threshold, rows, 0)
    return jax.lax.while_loop(unfinished, take, state)[3]


def birkhoff_draws(
    key: Array, probs: Float[Array, "*batch N N"], sample_shape: tuple[int, ...] = ()
) -> Int[Array, "*shape N"]:
    """Draws of `birkhoff_draw` for each matrix of a batch, sample shape first."""
    shape = (*sample_shape, *probs.shape)
    every = jnp.broadcast_to(probs, shape).reshape(-1, *shape[-2:])
    columns = jax.vmap(birkhoff_draw)(jax.random.split(key, len(every)), every)
    return columns.reshape(shape[:-1])
