"""The best assignment against scipy's; random permutations with a given mean."""

import jax
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from models.numerics.assignment import best_assignment, birkhoff_draw
from tests import oracle

best = jax.jit(best_assignment)


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_the_best_assignment_of_a_batch(scale):
    scores = scale * np.random.default_rng(0).normal(size=(2, 4, 6, 6))
    columns = np.asarray(best(scores))
    for index in np.ndindex(2, 4):
        _, expected = linear_sum_assignment(scores[index], maximize=True)
        np.testing.assert_array_equal(columns[index], expected)


@pytest.mark.parametrize("seed", range(10))
def test_forbidden_pairs_are_avoided(seed):
    rng = np.random.default_rng(seed)
    scores = 100 * rng.normal(size=(5, 5))
    scores[(rng.random((5, 5)) < 0.5) & (np.eye(5) == 0)] = -np.inf  # the identity stays possible
    totals = oracle.scores(scores, oracle.permutations(5))
    columns = np.asarray(best(scores))
    np.testing.assert_array_equal(columns, oracle.permutations(5)[np.argmax(totals)])


def test_equal_scores_give_some_permutation():
    assert sorted(best(np.zeros((5, 5))).tolist()) == [0, 1, 2, 3, 4]


def test_random_permutations_have_the_given_mean():
    draws = 20_000
    probs = oracle.sinkhorn(np.random.default_rng(1).normal(size=(4, 4)))
    keys = jax.random.split(jax.random.key(0), draws)
    columns = np.asarray(jax.jit(jax.vmap(birkhoff_draw, (0, None)))(keys, probs))
    frequencies = oracle.as_matrices(columns, 4).mean(axis=0)
    assert (abs(frequencies - probs) <= 5 * np.sqrt(probs * (1 - probs) / draws)).all()
