"""The combinatorics of exact inference, against plain listing."""

import itertools

import numpy as np
import pytest

from inference import subsets
from models.errors import InputError


def listed_injections(num_points, num_parts):
    """Every way to give each part a point of its own or none (num_points)."""
    return {
        assignment
        for assignment in itertools.product(range(num_points + 1), repeat=num_parts)
        if len(used := [a for a in assignment if a < num_points]) == len(set(used))
    }


@pytest.mark.parametrize(("num_points", "num_parts"), [(1, 1), (2, 3), (4, 2), (3, 3), (5, 3)])
def test_all_injections_are_listed_once(num_points, num_parts):
    found = subsets.injections(num_points, num_parts)
    rows, masks = [], []
    for size, block in enumerate(found.blocks):
        assert block.points.shape[1] == block.parts.shape[1] == size
        for points in block.points:
            masks.append(sum(1 << int(m) for m in points))
            for parts, pattern in zip(block.parts, block.pattern, strict=True):
                row = np.full(num_parts, num_points)
                row[parts] = points
                rows.append(tuple(row.tolist()))
                assert pattern == sum(1 << int(n) for n in parts)
    assert len(rows) == len(set(rows)) == subsets.count_injections(num_points, num_parts)
    assert set(rows) == listed_injections(num_points, num_parts)
    assert found.subsets.tolist() == masks


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
        level, own = levels[k], subsets.injections(num_points, sizes[k]).subsets
        for subset, rest in zip(level.subset[place], level.rest[place], strict=True):
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
    splits = sum(
        int((level.subset < len(subsets.injections(num_points, size).subsets)).sum())
        for level, size in zip(levels, sizes, strict=True)
    )
    assert splits == subsets.count_splits(num_points, sizes)


def test_members_are_the_bits():
    assert subsets.members(np.array([0, 5]), 3).tolist() == [[False] * 3, [True, False, True]]


def test_what_is_too_large_is_refused_before_it_is_made():
    subsets.refuse_if_too_large(11, (4, 3, 4))
    with pytest.raises(InputError, match=r"30 points and objects of \(10, 10, 10\) parts .* GiB"):
        subsets.refuse_if_too_large(30, (10, 10, 10))
