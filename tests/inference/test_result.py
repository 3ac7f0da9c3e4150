"""The result type: its status, its scenes one by one, and the partition it reads."""

from dataclasses import replace

import numpy as np
import pytest

from inference.result import Result, join_results, partition
from models.scenes import Scene

OWNER = np.array([0, 0, 1])


def make_result(**options):
    present = np.array([[True, True, False], [True, True, True]])
    fields = {
        "method": "ds",
        "scene": Scene(np.arange(12.0).reshape(2, 3, 2), present),
        "match_probs": np.tile(np.eye(3), (2, 1, 1)),
        "pose_mean": np.arange(8.0).reshape(2, 2, 2),
        "pose_covariance": np.tile(np.eye(2), (2, 2, 1, 1)),
        "labels": np.array([[0, 0, -1], [0, 0, 1]]),
        "owner": OWNER,
        "converged": np.array([True, False]),
        "steps": np.array([4, 9]),
        "elbo": np.array([-1.0, -3.0]),
    }
    return Result(**(fields | options))


def test_the_status_of_a_batch():
    assert make_result().status == "ds: 1 of 2 scenes converged, ELBO -2.000 ± 1 on average"
    assert make_result(elbo=None).status == "ds: 1 of 2 scenes converged"


def test_the_status_of_a_scene():
    assert make_result().take(0).status == "ds: converged after 4 steps, ELBO -1.000"
    assert make_result().take(1).status == "ds: did not converge after 9 steps, ELBO -3.000"
    exact = make_result(elbo=None, log_evidence=np.array([1.5, 2.0]))
    assert exact.take(1).status == "ds: did not converge after 9 steps, log evidence 2.000"


def test_a_scene_of_a_batch():
    batch = make_result(partitions=["a", "b"], details={"cost": np.array([2.0, 3.0])})
    assert batch.is_batch
    assert len(batch) == 2
    scene = batch.take(1)
    assert not scene.is_batch
    assert len(scene) == 1
    assert scene.match_probs.shape == (3, 3)
    assert scene.pose_mean.tolist() == [[4, 5], [6, 7]]
    assert scene.scene.points.shape == (3, 2)
    assert scene.elbo == -3
    assert scene.partitions == "b"
    assert scene.details == {"cost": 3.0}
    assert scene.owner.tolist() == OWNER.tolist()
    assert scene.take(0) is scene


def test_a_scene_of_a_batch_has_its_own_history():
    history = {
        "elbo": np.array([[-5.0, -1.0], [-9.0, -3.0]]),
        "match_probs": np.zeros((2, 2, 3, 3)),
    }
    scene = make_result(history=history).take(1)
    assert scene.history["elbo"].tolist() == [-9, -3]
    assert scene.history["match_probs"].shape == (2, 3, 3)


def test_batches_are_joined():
    first = make_result(partitions=["a", "b"], conditions={"sigma": np.array([1.0, 2.0])})
    second = make_result(partitions=["c", "d"], conditions={"sigma": np.array([3.0, 4.0])})
    whole = join_results([replace(first, seconds=1.0), replace(second, seconds=2.0)])
    assert len(whole) == 4 and whole.seconds == 3
    assert whole.partitions == ["a", "b", "c", "d"]
    assert whole.conditions["sigma"].tolist() == [1, 2, 3, 4]
    assert whole.scene.points.shape == (4, 3, 2)
    assert whole.owner.tolist() == OWNER.tolist() and whole.log_evidence is None
    assert whole.take(3).conditions == {"sigma": 4.0}


def test_results_do_not_change():
    with pytest.raises(AttributeError):
        make_result().elbo = 3


def test_the_partition_goes_by_the_mass_of_the_object():
    """Two parts with 0.3 each outweigh one with 0.4."""
    match_probs = np.array([[0.3, 0.3, 0.4], [0.1, 0.2, 0.7], [0.6, 0.5, -0.1]])
    found = partition(match_probs, OWNER, np.array([True, True, False]))
    assert found.tolist() == [0, 1, -1]
    batch = partition(match_probs[None], OWNER, np.ones((1, 3), bool))
    assert batch.tolist() == [[0, 1, 0]]
