"""The combinatorics of exact inference: subsets of points and their placements, in plain numpy.

Given the match the objects are independent. So a sum over all matches is a sum over the ways to
give each object a subset of the points and, for each object, over the placements of its subset on
its parts. Everything here depends only on the numbers of points and parts, and is cached for these.

Lists of different lengths are padded to the longest. Each list is a column, so a sum over its
entries is a sum over the first axis. An empty entry is marked by the number of possible values.
"""

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from models.errors import InputError

MAX_TERMS = 2_000_000
"""Largest number of placements of one object, or of splits; larger scenes are refused."""


class Placements(NamedTuple):
    """Every way to place some of M points on the parts of an object, at most one on a part.

    The parts are divided into two halves. A row of `left` has the point on each part of the left
    half, M for none; a row of `right` does the same for the right half. A placement is a pair of
    rows without a common point, so terms that involve both halves are a grid of pairs.
    """

    left: Int[np.ndarray, "left_rows left_parts"]
    right: Int[np.ndarray, "right_rows right_parts"]
    left_met: Bool[np.ndarray, "left_patterns left_parts"]
    """The patterns that occur in rows of `left`: which parts have a point."""
    left_pattern: Int[np.ndarray, " left_rows"]
    right_met: Bool[np.ndarray, "right_patterns right_parts"]
    right_pattern: Int[np.ndarray, " right_rows"]
    masks: Int[np.ndarray, " subsets"]
    """The subsets of points that the object can have, as bit masks."""
    subset: Int[np.ndarray, "left_rows right_rows"]
    """The subset that a pair of rows places; the number of subsets if it is not a placement."""
    ways: Int[np.ndarray, "most subsets"]
    """For each subset, its placements as indices into the flattened grid of pairs."""


class Level(NamedTuple):
    """How a point set of the first k objects splits into a subset of object k and the rest.

    The same list of splits is stored three times: by the set, by the subset, and by the rest.
    """

    masks: Int[np.ndarray, " sets"]
    subset_of_set: Int[np.ndarray, "most sets"]
    rest_of_set: Int[np.ndarray, "most sets"]
    set_of_subset: Int[np.ndarray, "most subsets"]
    rest_of_subset: Int[np.ndarray, "most subsets"]
    set_of_rest: Int[np.ndarray, "most rests"]
    subset_of_rest: Int[np.ndarray, "most rests"]


def count_placements(num_points: int, num_parts: int) -> int:
    """Number of pairs of rows of an object with `num_parts` parts."""
    halves = (num_parts // 2, num_parts - num_parts // 2)
    return math.prod(
        sum(math.comb(half, size) * math.perm(num_points, size) for size in range(half + 1))
        for half in halves
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
    """Raise an error with the cost of a scene before anything is allocated."""
    terms = max(count_placements(num_points, size) for size in sizes)
    splits = count_splits(num_points, sizes)
    if max(terms, splits) > MAX_TERMS:
        memory = 8 * max(8 * terms, 9 * splits) / 2**30
        raise InputError(
            f"exact inference on {num_points} points and objects of {sizes} parts takes {terms:,} "
            f"placements on an object and {splits:,} splits of point sets, about {memory:,.1f} "
            f"GiB, more than the limit of {MAX_TERMS:,}; use the variational method (ds) instead"
        )


@functools.cache
def placements(num_points: int, num_parts: int, fewest: int) -> Placements:
    """List the placements of subsets of at least `fewest` points."""
    half = num_parts // 2
    left = _rows(num_points, half, fewest - (num_parts - half))
    right = _rows(num_points, num_parts - half, fewest - half)
    left_mask, right_mask = (_as_masks(rows, num_points) for rows in (left, right))
    union = left_mask[:, None] | right_mask
    possible = ((left_mask[:, None] & right_mask) == 0) & (bit_count(union) >= fewest)
    masks = np.unique(union[possible])
    subset = np.where(possible, np.searchsorted(masks, union), len(masks))
    (ways,) = _columns(subset[possible], len(masks), (np.flatnonzero(possible), subset.size))
    left_met, left_pattern = np.unique(left < num_points, axis=0, return_inverse=True)
    right_met, right_pattern = np.unique(right < num_points, axis=0, return_inverse=True)
    return Placements(
        left, right, left_met, left_pattern, right_met, right_pattern, masks, subset, ways
    )


@functools.cache
def levels(num_points: int, sizes: tuple[int, ...]) -> tuple[Level, ...]:
    """List the splits for objects of these sizes; the last level has only the full set.

    A set is listed only if the objects up to this one can fill it and the others can take the rest.
    """
    windows = _windows(num_points, sizes)
    before = np.zeros(1, int)
    result = []
    for k, size in enumerate(sizes):
        masks = placements(num_points, size, fewest(num_points, sizes, k)).masks
        rest, subset = np.nonzero((before[:, None] & masks) == 0)
        union = before[rest] | masks[subset]
        wanted = np.isin(bit_count(union), list(windows[k + 1]))
        rest, subset, union = rest[wanted], subset[wanted], union[wanted]
        sets, target = np.unique(union, return_inverse=True)
        of_set, of_rest = (target, len(sets)), (rest, len(before))
        of_subset = (subset, len(masks))
        result.append(
            Level(
                sets,
                *_columns(*of_set, of_subset, of_rest),
                *_columns(*of_subset, of_set, of_rest),
                *_columns(*of_rest, of_set, of_subset),
            )
        )
        before = sets
    return tuple(result)


def fewest(num_points: int, sizes: tuple[int, ...], k: int) -> int:
    """The smallest number of points of object k: those that the other objects cannot take."""
    return max(0, num_points - (sum(sizes) - sizes[k]))


def members(masks: Int[np.ndarray, "*shape"], num_points: int) -> Bool[np.ndarray, "*shape M"]:
    """Bit masks as rows of booleans."""
    return (masks[..., None] >> np.arange(num_points)) & 1 == 1


def bit_count(masks: Int[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
    """Number of points in each bit mask."""
    return np.bitwise_count(masks).astype(int)


def _rows(num_points: int, num_parts: int, fewest: int) -> Int[np.ndarray, "rows parts"]:
    """Every way to place at least `fewest` points on some parts; M for a part without a point."""
    rows = []
    for pattern in itertools.product((False, True), repeat=num_parts):
        size = sum(pattern)
        if max(fewest, 0) <= size <= num_points:
            placed = list(itertools.permutations(range(num_points), size))
            block = np.full((len(placed), num_parts), num_points)
            block[:, np.array(pattern, bool)] = np.array(placed, int).reshape(len(placed), size)
            rows.append(block)
    return np.concatenate(rows)


def _as_masks(rows: Int[np.ndarray, "rows parts"], num_points: int) -> Int[np.ndarray, " rows"]:
    return np.where(rows < num_points, 1 << rows, 0).sum(axis=1)


def _columns(
    key: Int[np.ndarray, " n"], num_keys: int, *values: tuple[Int[np.ndarray, " n"], int]
) -> list[Int[np.ndarray, "most keys"]]:
    """List the values of each key in a column; each array of values comes with its empty mark."""
    order = np.argsort(key, kind="stable")
    counts = np.bincount(key, minlength=num_keys)
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = []
    for value, empty in values:
        column = np.full((counts.max(), num_keys), empty)
        column[place, key[order]] = value[order]
        columns.append(column)
    return columns


def _windows(num_points: int, sizes: tuple[int, ...]) -> list[range]:
    """The sizes that the point sets of the first 0, 1, ..., K objects can have."""
    return [
        range(max(0, num_points - sum(sizes[k:])), min(num_points, sum(sizes[:k])) + 1)
        for k in range(len(sizes) + 1)
    ]
