"""Sinkhorn scaling: the doubly stochastic matrix of the form diag(u) exp(logits) diag(v).

Alternating normalisation of rows and columns (the paper's Algorithm SinkhornKnopp) converges, but
can take millions of sweeps on the sharp matrices that a small noise variance makes: two points that
both sit near one part, and far from the other, are enough. In the scenes of the paper two thirds
of all scalings are still off by 1e-8 after 24 sweeps. So each iteration takes the better of a sweep
and a Newton step on the concave dual, which sweeps ascend too,

    phi(g) = sum_j g_j - sum_i logsumexp_j(logits_ij + g_j),

whose gradient is 1 - c, with c the column sums once the rows are normalised, and whose Hessian is
-(diag(c) - R'R). A Newton step squares the error. Where the dual flattens out exponentially it only
divides it by e, so a longer step along the same line is tried too. A warm start usually takes three
or four iterations. From a cold start, sharp matrices are first scaled at a high temperature,
logits / T, and T is halved down to one: matrices with 1e6 nats between their entries then take 20
to 25 iterations in all.

`scale` and `refine` take the matrix axes first and a batch axis, if any, last:
`models.numerics.linalg`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.numerics.linalg import loop_total, solve, total

TOLERANCE = 1e-12
"""Largest deviation of a column sum from one that is accepted."""

_LOG_ZERO = -1e30  # forbidden entries: finite, so that no potential becomes inf - inf
_LINE = (0.25, 1.0, 4.0)  # multiples of the Newton step that are tried
_FIRST_ITERATIONS = 3  # for a whole batch
_MAX_ITERATIONS = 200  # for what is left; more than 30 have not been seen
_PATIENCE = 40  # iterations from a warm start before starting cold
_SMALL_BATCH = 64
_SHARE = 8  # after the first iterations only the worst 1 in 8 of a batch is worked on
_EASY_SPREAD = 8.0  # nats between entries that Newton can scale from a cold start
_SWEEPS = 10
_LEAST = -100.0  # nats relative to a row's largest entry, so that no scale of a column overflows
_LONGEST_STEP = 30.0  # nats; longer steps from a nearly flat spot are not reliable


class Scaling(NamedTuple):
    """A scaled matrix: its rows sum to one, its columns to one within the error."""

    matrix: Float[Array, "N N *batch"]
    potentials: Float[Array, "N *batch"]
    """g, such that the matrix is the row softmax of logits + g."""
    error: Float[Array, "*batch"]


class _Search(NamedTuple):
    """State of the search for the potentials, at a temperature of 2^halvings."""

    potentials: Float[Array, "N B"]
    error: Float[Array, " B"]
    halvings: Float[Array, " B"]
    iterations: Int[Array, ""]


def log_sinkhorn(logits: Float[Array, "*batch N N"]) -> Float[Array, "*batch N N"]:
    """Log of the doubly stochastic scaling of exp(logits), with its exact (implicit) derivative.

    Entries of -inf stay forbidden. Forward and reverse mode both work, because the derivative is
    one linear solve at the fixed point instead of a trace through the iteration.
    """
    return _vectorised_log_sinkhorn(logits)


def scale(logits: Float[Array, "N N *batch"], tolerance: float = TOLERANCE) -> Scaling:
    """Scale from a cold start."""
    batched = jnp.maximum(logits, _LOG_ZERO).reshape(*logits.shape[:2], -1)
    potentials = jnp.zeros(batched.shape[1:])
    state = _search(batched, potentials, _cold(batched), tolerance, _MAX_ITERATIONS)
    return _unflatten(state, logits.shape)


def refine(
    logits: Float[Array, "N N *batch"],
    potentials: Float[Array, "N *batch"],
    tolerance: float = TOLERANCE,
) -> Scaling:
    """Scale from a warm start, column potentials that are nearly right.

    Some matrices of a batch take three iterations and some thirty. So the first few iterations run
    on the whole batch, and the others on the worst eighth, repeatedly until all have converged.
    """
    batched = jnp.maximum(logits, _LOG_ZERO).reshape(*logits.shape[:2], -1)
    warm = potentials.reshape(len(potentials), -1)
    own_temperature = jnp.zeros(warm.shape[1:])
    if batched.shape[-1] <= _SMALL_BATCH:  # not worth the compilation of a second search
        state = _search(batched, warm, own_temperature, tolerance, _MAX_ITERATIONS)
        return _unflatten(state, logits.shape)
    state = _search(batched, warm, own_temperature, tolerance, _FIRST_ITERATIONS)
    count = -(-batched.shape[-1] // _SHARE)

    def unfinished(loop: tuple[Scaling, Int[Array, ""]]) -> Bool[Array, ""]:
        return jnp.any(loop[0].error > tolerance) & (loop[1] < 2 * _SHARE)

    def finish_the_worst(loop: tuple[Scaling, Int[Array, ""]]) -> tuple[Scaling, Int[Array, ""]]:
        state, rounds = loop
        worst = jax.lax.top_k(state.error, count)[1]
        better = _search(
            batched[..., worst],
            state.potentials[:, worst],
            jnp.zeros(count),
            tolerance,
            _MAX_ITERATIONS,
        )
        merged = (old.at[..., worst].set(new) for old, new in zip(state, better, strict=True))
        return Scaling(*merged), rounds + 1

    state = jax.lax.while_loop(unfinished, finish_the_worst, (state, jnp.zeros((), int)))[0]
    return _unflatten(state, logits.shape)


def swept(logits: Float[Array, "N N *batch"]) -> Float[Array, "N *batch"]:
    """Column potentials after ten sweeps: a start for `refine` at less than a Newton step's cost.

    Most matrices that are not very sharp, such as the logits of a network, have nearly converged.
    """
    weights = jnp.exp(jnp.maximum(logits - logits.max(axis=1, keepdims=True), _LEAST))

    def sweep(_: int, columns: Float[Array, "N *batch"]) -> Float[Array, "N *batch"]:
        rows = 1.0 / jnp.sum(weights * columns, axis=1)
        return 1.0 / jnp.sum(weights * rows[:, None], axis=0)

    return jnp.log(jax.lax.fori_loop(0, _SWEEPS, sweep, jnp.ones(logits.shape[1:])))


def _unflatten(state: Scaling, shape: tuple[int, ...]) -> Scaling:
    return Scaling(
        state.matrix.reshape(shape),
        state.potentials.reshape(shape[1:]),
        state.error.reshape(shape[2:]),
    )


def _cold(logits: Float[Array, "N N B"]) -> Float[Array, " B"]:
    """How often the temperature must be halved from one at which the scaling is easy."""
    allowed = logits > 0.1 * _LOG_ZERO
    highest = jnp.where(allowed, logits, -jnp.inf).max(axis=1)
    lowest = jnp.where(allowed, logits, jnp.inf).min(axis=1)
    spread = jnp.max(highest - lowest, axis=0)  # within a row: row constants do not matter
    return jnp.ceil(jnp.log2(jnp.maximum(spread / _EASY_SPREAD, 1.0)))


def _search(
    logits: Float[Array, "N N B"],
    potentials: Float[Array, "N B"],
    halvings: Float[Array, " B"],
    tolerance: float,
    max_iterations: int,
) -> Scaling:
    """Newton from the given potentials and temperatures, halving a temperature on convergence."""

    def unfinished(search: _Search) -> Bool[Array, ""]:
        waiting = (search.error > tolerance) | (search.halvings > 0)
        return jnp.any(waiting) & (search.iterations < max_iterations)

    def improve(search: _Search) -> _Search:
        potentials, error, halvings, iterations = search
        new, new_error = _newton(logits * 2.0**-halvings, potentials)
        finished = (error <= tolerance) & (halvings == 0)
        new, new_error = (
            jnp.where(finished, a, b) for a, b in ((potentials, new), (error, new_error))
        )
        cooler = (halvings > 0) & (new_error < 0.1)
        stuck = (iterations == _PATIENCE) & (new_error > tolerance) & (halvings == 0)
        return _Search(
            potentials=jnp.where(stuck, 0.0, jnp.where(cooler, 2.0 * new, new)),
            error=jnp.where(cooler | stuck, jnp.inf, new_error),
            halvings=jnp.where(cooler, halvings - 1, jnp.where(stuck, _cold(logits), halvings)),
            iterations=iterations + 1,
        )

    start = _Search(potentials, jnp.full(halvings.shape, jnp.inf), halvings, jnp.zeros((), int))
    found = jax.lax.while_loop(unfinished, improve, start)
    return Scaling(_row_softmax(logits, found.potentials)[0], found.potentials, found.error)


def _newton(
    logits: Float[Array, "N N B"], potentials: Float[Array, "N B"]
) -> tuple[Float[Array, "N B"], Float[Array, " B"]]:
    """The best of a sweep and some points on the line of a Newton step, and its column error."""
    matrix, row_sums = _row_softmax(logits, potentials)
    columns = jnp.maximum(total(matrix, axis=0), 1e-300)
    step = _newton_step(matrix, columns)
    moves = jnp.stack([-jnp.log(columns), *(length * step for length in _LINE)], axis=1)
    # Tries differ only in the scale of columns, so each takes N exponentials instead of N². The
    # loops keep XLA from computing them again for every entry of the matrix.
    scales = jnp.exp(moves)
    sums = loop_total(lambda j: matrix[:, j, None] * scales[j], len(moves))
    inverse = 1.0 / sums
    columns = scales * loop_total(lambda i: matrix[i, :, None] * inverse[i], len(moves))
    error = jnp.max(jnp.abs(columns - 1.0), axis=0)
    tries = potentials[:, None] + moves
    dual = total(tries - row_sums[:, None] - jnp.log(sums), axis=0)
    # The highest dual wins. Near convergence duals differ only by rounding, and the error decides.
    highest = dual.max(axis=0)
    level = dual >= highest - 1e-12 * (1.0 + jnp.abs(highest))
    winner = jnp.argmin(jnp.where(level, error, jnp.inf), axis=0)
    chosen = jnp.arange(tries.shape[1])[:, None] == winner
    best, best_error = (jnp.where(chosen, x, 0.0) for x in (tries, error))
    return total(best, axis=1), total(best_error, axis=0)


def _row_softmax(
    logits: Float[Array, "N N *batch"], potentials: Float[Array, "N *batch"]
) -> tuple[Float[Array, "N N *batch"], Float[Array, "N *batch"]]:
    """The matrix with its rows normalised, and the log of what they summed to."""
    shifted = logits + potentials
    highest = shifted.max(axis=1)
    weights = jnp.exp(shifted - highest[:, None])
    sums = total(weights, axis=1)
    return weights / sums[:, None], highest + jnp.log(sums)


def _newton_step(
    matrix: Float[Array, "N N B"], columns: Float[Array, "N B"]
) -> Float[Array, "N B"]:
    """Solve (diag(c) - R'R) d = 1 - c, on the complement of the constant vector."""
    size = len(columns)
    gram = jnp.einsum("ijb,ikb->jkb", matrix, matrix)
    hessian = jnp.eye(size)[..., None] * (columns + 1e-14) - gram + 1.0 / size
    step = solve(hessian, 1.0 - columns)
    step = jnp.where(jnp.isfinite(step), step, 0.0)
    longest = jnp.max(jnp.abs(step), axis=0)
    return step * jnp.minimum(1.0, _LONGEST_STEP / jnp.maximum(longest, 1e-300))


@jax.custom_jvp
def _log_sinkhorn(logits: Float[Array, "N N"]) -> Float[Array, "N N"]:
    log_matrix = jax.nn.log_softmax(logits + scale(logits).potentials, axis=1)
    return jnp.where(jnp.isfinite(logits), log_matrix, -jnp.inf)


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
    column_change = jnp.linalg.pinv(schur, rtol=1e-13, hermitian=True) @ (matrix.T @ rows - columns)
    row_change = -rows - matrix @ column_change
    return log_matrix, tangents[0] + row_change[:, None] + column_change


_vectorised_log_sinkhorn = functools.partial(jnp.vectorize, signature="(n,n)->(n,n)")(_log_sinkhorn)
