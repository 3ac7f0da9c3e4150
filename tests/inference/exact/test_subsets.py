"""The combinatorics of exact inference, against plain listing."""

import itertools

import numpy as np
import pytest

from inference.exact import subsets
from models.errors import InputError


def listed_injections(num_points, num_parts):
    """Every way to give each part a point of its own or none (num_points)."""
    return {
        assignment
        for assignment in itertools.product(range(num_points + 1), repeat=num_parts)
        if len(used := [a for a in assignment if a < num_points]) == len(set(used))
    }


@pytest.mark.parametrize(
    ("num_points", "num_parts", "fewest"),
    [(1, 1, 0), (2, 3, 0), (4, 2, 0), (3, 3, 0), (5, 3, 0), (4, 5, 2), (5, 4, 4)],
)
def test_all_placements_are_listed_once(num_points, num_parts, fewest):
    placed = subsets.placements(num_points, num_parts, fewest)
    ways, width = placed.ways, len(placed.right)
    rows = []
    for column, mask in zip(ways.T, placed.masks, strict=True):
        for cell in column[column < placed.subset.size]:
            i, j = divmod(int(cell), width)
            assert placed.masks[placed.subset[i, j]] == mask
            row = (*placed.left[i].tolist(), *placed.right[j].tolist())
            assert sum(1 << point for point in row if point < num_points) == mask
            np.testing.assert_array_equal(
                placed.left_met[placed.left_pattern[i]], placed.left[i] < num_points
            )
            np.testing.assert_array_equal(
                placed.right_met[placed.right_pattern[j]], placed.right[j] < num_points
            )
            rows.append(row)
    wanted = {
        row
        for row in listed_injections(num_points, num_parts)
        if sum(point < num_points for point in row) >= fewest
    }
    assert len(rows) == len(set(rows))
    assert set(rows) == wanted
    listed = placed.subset < len(placed.masks)
    assert listed.sum() == len(rows)  # and nothing else is taken for a placement
    assert placed.subset.size <= subsets.count_placements(num_points, num_parts)


@pytest.mark.parametrize(
    ("num_points", "sizes"), [(3, (2, 2)), (4, (1, 2, 3)), (6, (3, 3)), (1, (2, 2)), (2, (4,))]
)
def test_the_levels_hold_every_way_to_share_out_the_points(num_points, sizes):
    """Follow the splits down from the full set and compare with listing."""
    levels = subsets.levels(num_points, sizes)
    found = []

    def follow(k, place, chosen):
        if k < 0:
            found.append(tuple(chosen[::-1]))
            return
        level, own = levels[k], masks_of(num_points, sizes, k)
        columns = level.subset_of_set[:, place], level.rest_of_set[:, place]
        for subset, rest in zip(*columns, strict=True):
            if subset < len(own):
                follow(k - 1, rest, [*chosen, int(own[subset])])

    assert levels[-1].masks.tolist() == [2**num_points - 1]
    follow(len(sizes) - 1, 0, [])
    wanted = set()
    for labels in itertools.product(range(len(sizes)), repeat=num_points):
        counts = np.bincount(labels, minlength=len(sizes))
        if (counts <= sizes).all():
            wanted.add(
                tuple(
                    sum(1 << m for m in range(num_points) if labels[m] == k)
                    for k in range(len(sizes))
                )
            )
    assert len(found) == len(set(found))
    assert set(found) == wanted
    splits = 0
    for k, level in enumerate(levels):
        num_before = 1 if k == 0 else len(levels[k - 1].masks)
        num_subsets, num_sets = len(masks_of(num_points, sizes, k)), len(level.masks)
        by_set = triples(level.subset_of_set, level.rest_of_set, num_subsets)
        by_subset = triples(level.set_of_subset, level.rest_of_subset, num_sets)
        by_rest = triples(level.set_of_rest, level.subset_of_rest, num_sets)
        assert {(s, subset, rest) for s, subset, rest in by_set} == {
            (s, subset, rest) for subset, s, rest in by_subset
        }
        assert {(s, subset, rest) for rest, s, subset in by_rest} == set(by_set)
        assert all(rest < num_before for _, _, rest in by_set)
        splits += len(by_set)
    assert splits == subsets.count_splits(num_points, sizes)


def masks_of(num_points, sizes, k):
    fewest = subsets.fewest(num_points, sizes, k)
    return subsets.placements(num_points, sizes[k], fewest).masks


def triples(first, second, empty):
    """The entries of two lists down columns, each with its column."""
    return [
        (column, int(a), int(b))
        for column in range(first.shape[1])
        for a, b in zip(first[:, column], second[:, column], strict=True)
        if a < empty
    ]


def test_members_are_the_bits():
    assert subsets.members(np.array([0, 5]), 3).tolist() == [[False] * 3, [True, False, True]]


def test_what_is_too_large_is_refused_before_it_is_made():
    subsets.refuse_if_too_large(11, (4, 3, 4))
    with pytest.raises(InputError, match=r"30 points and objects of \(10, 10, 10\) parts .* GiB"):
        subsets.refuse_if_too_large(30, (10, 10, 10))
