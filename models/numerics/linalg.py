"""Small dense linear algebra with the matrix axes first and any number of batch axes last.

Batches of thousands of 4 x 4 and 11 x 11 systems are the inner loop of the variational methods.
LAPACK takes them one by one, and XLA's calls to it on the CPU have been seen to deadlock.
Eliminating all matrices of the batch at once, with the batch along the last, contiguous axis, is
several times faster and has no such calls. All matrices are symmetric positive definite, so no
pivoting is needed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_UNROLLED = 32

_ROUNDING = 64 * 2.0**-52
"""Relative increase of a covariance's diagonal, a little more than the rounding error."""


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
    """The sum of term(0), term(1), ..., arrays or tuples of them, computed in a loop.

    Use it for nested sums: XLA fuses slices that are added, and computes the sum again for each use
    of it. The inputs and outputs of a loop are computed once.
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
    """Inverse and log determinant of a positive definite matrix, by forward elimination.

    With U the inverse of the unit triangular factor and d the pivots, the inverse is
    sum_i U_i' U_i / d_i. As a sum of squares it is positive definite even if the matrix is nearly
    singular, unlike the result of Gauss-Jordan sweeps.

    It is a loop because XLA would fuse unrolled steps and compute their inputs over and over.
    """
    numbers = jnp.arange(len(matrix)).reshape(-1, *(1,) * (matrix.ndim - 2))

    def eliminate(i: int, system: Float[Array, "n n *batch"]) -> Float[Array, "n n *batch"]:
        here, below = numbers == i, numbers > i
        row = jnp.where(here, 1.0, system[i])
        share = jnp.where(below, system[:, i] / system[i, i], 0.0)
        kept = jnp.where(below[:, None] & here[None], 0.0, system)  # the column of U comes here
        return kept - share[:, None] * row[None]

    system = jax.lax.fori_loop(0, len(matrix), eliminate, jnp.asarray(matrix, float))
    pivots = jnp.stack([system[i, i] for i in range(len(matrix))])
    is_below, is_diagonal = numbers[:, None] > numbers[None], numbers[:, None] == numbers[None]
    unit = jnp.where(is_diagonal, 1.0, jnp.where(is_below, system, 0.0))
    inverse = total(unit[:, :, None] * (unit / pivots[:, None])[:, None], axis=0)
    return inverse, total(jnp.log(pivots), axis=0)


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

    The loop runs a third slower than unrolled steps and compiles several times faster.
    """
    system = jnp.concatenate([matrix, right[:, None]], axis=1)

    def eliminate(i: int, system: Float[Array, "n m *batch"]) -> Float[Array, "n m *batch"]:
        row = system[i] / system[i, i]
        column = system[:, i].at[i].add(-1.0)  # leaves the scaled row itself in place
        return system - column[:, None] * row[None]

    return jax.lax.fori_loop(0, len(system), eliminate, system)[:, -1]


class Conditioning(NamedTuple):
    """The effect of noisy linear observations on a Normal vector, for any observed numbers.

    The rows are observed one after another. `gain` and `deviation` are given the rows before.
    """

    design: Float[Array, "rows p *batch"]
    gain: Float[Array, "rows p *batch"]
    """How far the mean moves for each unit that an observation differs from its prediction."""
    deviation: Float[Array, "rows *batch"]
    """The standard deviation of the prediction, at least 1, which is that of the noise."""
    factor: Float[Array, "p p *batch"]
    """The covariance after all rows is `factor` times its transpose."""


def condition(
    factor: Float[Array, "p p *batch"], design: Float[Array, "rows p *batch"]
) -> Conditioning:
    """Condition y ~ N(mean, C C') on numbers a' y + noise, the noise being N(0, 1).

    Potter's square-root form of the Kalman filter. For each row a, with f = C' a,

        s = 1 + f' f,    gain = C f / s,    C <- C (I - f f' / (s + sqrt(s))),

    and the number has variance s before it is observed. Everything is a sum of squares or relative
    to C, so the relative error is about the machine epsilon times sqrt(s). Inverting the precision
    matrix would make it epsilon times s.
    """

    def observe(
        factor: Float[Array, "p p *batch"], row: Float[Array, "p *batch"]
    ) -> tuple[Float[Array, "p p *batch"], tuple[Array, Array]]:
        seen = total(factor * row[:, None], axis=0)
        variance = 1.0 + total(seen**2, axis=0)
        deviation = jnp.sqrt(variance)
        towards = total(factor * seen, axis=1)
        shrunk = factor - towards[:, None] * (seen / (variance + deviation))
        return shrunk, (towards / variance, deviation)

    batch = jnp.broadcast_shapes(factor.shape[2:], design.shape[2:])
    start = jnp.broadcast_to(factor, (*factor.shape[:2], *batch))
    last, (gain, deviation) = jax.lax.scan(observe, start, design)
    return Conditioning(design, gain, deviation, last)


def innovations(
    steps: Conditioning, observed: Float[Array, "rows *batch"], mean: Float[Array, "p *batch"]
) -> tuple[Float[Array, "rows *batch"], Float[Array, "p *batch"]]:
    """Standardised prediction errors z of the numbers, and the mean after all of them.

    The log density of the numbers is -1/2 sum_i (z_i^2 + log(2 pi)) - sum_i log deviation_i. Both
    returned values are jointly linear in the numbers and the mean.
    """

    def observe(
        mean: Float[Array, "p *batch"], inputs: tuple[Array, Array, Array, Array]
    ) -> tuple[Float[Array, "p *batch"], Float[Array, "*batch"]]:
        row, gain, deviation, number = inputs
        surprise = number - total(row * mean, axis=0)
        return mean + gain * surprise, surprise / deviation

    batch = jnp.broadcast_shapes(mean.shape[1:], observed.shape[1:], steps.deviation.shape[1:])
    start = jnp.broadcast_to(mean, (len(mean), *batch))
    last, scaled = jax.lax.scan(observe, start, (*steps[:3], observed))
    return scaled, last


def covariance_of(factor: Float[Array, "p p *batch"]) -> Float[Array, "p p *batch"]:
    """The covariance `factor factor'`, positive definite in floating point."""
    return rounded_up(total(factor[:, None] * factor[None], axis=2))


def rounded_up(covariance: Float[Array, "p p *batch"]) -> Float[Array, "p p *batch"]:
    """Symmetrise a covariance and raise its variances by a few units in the last place.

    Rounding may make a nearly singular sum of outer products indefinite. Raised by more than the
    rounding error, it has a Cholesky factor.
    """
    diagonal = jnp.eye(len(covariance)).reshape(
        *covariance.shape[:2], *(1,) * (covariance.ndim - 2)
    )
    symmetric = 0.5 * (covariance + jnp.swapaxes(covariance, 0, 1))
    return symmetric * (1.0 + _ROUNDING * diagonal)
