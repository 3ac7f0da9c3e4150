"""Small dense linear algebra with the matrix axes first and any number of batch axes last.

Batches of thousands of 4 x 4 and 11 x 11 systems are the inner loop of the variational methods.
LAPACK takes them one by one, and XLA's calls to it on the CPU have been seen to wait for each other
for ever. Eliminating all matrices of the batch at once, with the batch along the last, contiguous
axis, is several times faster and has no such calls. Only symmetric positive definite matrices come
up, so no pivoting is needed.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_UNROLLED = 32


def total(values: Float[Array, "*shape"], axis: int) -> Float[Array, "*rest"]:
    """The sum over a short axis, slice by slice.

    With the batch last, adding slices runs along contiguous memory; XLA's own reduction over a
    leading axis does not, and takes five to ten times as long for some ten slices.
    """
    return _reduce(jnp.add, jnp.sum, values, axis)


def largest(values: Float[Array, "*shape"], axis: int) -> Float[Array, "*rest"]:
    """The maximum over a short axis, slice by slice."""
    return _reduce(jnp.maximum, jnp.max, values, axis)


def loop_total(term: Callable[[Any], Any], count: int) -> Any:
    """The sum of term(0), term(1), ..., arrays or tuples of them, one after another in a loop.

    For sums that others are made of, or that are made of others: XLA fuses slices that are added,
    and then computes a sum again for each use of it. What a loop takes and gives is computed once.
    """
    return jax.lax.fori_loop(
        1, count, lambda i, sums: jax.tree.map(jnp.add, sums, term(i)), term(0)
    )


def _reduce(
    pairwise: Callable[[Array, Array], Array],
    whole: Callable[..., Array],
    values: Float[Array, "*shape"],
    axis: int,
) -> Float[Array, "*rest"]:
    size = values.shape[axis]
    if size > _UNROLLED:
        return whole(values, axis=axis)
    slices = (jax.lax.index_in_dim(values, i, axis, keepdims=False) for i in range(size))
    return functools.reduce(pairwise, slices)


def inverse_and_log_det(
    matrix: Float[Array, "n n *batch"],
) -> tuple[Float[Array, "n n *batch"], Float[Array, "*batch"]]:
    """Inverse and log determinant of a positive definite matrix, by Gauss-Jordan sweeps.

    A loop and not unrolled: XLA would fuse the sweeps and compute what goes in over and over.
    """
    numbers = jnp.arange(len(matrix)).reshape(-1, *(1,) * (matrix.ndim - 2))

    def sweep(
        i: int, state: tuple[Float[Array, "n n *batch"], Float[Array, "*batch"]]
    ) -> tuple[Float[Array, "n n *batch"], Float[Array, "*batch"]]:
        matrix, log_det = state
        here = numbers == i
        row = jnp.where(here, 1.0, matrix[i]) / matrix[i, i]
        cleared = jnp.where(here[None], 0.0, matrix) - matrix[:, i][:, None] * row[None]
        return jnp.where(here[:, None], row[None], cleared), log_det + jnp.log(matrix[i, i])

    start = (jnp.asarray(matrix, float), jnp.zeros(matrix.shape[2:]))
    return jax.lax.fori_loop(0, len(matrix), sweep, start)


def cholesky(matrix: Float[Array, "n n *batch"]) -> Float[Array, "n n *batch"]:
    """The lower triangular factor of a positive definite matrix, column by column."""
    size = matrix.shape[0]
    columns: list[Float[Array, "n *batch"]] = []
    for i in range(size):
        rest = matrix[:, i] - sum(column * column[i] for column in columns)
        below = (jnp.arange(size) >= i).reshape(-1, *(1,) * (matrix.ndim - 2))
        columns.append(jnp.where(below, rest / jnp.sqrt(rest[i]), 0.0))
    return jnp.stack(columns, axis=1)


def solve(
    matrix: Float[Array, "n n *batch"], right: Float[Array, "n *batch"]
) -> Float[Array, "n *batch"]:
    """Solve for one right-hand side with a positive definite matrix, by elimination.

    A loop and not unrolled: a third slower to run, and several times faster to compile.
    """
    system = jnp.concatenate([matrix, right[:, None]], axis=1)

    def eliminate(i: int, system: Float[Array, "n m *batch"]) -> Float[Array, "n m *batch"]:
        row = system[i] / system[i, i]
        column = system[:, i].at[i].add(-1.0)  # leaves the scaled row itself in place
        return system - column[:, None] * row[None]

    return jax.lax.fori_loop(0, len(system), eliminate, system)[:, -1]
