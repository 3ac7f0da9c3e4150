"""Proposals: the parses of each scene with which inference begins.

Small scenes are searched exhaustively (`inference.proposals.exhaustive`), large ones through
candidate objects (`inference.proposals.likely`). If the best parse leaves points unexplained, the
scene is searched again with a wider gate.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from inference.exact.subsets import count_placements, count_splits
from inference.proposals import exhaustive, likely
from inference.proposals.parses import NUM_PARSES, Parses, Pass
from inference.proposals.plan import make_plan
from inference.proposals.starts import structure
from models.program.batches import Reading, Skeleton, twins, with_points
from models.scenes import points_first

WIDTHS = (1, 8, 64)
"""Batch widths of the search; each one is compiled."""

MAX_PLACEMENTS, MAX_SPLITS = 1 << 17, 1 << 20
"""Largest numbers of placements per object and of point-set splits for exhaustive search."""

GATES = (1.0, 4.0, 25.0)
"""Noise variances to try, in units of the program's, until whole objects explain all points."""

BLOCK = 64
"""Scenes of a block in exhaustive search."""

ENTRIES = 1 << 13
"""Point-part pairs of a block in the search through candidates, which bounds memory."""

CLOSE = 10.0
"""Inference is run from parses within this many nats of the best one."""


def propose(
    readings: Sequence[Reading], log_prior: Float[np.ndarray, "S K"], *, whole: bool
) -> Parses:
    """Find the best parses of every scene, with the scene axis first.

    Args:
        readings: readings of the same scenes at each state that an object may have.
        log_prior: log probability of each state.
        whole: prefer whole objects, and take the variance of the gate as the noise. This is for
            programs under which a missing part costs nothing. Otherwise parses are ranked by their
            density under the program.
    """
    readings = [reading.at_prior_mean() for reading in readings]
    left = np.arange(readings[0].model.points.shape[-1])
    passes = exhaustive_passes if is_small(readings) else likely_passes
    best: Any = None
    for one in passes(readings, log_prior, whole):
        found = _in_blocks(one, left)
        if best is None:
            best = found
        else:
            better = found.value[:, 0] > best.value[left, 0]
            for known, new in zip(best, found, strict=True):
                known[left[better]] = new[better]
        enough = _is_enough(jax.tree.map(lambda x, own=left: x[own, 0], best), one.gate, whole)
        left = left[~enough]
        if not len(left):
            break
    return best


def propose_whole(reading: Reading) -> Parses:
    """Propose parses for a program without open object states."""
    return propose([reading], np.zeros((1, reading.skeleton.num_objects)), whole=True)


def drawn(parses: Parses, rng_key: Array, count: int, skeleton: Skeleton) -> Parses:
    """Sample parses of each scene in proportion to their weights.

    A parse has the points of each object on their best parts. If the points only just fix a pose,
    any parts are as good, so random ones are taken.
    """
    key, place_key = jax.random.split(rng_key)
    noise = jax.random.gumbel(key, (len(parses.value), count, parses.value.shape[1]))
    chosen = np.asarray((parses.value[:, None] + noise).argmax(axis=2))
    scene = np.arange(len(chosen))[:, None]
    match = np.array(parses.match[scene, chosen])
    order = np.asarray(jax.random.uniform(place_key, match.shape))
    fewest = structure(skeleton).basis_size
    for parts in skeleton.parts:
        own = match[..., parts]
        shuffled = np.take_along_axis(own, order[..., parts].argsort(axis=-1), axis=-1)
        few = (own >= 0).sum(axis=-1, keepdims=True) <= fewest
        match[..., parts] = np.where(few, shuffled, own)
    some = jax.tree.map(lambda x: x[scene, chosen], parses)
    return some._replace(match=match, value=np.zeros(chosen.shape))


def is_small(readings: Sequence[Reading]) -> bool:
    """Whether every scene is small enough for exhaustive search.

    As in exact inference, points must be fully seen or absent, and dummy rows identical.
    """
    skeleton = readings[0].skeleton
    sizes = tuple(len(group) for group in skeleton.groups)
    most = int(readings[0].model.seen.any(axis=1).sum(axis=0).max())
    return all(map(_is_plain, readings)) and _has_small_tables(most, sizes)


@functools.cache
def _has_small_tables(num_points: int, sizes: tuple[int, ...]) -> bool:
    """Whether the lists of placements and splits are short enough."""
    most = max(count_placements(num_points, size) for size in sizes)
    return most <= MAX_PLACEMENTS and count_splits(num_points, sizes) <= MAX_SPLITS


def _is_plain(reading: Reading) -> bool:
    seen, logits = reading.model.seen, reading.model.match_logits
    is_point = seen.all(axis=1)
    dummy = ~is_point[:, None]
    low = np.where(dummy, logits, np.inf).min(axis=0)
    high = np.where(dummy, logits, -np.inf).max(axis=0)
    return bool((is_point == seen.any(axis=1)).all() and ((low == high) | (high < low)).all())


def exhaustive_passes(
    readings: Sequence[Reading], log_prior: Float[np.ndarray, "S K"], whole: bool
) -> Iterator[Pass]:
    """One pass with the program's noise or, for whole objects, one per gate."""
    model, states, skeleton = readings[0].model, with_points(readings), readings[0].skeleton
    twin = tuple(twins(readings, log_prior).tolist())
    present = np.broadcast_to(model.seen.any(axis=1), (len(model.points), model.points.shape[-1]))
    order, size = points_first(present.T)
    for gate in GATES if whole else GATES[:1]:

        def search(some: Int[np.ndarray, " block"], gate: float = gate) -> Parses:
            compiled = exhaustive.search_of(skeleton, twin, int(size[some[0]]), states, whole)
            pieces = [reading.take(some) for reading in readings]
            return compiled(pieces, log_prior, order[some], gate)

        yield Pass(gate, BLOCK, size, search)


def likely_passes(
    readings: Sequence[Reading], log_prior: Float[np.ndarray, "S K"], whole: bool
) -> Iterator[Pass]:
    """One search per effort, each with a wider gate."""
    num_points, num_scenes = readings[0].model.points.shape[::2]
    many = readings[0].skeleton.num_objects > likely.MANY_OBJECTS
    plan = likely.HashablePlan(make_plan(readings, log_prior))
    # If parses are ranked by the density of the program, the only priced gate is that of its noise.
    priced = likely.PRICED if whole else likely.PRICED[:1]
    # Features other than places are noisy, so no gate is tight, and they tell points apart, so the
    # best candidates mostly suffice.
    has_more = readings[0].skeleton.num_features > likely.PLACE
    efforts = (likely.MANY if has_more else likely.TIGHTEST, *priced)
    for effort in (likely.TIGHTEST, likely.MANY) if many else efforts:
        compiled = likely.search_of(plan, effort, with_points(readings), whole, many)
        is_priced = effort in likely.PRICED
        block = 1 if is_priced else int(np.clip(ENTRIES // num_points**2, 1, 64))

        def search(some: Int[np.ndarray, " block"], compiled: likely.Search = compiled) -> Parses:
            return compiled([reading.take(some) for reading in readings], log_prior)

        yield Pass(effort.gate, block, np.zeros(num_scenes, int), search)


def _is_enough(first: Parses, gate: float, whole: bool) -> Bool[np.ndarray, " scenes"]:
    """Whether a wider gate cannot give a better parse than the first of each scene.

    Any point outside the gate must cost more than the misfit of all points within, and no point
    that could be explained may be left over. Unless whole objects are preferred, points left over
    at a gate of at least the program's noise are clutter.
    """
    if whole and gate:
        explained = first.left_over + first.missing == 0
    else:
        explained = (first.left_over == 0) | (gate >= 1)
    return np.asarray(first.is_clear & (first.misfit <= 1) & explained)


def _in_blocks(one: Pass, some: Int[np.ndarray, " some"]) -> Parses:
    """Search some scenes block by block, with one thread per core.

    The first block runs alone, because it may trigger compilation.
    """
    group = one.group[some]
    members = [np.flatnonzero(group == g) for g in np.unique(group)]
    width = min(one.block, next((w for w in WIDTHS if w >= len(one.group)), WIDTHS[-1]))
    blocks = [own[i : i + width] for own in members for i in range(0, len(own), width)]

    def search(places: Int[np.ndarray, " places"]) -> Parses:
        found = one.search(some[np.resize(places, width)])
        return jax.tree.map(lambda x: np.array(x)[: len(places), :NUM_PARSES], found)

    found = [search(blocks[0])]
    if len(blocks) > 1:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found += pool.map(search, blocks[1:])
    order = np.argsort(np.concatenate(blocks))
    return jax.tree.map(lambda *x: np.concatenate(x)[order], *found)
