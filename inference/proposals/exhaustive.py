"""Exhaustive search of small scenes, with the tables of exact inference.

Every placement of points on every object is scored, and the best combinations of objects follow by
dynamic programming.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from inference.exact.parses import best_configurations, points_of
from inference.exact.permutations import LOG_ZERO, Plan, flat, largest_sum, object_grid
from inference.exact.permutations import make_plan as exact_plan
from inference.exact.solutions import ordered
from inference.proposals.parses import EDGE, NUM_PARSES, Odds, Parses, judged_at, odds
from models.numerics.arrays import AnyArray
from models.numerics.devices import compiled
from models.program.batches import Skeleton
from models.program.reading import LinearGaussianModel

MAX_SWAPS = 8
"""Largest number of relabellings of identical objects that the search allows for."""

Search = Callable[[list[LinearGaussianModel], AnyArray, AnyArray, float], Parses]
"""Takes the pieces of scenes at each state, the log prior of the states, an order of the rows with
points first, and the gate."""


@functools.lru_cache(maxsize=64)
def search_of(
    skeleton: Skeleton,
    twin: tuple[int, ...],
    num_points: int,
    states: tuple[int, ...],
    whole: bool,
) -> Search:
    """The search, compiled once for each number of points.

    Args:
        twin: for each object, the first one that is identical to it.
        states: the states in which objects may have points.
    """
    plan = exact_plan(skeleton, num_points)
    num_objects = plan.num_objects
    plan = plan._replace(template=(*twin, *range(num_objects, len(plan.parts))))
    lack = EDGE if whole else 0.0
    sizes = np.array([len(parts) for parts in plan.parts[:num_objects]])

    @compiled
    def search(
        models: list[LinearGaussianModel],
        log_prior: Float[Array, "S K"],
        order: Int[Array, "scenes N"],
        gate: Float[Array, ""],
    ) -> Parses:
        width = len(order)
        judged = [ordered(model, plan, order)[0] for model in models]
        if whole:
            judged = [judged_at(model, gate * model.parts.variance) for model in judged]
        known = _odds(judged, log_prior, plan.owner, width)
        cells, subsets, of_state = [], [], []
        for k, first in enumerate(plan.template):
            if first == k:
                own = [_weights(judged[s], known, plan, k, s, lack, width) for s in states]
                best = jnp.stack([largest_sum((x, plan.placed[k].ways)) for x in own])
                empty = jnp.asarray(plan.placed[k].masks == 0)[:, None]
                cells.append(jnp.stack(own))
                subsets.append(jnp.where(empty, 0.0, best.max(axis=0)))
                of_state.append(best.argmax(axis=0))
            else:
                for known_of in (cells, subsets, of_state):
                    known_of.append(known_of[first])
        position, value = _distinct(plan, tuple(subsets), NUM_PARSES)
        scene = jnp.arange(width)
        match = jnp.full((len(plan.owner), NUM_PARSES, width), -1)
        state = jnp.broadcast_to(known.state.argmax(axis=0)[:, None], (num_objects, *value.shape))
        for k, parts in enumerate(plan.parts):
            place = jnp.minimum(position[k], len(plan.placed[k].masks) - 1)
            which = of_state[k][place, scene]
            point = _placed(plan, k, cells[k], place, which)
            match = match.at[parts].set(jnp.moveaxis(point, -1, 0))
            if k < num_objects:
                has_points = (point >= 0).any(axis=-1)
                own_state = jnp.asarray(states)[which]
                state = state.at[k].set(jnp.where(has_points, own_state, state[k]))
        row = jnp.take_along_axis(order.T[:, None], jnp.maximum(match, 0), axis=0)
        number = jnp.stack([(match[parts] >= 0).sum(axis=0) for parts in plan.parts[:num_objects]])
        missing = jnp.where(number > 0, sizes[:, None, None] - number, 0).sum(axis=0)
        found = Parses(
            match=jnp.where(match >= 0, row, -1),
            state=state,
            value=value,
            misfit=jnp.zeros_like(value),
            left_over=jnp.zeros_like(missing),
            missing=missing,
            is_clear=jnp.ones_like(missing, bool),
        )
        return jax.tree.map(lambda x: jnp.moveaxis(x, (-1, -2), (0, 1)), found)

    return search


def _odds(
    models: list[LinearGaussianModel], log_prior: Array, owner: np.ndarray, width: int
) -> Odds:
    """The odds of every scene, with the scene axis last."""
    axes = jax.tree.map(lambda x: -1 if x.shape[-1] == width else None, tuple(models))
    single = jax.tree.map(lambda x: x if x.shape[-1] == width else x[..., 0], tuple(models))
    of_scene = functools.partial(odds, log_prior=log_prior, owner=owner, outside=0.0, lack=0.0)
    return jax.vmap(of_scene, (axes,), -1)(single)


def _weights(
    model: LinearGaussianModel, odds: Odds, plan: Plan, k: int, s: int, lack: float, width: int
) -> Float[Array, "cells scenes"]:
    """Log weight of every placement on object k in state s, or on the background."""
    is_object = k < plan.num_objects
    unmet = jnp.full((1, len(plan.owner), width), -lack if is_object else 0.0)
    pairs = jnp.concatenate([odds.pair[s, : plan.num_points], unmet])
    rows = min(plan.num_points + 1, len(model.points))  # without dummy rows all parts have points
    own = replace(model, points=model.points[:rows], match_logits=pairs[:rows])
    grid = object_grid(own, k, plan.parts[k], plan.placed[k], plan.num_points)
    return flat(grid) + (odds.state[s, k] if is_object else 0.0)


def _distinct(
    plan: Plan, subsets: tuple[Float[Array, "subsets scenes"], ...], count: int
) -> tuple[Int[Array, "K count scenes"], Float[Array, "count scenes"]]:
    """The best parses that differ in more than the names of identical objects."""
    swaps = math.prod(math.factorial(plan.template.count(k)) for k in set(plan.template))
    position, value = best_configurations(subsets, plan.levels, count * min(swaps, MAX_SWAPS))
    for k, first in enumerate(plan.template):
        before = [j for j in range(k) if plan.template[j] == first]
        if before:
            value = jnp.where(position[before[-1]] >= position[k], value, -jnp.inf)
    value = jnp.where(value > LOG_ZERO / 2, value, -jnp.inf)
    lacking = max(count - len(value), 0)
    value = jnp.pad(value, ((0, lacking), (0, 0)), constant_values=-jnp.inf)
    position = jnp.pad(position, ((0, 0), (0, lacking), (0, 0)))
    best = jnp.argsort(-value, axis=0)[:count]
    return (
        jnp.take_along_axis(position, best[None], axis=1),
        jnp.take_along_axis(value, best, axis=0),
    )


def _placed(
    plan: Plan,
    k: int,
    cells: Float[Array, "states cells scenes"],
    place: Int[Array, "count scenes"],
    which: Int[Array, "count scenes"],
) -> Int[Array, "count scenes n"]:
    """The point on each part of object k in the best placement of a subset, -1 for none."""
    scene = jnp.arange(cells.shape[-1])
    ways = jnp.asarray(plan.placed[k].ways)[:, place]  # (most, count, scenes)
    inside = ways < cells.shape[1]
    weight = jnp.where(inside, cells[which, jnp.where(inside, ways, 0), scene], -jnp.inf)
    best = jnp.take_along_axis(ways, weight.argmax(axis=0)[None], axis=0)[0]
    point = points_of(plan.placed[k], best)
    return jnp.where(point < plan.num_points, point, -1)
