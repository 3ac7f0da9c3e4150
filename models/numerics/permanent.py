"""The log permanent and what follows from it, by dynamic programming over subsets of rows.

The permanent of an M x N matrix B with M <= N is the sum over all ways to give each row a column of
its own,

    perm(B) = sum over injections s of prod_m B[m, s(m)].

With B the likelihood of point m under part n it is the sum over all matches. Columns are taken one
after another; after n of them the state is the set S of rows that are matched:

    f_n(S) = f_{n-1}(S) + sum_{m in S} f_{n-1}(S \\ m) B[m, n].

Only sets that can still be completed are visited, n - (N - M) <= |S| <= n, so the cost is at most
N 2^M M and, for a square matrix, 2^M M. All sums are in the log domain: likelihoods of a scene span
thousands of nats. Zero entries are log weights of -inf.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.errors import InputError

MAX_ROWS = 20
"""The largest number of rows; beyond it there are too many subsets, 2^M."""

_LOG_ZERO = -1e30  # stands for -inf inside the sums, so that gradients have no inf - inf


def log_permanent(log_weights: Float[Array, "*batch M N"]) -> Float[Array, "*batch"]:
    """Log of the permanent of exp(log_weights), differentiable; -inf where no injection has weight.

    Its gradient is the matrix of marginals: the probability that row m has column n when
    injections are drawn in proportion to their weight.
    """
    _check_shape(log_weights.shape)
    return _vectorised_log_permanent(log_weights)


def injection_marginals(log_weights: Float[Array, "*batch M N"]) -> Float[Array, "*batch M N"]:
    """Probability of each row having each column, the gradient of the log permanent."""
    _check_shape(log_weights.shape)
    return _gradient(log_weights)


def log_cofactors(log_weights: Float[Array, "*batch N N"]) -> Float[Array, "*batch N N"]:
    """Log of the permanent without row m and column n, for every m and n of a square matrix.

    Permanents are linear in each row, so perm(B) = sum_n B[m, n] cofactor[m, n], and row m may be
    replaced by any other. Entry (m, n) of the marginals is B[m, n] cofactor[m, n] / perm(B);
    cofactors, unlike marginals, do not vanish where B[m, n] does.
    """
    _check_shape(log_weights.shape)
    if log_weights.shape[-1] != log_weights.shape[-2]:
        raise InputError(
            f"cofactors require a square matrix, got shape {log_weights.shape}; pad missing points "
            "with dummy rows first"
        )
    return _vectorised_log_cofactors(log_weights)


def sample_injection(
    key: Array, log_weights: Float[Array, "*batch M N"], sample_shape: tuple[int, ...] = ()
) -> Int[Array, "*shape M"]:
    """Draw injections, the column of each row, exactly in proportion to their weights."""
    *batch, num_rows, num_columns = log_weights.shape
    _check_shape(log_weights.shape)
    flat = log_weights.reshape(-1, num_rows, num_columns)
    keys = jax.random.split(key, (len(flat), math.prod(sample_shape)))
    columns = jax.vmap(_sample_one_matrix, out_axes=1)(keys, flat)
    return columns.reshape(*sample_shape, *batch, num_rows)


class _Subsets(NamedTuple):
    """Subsets of M rows in order of size, so that sets of equal size are contiguous."""

    bits: np.ndarray  # (2^M,) the subset as a bit mask
    position: np.ndarray  # (2^M,) where a bit mask stands in this order
    member: np.ndarray  # (2^M, M) whether a row is in the subset
    without: np.ndarray  # (2^M, M) position of the subset less that row (itself if not in it)
    start: np.ndarray  # (M + 2,) where the subsets of each size begin


@functools.cache
def _subsets(num_rows: int) -> _Subsets:
    masks = np.arange(2**num_rows)
    member = (masks[:, None] >> np.arange(num_rows)) & 1 == 1
    order = np.argsort(member.sum(axis=1), kind="stable")
    position = np.argsort(order)
    without = position[masks[:, None] & ~(1 << np.arange(num_rows))]
    sizes = np.array([math.comb(num_rows, size) for size in range(num_rows + 1)])
    start = np.concatenate([[0], np.cumsum(sizes)])
    return _Subsets(order, position, member[order], without[order], start)


def _forward(log_weights: Float[Array, "M N"]) -> list[Float[Array, " subsets"]]:
    """The tables log f_0, ..., log f_N over subsets in order of size."""
    num_rows, num_columns = log_weights.shape
    subsets = _subsets(num_rows)
    weights = jnp.maximum(log_weights, _LOG_ZERO)
    empty = jnp.full(2**num_rows, _LOG_ZERO)
    tables = [empty.at[0].set(0.0)]
    for n in range(1, num_columns + 1):
        smallest = max(0, n - (num_columns - num_rows))
        low, high = subsets.start[smallest], subsets.start[min(n, num_rows) + 1]
        previous = tables[-1]
        taken = jnp.where(
            subsets.member[low:high],
            previous[subsets.without[low:high]] + weights[:, n - 1],
            _LOG_ZERO,
        )
        # The column stays free only if some column may: never for a square matrix.
        left = previous[low:high, None] if num_rows < num_columns else taken[:, :0]
        sums = jax.nn.logsumexp(jnp.concatenate([taken, left], axis=1), axis=1)
        tables.append(empty.at[low:high].set(sums))
    return tables


@jax.jit  # even if the caller does not compile: there are thousands of small steps
@functools.partial(jnp.vectorize, signature="(m,n)->()")
def _vectorised_log_permanent(log_weights: Float[Array, "M N"]) -> Float[Array, ""]:
    total = _forward(log_weights)[-1][-1]
    return jnp.where(total > 0.1 * _LOG_ZERO, total, -jnp.inf)


_gradient = jax.jit(jax.grad(lambda weights: _vectorised_log_permanent(weights).sum()))


@jax.jit
@functools.partial(jnp.vectorize, signature="(n,n)->(n,n)")
def _vectorised_log_cofactors(log_weights: Float[Array, "N N"]) -> Float[Array, "N N"]:
    """Sum over sets S: columns before n match S, and those after it all other rows except m."""
    size = len(log_weights)
    subsets = _subsets(size)
    before, after = _forward(log_weights), _forward(log_weights[:, ::-1])
    columns = []
    for n in range(size):
        here = slice(subsets.start[n], subsets.start[n + 1])  # the sets of n rows
        rest = subsets.position[2**size - 1 - subsets.bits[here]]
        others = jnp.where(
            subsets.member[here], _LOG_ZERO, after[size - 1 - n][subsets.without[rest]]
        )
        total = jax.nn.logsumexp(before[n][here, None] + others, axis=0)
        columns.append(jnp.where(total > 0.1 * _LOG_ZERO, total, -jnp.inf))
    return jnp.stack(columns, axis=1)


@jax.jit
def _sample_one_matrix(keys: Array, log_weights: Float[Array, "M N"]) -> Int[Array, "samples M"]:
    """Walk the tables back from the full set: each column picks its row, or stays free."""
    num_rows, num_columns = log_weights.shape
    subsets = _subsets(num_rows)
    member, without = jnp.asarray(subsets.member), jnp.asarray(subsets.without)
    weights = jnp.maximum(log_weights, _LOG_ZERO)
    tables = jnp.stack(_forward(log_weights)[:-1])
    full = jnp.asarray(2**num_rows - 1)

    def pick(
        state: Int[Array, ""], inputs: tuple[Array, Array, Array]
    ) -> tuple[Int[Array, ""], Int[Array, ""]]:
        key, table, column = inputs
        taken = jnp.where(member[state], table[without[state]] + column, _LOG_ZERO)
        row = jax.random.categorical(key, jnp.append(taken, table[state]))
        return jnp.append(without[state], state)[row], row

    def walk(key: Array) -> Int[Array, " M"]:
        inputs = (jax.random.split(key, num_columns), tables, weights.T)
        _, rows = jax.lax.scan(pick, full, inputs, reverse=True)
        # rows[n] is the row of column n, or num_rows where the column stays free.
        columns = jnp.zeros(num_rows + 1, int).at[rows].set(jnp.arange(num_columns))
        return columns[:num_rows]

    return jax.vmap(walk)(keys)


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) < 2 or shape[-2] > shape[-1]:
        raise InputError(
            "a permanent requires a matrix with at most as many rows as columns, got shape "
            f"{shape}; put the points in rows and the parts in columns"
        )
    if shape[-2] > MAX_ROWS:
        raise InputError(
            f"a permanent over {shape[-2]} rows needs 2^{shape[-2]} = {2 ** shape[-2]:,} sums, "
            f"more than the limit of 2^{MAX_ROWS}; use the doubly stochastic or mixture match, or "
            "a PermutationMatch with normalizer='bethe'"
        )
