"""Reliability: bins by hand, and probabilities that mean what they say."""

from dataclasses import replace

import numpy as np
import pytest

from inference.diagnostics.reliability import pairs_together, reliability
from inference.plots.reliability import plot_reliability
from inference.result import Result
from models.errors import InputError
from models.scenes import Scene


def test_bins_are_those_counted_by_hand():
    probs = np.array([0.05, 0.15, 0.17, 0.95, 1.0])
    found = reliability(probs, np.array([False, True, False, True, True]))
    np.testing.assert_allclose(found.said, [0.05, 0.16, 0.975])
    np.testing.assert_allclose(found.happened, [0, 0.5, 1])
    np.testing.assert_array_equal(found.events, [1, 2, 2])
    assert found.error == pytest.approx((0.05 + 2 * 0.34 + 2 * 0.025) / 5)


def test_draws_at_their_probabilities_are_reliable():
    rng = np.random.default_rng(0)
    probs = rng.random(20_000)
    honest = reliability(probs, rng.random(20_000) < probs)
    assert honest.error < 5 * 0.5 / np.sqrt(2_000)
    too_sure = reliability(probs, rng.random(20_000) < 0.5 + 0.5 * (probs - 0.5))
    assert too_sure.error > 0.1


def answer(match_probs, truth=None):
    present = np.array([True, True, True, False])
    return Result(
        method="some",
        scene=Scene(np.zeros((4, 2)), present, truth),
        match_probs=match_probs,
        pose_mean=np.zeros((2, 4)),
        pose_covariance=np.zeros((2, 4, 4)),
        labels=np.array([0, 0, 1, -1]),
        owner=np.array([0, 0, 1, 1]),
        converged=np.array(True),
        steps=np.array(1),
    )


def test_pairs_are_together_by_the_objects_of_their_parts():
    match_probs = np.array(
        [[0.5, 0.5, 0, 0], [0.1, 0.5, 0.4, 0], [0, 0.2, 0.3, 0.5], [0.4, 0, 0.1, 0.5]]
    )
    probs, happened = pairs_together(answer(match_probs, np.array([0, 0, 1, -1])))
    np.testing.assert_allclose(probs, [0.6, 0.2, 0.6 * 0.2 + 0.4 * 0.8])
    np.testing.assert_array_equal(happened, [True, False, False])
    swapped = match_probs[:, [2, 3, 0, 1]]
    np.testing.assert_allclose(pairs_together(answer(swapped, np.array([1, 1, 0, -1])))[0], probs)
    with pytest.raises(InputError, match="no truth"):
        pairs_together(answer(match_probs))


def test_averages_over_matches_do_not_say_which_points_go_together():
    """Two segments that are surely one each, in two names: marginals give each pair 1/2."""
    averaged = answer(np.full((4, 4), 0.25), np.array([0, 0, 1, -1]))
    exact = replace(averaged, method="exact", best_match=np.array([0, 1, 2, -1]))
    np.testing.assert_allclose(pairs_together(averaged)[0], 0.5)
    with pytest.raises(InputError, match="of 'exact' are averages over many matches"):
        pairs_together(exact)


def test_the_diagram_has_a_line_for_each_method():
    one = reliability(np.array([0.1, 0.9]), np.array([False, True]))
    axes = plot_reliability({"first": one, "second": one}).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "first (error 0.100)",
        "second (error 0.100)",
    ]
