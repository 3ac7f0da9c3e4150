"""The four metrics: by hand, against scikit-learn, and CCAE's published row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, mutual_info_score

from inference.metrics import partition_metrics, same_partition

LOG2 = np.log(2)
CASES = {
    "the same": ([0, 0, 1, 1], [5, 5, 3, 3], (1, 1, 0, 1)),
    "one point astray": ([0, 0, 0, 1], [0, 0, 1, 1], (0.75, 0, None, 0)),
    "two halves for a whole": ([0, 0, 0, 0], [0, 0, 1, 1], (0.5, 0, LOG2, 0)),
    "crossed": ([0, 0, 1, 1], [0, 1, 0, 1], (0.5, -0.5, 2 * LOG2, 0)),
    "missing ones count as a group": ([0, 0, -1, -1], [1, 1, -1, -1], (1, 1, 0, 1)),
    "a single row": ([0], [2], (1, 1, 0, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_by_hand(case):
    truth, predicted, wanted = CASES[case]
    found = partition_metrics(np.array([truth]), np.array([predicted]))
    for name, value in zip(("sa", "ari", "vi", "scene_accuracy"), wanted, strict=True):
        if value is not None:
            assert found[name][0] == pytest.approx(value, abs=1e-12), name


def test_a_value_for_each_scene():
    truth = np.array([[0, 0, 1, 1], [0, 0, 0, 1]])
    found = partition_metrics(truth, np.array([[0, 0, 1, 1], [0, 0, 1, 1]]))
    assert found["sa"].tolist() == [1, 0.75]
    assert found["scene_accuracy"].tolist() == [1, 0]


labels = st.lists(st.integers(-1, 3), min_size=7, max_size=7).map(np.array)


@given(labels, labels, st.permutations(range(5)))
def test_names_and_order_do_not_matter(truth, predicted, names):
    found = partition_metrics(truth[None], predicted[None])
    renamed = partition_metrics(np.array(names)[truth + 1][None], predicted[None])
    turned = partition_metrics(predicted[None], truth[None])
    rows = np.random.default_rng(0).permutation(7)
    moved = partition_metrics(truth[rows][None], predicted[rows][None])
    for name, value in found.items():
        for other in (renamed, turned, moved):
            np.testing.assert_allclose(other[name], value, atol=1e-12)


@given(labels, labels)
def test_against_scikit_learn(truth, predicted):
    found = partition_metrics(truth[None], predicted[None])
    assert found["ari"][0] == pytest.approx(adjusted_rand_score(truth, predicted))
    entropies = mutual_info_score(truth, truth) + mutual_info_score(predicted, predicted)
    information = mutual_info_score(truth, predicted)
    assert found["vi"][0] == pytest.approx(entropies - 2 * information, abs=1e-9)
    same = found["vi"][0] < 1e-9
    assert found["scene_accuracy"][0] == same == (found["sa"][0] == 1)
    assert same_partition(truth[None], predicted[None])[0] == same


PUBLISHED = {
    "0.00": (0.950, 0.897, 0.157, 0.736),
    "0.10": (0.867, 0.729, 0.403, 0.386),
    "0.25": (0.774, 0.621, 0.540, 0.033),
}


@pytest.mark.parametrize("sigma", PUBLISHED)
def test_the_published_row_of_ccae(shared_data, sigma):
    with np.load(shared_data / f"constellations_{sigma}.npz") as file:
        present, truth, predicted = (file[n] for n in ("present", "object", "ccae_object"))
    occupied = present.any(axis=1)
    truth = np.where(present, truth, -1)[occupied]
    predicted = np.where(present, predicted, -1)[occupied]
    found = partition_metrics(truth, predicted)
    means = [found[name].mean() for name in ("sa", "ari", "vi", "scene_accuracy")]
    np.testing.assert_allclose(means, PUBLISHED[sigma], atol=5.01e-4)
