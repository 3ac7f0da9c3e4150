"""The best sets of candidates that share no point, against all sets."""

import itertools

import numpy as np
import pytest

from inference.proposals import packing
from inference.proposals.packing import Columns, Points, best_parses, given_away, relax, value_of
from inference.proposals.plan import Plan

N, C = 8, 6
TWIN = np.array([0, 1, 0])  # the first and the last object are twins
SETTINGS = [(3.0, 0.0), (3.0, 1.0), (0.5, 4.0), (50.0, 0.0)]


def plan(num_slots: int = 0) -> Plan:
    owner = np.r_[np.repeat(np.arange(3), 3), np.full(num_slots, 3)]
    members, valid = np.arange(9).reshape(3, 3), np.ones((3, 3), bool)
    bases = np.array([[[0, 1]], [[0, 1]]])
    return Plan(
        owner, TWIN, np.array([0, 1]), TWIN, members, valid, 2, bases, np.ones((2, 1), bool)
    )


def problem(seed: int) -> Columns:
    """Six columns for the twins and six for the other object, each of two or three points."""
    rng = np.random.default_rng(seed)
    match = np.full((2 * C, 3), -1)
    for own in match:
        some = rng.choice(N - 1, rng.integers(2, 4), replace=False)
        own[: len(some)] = some
    points = (match[..., None] == np.arange(N)).any(axis=1)
    group = np.repeat([0, 1], C)
    return Columns(
        group, np.ones(2 * C, int), match, points, rng.normal(2.0, 2.0, 2 * C), np.zeros(2 * C)
    )


def scene(outside: float, lack: float, free: bool = True) -> Points:
    return Points(np.arange(N) < N - 1, outside, lack, free)


def all_values(columns: Columns, points: Points, num_slots: int) -> dict[frozenset[int], float]:
    """The value of every parse, by plain loops."""
    first, second = (
        [(), *itertools.combinations(np.flatnonzero(columns.group == j), 1)] for j in (0, 1)
    )
    pairs = list(itertools.combinations(np.flatnonzero(columns.group == 0), 2))
    values = {}
    for own in itertools.product([*first, *pairs], second):
        chosen = [int(c) for some in own for c in some]
        taken = [m for c in chosen for m in np.flatnonzero(columns.points[c])]
        if len(taken) > len(set(taken)):
            continue
        left = int(points.present.sum()) - len(taken)
        beyond = left - points.free * (3 - len(chosen)) - num_slots
        cost = max(points.lack * left, points.outside * max(beyond, 0))
        values[frozenset(chosen)] = sum(columns.gain[c] for c in chosen) - cost
    return values


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("num_slots", [0, 2])
@pytest.mark.parametrize(("outside", "lack"), SETTINGS)
@pytest.mark.parametrize("seed", range(6))
def test_the_best_parses_are_those_of_plain_loops(seed, outside, lack, num_slots, free):
    columns, points = problem(seed), scene(outside, lack, free)
    every = all_values(columns, points, num_slots)
    price = relax(columns, points, plan(num_slots))
    found = best_parses(columns, price, points, plan(num_slots), 5)
    values = [value_of(columns.take(own), points, plan(num_slots)) for own in found]
    assert values == pytest.approx(sorted(every.values(), reverse=True)[: len(values)])
    assert values == pytest.approx([every[frozenset(own.tolist())] for own in found])
    assert len({frozenset(own.tolist()) for own in found}) == len(found)


@pytest.mark.parametrize(("outside", "lack"), SETTINGS)
@pytest.mark.parametrize("seed", range(6))
def test_what_columns_give_away_bounds_the_value_of_every_parse(seed, outside, lack):
    columns, points = problem(seed), scene(outside, lack)
    price = relax(columns, points, plan(1))
    loss = given_away(columns, price, points, plan(1))
    assert loss.min() > -1e-9
    for chosen, value in all_values(columns, points, 1).items():
        assert price.value - value >= sum(loss[c] for c in chosen) - 1e-9


def test_a_point_that_two_objects_want_has_a_price():
    """Both want point 2: one gains 5 with it and 1 without, the other 4 and 3."""
    match = np.array([[0, 1, 2], [0, 1, -1], [3, 2, -1], [3, 4, -1]])
    points = (match[..., None] == np.arange(N)).any(axis=1)
    columns = Columns(
        np.array([0, 0, 1, 1]),
        np.ones(4, int),
        match,
        points,
        np.array([5.0, 1, 4, 3]),
        np.zeros(4),
    )
    price = relax(columns, scene(0.0, 0.0), plan())
    assert price.value == pytest.approx(8.0)
    loss = given_away(columns, price, scene(0.0, 0.0), plan())
    assert loss[[0, 3]] == pytest.approx(0.0, abs=1e-9)
    # Beside the point that the other object has instead, what it would gain with this one.
    assert price.point[2] - price.point[4] == pytest.approx(loss[2] + 1.0)
    (best, *_) = best_parses(columns, price, scene(0.0, 0.0), plan(), 4)
    assert sorted(best.tolist()) == [0, 3]


def test_few_partial_parses_still_give_a_parse(monkeypatch):
    monkeypatch.setattr(packing, "MAX_PARTIAL", 1)
    columns, points = problem(0), scene(3.0, 0.0)
    price = relax(columns, points, plan())
    found = best_parses(columns, price, points, plan(), 4)
    every = all_values(columns, points, 0)
    assert every[frozenset(found[0].tolist())] <= max(every.values()) + 1e-9
    assert len(found[0])


@pytest.mark.parametrize("seed", range(3))
def test_where_the_relaxed_problem_says_little_the_integer_program_has_the_best(seed, monkeypatch):
    monkeypatch.setattr(packing, "NEAR", ())
    columns, points = problem(seed), scene(50.0, 0.0)
    found = best_parses(columns, relax(columns, points, plan()), points, plan(), 4)
    every = all_values(columns, points, 0)
    assert every[frozenset(found[0].tolist())] == pytest.approx(max(every.values()))


def test_nothing_is_worth_it():
    columns, points = problem(0), scene(0.0, 0.0)
    columns = columns._replace(gain=-abs(columns.gain))
    found = best_parses(columns, relax(columns, points, plan()), points, plan(), 4)
    assert len(found[0]) == 0


def test_of_columns_with_the_same_points_the_best_is_kept():
    columns = problem(1)
    worse = columns._replace(gain=columns.gain - 1.0, match=columns.match[:, ::-1])
    kept = worse.joined(columns)
    assert sorted(kept.gain) == pytest.approx(sorted(columns.joined(columns).gain))


def test_more_than_sixty_four_points_are_told_apart():
    sets = np.eye(130, dtype=bool)
    words = packing._words(sets)
    assert words.shape == (130, 3)
    assert len(np.unique(words, axis=0)) == 130
    assert not (words[:1] & words[1:]).any()
