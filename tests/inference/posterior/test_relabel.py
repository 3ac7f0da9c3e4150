"""Symmetries of programs, found and not found, and draws that are brought into one frame."""

import functools

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from inference.diagnostics.to_arviz import to_arviz
from inference.posterior import symmetry
from inference.posterior.densities import log_joint
from inference.posterior.relabel import Frame, frame_of, match_probs, relabel
from models.constellation import constellation
from models.distributions.likelihood import MatchedParts
from models.distributions.match import PermutationMatch
from models.scenes import make_scene
from models.templates import shapes, stack
from tests.inference.two_triangles import FIVE, PARTS, POSES, PROGRAM, SCENE, result_of

pytestmark = pytest.mark.long

SQUARES = stack(shapes("square", "square"))
PRIORS = [  # mean and scale of the pose of each square, and how many symmetries are left
    (np.zeros((2, 4)), np.ones((2, 4)), 2 * 4 * 4),
    (np.zeros((2, 4)), [[1, 1, 1, 1], [1, 2, 1, 1]], 4 * 4),  # not to be swapped
    (np.zeros((2, 4)), [[1, 1, 1, 2], [1, 1, 1, 2]], 2 * 2 * 2),  # half turns only
    ([[0, 0, 1, 0], [0, 0, 1, 0]], np.ones((2, 4)), 2),  # no turns
    ([[0, 0, 1, 0], [0, 0, 0, 1]], np.ones((2, 4)), 2),  # a swap that turns
    ([[0, 0, 1, 0], [0, 0, 2, 0]], np.ones((2, 4)), 1),
]
MEANS, SCALES = (np.array([prior[i] for prior in PRIORS], float) for i in (0, 1))


def squares(points=None, present=None, point_type=None):
    """Two squares; the scene's point type says which of the priors holds, so it compiles once."""
    which = point_type[0]
    prior = dist.Normal(jnp.asarray(MEANS)[which], jnp.asarray(SCALES)[which]).to_event(1)
    with numpyro.plate("object", 2):
        pose = numpyro.sample("pose", prior)
    match = numpyro.sample("match", PermutationMatch(jnp.zeros((8, 8))))
    likelihood = MatchedParts(match, pose, SQUARES, precision=10.0, present=present)
    return numpyro.sample("points", likelihood, obs=points)


@functools.cache
def symmetry_under(which):
    scene = make_scene(np.random.default_rng(0).normal(size=(3, 2)), 8)
    return symmetry.find(squares, scene._replace(point_type=np.full(8, which)))


SEGMENTS = stack([np.array([[-1.0, 0.0], [1.0, 0.0]])] * 2)


def with_an_odd_pair(points=None, present=None):
    """Two segments, of which the first may be turned: a point prefers an end of the second."""
    with numpyro.plate("object", 2):
        pose = numpyro.sample("pose", dist.Normal(0, 1).expand([4]).to_event(1))
    match = numpyro.sample("match", PermutationMatch(jnp.zeros((4, 4)).at[1, 2].set(1.5)))
    likelihood = MatchedParts(match, pose, SEGMENTS, precision=20.0, present=present)
    return numpyro.sample("points", likelihood, obs=points)


# --- which symmetries a program has -------------------------------------------------------------


def test_a_match_prior_breaks_symmetries_wherever_the_points_are():
    rng = np.random.default_rng(0)
    scenes = [make_scene(rng.normal(size=(3, 2)), 4) for _ in range(8)]
    assert [symmetry.find(with_an_odd_pair, scene).order for scene in scenes] == [2] * 8


def test_two_squares_can_be_swapped_and_each_turned_four_times():
    group = symmetry_under(0)
    assert group.order == 2 * 4 * 4
    assert group.kinds.tolist() == [0, 0]
    quarter = np.array([[0, -1], [1, 0]])
    turns = [np.linalg.matrix_power(quarter, i) for i in range(4)]
    for pair in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert len(group.turns[pair]) == 4
        for turn in group.turns[pair]:
            np.testing.assert_allclose(turn.matrix[:2], np.eye(2, 4), atol=1e-12)
            assert any(np.allclose(turn.matrix[2:, 2:], q) for q in turns)
    np.testing.assert_array_equal(group.turns[0, 0][0].matrix, np.eye(4))


def test_a_turn_puts_the_parts_where_they_were():
    poses = np.random.default_rng(1).normal(size=(2, 4))
    before = np.asarray(SQUARES.predict(poses)).reshape(2, 4, 2)
    for (source, target), turns in symmetry_under(0).turns.items():
        for turn in turns:
            moved = poses.copy()
            moved[target] = turn(poses[source])
            after = np.asarray(SQUARES.predict(moved)).reshape(2, 4, 2)
            np.testing.assert_allclose(after[target][turn.part], before[source], atol=1e-12)
            np.testing.assert_allclose(turn.inverse(turn(poses)), poses, atol=1e-12)


@pytest.mark.parametrize("which", range(len(PRIORS)))
def test_a_prior_that_breaks_a_symmetry_is_noticed(which):
    assert symmetry_under(which).order == PRIORS[which][-1]


def test_different_shapes_have_nothing_in_common():
    parts = stack([[[0, 0], [1, 0]], [[0, 0], [0, 1], [2, 0]]])
    program = functools.partial(constellation, parts=parts, precision=10.0)
    group = symmetry.find(program, make_scene(np.zeros((1, 2)), 5))
    assert sorted(group.turns) == [(0, 0), (1, 1)]
    assert group.order == 1


# --- one frame ----------------------------------------------------------------------------------


def test_renamed_draws_come_back_and_their_matches_with_them():
    """Each draw is renamed at random; relabelling undoes it, for pose and match together."""
    rng = np.random.default_rng(2)
    group = symmetry_under(0)
    mean = rng.normal(size=(2, 4))
    frame = Frame(mean, np.tile(0.01 * np.eye(4), (2, 1, 1)))
    pose = mean + 0.1 * rng.normal(size=(2, 25, 2, 4))
    match = np.stack([rng.permutation(8) for _ in range(50)]).reshape(2, 25, 8)
    match[..., -1] = -1  # a dummy row
    mixed_pose, mixed_match = pose.copy(), match.copy()
    for chain, draw in np.ndindex(2, 25):
        swap = rng.integers(2)
        for source in range(2):
            target = source ^ swap
            turn = group.turns[source, target][rng.integers(4)]
            mixed_pose[chain, draw, target] = turn(pose[chain, draw, source])
            for n in range(4):
                mixed_match[chain, draw][match[chain, draw] == 4 * source + n] = (
                    4 * target + turn.part[n]
                )
    assert np.abs(mixed_pose - pose).max() > 0.5
    again = relabel(group, frame, {"pose": mixed_pose, "match": mixed_match})
    np.testing.assert_allclose(again["pose"], pose, atol=1e-10)
    np.testing.assert_array_equal(again["match"], match)


def test_relabelling_keeps_the_density_and_the_fit_of_every_point():
    draws = _swapped_chains()
    group = symmetry.find(PROGRAM, SCENE)
    new = relabel(group, Frame(POSES, np.tile(0.01 * np.eye(4), (2, 1, 1))), draws)
    poses = {"pose": new["pose"].reshape(-1, 2, 4)}
    raw = {"pose": draws["pose"].reshape(-1, 2, 4)}
    np.testing.assert_allclose(log_joint(PROGRAM, SCENE, poses), log_joint(PROGRAM, SCENE, raw))
    for d in (draws, new):
        predicted = np.asarray(PARTS.predict(d["pose"]))
        placed = np.take_along_axis(predicted, d["match"][..., None], axis=2)
        np.testing.assert_allclose(np.abs(placed - SCENE.points).max(), 0, atol=0.3)


def _swapped_chains():
    """Four chains around the truth of the scene, of which the last two have the names swapped."""
    rng = np.random.default_rng(3)
    pose = POSES + 0.02 * rng.normal(size=(4, 200, 2, 4))
    predicted = np.asarray(PARTS.predict(POSES))
    nearest = np.linalg.norm(SCENE.points[:, None] - predicted, axis=-1).argmin(axis=1)
    match = np.tile(nearest, (4, 200, 1))
    pose[2:] = pose[2:, :, ::-1]
    match[2:] = (match[2:] + 3) % 6
    return {"pose": pose, "match": match}


def test_r_hat_before_and_after():
    draws = _swapped_chains()
    before = az.rhat({"pose": draws["pose"]}).pose
    assert before.min() > 1.5
    frame = Frame(POSES, np.tile(0.01 * np.eye(4), (2, 1, 1)))
    after = relabel(symmetry.find(PROGRAM, SCENE), frame, draws)
    assert az.rhat({"pose": after["pose"]}).pose.max() < 1.02
    assert match_probs(after).max(axis=1).tolist() == [1.0] * 6


def kinds_of_objects(points=None, present=None):
    """Two triangles, each small or large, and a throw of two dice that says nothing of them."""
    dice = numpyro.sample("dice", dist.Categorical(probs=jnp.ones((2, 3)) / 3))
    numpyro.sample("sum", dist.Normal(jnp.asarray([1.0, 2.0]) @ dice, 1.0), obs=2.5)
    with numpyro.plate("object", 2):
        kind = numpyro.sample("kind", dist.Bernoulli(0.3))
        scale = jnp.where(kind == 1, 1.0, 0.1)[:, None] * jnp.ones(4)
        pose = numpyro.sample("pose", dist.Normal(0.0, scale).to_event(1))
    match = numpyro.sample("match", PermutationMatch(jnp.zeros((6, 6))))
    likelihood = MatchedParts(match, pose, PARTS, precision=1e3, present=present)
    return numpyro.sample("points", likelihood, obs=points)


def test_only_the_sites_that_belong_to_objects_are_relabelled():
    """By the density: each draw is as probable as before, at the values of its own sites."""
    group = symmetry.find(kinds_of_objects, SCENE)
    assert (0, 1) in group.turns
    draws = _swapped_chains()
    rng = np.random.default_rng(4)
    draws |= {"kind": rng.integers(2, size=(4, 200, 2)), "dice": rng.integers(3, size=(4, 200, 2))}
    new = relabel(group, Frame(POSES, np.tile(0.01 * np.eye(4), (2, 1, 1))), draws)
    np.testing.assert_array_equal(new["dice"], draws["dice"])
    np.testing.assert_array_equal(new["kind"][2:], draws["kind"][2:, :, ::-1])
    before, after = (
        log_joint(kinds_of_objects, SCENE, {n: x.reshape(-1, *x.shape[2:]) for n, x in d.items()})
        for d in (draws, new)
    )
    np.testing.assert_allclose(after, before)
    assert group.sites == ("kind",)


# --- frames of results --------------------------------------------------------------------------


def test_the_frame_of_an_exact_result_is_the_conditional_at_its_best_match():
    """Against the least-squares fit with a standard Normal prior, worked out apart."""
    result = result_of("exact")
    frame = frame_of(PROGRAM, result)
    match, owner = result.best_match, np.asarray(PARTS.owner)
    for k in range(2):
        rows = np.flatnonzero((match >= 0) & (owner[match] == k))
        F = np.asarray(PARTS.F)[match[rows]].reshape(-1, 4)
        precision = np.eye(4) + 1e3 * F.T @ F
        mean = np.linalg.solve(precision, 1e3 * F.T @ FIVE.points[rows].ravel())
        # The prior is read from a thousand of its draws.
        np.testing.assert_allclose(frame.mean[k], mean, atol=2e-3)
        np.testing.assert_allclose(frame.covariance[k], np.linalg.inv(precision), atol=2e-3)


@pytest.mark.slow
def test_raw_draws_are_to_be_had():
    """The exact posterior puts half of the draws under each naming; relabelled, all agree."""
    result = result_of("exact")
    raw = to_arviz(result, PROGRAM, jax.random.key(0), num_samples=100, relabel=False).posterior
    new = to_arviz(result, PROGRAM, jax.random.key(0), num_samples=100).posterior
    assert raw.attrs["relabelled"] == 0
    assert new.attrs["relabelled"] == 1
    first = (raw.pose.values[..., 0, :] - POSES[0]) @ (POSES[1] - POSES[0]) > 0.5
    assert 0.3 < first.mean() < 0.7
    places = [x.pose.sel(pose_dim="t_x").std(("chain", "draw")) for x in (raw, new)]
    assert places[0].min() > 2 * places[1].max()
    np.testing.assert_allclose(
        np.sort(raw.pose.values, axis=2), np.sort(new.pose.values, axis=2), atol=1e-12
    )
