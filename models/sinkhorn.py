"""Sinkhorn scaling: the doubly stochastic matrix of the form diag(u) exp(logits) diag(v).

Alternating normalisation of rows and columns (the paper's Algorithm SinkhornKnopp) converges, but
can take millions of sweeps on the sharp matrices that a small noise variance makes: two points that
both sit near one part, and far from the other, are enough. So each iteration here takes the better
of a few sweeps and a Newton step. Both climb the same concave dual,

    phi(g) = sum_j g_j - sum_i logsumexp_j(logits_ij + g_j),

whose gradient is 1 - c, with c the column sums once the rows are normalised, and whose Hessian is
-(diag(c) - R'R). Where a sweep gains a fixed share of the error, or less, a Newton step squares it,
and on the flattest duals still divides it by e. From a cold start the matrix is first scaled at a
high temperature, logits / T, and T is halved down to one: sharp matrices (1e6 nats between entries)
then take some ten iterations in all, where plain sweeps never arrive.

`scale` and `refine` take the matrix axes first and any batch axes last (see `models.linalg`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.linalg import solve

TOLERANCE = 1e-12
"""Largest deviation of a column sum from one at which the iteration stops."""

MAX_ITERATIONS = 100
"""At one temperature; more than 25 in all have not been seen."""

_LOG_ZERO = -1e30  # forbidden entries: finite, so that no potential becomes inf - inf
_EASY_SPREAD = 8.0  # nats between entries that Newton takes from a cold start
_LONGEST_STEP = 30.0  # nats; a Newton step from a nearly flat spot is not to be trusted further


class Scaling(NamedTuple):
    """A scaled matrix, the column potentials that give it, and how far it got."""

    log_matrix: Float[Array, "N N *batch"]
    potentials: Float[Array, "N *batch"]
    error: Float[Array, "*batch"]
    iterations: Int[Array, ""]


def log_sinkhorn(logits: Float[Array, "*batch N N"]) -> Float[Array, "*batch N N"]:
    """Log of the doubly stochastic scaling of exp(logits), with its exact (implicit) derivative.

    Entries of -inf stay forbidden. Forward and reverse mode both work, because the derivative is
    one linear solve at the fixed point instead of a trace through the iteration.
    """
    return _vectorised_log_sinkhorn(logits)


def scale(logits: Float[Array, "N N *batch"]) -> Scaling:
    """Scale from a cold start, cooling the matrix down to its own temperature."""
    logits = jnp.maximum(logits, _LOG_ZERO)
    allowed = logits > 0.1 * _LOG_ZERO
    highest = jnp.where(allowed, logits, -jnp.inf).max(axis=1)
    lowest = jnp.where(allowed, logits, jnp.inf).min(axis=1)
    spread = jnp.max(highest - lowest)  # of any row; row constants do not matter
    halvings = jnp.ceil(jnp.log2(jnp.maximum(spread / _EASY_SPREAD, 1.0)))

    def cool(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        halvings, potentials, iterations = state
        temperature = 2.0**halvings
        warm = refine(logits / temperature, potentials / temperature, tolerance=0.1)
        return halvings - 1, warm.potentials * temperature, iterations + warm.iterations

    start = (halvings, jnp.zeros(logits.shape[1:]), jnp.zeros((), int))
    _, potentials, spent = jax.lax.while_loop(lambda state: state[0] > 0, cool, start)
    final = refine(logits, potentials)
    return final._replace(iterations=final.iterations + spent)


def refine(
    logits: Float[Array, "N N *batch"],
    potentials: Float[Array, "N *batch"],
    tolerance: float = TOLERANCE,
) -> Scaling:
    """Scale from column potentials that are nearly right already (a warm start)."""
    logits = jnp.maximum(logits, _LOG_ZERO)

    def unfinished(state: Scaling) -> Bool[Array, ""]:
        return jnp.any(state.error > tolerance) & (state.iterations < MAX_ITERATIONS)

    def improve(state: Scaling) -> Scaling:
        matrix = jnp.exp(state.log_matrix)
        columns = matrix.sum(axis=0)
        sweep = state.potentials - jnp.log(jnp.maximum(columns, jnp.finfo(columns).tiny))
        newton = state.potentials + _newton_step(matrix, columns)
        swept, jumped = _state(logits, sweep), _state(logits, newton)
        # Judged by the error, not by the dual: near the end the dual no longer moves in its digits.
        better = jumped.error < swept.error
        finished = state.error <= tolerance
        return Scaling(
            *(
                jnp.where(finished, old, jnp.where(better, jump, sweep))
                for old, jump, sweep in zip(state[:3], jumped[:3], swept[:3], strict=True)
            ),
            iterations=state.iterations + 1,
        )

    return jax.lax.while_loop(unfinished, improve, _state(logits, potentials))


def _state(logits: Float[Array, "N N *batch"], potentials: Float[Array, "N *batch"]) -> Scaling:
    """Normalise the rows for given column potentials and measure the columns."""
    log_matrix = jax.nn.log_softmax(logits + potentials, axis=1)
    error = jnp.max(jnp.abs(jnp.exp(log_matrix).sum(axis=0) - 1.0), axis=0)
    return Scaling(log_matrix, potentials, error, jnp.zeros((), int))


def _newton_step(
    matrix: Float[Array, "N N *batch"], columns: Float[Array, "N *batch"]
) -> Float[Array, "N *batch"]:
    """Solve (diag(c) - R'R) d = 1 - c, on the complement of the constant vector."""
    size = len(columns)
    diagonal = jnp.eye(size).reshape(size, size, *(1,) * (columns.ndim - 1))
    gram = (matrix[:, :, None] * matrix[:, None, :]).sum(axis=0)
    hessian = diagonal * (columns + 1e-14) - gram + 1.0 / size
    step = solve(hessian, 1.0 - columns)
    step = jnp.where(jnp.isfinite(step), step, 0.0)
    longest = jnp.max(jnp.abs(step), axis=0)
    return step * jnp.minimum(1.0, _LONGEST_STEP / jnp.maximum(longest, 1e-300))


@jax.custom_jvp
def _log_sinkhorn(logits: Float[Array, "N N"]) -> Float[Array, "N N"]:
    log_matrix = scale(logits).log_matrix
    return jnp.where(log_matrix > 0.1 * _LOG_ZERO, log_matrix, -jnp.inf)


@_log_sinkhorn.defjvp
def _log_sinkhorn_jvp(
    primals: tuple[Float[Array, "N N"]], tangents: tuple[Float[Array, "N N"]]
) -> tuple[Float[Array, "N N"], Float[Array, "N N"]]:
    """d log R = E + df 1' + 1 dg', with df and dg such that rows and columns of dR sum to zero."""
    log_matrix = _log_sinkhorn(primals[0])
    matrix = jnp.exp(log_matrix)
    change = matrix * jnp.where(jnp.isfinite(log_matrix), tangents[0], 0.0)
    rows, columns = change.sum(axis=1), change.sum(axis=0)
    size = len(matrix)
    # Eliminating df leaves (I - R'R) dg = R' rows - columns, singular along the constant vector.
    schur = jnp.eye(size) - matrix.T @ matrix
    column_change = jnp.linalg.pinv(schur, rtol=1e-13, hermitian=True) @ (
        matrix.T @ rows - columns
    )
    row_change = -rows - matrix @ column_change
    return log_matrix, tangents[0] + row_change[:, None] + column_change


_vectorised_log_sinkhorn = functools.partial(jnp.vectorize, signature="(n,n)->(n,n)")(_log_sinkhorn)
