"""The Bethe permanent: an approximation of the permanent, from below, for matrices of any size.

Belief propagation on a match sends messages between rows, which have one column each, and columns,
which have at most one row. With R the marginals at its fixed point, b the weights and
s_n = 1 - sum_m r_mn the probability that column n is free,

    log perm(B) >= sum r log b - sum r log r + sum (1 - r) log(1 - r) - sum s log s.

For a square matrix s is zero and this is Gurvits' inequality; for fewer rows than columns it is a
theorem of Straszak and Vishnoi, as both kinds of factor have real stable polynomials. The bound is
exact for one row, and where the likely pairs form no cycle. A pass costs O(M N).

Matrix axes are first and a batch axis, if any, last.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp, xlog1py, xlogy
from jaxtyping import Array, Bool, Float

from models.errors import InputError
from models.numerics.linalg import total
from models.numerics.sinkhorn import scale

TOLERANCE = 1e-9
"""Largest change of a message, and deviation of a sum from one, that counts as converged."""

_MAX_PASSES = 500
_LOG_ZERO = -1e30  # forbidden entries: finite, so that no message becomes inf - inf


class Settled(NamedTuple):
    """The result of belief propagation."""

    match_probs: Float[Array, "M N *batch"]
    messages: Float[Array, "M N *batch"]
    """From columns to rows, a warm start."""
    error: Float[Array, "*batch"]
    """At most the tolerance where it has converged."""


def log_bethe_permanent(log_weights: Float[Array, "*batch M N"]) -> Float[Array, "*batch"]:
    """Log of the Bethe permanent of exp(log_weights), a lower bound on the log permanent.

    Its gradient is `bethe_marginals`, as the marginals maximise the expression above. There is no
    second derivative.
    """
    _check_shape(log_weights.shape)
    return _log_bethe(log_weights)


def bethe_marginals(log_weights: Float[Array, "*batch M N"]) -> Float[Array, "*batch M N"]:
    """Probability of each row having each column, by belief propagation."""
    _check_shape(log_weights.shape)
    return _solve(log_weights)[1]


def propagate(
    log_weights: Float[Array, "M N *batch"],
    messages: Float[Array, "M N *batch"],
    tolerance: float = TOLERANCE,
) -> Settled:
    """Pass damped messages until they converge, at most 500 times."""
    log_weights = jnp.maximum(log_weights, _LOG_ZERO)
    possible = log_weights > 0.1 * _LOG_ZERO
    square = log_weights.shape[0] == log_weights.shape[1]

    def pass_messages(loop: tuple[Array, ...]) -> tuple[Array, ...]:
        old, _, _, count = loop
        to_columns = -_log_sum_of_others(log_weights + old, axis=1)
        values = log_weights + to_columns
        if square:
            new = -_log_sum_of_others(values, axis=0)
        else:  # a column may also stay free, with a weight of one
            free = jnp.zeros((1, *values.shape[1:]))
            new = -_log_sum_of_others(jnp.concatenate([values, free]), axis=0)[:-1]
        match_probs = jax.nn.sigmoid(values + new)
        error = jnp.abs(total(match_probs, axis=1) - 1.0).max(axis=0)
        if square:
            columns = jnp.abs(total(match_probs, axis=0) - 1.0).max(axis=0)
            error = jnp.maximum(error, columns)
        # R may have the right sums long before the messages have converged.
        moved = jnp.where(possible, jnp.abs(new - old) / (1.0 + jnp.abs(old)), 0.0)
        error = jnp.maximum(error, moved.max(axis=(0, 1)))
        damped = jnp.where(error <= tolerance, old, 0.5 * (old + new))
        return damped, match_probs, error, count + 1

    def unfinished(loop: tuple[Array, ...]) -> Bool[Array, ""]:
        return jnp.any(loop[2] > tolerance) & (loop[3] < _MAX_PASSES)

    far = jnp.full(log_weights.shape[2:], jnp.inf)
    loop: tuple[Array, ...] = (messages, jnp.zeros_like(log_weights), far, jnp.zeros((), int))
    messages, match_probs, error, _ = jax.lax.while_loop(unfinished, pass_messages, loop)
    return Settled(match_probs, messages, error)


def bethe_entropy(match_probs: Float[Array, "M N *batch"]) -> Float[Array, "*batch"]:
    """-sum r log r + sum (1 - r) log(1 - r) - sum s log s, the last only if columns may be free."""
    entropy = xlog1py(1.0 - match_probs, -match_probs) - xlogy(match_probs, match_probs)
    entropy = total(total(entropy, axis=0), axis=0)
    if match_probs.shape[0] == match_probs.shape[1]:
        return entropy
    left = jnp.clip(1.0 - total(match_probs, axis=0), 0.0, 1.0)
    return entropy - total(xlogy(left, left), axis=0)


def fill(match_probs: Float[Array, "M N *batch"]) -> Float[Array, "N N *batch"]:
    """Add rows until the matrix is square; they share what is left of each column equally."""
    rows, columns = match_probs.shape[:2]
    if rows == columns:
        return match_probs
    left = jnp.clip(1.0 - total(match_probs, axis=0), 0.0, 1.0) / (columns - rows)
    more = jnp.broadcast_to(left, (columns - rows, *left.shape))
    return jnp.concatenate([match_probs, more])


@jax.jit
def _solve(
    log_weights: Float[Array, "*batch M N"],
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch M N"]]:
    """The log Bethe permanent and the marginals, scaled to the right sums if not converged."""
    *batch, rows, columns = log_weights.shape
    weights = jnp.maximum(jnp.moveaxis(log_weights.reshape(-1, rows, columns), 0, -1), _LOG_ZERO)
    found = propagate(weights, jnp.zeros_like(weights))
    settled = found.error <= TOLERANCE
    # Any R with the right sums keeps the bound.
    probs = jax.lax.cond(
        jnp.all(settled),
        lambda: found.match_probs,
        lambda: jnp.where(
            settled,
            found.match_probs,
            scale(jnp.log(fill(found.match_probs)), TOLERANCE).matrix[:rows],
        ),
    )
    weighted = jnp.where(probs > 0, probs * weights, 0.0)
    value = total(total(weighted, axis=0), axis=0) + bethe_entropy(probs)
    value = jnp.where(value > 1e-3 * _LOG_ZERO, value, -jnp.inf)  # no match is possible
    return value.reshape(batch), jnp.moveaxis(probs, -1, 0).reshape(log_weights.shape)


@jax.custom_jvp
def _log_bethe(log_weights: Float[Array, "*batch M N"]) -> Float[Array, "*batch"]:
    return _solve(log_weights)[0]


@_log_bethe.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    value, probs = _solve(primals[0])
    slope = jnp.where(probs > 0, probs * tangents[0], 0.0)
    return value, slope.sum(axis=(-2, -1))


def _log_sum_of_others(values: Float[Array, "M N *batch"], axis: int) -> Array:
    """For each entry the log of the sum of exp of all *others* along the axis.

    Subtracting an entry from the total loses digits only for the largest, for which the others are
    summed separately.
    """
    largest = values == values.max(axis=axis, keepdims=True)
    first = jnp.cumsum(largest, axis=axis) == 1
    largest = largest & first
    without = logsumexp(jnp.where(largest, _LOG_ZERO, values), axis=axis, keepdims=True)
    highest = values.max(axis=axis, keepdims=True)
    relative = jnp.exp(values - highest)
    others = jnp.maximum(relative.sum(axis=axis, keepdims=True) - relative, 1e-300)
    return jnp.where(largest, without, highest + jnp.log(others))


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) < 2 or shape[-2] > shape[-1]:
        raise InputError(
            f"a Bethe permanent requires a matrix with at most as many rows as columns, got shape "
            f"{shape}; put the points in rows and the parts in columns"
        )
