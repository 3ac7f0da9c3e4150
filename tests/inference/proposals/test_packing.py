"""The best set of candidates that share no point, against all sets."""

import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from inference.proposals.beam import beam_search
from inference.proposals.packing import Packing, best_packing, upper_bound, value_of
from inference.proposals.plan import Plan

N, C = 8, 6
KIND = np.array([0, 1, 0])  # the first and the last object are twins


def plan(num_slots: int = 0) -> Plan:
    owner = np.r_[np.repeat(np.arange(3), 3), np.full(num_slots, 3)]
    members, valid = np.arange(9).reshape(3, 3), np.ones((3, 3), bool)
    return Plan(owner, KIND, np.array([0, 1]), np.array([0, 1, 0]), members, valid, 2, ())


def problem(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gains, the points of each candidate, and which rows are points; some are no candidates."""
    rng = np.random.default_rng(seed)
    claims = np.zeros((2, N, C), bool)
    for kind, c in itertools.product(range(2), range(C)):
        claims[kind, rng.choice(N - 1, rng.integers(2, 4), replace=False), c] = True
    gain = rng.normal(2.0, 2.0, size=(2, C))[KIND]
    gain[:, 4] = -np.inf
    return gain, claims, np.arange(N) < N - 1


def value(choice, gain, claims, present, outside, lack, num_slots):
    """Of a parse, or None where two of its candidates share a point."""
    own = [claims[KIND[k], :, c] for k, c in enumerate(choice) if c < C]
    if sum(own, np.zeros(N, int)).max() > 1:
        return None
    left = int(present.sum() - sum(x.sum() for x in own))
    alone = len(KIND) - len(own) + num_slots
    total = sum(gain[k, c] for k, c in enumerate(choice) if c < C)
    return total - max(lack * left, outside * max(left - alone, 0))


def best_by_listing(*given):
    values = (value(choice, *given) for choice in itertools.product(range(C + 1), repeat=3))
    return max(x for x in values if x is not None)


@pytest.mark.parametrize("num_slots", [0, 2])
@pytest.mark.parametrize(("outside", "lack"), [(3.0, 0.0), (3.0, 1.0), (0.5, 4.0), (50.0, 0.0)])
@pytest.mark.parametrize("seed", range(6))
def test_no_set_of_candidates_is_better(seed, outside, lack, num_slots):
    gain, claims, present = problem(seed)
    choice = best_packing(gain, claims, present, outside, lack, plan=plan(num_slots))
    given = (gain, claims, present, outside, lack, num_slots)
    assert value(choice, *given) == pytest.approx(best_by_listing(*given), abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_a_wide_beam_finds_the_same(seed):
    gain, claims, present = problem(seed)
    kept = beam_search(jnp.asarray(gain), jnp.asarray(claims), jnp.asarray(present), plan(), 64)
    given = (gain, claims, present, 0.0, 0.0, 0)
    values = [value(c, *given) for c in np.asarray(kept) if (c >= 0).all()]
    assert max(x for x in values if x is not None) == pytest.approx(best_by_listing(*given))
    assert None not in values


@pytest.mark.parametrize("seed", range(6))
def test_values_and_their_bound_are_those_of_plain_loops(seed):
    given = (*problem(seed), 50.0, 1.0)
    found = []
    for choice in itertools.product(range(C + 1), repeat=3):
        wanted = value(choice, *given, 2)
        if wanted is not None and np.isfinite(wanted):
            found.append(value_of(np.array(choice), *given, plan=plan(2)))
            assert found[-1] == pytest.approx(wanted)
    assert max(found) <= upper_bound(*given[:2], plan(2))


def test_the_bound_is_reached_where_the_best_candidates_share_no_point():
    gain, claims = np.full((3, C), -1.0), np.zeros((2, N, C), bool)
    claims[0, :3, 0], claims[0, 3:5, 1], claims[1, 5:, 0] = True, True, True
    claims[0, :2, 2] = True  # the first candidate of squares less a point
    gain[[0, 2]] = [6.0, 4.0, 3.9, -1.0, -1.0, -1.0]
    gain[1, 0] = 9.0
    # By objects 6 + 4 + 9; by points 3 (6/3), 2 (4/2), 3 (9/3).
    assert upper_bound(gain, claims, plan()) == pytest.approx(19.0)
    claims[0, :2, 1] = True  # now two candidates of squares share points
    assert upper_bound(gain, claims, plan()) == pytest.approx(2 * 3 + 2 * 1 + 9)


def test_what_a_narrow_beam_loses_is_found_by_packing():
    known = SimpleNamespace(outside=np.full(6, 3.0), lack=np.full(6, 0.0))
    problems = [problem(seed) for seed in range(6)]
    gain, claims, present = (np.stack(x) for x in zip(*problems, strict=True))
    kept = np.stack([beam_search(*map(jnp.asarray, own), plan(), 1) for own in problems])
    packing = Packing(known, None, gain, claims, present, kept)
    lost = 0
    for own, beam, choices in zip(problems, kept, packing.choices(plan()), strict=True):
        given = (*own, 3.0, 0.0, 0)
        values = [value(choice, *given) for choice in choices if (choice >= 0).all()]
        assert max(values) == pytest.approx(best_by_listing(*given))
        assert len(np.unique(choices, axis=0)) == len(choices)
        lost += value(beam[0], *given) < max(values) - 1e-6
    assert lost > 0


def test_nothing_is_worth_it():
    gain, claims, present = problem(0)
    choice = best_packing(-abs(gain), claims, present, 0.0, 0.0, plan=plan())
    np.testing.assert_array_equal(choice, np.full(3, C))
