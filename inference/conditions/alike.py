"""Find the values of discrete conditions that differ only by a swap of alike objects.

Such values have the same evidence, so it is enough to solve one of them. Whether a swap changes
anything is checked on the arrays read from the program at all values, not assumed.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from models.program.batches import Reading
from models.program.reading import LinearGaussianModel

Values = dict[str, np.ndarray]
"""Joint values of discrete conditions by site, (values, ...)."""


def alike_objects(reading: Reading, values: Values, count: int) -> Int[np.ndarray, " K"]:
    """For each object, the first object with which it can be swapped; itself if there is none.

    A swap must map the arrays read at each joint value to those at the value with objects swapped.
    """
    template = np.array(reading.skeleton.alike)
    num_objects = len(template)
    if not values:
        return np.arange(num_objects)
    # `skeleton.alike` separates objects whose arrays depend on the conditions: compare these here.
    owner = np.array(reading.skeleton.owner)
    parts = reading.skeleton.parts
    varying = jax.tree.map(np.asarray, reading.model)
    result = np.arange(num_objects)
    for k in range(num_objects):
        for first in range(k):
            if result[first] != first or len(parts[first]) != len(parts[k]):
                continue
            order = np.arange(num_objects)
            order[[first, k]] = k, first
            columns = np.arange(len(owner))
            columns[parts[first]], columns[parts[k]] = parts[k], parts[first]
            if _swap_is_a_symmetry(varying, reading.varies, values, count, order, columns):
                result[k] = first
                break
    return result


def _swap_is_a_symmetry(
    model: LinearGaussianModel,
    varies: LinearGaussianModel,
    values: Values,
    count: int,
    order: Int[np.ndarray, " K"],
    columns: Int[np.ndarray, " N"],
) -> bool:
    swapped = _swapped_values(values, order)
    if swapped is None:
        return False
    of_runs = (np.arange(model.points.shape[-1]) // count) * count
    runs = of_runs + np.tile(swapped, len(of_runs) // count)

    def unchanged(x: np.ndarray, flag: bool, axis: int, places: np.ndarray) -> bool:
        moved = np.take(x, places, axis=axis)
        return np.allclose(moved[..., runs] if flag else moved, x, rtol=1e-12, atol=0.0)

    pairs = [(model.pose_mean, varies.pose_mean), (model.pose_covariance, varies.pose_covariance)]
    fields = [
        (x, flag)
        for name, x, flag in zip(model.parts._fields, model.parts, varies.parts, strict=True)
        if name != "owner"
    ]
    constant = model.log_constant[runs] if varies.log_constant else model.log_constant
    with np.errstate(invalid="ignore"):
        return (
            all(unchanged(x, flag, 0, order) for x, flag in pairs)
            and all(unchanged(x, flag, 0, columns) for x, flag in fields)
            and unchanged(model.match_logits, varies.match_logits, 1, columns)
            and np.allclose(constant, model.log_constant, rtol=1e-12)
        )


def _swapped_values(
    values: Values, order: Int[np.ndarray, " K"]
) -> Int[np.ndarray, " values"] | None:
    """For each joint value, the index of the value with the objects reordered; None if unlisted."""
    flat, moved = [], []
    for x in values.values():
        of_objects = x.ndim > 1 and x.shape[1] == len(order)
        flat.append(x.reshape(len(x), -1))
        moved.append((x[:, order] if of_objects else x).reshape(len(x), -1))
    number = {row.tobytes(): i for i, row in enumerate(np.concatenate(flat, axis=1))}
    places = [number.get(row.tobytes()) for row in np.concatenate(moved, axis=1)]
    return None if None in places else np.array(places)


def classes(
    values: Values, template: Int[np.ndarray, " K"]
) -> tuple[Int[np.ndarray, " classes"], Int[np.ndarray, " values"]]:
    """The first value of each class under swaps, and the size of its class (1 at other values)."""
    size = len(template)
    count = len(next(iter(values.values()))) if values else 1
    of_objects = [x for x in values.values() if x.ndim > 1 and x.shape[1] == size]
    of_scene = [x for x in values.values() if not (x.ndim > 1 and x.shape[1] == size)]
    known: dict[Any, list[int]] = {}
    for i in range(count):
        state = [tuple(np.ravel(x[i, k]).tolist() for x in of_objects) for k in range(size)]
        by_object = sorted(
            (int(kind), *map(tuple, own)) for kind, own in zip(template, state, strict=True)
        )
        shared = tuple(tuple(np.ravel(x[i]).tolist()) for x in of_scene)
        known.setdefault((tuple(by_object), shared), []).append(i)
    chosen = np.array([places[0] for places in known.values()])
    ways = np.ones(count, int)
    ways[chosen] = [len(places) for places in known.values()]
    return chosen, ways
