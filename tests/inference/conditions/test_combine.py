"""Runs under several conditions put together."""

import numpy as np

from inference.conditions.combine import best_runs


def test_rounding_does_not_choose_between_runs_of_equal_weight():
    """Two states that differ in the names of identical objects have the same weight."""
    weight, scene_of = np.array([0.2, 0.4, 0.4 + 1e-13, 0.3, 0.7]), np.array([0, 0, 0, 1, 1])
    np.testing.assert_array_equal(best_runs(weight, scene_of, 2), [1, 4])
