"""All parses of small scenes against a list of all matches, in plain numpy."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from capsules.experiments.generator import sample_scenes
from inference.proposals import propose
from inference.proposals.parses import EDGE, NUM_PARSES
from models.constellation import cluttered_constellation, constellation, presence_constellation
from models.program.batches import read_scenes
from models.scenes import make_scene
from models.templates import shapes, stack

pytestmark = pytest.mark.long

VISIBILITY, PRESENT = 0.9, np.array([0.3, 0.6])


def scene_of(names, rows, seed=0):
    scene = sample_scenes(1, sigma=0.1, seed=seed, objects=names, presence=1.0).take(0)
    return make_scene(scene.points[rows], len(scene.points))


def placements(model, k, subset):
    """Every way to put the points of a subset on different parts of object k."""
    parts = np.flatnonzero(np.asarray(model.parts.owner)[:, 0] == k)
    for some in itertools.combinations(parts, len(subset)):
        for order in itertools.permutations(some):
            yield dict(zip(order, subset, strict=True))


def log_density(model, k, placed):
    """One Normal for all points of object k, its pose integrated out."""
    part, point = list(placed), list(placed.values())
    F = model.parts.F[part, ..., 0].reshape(-1, model.pose_mean.shape[1])
    mean = model.parts.offset[part, ..., 0].ravel() + F @ model.pose_mean[k, :, 0]
    noise = np.diag(model.parts.variance[part, ..., 0].ravel())
    covariance = F @ model.pose_covariance[k, ..., 0] @ F.T + noise
    return multivariate_normal(mean, covariance).logpdf(model.points[point, :, 0].ravel())


def best_of_subsets(model, value):
    """For each object and each subset of the points the value of its best placement."""
    sizes = np.bincount(np.asarray(model.parts.owner)[:, 0])
    points = np.flatnonzero(model.seen.any(axis=1)[:, 0])
    return [
        {
            frozenset(subset): max(
                (value(k, placed) for placed in placements(model, k, subset)), default=-np.inf
            )
            for count in range(size + 1)
            for subset in itertools.combinations(points, count)
        }
        for k, size in enumerate(sizes)
    ]


def all_parses(model, value):
    """The values of all ways to give every point to an object, best first."""
    tables = best_of_subsets(model, value)
    everything = frozenset(np.flatnonzero(model.seen.any(axis=1)[:, 0]).tolist())
    found = []
    for first, one in tables[0].items():
        rest = everything - first
        if rest in tables[1]:
            found.append((one + tables[1][rest], first, rest))
    return sorted(found, key=lambda x: -x[0])


def subsets_of(match, owner):
    return [frozenset(match[(owner == k) & (match >= 0)].tolist()) for k in range(2)]


@pytest.mark.parametrize("gate", range(len(propose.GATES)))
def test_whole_objects_are_found_through_every_gate(gate):
    names = ("square", "triangle")
    program = functools.partial(constellation, parts=stack(shapes(*names)), precision=1e3)
    scene = scene_of(names, [0, 1, 2, 4, 5])
    reading = read_scenes(program, scene.batch())
    noise = reading.model.parts.variance * propose.GATES[gate]
    model = replace(reading.model, parts=reading.model.parts._replace(variance=noise))

    def value(k, placed):
        lacks = len(np.flatnonzero(np.asarray(model.parts.owner)[:, 0] == k)) - len(placed)
        return log_density(model, k, placed) - EDGE * lacks if placed else 0.0

    passes = list(propose.exhaustive_passes([reading], np.zeros((1, 2)), True))
    found = passes[gate].search(np.array([0]))
    wanted = all_parses(model, value)[:NUM_PARSES]
    np.testing.assert_allclose(found.value[0], [x[0] for x in wanted], atol=1e-6)
    first = subsets_of(np.asarray(found.match[0, 0]), np.asarray(model.parts.owner)[:, 0])
    assert first == list(wanted[0][1:])
    sizes = np.array([4, 3])
    assert found.missing[0, 0] == sum(
        size - len(own) for size, own in zip(sizes, first, strict=True) if own
    )


@pytest.mark.parametrize("names", [("square", "triangle"), ("triangle", "triangle")])
def test_parses_are_paid_at_the_odds_of_the_program(names):
    program = functools.partial(
        presence_constellation, parts=stack(shapes(*names)), precision=1e3, visibility=VISIBILITY
    )
    scene = scene_of(names, [0, 1, 2, 3, 4])
    readings = [
        read_scenes(program, scene.batch(), {"presence": np.full((1, 2), state)})
        for state in (0, 1)
    ]
    is_twin = names[0] == names[1]
    there = np.full(2, 0.4) if is_twin else PRESENT
    model = readings[1].model
    sizes = np.bincount(np.asarray(model.parts.owner)[:, 0])

    def value(k, placed):
        seen, lacks = len(placed), sizes[k] - len(placed)
        present = np.log(there[k]) + seen * np.log(VISIBILITY) + lacks * np.log(1 - VISIBILITY)
        if not placed:
            return max(present, np.log(1 - there[k]))
        return present + log_density(model, k, placed)

    found = propose.propose(readings, np.log(np.stack([1 - there, there])), whole=False)
    wanted = all_parses(model, value)
    if is_twin:  # each parse comes twice, with the names of the objects exchanged
        wanted = wanted[::2]
    wanted = wanted[:NUM_PARSES]
    number = len(wanted)
    # Values are relative to a constant of the scene.
    np.testing.assert_allclose(
        found.value[0, :number] - found.value[0, 0],
        [x[0] - wanted[0][0] for x in wanted],
        atol=1e-6,
    )
    assert not np.isfinite(found.value[0, number:]).any()
    for match, state, (_, *own) in zip(found.match[0], found.state[0], wanted, strict=False):
        mine = subsets_of(match, np.asarray(model.parts.owner)[:, 0])
        assert set(mine) == set(own) if is_twin else mine == own
        empty_is_there = np.log(there) + sizes * np.log(1 - VISIBILITY) > np.log(1 - there)
        assert [bool(s) for s in state] == [
            bool(x) or bool(e) for x, e in zip(mine, empty_is_there, strict=True)
        ]


def test_clutter_takes_what_no_object_explains():
    names = ("square", "triangle")
    parts = stack(shapes(*names), clutter=2)
    program = functools.partial(cluttered_constellation, parts=parts, precision=1e6)
    scene = sample_scenes(1, seed=3, objects=names, presence=1.0).take(0)
    points = np.concatenate([scene.points[:4], [[0.9, -0.8], [-0.7, 0.1]]])
    reading = read_scenes(program, make_scene(points, 9).batch())
    assert propose.is_small([reading])
    found = propose.propose_whole(reading)
    slots = np.asarray(parts.owner) == 2
    assert sorted(found.match[0, 0][slots]) == [4, 5]
    assert sorted(found.match[0, 0][:4]) == [0, 1, 2, 3]


def test_large_scenes_and_points_that_are_seen_in_part_are_not_for_it():
    six = functools.partial(constellation, parts=stack(shapes("L", "plane", "L")))
    scenes = sample_scenes(1, seed=0, objects=("L", "plane", "L"), presence=1.0)
    assert not propose.is_small([read_scenes(six, scenes)])
    small = read_scenes(constellation, sample_scenes(2, seed=0))
    assert propose.is_small([small])
    seen = small.model.seen.copy()
    seen[np.flatnonzero(seen[:, 0, 0])[0], 0] = False
    in_part = small._replace(model=replace(small.model, seen=seen))
    assert not propose.is_small([in_part])
