"""The four metrics: by hand, against scikit-learn, and CCAE's published row."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate
from scipy.stats import t as student_t
from sklearn.metrics import adjusted_rand_score, mutual_info_score

from inference.diagnostics.metrics import (
    METRICS,
    Summary,
    ccae_scores,
    paired_test,
    partition_metrics,
    same_partition,
    score,
    slot_labels,
    summarise,
)
from inference.result import Result, partition
from models.errors import InputError
from models.scenes import Scene

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


# --- the protocol of slots ----------------------------------------------------------------------

OWNER = np.array([0, 0, 1, 2, 2])  # two identical objects of two parts, and one of one


def result_of(match_probs, present, truth, **more):
    """A result with these match probabilities for a batch of scenes."""
    match_probs, present = np.asarray(match_probs, float), np.asarray(present, bool)
    count = len(match_probs)
    scene = Scene(np.zeros((*present.shape, 2)), present, np.asarray(truth))
    return Result(
        method="hand",
        scene=scene,
        match_probs=match_probs,
        pose_mean=np.zeros((count, 3, 4)),
        pose_covariance=np.zeros((count, 3, 4, 4)),
        labels=partition(match_probs, OWNER, present),
        owner=OWNER,
        converged=np.ones(count, bool),
        steps=np.ones(count, int),
        **more,
    )


def permutation(*columns):
    return np.eye(len(columns))[list(columns)]


PRESENT, TRUTH = [True, True, True, False, False], [0, 0, 1, -1, -1]


def test_slots_by_hand():
    """A square alone in the twin's slots: its own slots count as missing."""
    present, truth = [True, True, False, False, False], [0, 0, -1, -1, -1]
    right = result_of([permutation(0, 1, 2, 3, 4)], [present], [truth])
    assert slot_labels(right).tolist() == [[0, 0, -1, -1, -1]]
    assert {name: value.tolist() for name, value in score(right)["slots"].items()} == {
        "sa": [1], "ari": [1], "vi": [0], "scene_accuracy": [1]
    }  # fmt: skip
    match_probs = permutation(3, 4, 0, 1, 2)
    match_probs[2:, :3] = 1 / 3  # the dummies share what is left, most of it of object 0
    twin = result_of([match_probs], [present], [truth])
    assert slot_labels(twin).tolist() == [[-1, -1, -1, 0, 0]]
    found = score(twin)
    assert found["partition"]["scene_accuracy"] == [1]
    assert found["slots"]["scene_accuracy"] == [0]
    assert found["slots"]["sa"][0] == pytest.approx(4 / 5)  # {0 1} in {0 1 2}, {3 4} in {2 3 4}
    # Truth 2 + 3, prediction 3 + 2, and 2, 1 and 2 rows in common: by hand
    joint = -(2 * 0.4 * np.log(0.4) + 0.2 * np.log(0.2))
    single = -(0.4 * np.log(0.4) + 0.6 * np.log(0.6))
    assert found["slots"]["vi"][0] == pytest.approx(2 * joint - 2 * single)


def test_a_little_mass_fills_a_slot():
    match_probs = permutation(0, 1, 2, 3, 4)
    present, truth = [True, True, False, False, False], [0, 0, -1, -1, -1]
    for mass, wanted in ((0.9e-3, -1), (1.1e-3, 2)):
        leaky = match_probs.copy()
        leaky[0, [0, 3]] = 1 - mass, mass
        result = result_of([leaky], [present], [truth])
        assert slot_labels(result)[0, 3] == wanted
    # What dummy rows have does not count.
    assert slot_labels(result_of([match_probs], [present], [truth]))[0, 2] == -1


def test_a_most_probable_match_says_the_slots():
    """Marginals of an exact method fill the slots of all identical objects."""
    present, truth = [True, True, False, False, False], [0, 0, -1, -1, -1]
    averaged = np.full((5, 5), 0.2)
    best = np.array([[0, 1, -1, -1, -1]])
    without = result_of([averaged], [present], [truth])
    assert (slot_labels(without) >= 0).all()
    result = result_of([averaged], [present], [truth], best_match=best)
    assert slot_labels(result).tolist() == [[0, 0, -1, -1, -1]]


def test_scenes_without_a_truth_are_refused():
    result = result_of([permutation(0, 1, 2, 3, 4)], [PRESENT], [TRUTH])
    with pytest.raises(InputError, match="no truth to compare with"):
        score(replace(result, scene=result.scene._replace(object=None)))


def test_a_truth_of_more_objects_than_the_program_has_is_refused():
    """As many rows, but other shapes: the label K must not pass for clutter."""
    result = result_of([permutation(0, 1, 2, 3, 4)], [PRESENT], [TRUTH])
    more = np.where(np.array([TRUTH]) == 0, result.owner.max() + 1, TRUTH)
    with pytest.raises(InputError, match=r"truth has an object 3, but .* objects 0 to 2"):
        score(replace(result, scene=result.scene._replace(object=more)))


def test_an_object_more_does_not_pass_for_clutter():
    """A scene of one object more has points labelled K, more than the program has slots for."""
    owner = np.array([0, 0, 1, 2, 2])  # two objects, and two slots for clutter
    result = result_of([permutation(0, 1, 2, 3, 4)], [PRESENT], [TRUTH])
    result = replace(result, owner=owner, pose_mean=result.pose_mean[..., :2, :])
    for truth, is_possible in (([0, 0, 1, 2, 2], True), ([0, 1, 2, 2, 2], False)):
        scene = result.scene._replace(present=np.ones((1, 5), bool), object=np.array([truth]))
        asked = replace(result, scene=scene, labels=np.array([truth]))
        if is_possible:
            assert score(asked)["partition"]["scene_accuracy"] == 1
        else:
            with pytest.raises(InputError, match="has 2 slots where a scene has 3 such points"):
                score(asked)


# --- how sure a mean is -------------------------------------------------------------------------


def test_standard_error_and_interval():
    values = (np.arange(400) < 300).astype(float)
    found = summarise(values)
    error = np.sqrt(0.75 * 0.25 / 399)  # of a share
    assert found.mean == 0.75
    assert found.standard_error == pytest.approx(error)
    # A bootstrap quantile of 2000 resamples has a standard error of about 0.06 of that.
    assert found.low == pytest.approx(0.75 - 1.96 * error, abs=0.3 * error)
    assert found.high == pytest.approx(0.75 + 1.96 * error, abs=0.3 * error)
    assert summarise(values) == found
    assert np.isnan(summarise(values[:1]).standard_error)
    assert "±" not in summarise(values[:1]).text()
    assert Summary(0.5, 0.25, 0, 1).text() == "0.500 ± 0.250"
    assert Summary(0.5, 0.25, 0, 1).text(100, 1) == "50.0 ± 25.0"
    assert summarise(np.ones(7)) == (1, 0, 1, 1)


def test_paired_test_by_its_formula():
    rng = np.random.default_rng(3)
    first, second = rng.normal([[0.3], [0.0]], size=(2, 50))
    found = paired_test(first, second)
    difference = first - second
    t = difference.mean() / (difference.std(ddof=1) / np.sqrt(50))
    assert found.difference == pytest.approx(difference.mean())
    assert found.t == pytest.approx(t)
    tail = integrate.quad(lambda x: student_t.pdf(x, 49), abs(t), np.inf)[0]
    assert found.p == pytest.approx(2 * tail, rel=1e-6)
    back = paired_test(second, first)
    assert (back.difference, back.t) == pytest.approx((-found.difference, -t))


def test_paired_test_of_what_does_not_vary():
    ones = np.ones(5)
    assert paired_test(ones, ones) == (0, 0, 1)
    assert paired_test(0 * ones, ones) == (-1, -np.inf, 0)


# --- CCAE ---------------------------------------------------------------------------------------

PUBLISHED = {
    "0.00": {
        "slots": (0.828, 0.599, 0.481, 0.365),
        "partition": (0.950, 0.897, 0.157, 0.736),
    },
    "0.10": {
        "slots": (0.754, 0.484, 0.689, 0.138),
        "partition": (0.867, 0.729, 0.403, 0.386),
    },
    "0.25": {
        "slots": (0.623, 0.248, 0.988, 0.033),
        "partition": (0.774, 0.621, 0.540, 0.033),
    },
}


@pytest.mark.parametrize("sigma", PUBLISHED)
def test_the_published_row_of_ccae(shared_data, sigma):
    with np.load(shared_data / f"constellations_{sigma}.npz") as file:
        arrays = [file[n] for n in ("present", "object", "ccae_object", "ccae_present")]
    occupied = arrays[0].any(axis=1)
    _, truth, predicted, present = (x[occupied] for x in arrays)
    owner = np.repeat([0, 1, 2], [4, 3, 4])
    found = ccae_scores(truth.astype(int), predicted, present, owner)
    for protocol, wanted in PUBLISHED[sigma].items():
        means = [found[protocol][name].mean() for name in METRICS]
        np.testing.assert_allclose(means, wanted, atol=5.01e-4, err_msg=protocol)
