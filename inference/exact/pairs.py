"""Joint posterior moments of a pose and a match entry, summed over all matches, for learning.

For a point m and a part n of object k,

    shift_mn = E[z_mn (y_k - E y_k)]    and    spread_mn = E[z_mn (y_k - E y_k)(y_k - E y_k)'].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from inference.exact.permutations import (
    LOG_ZERO,
    Grid,
    Moments,
    Plan,
    Tables,
    log_sum,
    moments,
    one_hot,
)


class PairMoments(NamedTuple):
    """The moments of each pair of a point and a part."""

    shift: Float[Array, "M N p *scenes"]
    spread: Float[Array, "M N p p *scenes"]


def pair_moments(plan: Plan, tables: Tables) -> tuple[Moments, PairMoments]:
    """The moments of exact inference, and those of each pair of a point and a part."""
    whole = moments(plan, tables)
    after = jnp.zeros((1, *tables.evidence.shape))
    found: list[PairMoments] = []
    for k in reversed(range(len(plan.parts))):
        level, before = plan.levels[k], tables.forward[k]
        others = log_sum((after, level.set_of_subset), (before, level.rest_of_subset))
        mean = whole.pose_mean[min(k, plan.num_objects - 1)]  # any will do for the background
        found.append(_of_object(plan, k, tables.grids[k], others - tables.evidence, mean))
        after = log_sum((after, level.set_of_rest), (tables.subsets[k], level.subset_of_rest))
    order = np.argsort(np.concatenate(plan.parts))
    every = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1)[:, order], *found[::-1])
    return whole, every


def _of_object(
    plan: Plan,
    k: int,
    grid: Grid,
    outside: Float[Array, "subsets *scenes"],
    pose_mean: Float[Array, "p *scenes"],
) -> PairMoments:
    """Pair moments of one object; scans the grid row by row, as in `permutations`."""
    placed = plan.placed[k]
    of_right = placed.right_pattern
    outside = jnp.concatenate([outside, jnp.full_like(outside[:1], 2 * LOG_ZERO)])
    centre = grid.prior_mean - pose_mean

    def add_row(
        by_right: tuple[Array, Array], inputs: tuple[Array, Array, Array, Array]
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        pattern, subset, log_weight, left_mean = inputs
        probs = jnp.exp(log_weight + outside[subset])
        apart = (left_mean + centre[:, None])[:, of_right] + grid.right_mean[pattern]
        squares = grid.covariance[:, :, pattern][:, :, of_right] + apart[:, None] * apart
        first, second = probs * apart, probs * squares
        of_left = first.sum(axis=1), second.sum(axis=2)
        return (by_right[0] + first, by_right[1] + second), of_left

    size, scenes = grid.prior_mean.shape[0], grid.log_weight.shape[-1]
    columns_of = (len(of_right), scenes)
    start = (jnp.zeros((size, *columns_of)), jnp.zeros((size, size, *columns_of)))
    rows = (
        jnp.asarray(placed.left_pattern),
        jnp.asarray(placed.subset),
        grid.log_weight,
        grid.left_mean,
    )
    by_right, by_left = jax.lax.scan(add_row, start, rows)
    by_right = (jnp.moveaxis(by_right[0], 1, 0), jnp.moveaxis(by_right[1], 2, 0))
    halves = [(placed.left, by_left), (placed.right, by_right)]
    columns = [
        jax.tree.map(lambda x, own=rows[:, a]: _by_point(x, own, plan.num_points), by_row)
        for rows, by_row in halves
        for a in range(rows.shape[1])
    ]
    return PairMoments(*(jnp.stack(x, axis=1) for x in zip(*columns, strict=True)))


def _by_point(
    by_row: Float[Array, "rows *rest"], point: np.ndarray, num_points: int
) -> Float[Array, "M *rest"]:
    """Sum the contributions of rows by the point that each row has on a part."""
    return jnp.einsum("im,i...->m...", one_hot(point, num_points), by_row)
