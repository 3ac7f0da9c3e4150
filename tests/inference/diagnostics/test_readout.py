"""Poses given the match are read at the conditions that go with it."""

from functools import partial

import numpy as np
import pytest

from inference.diagnostics.readout import conditions_at, poses_given_match, similarity_of
from inference.result import Result
from models import sized_constellation
from models.constellation import pose_kinds
from models.geometry import similarity_pose
from models.scenes import make_scene
from models.templates import shapes, stack

PARTS = stack(shapes("square"))
SIZES = (0.15, 0.28)


def result_of(points, conditions):
    """What exact inference would say of a square that is found whole."""
    scene = make_scene(points, 4)
    return Result(
        method="exact",
        scene=scene,
        match_probs=np.eye(4),
        pose_mean=np.zeros((1, 4)),
        pose_covariance=np.eye(4)[None],
        labels=np.zeros(4, int),
        owner=np.zeros(4, int),
        converged=np.asarray(True),
        steps=np.asarray(1),
        log_evidence=np.asarray(0.0),
        best_match=np.arange(4),
        conditions=conditions,
    )


@pytest.mark.parametrize("kind", [1, 2, 3, 4])
def test_a_pose_is_that_of_the_object_of_its_own_kind(kind):
    """The posterior by hand: the prior of the kind, and noise in proportion to its size."""
    program = partial(sized_constellation, parts=PARTS, sizes=SIZES, turns=2)
    truth = np.asarray(similarity_pose(np.array([-0.3, -0.2]), 0.28, np.pi / 4))
    points = np.asarray(PARTS.predict(truth[None]))
    result = result_of(points, {"presence": np.array([kind]), "precision": np.asarray(3.0)})
    mean, covariance = poses_given_match(program, result, np.arange(4))
    prior_mean, prior_covariance, size = (np.asarray(x) for x in pose_kinds(np.array(SIZES), 2))
    weight = 3.0 / (0.15 * size[kind - 1]) ** 2
    F = np.asarray(PARTS.F).reshape(-1, 4)
    prior = np.linalg.inv(prior_covariance[kind - 1])
    precision = prior + weight * F.T @ F
    votes = prior @ prior_mean[kind - 1] + weight * F.T @ points.ravel()
    np.testing.assert_allclose(mean[0], np.linalg.solve(precision, votes), rtol=1e-9)
    np.testing.assert_allclose(covariance[0], np.linalg.inv(precision), rtol=1e-9, atol=1e-14)
    if kind == 4:  # the right one: large, and turned to the right
        assert abs(np.rad2deg(similarity_of(mean[0], covariance[0]).angle) - 45) < 1.0


def test_conditions_of_a_sampler_are_those_of_its_draws_with_the_match():
    match = np.array([[[0, 1, 2, 3], [0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 2, 3]]])
    draws = {
        "match": match,
        "pose": np.zeros((1, 4, 1, 4)),
        "presence": np.array([[[2], [2], [1], [1]]]),
        "precision": np.array([[1.0, 3.0, 50.0, 5.0]]),
    }
    exact = result_of(np.zeros((4, 2)) + np.arange(4)[:, None], {})
    sampled = Result(**{**vars(exact), "method": "gibbs", "draws": draws, "details": {}})
    found = conditions_at(sampled, np.arange(4))
    assert found["presence"].tolist() == [2]
    assert found["precision"] == 3.0


@pytest.mark.parametrize("angle", [0.0, 0.3, 2.0, -1.2])
def test_the_spread_of_scale_and_angle_is_that_of_draws(angle):
    """Along the pose is the scale, across it the angle."""
    along, across, scale = 0.03, 0.01, 0.8
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    covariance = np.diag([0.04, 0.09, 0.0, 0.0])
    covariance[2:, 2:] = turn @ np.diag([along**2, across**2]) @ turn.T
    mean = np.array([1.0, 2.0, *(scale * turn[:, 0])])
    pose = similarity_of(mean, covariance)
    draws = np.random.default_rng(0).multivariate_normal(mean, covariance, 100_000)
    lengths = np.hypot(draws[:, 2], draws[:, 3])
    angles = np.angle(np.exp(1j * (np.arctan2(draws[:, 3], draws[:, 2]) - angle)))
    np.testing.assert_allclose(pose.scale_sd, lengths.std(), rtol=0.02)
    np.testing.assert_allclose(pose.angle_sd, angles.std(), rtol=0.02)
    np.testing.assert_allclose(pose.translation_sd, [0.2, 0.3])
    np.testing.assert_allclose([pose.scale, pose.angle], [scale, angle])
