"""Whether chains have converged: by the worst R-hat, names of objects aside."""

import numpy as np

from inference.posterior.densities import log_likelihood_by_point
from inference.posterior.draws import largest_r_hat, result_of_draws
from inference.posterior.relabel import frame_at_match
from tests.inference.two_triangles import FIVE, PARTS, POSES, PROGRAM, SCENE

CHAINS, DRAWS = 4, 200


def result_with(poses, lp=None):
    """A result of chains around given poses (chain, object, pose dimension)."""
    rng = np.random.default_rng(0)
    pose = poses[:, None] + 0.01 * rng.normal(size=(CHAINS, DRAWS, 2, 4))
    places = np.asarray(PARTS.predict(POSES))
    nearest = np.linalg.norm(SCENE.points[:, None] - places, axis=-1).argmin(axis=1)
    match = np.broadcast_to(nearest, (CHAINS, DRAWS, 6))
    lp = rng.normal(size=(CHAINS, DRAWS)) if lp is None else lp
    draws = {"pose": pose, "match": match}
    return result_of_draws("nuts", PROGRAM, SCENE, draws, np.eye(6), {"lp": lp}, DRAWS)


def test_chains_whose_objects_are_swapped_have_converged():
    same = np.broadcast_to(POSES, (CHAINS, 2, 4))
    swapped = np.stack([POSES, POSES[::-1], POSES, POSES[::-1]])
    for poses in (same, swapped):
        result = result_with(poses)
        assert result.converged
        assert result.details["pose_r_hat"] < 1.03


def test_chains_at_different_poses_have_not_though_their_log_density_agrees():
    moved = np.stack([POSES, POSES, POSES + 0.1, POSES])
    result = result_with(moved)
    assert result.details["lp_r_hat"] < 1.03
    assert result.details["pose_r_hat"] > 1.5
    assert not result.converged


def test_chains_at_different_log_densities_have_not_either():
    lp = np.random.default_rng(1).normal(size=(CHAINS, DRAWS)) + 5 * np.eye(CHAINS)[:, :1]
    result = result_with(np.broadcast_to(POSES, (CHAINS, 2, 4)), lp)
    assert not result.converged


def test_the_largest_r_hat():
    rng = np.random.default_rng(2)
    values = rng.normal(size=(4, 500, 3))
    assert 0.99 < largest_r_hat(values) < 1.02
    assert 0.99 < largest_r_hat(values[:1]) < 1.03  # a chain against itself
    drifting = values[:1] + np.linspace(0, 4, 500)[:, None]
    assert largest_r_hat(drifting) > 1.5
    values[..., 1] = 7.0  # never moves
    assert largest_r_hat(values) < 1.02
    values[..., 1] = np.arange(4)[:, None]  # each stands still, elsewhere
    assert largest_r_hat(values) > 1e3


def test_what_is_observed_is_the_value_of_the_site():
    """A program that moves its points is at every step the program of the moved scene."""

    def moved(points, present):
        return PROGRAM(points - 3.0, present)

    scene = FIVE._replace(points=FIVE.points + 3.0)
    match = np.where(FIVE.present, np.arange(len(FIVE.present)), -1)
    own, expected = (
        frame_at_match(program, at, match, {}) for program, at in ((moved, scene), (PROGRAM, FIVE))
    )
    np.testing.assert_allclose(own.mean, expected.mean, atol=1e-9)
    draws = {"pose": POSES[None]}
    np.testing.assert_allclose(
        log_likelihood_by_point(moved, scene, draws),
        log_likelihood_by_point(PROGRAM, FIVE, draws),
        atol=1e-9,
    )
