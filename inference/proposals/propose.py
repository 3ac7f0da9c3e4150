"""Proposals: the parses of each scene with which inference begins.

Small scenes are searched exhaustively, large ones through candidate objects. If the best parse
leaves points unexplained, the scene is searched again with a wider gate.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from inference.proposals import exhaustive, likely
from inference.proposals.parses import NUM_PARSES, Parses, Pass
from inference.proposals.starts import structure
from models.program.batches import Reading, Skeleton

WIDTHS = (1, 8, 64)
"""Batch widths of the search; each one is compiled."""

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
    search = exhaustive if exhaustive.is_small(readings) else likely
    best: Any = None
    for one in search.passes(readings, log_prior, whole):
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
