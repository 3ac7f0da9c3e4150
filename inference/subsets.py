"""Which points can an object have? The combinatorics of exact inference, in plain numpy.

Given the match the objects are independent, so a sum over all matches is a sum over ways to give
each object a subset of the points, and for each object over the injections of its subset into its
parts. Everything here depends on the numbers of points and parts alone and is made once for each.
"""

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from models.errors import InputError

MAX_TERMS = 2_000_000
"""Injections of one object, or splits of point sets in all, beyond which a scene is refused."""


class Injections(NamedTuple):
    """Every way to give an object of `n` parts some of `M` points, in order of the subsets."""

    subsets: Int[np.ndarray, " subsets"]
    """The subsets as bit masks, by size; those of one size stand together."""
    blocks: tuple["Block", ...]
    """The injections, for each size of the subset."""


class Block(NamedTuple):
    """The injections of subsets of one size: every subset with every way to place it."""

    points: Int[np.ndarray, "subsets size"]
    parts: Int[np.ndarray, "ways size"]
    """The part that each of the points gets."""
    pattern: Int[np.ndarray, " ways"]
    """Which parts have a point, as a bit mask."""


class Level(NamedTuple):
    """How point sets of the first k objects split into one of k - 1 objects and the k-th's."""

    masks: Int[np.ndarray, " masks"]
    subset: Int[np.ndarray, "masks splits"]
    """Position of the k-th object's subset; the number of subsets marks an empty place."""
    rest: Int[np.ndarray, "masks splits"]
    """Position of what is left among the masks of the level before."""


def count_injections(num_points: int, num_parts: int) -> int:
    """Number of partial injections of points into the parts of one object."""
    return sum(
        math.comb(num_points, size) * math.perm(num_parts, size)
        for size in range(min(num_points, num_parts) + 1)
    )


def count_splits(num_points: int, sizes: tuple[int, ...]) -> int:
    """Number of splits over all levels."""
    windows = _windows(num_points, sizes)
    return sum(
        math.comb(num_points, c) * math.comb(c, s)
        for k, size in enumerate(sizes)
        for c in windows[k + 1]
        for s in range(min(size, c) + 1)
        if c - s in windows[k]
    )


def refuse_if_too_large(num_points: int, sizes: tuple[int, ...]) -> None:
    """Say what a scene would cost before anything is allocated."""
    terms = max(count_injections(num_points, size) for size in sizes)
    splits = count_splits(num_points, sizes)
    if max(terms, splits) > MAX_TERMS:
        memory = 8 * max(terms * (max(sizes) + 8), 3 * splits) / 2**30
        raise InputError(
            f"exact inference on {num_points} points and objects of {sizes} parts needs {terms:,} "
            f"injections of an object and {splits:,} splits of point sets, about {memory:,.1f} "
            f"GiB, more than the limit of {MAX_TERMS:,}; use the variational method (ds) instead"
        )


@functools.cache
def injections(num_points: int, num_parts: int) -> Injections:
    """List them, by size of the subset, then by subset, then by injection."""
    blocks = []
    for size in range(min(num_points, num_parts) + 1):
        points = np.array(list(itertools.combinations(range(num_points), size)), int)
        parts = np.array(list(itertools.permutations(range(num_parts), size)), int)
        blocks.append(Block(points, parts, (1 << parts).sum(axis=1)))
    subsets = np.concatenate([(1 << block.points).sum(axis=1) for block in blocks])
    return Injections(subsets, tuple(blocks))


@functools.cache
def levels(num_points: int, sizes: tuple[int, ...]) -> tuple[Level, ...]:
    """The splits for objects of the given numbers of parts; the last level has only the full set.

    A set is only listed if the objects before can have filled it and those after can take the rest.
    """
    windows = _windows(num_points, sizes)
    before = np.zeros(1, int)
    result = []
    for k, size in enumerate(sizes):
        subsets = injections(num_points, size).subsets
        which_rest, which_subset = np.nonzero((before[:, None] & subsets) == 0)
        union = before[which_rest] | subsets[which_subset]
        wanted = np.isin(_bit_count(union), list(windows[k + 1]))
        which_rest, which_subset, union = (x[wanted] for x in (which_rest, which_subset, union))
        masks, target = np.unique(union, return_inverse=True)
        order = np.argsort(target, kind="stable")
        counts = np.bincount(target, minlength=len(masks))
        place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        subset = np.full((len(masks), counts.max()), len(subsets))
        rest = np.zeros_like(subset)
        subset[target[order], place] = which_subset[order]
        rest[target[order], place] = which_rest[order]
        result.append(Level(masks, subset, rest))
        before = masks
    return tuple(result)


def members(masks: Int[np.ndarray, "*shape"], num_points: int) -> Bool[np.ndarray, "*shape M"]:
    """Bit masks as rows of booleans."""
    return (masks[..., None] >> np.arange(num_points)) & 1 == 1


def _windows(num_points: int, sizes: tuple[int, ...]) -> list[range]:
    """The sizes that the point sets of the first 0, 1, ..., K objects can have."""
    return [
        range(max(0, num_points - sum(sizes[k:])), min(num_points, sum(sizes[:k])) + 1)
        for k in range(len(sizes) + 1)
    ]


def _bit_count(masks: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    return members(masks, 63).sum(axis=-1)
