"""Samplers on programs that leave open which objects are there, against exact inference.

Exact inference under the same programs is held against brute force in `test_presence.py`.
"""

import functools

import jax
import numpy as np
import pytest

from inference import exact, gibbs, nuts
from inference.conditions.sets import possible_values
from inference.diagnostics.posterior_draws import draws_of
from inference.diagnostics.to_arviz import to_arviz
from inference.posterior import symmetry
from inference.posterior.densities import log_joint, log_joint_by_value, prior_draws
from inference.posterior.relabel import Frame, relabel
from models.constellation import presence_constellation, sized_constellation
from models.program.reading import read
from models.scenes import make_scene
from models.templates import shapes, stack
from tests.agreement import assert_means, assert_shares

pytestmark = pytest.mark.slow  # compiles samplers

PARTS = stack(shapes("square", "triangle"))
POINTS = np.array([[0.5, 0.4], [-0.6, 0.1], [0.2, -0.7]])
SCENE = make_scene(POINTS, PARTS.num_parts)
soft = functools.partial(presence_constellation, parts=PARTS, visibility=0.7, precision=8.0)
sized = functools.partial(
    sized_constellation, parts=PARTS, visibility=0.7, sizes=(0.5, 1.5), noise=0.4
)
RUNS = {
    "gibbs, presence": (
        soft,
        functools.partial(gibbs.run, num_temperatures=6, num_warmup=100, num_samples=1000),
    ),
    # Chains stay in a set for up to a hundred sweeps and some sets have a probability of 0.002:
    # in fewer chains it is a matter of luck whether these are visited.
    "gibbs, sized": (
        sized,
        functools.partial(
            gibbs.run,
            num_chains=24,
            num_temperatures=6,
            num_warmup=100,
            num_samples=1000,
            init_strategy="prior",
        ),
    ),
    "nuts, presence": (soft, functools.partial(nuts.run, num_warmup=200, num_samples=800)),
}


class Truth:
    """Exact inference for each set, and what follows from it."""

    def __init__(self, program):
        self.whole = exact.run(program, SCENE)
        self.sets = possible_values(program, SCENE)["presence"]
        copies = SCENE.batch().take(np.zeros(len(self.sets), int))._replace(presence=self.sets)
        self.given = exact.run(program, copies)
        self.weight = np.exp(self.given.log_evidence - self.whole.log_evidence)


@functools.cache
def truth(name):
    return Truth(RUNS[name][0])


@functools.cache
def drawn(name):
    program, run = RUNS[name]
    return run(program, SCENE, jax.random.key(0))


@pytest.fixture(params=RUNS)
def case(request):
    return drawn(request.param), truth(request.param)


def test_the_scene_leaves_open_what_is_there(case):
    """Or there would be nothing to test."""
    _, exact = case
    assert exact.weight.sum() == pytest.approx(1, abs=1e-9)
    assert len(exact.sets) > 2
    assert (exact.whole.details["presence"] > 0.2).all()
    assert (exact.whole.details["presence"] < 0.95).all()


def test_presence(case):
    result, exact = case
    flags = result.draws["presence"] > 0
    assert_shares(flags, exact.whole.details["presence"])
    of_set = (result.draws["presence"][..., None, :] == exact.sets).all(axis=-1)
    assert_shares(of_set, exact.weight)
    np.testing.assert_allclose(result.details["presence"], flags.mean(axis=(0, 1)))
    assert result.details["presence_sets"][0][1] == of_set.mean(axis=(0, 1)).max()


def test_match_marginals(case):
    result, exact = case
    rows = len(SCENE.present)
    indicators = (result.draws["match"][:, :, SCENE.present, None] == np.arange(rows)).astype(float)
    assert_means(
        indicators, exact.whole.match_probs[SCENE.present], floor=3 / indicators[..., 0, 0].size
    )
    np.testing.assert_allclose(
        result.match_probs[SCENE.present], indicators.mean(axis=(0, 1)), atol=0.03
    )


def test_poses_of_present_and_of_absent_objects(case):
    """First and second moments, of each kind of object by itself."""
    result, exact = case
    pose, there = result.draws["pose"], result.draws["presence"] > 0
    mean = exact.given.pose_mean
    second = mean**2 + np.diagonal(exact.given.pose_covariance, axis1=2, axis2=3)
    for flag in (there, ~there):
        of_sets = (exact.sets > 0) == (flag is there)
        weight = (exact.weight[:, None] * of_sets)[..., None]
        assert_means(pose * flag[..., None], (weight * mean).sum(axis=0))
        assert_means(pose**2 * flag[..., None], (weight * second).sum(axis=0))


def test_absent_objects_have_draws_of_the_prior():
    result = drawn("gibbs, presence")
    absent = result.draws["presence"][..., 0] == 0
    pose = result.draws["pose"][absent, 0]
    assert len(pose) > 500
    np.testing.assert_allclose(np.cov(pose.T), np.eye(4), atol=0.25)


@pytest.mark.parametrize("name", ["gibbs, presence", "gibbs, sized"])
def test_the_ladder_gives_the_log_evidence(name):
    """With the probability of the number of points, which the ladder starts from."""
    result, wanted = drawn(name), truth(name).whole.log_evidence
    error = result.log_evidence_error
    assert 0 < error < 0.2
    assert abs(result.log_evidence - wanted) < 5 * error


def test_the_evidence_given_a_set_counts_it_too():
    given = SCENE._replace(presence=np.array([True, False]))
    result = gibbs.run(
        soft, given, jax.random.key(0), num_temperatures=6, num_warmup=100, num_samples=400
    )
    wanted = exact.run(soft, given).log_evidence
    assert abs(result.log_evidence - wanted) < 5 * result.log_evidence_error


def test_exact_draws_agree_too():
    found, exact = (
        draws_of(soft, truth("nuts, presence").whole, jax.random.key(0), 1000, 4),
        truth("nuts, presence"),
    )
    assert_means(found["presence"].astype(float), exact.whole.details["presence"])
    assert_means(found["pose"], exact.whole.pose_mean)
    owner = np.asarray(PARTS.owner)[found["match"][..., SCENE.present]]
    assert np.take_along_axis(found["presence"], owner, axis=2).all()


def test_densities_sum_over_sets_where_draws_have_none():
    draws = {name: x[0, :5] for name, x in drawn("gibbs, presence").draws.items()}
    without = {name: x for name, x in draws.items() if name != "presence"}
    by_set = log_joint_by_value(soft, SCENE, without, possible_values(soft, SCENE))
    np.testing.assert_allclose(log_joint(soft, SCENE, without), np.logaddexp.reduce(by_set, axis=1))
    place = [
        (truth("gibbs, presence").sets == own).all(axis=1).argmax() for own in draws["presence"]
    ]
    np.testing.assert_allclose(log_joint(soft, SCENE, draws), by_set[np.arange(5), place])


def test_the_prior_is_drawn_given_the_number_of_points():
    sets = possible_values(soft, SCENE)["presence"]
    found = prior_draws(soft, SCENE, jax.random.key(0), 2000)["presence"]
    share = [(found == flags).all(axis=1).mean() for flags in sets]
    log_prior = [read(soft, SCENE, {"presence": flags}).log_constant for flags in sets]
    wanted = np.exp(log_prior - np.logaddexp.reduce(log_prior))
    np.testing.assert_allclose(share, wanted, atol=5 * 0.5 / np.sqrt(2000))


def test_relabelling_swaps_presence_with_the_objects():
    parts = stack(shapes("triangle", "triangle"))
    program = functools.partial(presence_constellation, parts=parts, visibility=0.9, precision=1)
    scene = make_scene(POINTS, 6)
    group = symmetry.find(program, scene)
    assert (0, 1) in group.turns
    unlike = functools.partial(program, presence_prob=np.array([0.8, 0.3]))
    assert (0, 1) not in symmetry.find(unlike, scene).turns
    here, away = np.array([0.1, 0.2, 0.5, 0.1]), np.array([-2.0, 1.0, 0.3, 2.0])
    frame = Frame(np.stack([here, away]), np.tile(0.01 * np.eye(4), (2, 1, 1)))
    draws = {
        "pose": np.array([[[here, away], [away, here]]]),
        "match": np.array([[[0, 1, 2, -1, -1, -1], [3, 4, 5, -1, -1, -1]]]),
        "presence": np.array([[[True, False], [False, True]]]),
    }
    renamed = relabel(group, frame, draws)
    np.testing.assert_allclose(renamed["pose"][0, 1], [here, away], atol=1e-9)
    assert renamed["presence"].tolist() == [[[True, False]] * 2]
    assert renamed["match"][0, 1].tolist() == [0, 1, 2, -1, -1, -1]


def test_arviz_has_presence_by_object():
    data = to_arviz(drawn("gibbs, presence"), soft, jax.random.key(0), num_samples=50)
    assert data.posterior["presence"].dims == ("chain", "draw", "object")
    assert data.prior["presence"].dims == ("chain", "draw", "object")
