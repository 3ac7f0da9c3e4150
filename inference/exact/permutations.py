"""The sum over all matches of a scene, by dynamic programming over sets of points.

Given the match, poses integrate out in closed form and objects are independent. For each object and
each subset of the points, the marginal likelihoods of all placements on its parts are summed. The
objects are then combined by dynamic programming over point sets: forwards for the evidence,
backwards for the posterior probability of every placement, which gives all marginals and moments.
Scene axes are last, as in `guides.meanfield`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from inference.exact.subsets import (
    Level,
    Placements,
    fewest,
    levels,
    placements,
    refuse_if_too_large,
)
from models.numerics.arrays import AnyArray
from models.numerics.linalg import (
    cholesky,
    condition,
    covariance_of,
    innovations,
    rounded_up,
    total,
)
from models.program.batches import Skeleton
from models.program.reading import LinearGaussianModel

LOG_ZERO = -1e30
"""Stands for log 0. It is finite because the difference of two infinities would be NaN."""


class Plan(NamedTuple):
    """Lists of placements and splits for a program and a number of points.

    If there is clutter, the slots of the background follow the objects as one more group, which
    takes points as objects do but has no pose.
    """

    num_objects: int
    parts: tuple[Int[np.ndarray, " n"], ...]
    template: tuple[int, ...]
    """For each object, the first one with the same template and prior; they share tables."""
    placed: tuple[Placements, ...]
    levels: tuple[Level, ...]
    num_points: int

    @property
    def num_cells(self) -> int:
        """Largest number of terms of a scene that are in memory at once."""
        return max(placed.subset.size for placed in self.placed)

    @property
    def owner(self) -> Int[np.ndarray, " N"]:
        """The object that each part belongs to."""
        return np.repeat(np.arange(len(self.parts)), [len(p) for p in self.parts])[
            np.argsort(np.concatenate(self.parts))
        ]


class Grid(NamedTuple):
    """The log weight of every pair of rows of `Placements`, including the prior of the pose.

    The posterior mean of the pose given a placement is the prior mean plus a term of each of its
    two rows. The term of a row also depends on the pattern of the other one, its parts with points.
    """

    log_weight: Float[Array, "left right *scenes"]
    left_mean: Float[Array, "left p right_patterns *scenes"]
    right_mean: Float[Array, "left_patterns p right *scenes"]
    covariance: Float[Array, "p p left_patterns right_patterns *scenes"]
    prior_mean: Float[Array, "p *scenes"]


class Tables(NamedTuple):
    """The sums for each object and each level."""

    grids: tuple[Grid, ...]
    subsets: tuple[Float[Array, "subsets *scenes"], ...]
    """Log of the summed weight of the placements of each subset."""
    forward: tuple[Float[Array, "sets *scenes"], ...]
    """Log of the sum over all ways to fill each point set with the first 0, 1, ..., K objects."""

    @property
    def evidence(self) -> Float[Array, "*scenes"]:
        """Log of the sum over all matches of the points."""
        return self.forward[-1][0]


class Moments(NamedTuple):
    """Posterior marginals and moments; the pose posterior is a mixture over matches."""

    match_probs: Float[AnyArray, "M N *scenes"]
    pose_mean: Float[AnyArray, "K p *scenes"]
    pose_covariance: Float[AnyArray, "K p p *scenes"]


def make_plan(skeleton: Skeleton, num_points: int) -> Plan:
    """List all placements and splits; raise an error with the cost if there are too many."""
    sizes = tuple(len(p) for p in skeleton.groups)
    objects = range(skeleton.num_objects)
    refuse_if_too_large(num_points, sizes)
    return Plan(
        num_objects=len(objects),
        parts=tuple(skeleton.groups),
        template=(*skeleton.exchangeable, *range(len(objects), len(sizes))),
        placed=tuple(
            placements(num_points, size, fewest(num_points, sizes, k))
            for k, size in enumerate(sizes)
        ),
        levels=levels(num_points, sizes),
        num_points=num_points,
    )


def sum_over_matches(model: LinearGaussianModel, plan: Plan) -> Tables:
    """The forward pass; points are the first rows of the model."""
    grids: list[Grid] = []
    subsets: list[Array] = []
    for k, (first, placed) in enumerate(zip(plan.template, plan.placed, strict=True)):
        if first < k:
            grids.append(grids[first])
            subsets.append(subsets[first])
        else:
            grids.append(object_grid(model, k, plan.parts[k], placed, plan.num_points))
            subsets.append(log_sum((flat(grids[k]), placed.ways)))
    forward = [jnp.zeros((1, *subsets[0].shape[1:]))]
    for table, level in zip(subsets, plan.levels, strict=True):
        forward.append(log_sum((table, level.subset_of_set), (forward[-1], level.rest_of_set)))
    return Tables(tuple(grids), tuple(subsets), tuple(forward))


def object_grid(
    model: LinearGaussianModel,
    k: int,
    parts: Int[np.ndarray, " n"],
    placed: Placements,
    num_points: int,
) -> Grid:
    """The marginal likelihood of every placement on the parts of object k, pose integrated out.

    Conditions on the features of the placed points one by one, left half first. Feature i, in units
    of its noise and relative to the prior mean, is r_i = (x - m - F mu_0) / sqrt(v), and

        log p(x) = -1/2 sum_i (z_i^2 + 2 log s_i + log(2 pi v_i)),    z_i = (r_i - E r_i) / s_i,

    where E r_i and s_i are its mean and standard deviation given the features before. Nothing
    cancels, however precise the points are. The s_i depend only on which parts have a point. The
    z_i of the right half are linear in its points and in the mean pose given the left half, so each
    is a term of the left row plus a term of the right row.
    """
    score, residual = pair_terms(model, k, parts, num_points)
    half = placed.left.shape[1]
    design = part_design(model, parts)
    k = min(k, len(model.pose_mean) - 1)  # any pose will do for the background
    prior_mean, prior_factor = model.pose_mean[k], cholesky(model.pose_covariance[k])
    of_left, of_right = placed.left_pattern, placed.right_pattern

    met = _by_feature(design[:half], placed.left_met)
    left = condition(prior_factor[:, :, None], met)  # (..., left patterns, scenes)
    met = _by_feature(design[half:], placed.right_met)[:, :, None]
    both = condition(left.factor[:, :, :, None], met)  # (..., left, right patterns, scenes)

    steps = jax.tree.map(lambda x: x[..., of_left, :], left)
    start = jnp.zeros((len(prior_mean), 1, 1))
    left_z, mean = innovations(steps, _placed(residual[:, :half], placed.left), start)
    # Steps that are the same for every left pattern have an axis of length one.
    steps = jax.tree.map(lambda x: x[..., of_left, :, :] if x.shape[-3] > 1 else x, both)
    from_left, left_mean = innovations(steps, jnp.zeros((len(met), 1, 1, 1)), mean[:, :, None])
    steps = jax.tree.map(lambda x: x[..., of_right, :], both)
    observed = _placed(residual[:, half:], placed.right)[:, None]
    from_right, right_mean = innovations(steps, observed, start[..., None])

    log_scale = jnp.log(left.deviation).sum(axis=0)[:, None] + jnp.log(both.deviation).sum(axis=0)
    left_term = _over_parts(score[:, :half], placed.left) - 0.5 * (left_z**2).sum(axis=0)
    left_term = left_term[:, None] - log_scale[of_left]
    right_term = _over_parts(score[:, half:], placed.right)
    from_left, left_mean = (jnp.moveaxis(x, 1, 0) for x in (from_left, left_mean))
    from_right, right_mean = (jnp.moveaxis(x, 1, 0) for x in (from_right, right_mean))

    def row(inputs: tuple[Array, Array, Array]) -> Float[Array, "right *scenes"]:
        pattern, term, predicted = inputs
        z = predicted[:, of_right] + from_right[pattern]
        return term[of_right] + right_term - 0.5 * total(z**2, axis=0)

    log_weight = jax.lax.map(row, (jnp.asarray(of_left), left_term, from_left))
    covariance = covariance_of(both.factor)
    return Grid(jnp.maximum(log_weight, LOG_ZERO), left_mean, right_mean, covariance, prior_mean)


def part_design(
    model: LinearGaussianModel, parts: Int[np.ndarray, " n"]
) -> Float[Array, "n d p *scenes"]:
    """F of each part in units of its noise; zero for features that the part lacks."""
    own = jax.tree.map(lambda x: x[parts], model.parts)
    return own.F * (own.feature_mask / jnp.sqrt(own.variance))[:, :, None]


def pair_terms(
    model: LinearGaussianModel, k: int, parts: Int[np.ndarray, " n"], num_points: int
) -> tuple[Float[Array, "M+1 n *scenes"], Float[Array, "M+1 n d *scenes"]]:
    """For each point as each part of object k: the log weight without its squares, and residuals.

    Residuals are relative to the part at the prior mean of the pose, in units of the noise. The
    last row stands for no point: a dummy row takes the part.
    """
    own = jax.tree.map(lambda x: x[parts], model.parts)
    k = min(k, len(model.pose_mean) - 1)  # any pose will do for the background
    expected = own.offset + total(own.F * model.pose_mean[k], axis=2)
    deviation = own.feature_mask / jnp.sqrt(own.variance)
    residual = (model.points[:num_points, None] - expected) * deviation  # (M, n, d, scenes)
    log_density = -0.5 * total(own.feature_mask * jnp.log(2 * jnp.pi * own.variance), axis=1)
    score = model.match_logits[:num_points, parts] + log_density
    score = jnp.broadcast_to(score, (*score.shape[:2], residual.shape[-1]))
    if num_points < len(model.points):
        unmet = model.match_logits[-1, parts]
    else:  # no dummy rows: every part has a point
        unmet = jnp.full((len(parts), 1), LOG_ZERO)
    unmet = jnp.broadcast_to(unmet, score.shape[1:])[None]
    score = jnp.maximum(jnp.concatenate([score, unmet]), LOG_ZERO)
    return score, jnp.concatenate([residual, jnp.zeros_like(residual[:1])])


def _by_feature(
    design: Float[Array, "n d p *scenes"], met: Bool[np.ndarray, "patterns n"]
) -> Float[Array, "n*d p patterns *scenes"]:
    """The design rows to condition on under each pattern; zero for parts without a point."""
    rows = design[:, :, :, None] * met.T[:, None, None, :, None]
    return rows.reshape(-1, *rows.shape[2:])


def _placed(
    residual: Float[Array, "M+1 n d *scenes"], rows: Int[np.ndarray, "rows n"]
) -> Float[Array, "n*d rows *scenes"]:
    """The residuals of the points in each row of placements, by part and feature."""
    chosen = jnp.moveaxis(residual[rows, np.arange(rows.shape[1])], 0, 2)  # (n, d, rows, scenes)
    return chosen.reshape(-1, *chosen.shape[2:])


def _over_parts(
    values: Float[Array, "M+1 n *rest"], rows: Int[np.ndarray, "rows n"]
) -> Float[Array, "rows *rest"]:
    """For each row of placements, sum the values of its points over parts."""
    start = jnp.zeros((len(rows), *values.shape[2:]))
    return sum((values[rows[:, a], a] for a in range(rows.shape[1])), start)


def moments(plan: Plan, tables: Tables) -> Moments:
    """The backward pass: posterior probabilities of all placements, then marginals and moments."""
    after = jnp.zeros((1, *tables.evidence.shape))  # log weight of completing each point set
    by_object: dict[int, tuple[Array, Array, Array]] = {}
    for k in reversed(range(len(plan.parts))):
        level, table, before = plan.levels[k], tables.subsets[k], tables.forward[k]
        if plan.template[k] == k:  # alike objects have the same marginals
            others = log_sum((after, level.set_of_subset), (before, level.rest_of_subset))
            by_object[k] = _object_moments(plan, k, tables.grids[k], others - tables.evidence)
        after = log_sum((after, level.set_of_rest), (table, level.subset_of_rest))
    columns, means, covariances = zip(*(by_object[first] for first in plan.template), strict=True)
    order = np.argsort(np.concatenate(plan.parts))
    poses = (jnp.stack(x[: plan.num_objects]) for x in (means, covariances))
    return Moments(jnp.concatenate(columns, axis=1)[:, order], *poses)


def _object_moments(
    plan: Plan, k: int, grid: Grid, outside: Float[Array, "subsets *scenes"]
) -> tuple[Float[Array, "M n *scenes"], Float[Array, "p *scenes"], Float[Array, "p p *scenes"]]:
    """Marginals and moments of one object.

    `outside` has, for each of its subsets, the log weight of all ways to assign the other points,
    relative to the evidence. Scans the grid row by row. The covariance between placements is a sum
    of squares around the mean, because a difference of second moments may be indefinite.
    """
    placed = plan.placed[k]
    of_right = placed.right_pattern
    num_left, num_right = len(placed.left_met), len(placed.right_met)
    outside = jnp.concatenate([outside, jnp.full_like(outside[:1], 2 * LOG_ZERO)])

    def add_row(
        right_probs: Array, inputs: tuple[Array, Array, Array]
    ) -> tuple[Array, tuple[Array, Array]]:
        pattern, subset, log_weight = inputs
        probs = jnp.exp(log_weight + outside[subset])
        by_pattern = jnp.stack([probs[of_right == r].sum(axis=0) for r in range(num_right)])
        return right_probs.at[pattern].add(probs), (probs, by_pattern)

    columns, scenes = grid.log_weight.shape[1:]
    start = jnp.zeros((num_left, columns, scenes))
    patterns = jnp.asarray(placed.left_pattern)
    # Probabilities by left pattern and right row, of each pair of rows, and by left row and right
    # pattern.
    right_probs, (probs, left_probs) = jax.lax.scan(
        add_row, start, (patterns, jnp.asarray(placed.subset), grid.log_weight)
    )

    halves = ((placed.left, left_probs.sum(axis=1)), (placed.right, right_probs.sum(axis=0)))
    match_probs = [
        jnp.einsum("im,i...->m...", one_hot(rows[:, a], plan.num_points), by_row)
        for rows, by_row in halves
        for a in range(rows.shape[1])
    ]
    shift = jnp.einsum("ir...,ipr...->p...", left_probs, grid.left_mean)
    shift = shift + jnp.einsum("lj...,lpj...->p...", right_probs, grid.right_mean)

    def add_squares(squares: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, None]:
        pattern, probs, mean = inputs
        apart = (mean - shift[:, None])[:, of_right] + grid.right_mean[pattern]
        return squares + ((probs * apart)[:, None] * apart).sum(axis=2), None

    start = jnp.zeros((len(shift), *shift.shape))
    between, _ = jax.lax.scan(add_squares, start, (patterns, probs, grid.left_mean))
    by_patterns = jnp.einsum("il,ir...->lr...", one_hot(placed.left_pattern, num_left), left_probs)
    within = jnp.einsum("lr...,pqlr...->pq...", by_patterns, grid.covariance)
    covariance = rounded_up(within + between)
    return jnp.stack(match_probs, axis=1), grid.prior_mean + shift, covariance


Lists = tuple[Float[Array, "n *scenes"], Int[np.ndarray, "most out"]]
"""Values, and lists of indices into them, one list per column; see `inference.exact.subsets`."""


def log_sum(*terms: Lists) -> Float[Array, "out *scenes"]:
    """For each list, the log-sum-exp over its entries of the sum of the terms.

    The loop is over entries, for all lists at once, so memory is read along the scene axis.
    """
    entry, most = _entries(terms)
    highest = _accumulate(jnp.maximum, entry, most)
    summed = _accumulate(jnp.add, lambda n: jnp.exp(entry(n) - highest), most)
    return jnp.maximum(highest + jnp.log(summed), LOG_ZERO)


def largest_sum(*terms: Lists) -> Float[Array, "out *scenes"]:
    """For each list, the maximum over its entries of the sum of the terms."""
    return jnp.maximum(_accumulate(jnp.maximum, *_entries(terms)), LOG_ZERO)


def flat(grid: Grid) -> Float[Array, "cells *scenes"]:
    """Log weights of a grid as one list of cells."""
    return grid.log_weight.reshape(-1, *grid.log_weight.shape[2:])


def _entries(terms: tuple[Lists, ...]) -> tuple[Callable[[Any], Array], int]:
    """The n-th entry of all lists as a function of n, and the number of entries."""
    values = [jnp.concatenate([x, jnp.full_like(x[:1], LOG_ZERO)]) for x, _ in terms]
    places = [jnp.asarray(lists) for _, lists in terms]

    def entry(n: Any) -> Float[Array, "out *scenes"]:
        looked_up = [x[place[n]] for x, place in zip(values, places, strict=True)]
        return sum(looked_up[1:], looked_up[0])

    return entry, len(places[0])


def _accumulate(
    add: Callable[[Array, Array], Array], entry: Callable[[Any], Array], count: int
) -> Array:
    return jax.lax.fori_loop(1, count, lambda n, so_far: add(so_far, entry(n)), entry(0))


def one_hot(values: Int[np.ndarray, " n"], size: int) -> Float[np.ndarray, "n size"]:
    """One-hot rows; a row of zeros for a value of `size` or more."""
    return (values[:, None] == np.arange(size)).astype(float)
