"""Single parses of a scene: the most probable ones, and draws from their posterior.

Both go backwards through the tables of `inference.exact.permutations`, from the full point set.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln
from jaxtyping import Array, Float, Int

from inference.exact.permutations import LOG_ZERO, Plan, Tables, flat, largest_sum
from inference.exact.subsets import Level, Placements, members
from models.numerics.arrays import AnyArray
from models.numerics.linalg import cholesky, condition, innovations, total
from models.numerics.permanent import log_permanent
from models.program.reading import LinearGaussianModel
from models.templates import pose_of_part


class Parses(NamedTuple):
    """The most probable ways to give each object a subset of the points, best first."""

    position: Int[AnyArray, "K best *scenes"]
    """Index of each object's subset in the object's list of subsets."""
    log_weight: Float[AnyArray, "best *scenes"]
    """Log weight of the partition of the points, summed over the objects of its groups."""
    log_unlisted: Float[AnyArray, "*scenes"]
    """Upper bound on the log weight of any partition that is not listed."""


class Draws(NamedTuple):
    """Independent draws from the posterior of one scene."""

    match: Int[AnyArray, "draws M"]
    """The part of each point."""
    pose: Float[AnyArray, "draws K p"]
    conditions: dict[str, AnyArray] | None = None
    """Values of the program's discrete conditions by site, (draws, ...); None without any."""


def best_parses(plan: Plan, tables: Tables, count: int) -> Parses:
    """Partitions of the highest weight, found by their best assignment of groups to objects.

    A partition has at most K! assignments of its groups to objects. No assignment of an unlisted
    partition is better than the last listed one, which bounds the weight of unlisted partitions.
    """
    position, weight = best_configurations(tables.subsets, plan.levels, count)
    complete = weight.shape[0] < count
    log_unlisted = jnp.where(complete, LOG_ZERO, weight[-1] + math.lgamma(plan.num_objects + 1))
    return Parses(position, _partition_weight(plan, tables, position), log_unlisted)


def best_match(plan: Plan, tables: Tables) -> Int[Array, "M *scenes"]:
    """The part of each point in the single most probable match."""
    cells = [flat(grid) for grid in tables.grids]
    best = [largest_sum((x, placed.ways)) for x, placed in zip(cells, plan.placed, strict=True)]
    position = best_configurations(tuple(best), plan.levels, 1)[0][:, 0]
    match = jnp.zeros((plan.num_points + 1, *tables.evidence.shape), int)
    scene = jnp.arange(len(tables.evidence))
    for weights, parts, placed, p in zip(cells, plan.parts, plan.placed, position, strict=True):
        padded = jnp.concatenate([weights, jnp.full_like(weights[:1], LOG_ZERO)])
        ways = jnp.asarray(placed.ways)[:, p]
        way = padded[ways, scene].argmax(axis=0)
        point = points_of(placed, ways[way, scene])  # (scenes, n)
        match = match.at[point, scene[:, None]].set(jnp.asarray(parts))
    return match[: plan.num_points]


def draw(key: Array, model: LinearGaussianModel, plan: Plan, tables: Tables, count: int) -> Draws:
    """Draw the subset and placement of each object, then the poses, for a single scene."""
    mask = jnp.zeros(count, int)
    match = jnp.full((count, plan.num_points + 1), -1)
    for k in reversed(range(len(plan.parts))):
        key, split_key, way_key = jax.random.split(key, 3)
        level, placed = plan.levels[k], plan.placed[k]
        subset, rest = (jnp.asarray(x)[:, mask] for x in (level.subset_of_set, level.rest_of_set))
        table, before = (
            jnp.append(x[:, 0], LOG_ZERO) for x in (tables.subsets[k], tables.forward[k])
        )
        split = jax.random.categorical(split_key, table[subset] + before[rest], axis=0)
        chosen = (split, jnp.arange(count))
        position, mask = subset[chosen], rest[chosen]
        weights = jnp.append(tables.grids[k].log_weight[..., 0].ravel(), LOG_ZERO)
        ways = jnp.asarray(placed.ways)[:, position]
        cell = ways[jax.random.categorical(way_key, weights[ways], axis=0), jnp.arange(count)]
        point = points_of(placed, cell)
        match = match.at[jnp.arange(count)[:, None], point].set(jnp.asarray(plan.parts[k]))
    match = match[:, : plan.num_points]
    return Draws(match, draw_poses(key, model, plan.owner, match))


def draw_poses(
    key: Array,
    model: LinearGaussianModel,
    owner: Int[np.ndarray, " N"],
    match: Int[Array, "draws M"],
) -> Float[Array, "draws K p"]:
    """Draw the poses given each match, for a single scene."""
    mean, factor = poses_given(jax.tree.map(lambda x: x[..., 0], model), owner, match)
    noise = jax.random.normal(key, mean.shape)
    return (mean + total(factor * noise, axis=1)).T


def poses_given(
    model: LinearGaussianModel, owner: Int[np.ndarray, " N"], match: Int[AnyArray, "draws M"]
) -> tuple[Float[Array, "p K draws"], Float[Array, "p p K draws"]]:
    """Mean of each pose given the match, and a factor C of its covariance C C'.

    Conditions on one feature after another, as in `permutations.object_grid`.

    Args:
        model: the model of a single scene, without a scene axis.
        match: the part of each of the first M rows, -1 for none.
    """
    num_rows = match.shape[1]
    own = jax.tree.map(lambda x: jnp.asarray(x)[match], model.parts)  # (draws, M, ...)
    of = jnp.asarray(owner)[match]  # index K for the background, which has no pose
    counted = own.feature_mask & model.seen[:num_rows] & (match >= 0)[..., None]
    scale = counted / jnp.sqrt(own.variance)
    expected = own.offset + jnp.einsum(
        "imdp,imp->imd", own.F, model.pose_mean[pose_of_part(of, model.num_objects)]
    )
    residual = jnp.moveaxis(scale * (model.points[:num_rows] - expected), 0, -1)
    rows = jnp.moveaxis(scale[..., None] * own.F, 0, -1)[:, :, :, None]  # (M, d, p, 1, draws)
    is_owner = of.T[:, None] == np.arange(model.num_objects)[:, None]  # (M, K, draws)
    design = rows * is_owner[:, None, None]
    prior_factor = cholesky(jnp.moveaxis(model.pose_covariance, 0, 2))
    steps = condition(prior_factor[..., None], design.reshape(-1, *design.shape[2:]))
    observed = residual.reshape(-1, 1, len(match))
    prior_mean = model.pose_mean.T[:, :, None]
    _, shift = innovations(steps, observed, jnp.zeros_like(prior_mean))
    return prior_mean + shift, steps.factor


def points_of(placed: Placements, cell: Int[Array, "*n"]) -> Int[Array, "*n parts"]:
    """The point on each part, for the placements at some cells of the grid."""
    row, column = jnp.divmod(cell, len(placed.right))
    return jnp.concatenate(
        [jnp.asarray(placed.left)[row], jnp.asarray(placed.right)[column]], axis=-1
    )


def best_configurations(
    tables: tuple[Float[Array, "subsets *scenes"], ...], levels: tuple[Level, ...], count: int
) -> tuple[Int[Array, "K found *scenes"], Float[Array, "found *scenes"]]:
    """The at most `count` ways of the highest weight to give each object a subset.

    A forward pass finds the weight of the best way to fill every point set. A backward pass, from
    the last object to the first, keeps the `count` partial ways with the best completions. This
    loses none of the best ways: a way is dropped only if `count` others complete at least as well.
    """
    best = [jnp.zeros((1, *tables[0].shape[1:]))]
    for table, level in zip(tables, levels, strict=True):
        best.append(largest_sum((table, level.subset_of_set), (best[-1], level.rest_of_set)))
    scene = jnp.arange(tables[0].shape[-1])
    mask = jnp.zeros((1, len(scene)), int)
    so_far = jnp.zeros(mask.shape)
    chosen: list[Array] = []
    for table, before, level in zip(tables[::-1], best[-2::-1], levels[::-1], strict=True):
        table, before = (
            jnp.concatenate([x, jnp.full_like(x[:1], LOG_ZERO)]) for x in (table, before)
        )
        subset, rest = (jnp.asarray(x)[:, mask] for x in (level.subset_of_set, level.rest_of_set))
        partial = so_far + table[subset, scene]  # (splits, ways so far, scenes)
        completed = (partial + before[rest, scene]).reshape(-1, len(scene))
        _, which = jax.lax.top_k(completed.T, min(count, len(completed)))
        split, way = jnp.divmod(which.T, len(so_far))
        so_far, mask = partial[split, way, scene], rest[split, way, scene]
        chosen = [x[way, scene] for x in chosen]
        chosen.append(subset[split, way, scene])
    return jnp.stack(chosen[::-1]), so_far


def _partition_weight(
    plan: Plan, tables: Tables, position: Int[Array, "K best *scenes"]
) -> Float[Array, "best *scenes"]:
    """Log of the summed weight of all ways that have the same partition of the points.

    Each group may belong to any object that can have it, so the sum is a permanent of the weights
    of groups under objects. Orders of the empty groups count once. The background keeps its points.
    """
    objects = slice(plan.num_objects)
    masks = [
        jnp.asarray(placed.masks)[p]
        for placed, p in zip(plan.placed[objects], position[objects], strict=True)
    ]
    rows = []
    for table, placed in zip(tables.subsets[objects], plan.placed[objects], strict=True):
        place = np.full(1 << plan.num_points, len(placed.masks))
        place[placed.masks] = np.arange(len(placed.masks))
        padded = jnp.concatenate([table, jnp.full_like(table[:1], LOG_ZERO)])
        scene = jnp.arange(table.shape[-1])
        rows.append(jnp.stack([padded[jnp.asarray(place)[mask], scene] for mask in masks], axis=-1))
    weights = jnp.stack(rows, axis=-2)  # (best, scenes, objects, groups)
    empty = sum((mask == 0).astype(float) for mask in masks)
    sizes = jnp.array([len(placed.masks) for placed in plan.placed])
    real = jnp.all(position < sizes[:, None, None], axis=0)  # there may be too few ways
    log_weight = log_permanent(weights) - gammaln(empty + 1.0)
    scene = jnp.arange(log_weight.shape[-1])
    for table, own in zip(
        tables.subsets[plan.num_objects :], position[plan.num_objects :], strict=True
    ):
        log_weight = log_weight + table[own, scene]
    return jnp.where(real, log_weight, LOG_ZERO)


def group_labels(
    plan: Plan, position: Int[Array, "K best *scenes"]
) -> Int[Array, "best *scenes M"]:
    """The object of each point in each of the parses."""
    labels = jnp.full((*position.shape[1:], plan.num_points), -1)
    for k, (placed, p) in enumerate(zip(plan.placed, position, strict=True)):
        taken = members(np.append(placed.masks, 0), plan.num_points)
        labels = jnp.where(jnp.asarray(taken)[p], k, labels)
    return labels
