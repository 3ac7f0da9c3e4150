"""The best parse as a method: its density written out by hand, and which match it finds."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from capsules.experiments.generator import sample_scenes
from inference import exact, map_parse
from inference.diagnostics.metrics import same_partition
from inference.diagnostics.readout import most_probable_match
from models import MatchedParts, PermutationMatch, constellation, presence_constellation
from models.scenes import make_scene
from models.templates import shapes, stack
from tests import oracle, oracle_inference

pytestmark = pytest.mark.long

PARTS = stack(shapes("square", "triangle"))
CLUTTERED = stack(shapes("square", "triangle"), clutter=2)
PREFERENCES = np.random.default_rng(4).normal(size=(7, 7))
POINTS = sample_scenes(
    num_samples=8, sigma=0.1, seed=3, objects=("square", "triangle"), presence=1.0
).take(0)


def with_preferences(points=None, present=None):
    with numpyro.plate("object", 2):
        pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.zeros(4), jnp.eye(4)))
    match = numpyro.sample("match", PermutationMatch(jnp.asarray(PREFERENCES)))
    likelihood = MatchedParts(match, pose, PARTS, precision=1e3, present=present)
    numpyro.sample("points", likelihood, obs=points)


def log_density_of(match, points, parts, precision, log_prior):
    """log p(points, match) as Normal densities of each object's points, and of clutter."""
    total = log_prior
    F, owner = np.asarray(parts.F), np.asarray(parts.owner)
    variance = (
        np.asarray(parts.variance) / np.where(owner == parts.num_objects, 1.0, precision)[:, None]
    )
    for k in range(owner.max() + 1):
        rows = [m for m, n in enumerate(match) if n >= 0 and owner[n] == k]
        if not rows:
            continue
        design = np.concatenate([F[match[m]] for m in rows])
        noise = np.concatenate([variance[match[m]] for m in rows])
        covariance = design @ design.T + np.diag(noise)  # a standard Normal pose
        x = np.concatenate([points[m] for m in rows])
        total += -0.5 * (
            x @ np.linalg.solve(covariance, x) + np.linalg.slogdet(2 * np.pi * covariance)[1]
        )
    return total


def uniform_log_prior(num_points, num_parts):
    return math.lgamma(num_parts - num_points + 1) - math.lgamma(num_parts + 1)


@pytest.mark.parametrize("num_points", [5, 7])
def test_the_elbo_is_the_density_of_the_points_and_the_match(num_points):
    scene = make_scene(POINTS.points[:num_points], num_parts=7)
    program = functools.partial(constellation, parts=PARTS, precision=1e3)
    result = map_parse.run(program, scene)
    match = most_probable_match(result)
    wanted = log_density_of(match, scene.points, PARTS, 1e3, uniform_log_prior(num_points, 7))
    assert result.elbo == pytest.approx(wanted, rel=1e-9)
    assert result.elbo < exact.run(program, scene).log_evidence


@pytest.mark.slow
def test_clutter_has_a_density_of_its_own():
    points = np.concatenate([POINTS.points, [[5.0, 5.0]]])
    scene = make_scene(points, num_parts=9)
    program = functools.partial(constellation, parts=CLUTTERED, precision=1e4)
    result = map_parse.run(program, scene)
    assert result.labels[7] == 2
    assert result.converged
    wanted = log_density_of(
        most_probable_match(result), scene.points, CLUTTERED, 1e4, uniform_log_prior(8, 9)
    )
    assert result.elbo == pytest.approx(wanted, rel=1e-9)


def log_density_with_preferences(match, points):
    """Dummy rows that are not alike have one order, the better one."""
    left = np.setdiff1d(np.arange(7), match[:5])
    orders = [(left[0], left[1]), (left[1], left[0])]
    of_points = PREFERENCES[np.arange(5), match[:5]].sum()
    log_priors = [of_points + PREFERENCES[5, a] + PREFERENCES[6, b] for a, b in orders]
    normaliser = oracle.log_permanent(PREFERENCES)
    return log_density_of(match, points, PARTS, 1e3, max(log_priors) - normaliser)


@pytest.mark.slow
def test_points_that_are_no_object_are_still_parts():
    """Points that no parse explains, and no slot for clutter."""
    points = np.array([[0.0, 0.0], [30.0, 1.0], [-9.0, 80.0], [55.0, -7.0], [1.0, 1.0]])
    scene = make_scene(points, num_parts=7)
    result = map_parse.run(with_preferences, scene)
    match = most_probable_match(result)
    assert sorted(set(match[:5])) == sorted(match[:5])
    assert not result.converged
    assert result.elbo == pytest.approx(log_density_with_preferences(match, scene.points), rel=1e-9)


@pytest.mark.slow
def test_dummy_rows_that_are_not_alike_have_one_order():
    """Then the density is that of a match of all rows, a lower bound still."""
    scene = make_scene(POINTS.points[:5], num_parts=7)
    result = map_parse.run(with_preferences, scene)
    match = most_probable_match(result)
    assert result.elbo == pytest.approx(log_density_with_preferences(match, scene.points), rel=1e-9)
    problem = oracle_inference.Problem(
        scene.points,
        np.repeat(scene.present[:, None], 2, axis=1),
        np.asarray(PARTS.F),
        np.zeros((7, 2)),
        np.full((7, 2), 1e-3),
        np.ones((7, 2), bool),
        np.asarray(PARTS.owner),
        np.zeros((2, 4)),
        np.tile(np.eye(4), (2, 1, 1)),
        PREFERENCES,
    )
    assert result.elbo < oracle_inference.posterior(problem).log_evidence


def test_under_presence_it_is_the_most_probable_partition():
    scenes = sample_scenes(num_samples=192, sigma=0.1, seed=11)
    scenes = scenes.take(scenes.present.sum(axis=1) == 7)  # a square and the triangle
    result = map_parse.run(presence_constellation, scenes)
    right = exact.run(presence_constellation, scenes)
    assert (result.elbo < right.log_evidence).all()
    sure = [s for s in range(len(scenes.points)) if right.partitions[s][0][1] > 0.9]
    assert len(sure) > 20
    found = [same_partition(result.labels[s], right.partitions[s][0][0]) for s in sure]
    assert all(found)


@pytest.mark.slow
def test_a_batch_has_what_each_scene_has():
    scenes = sample_scenes(num_samples=16, sigma=0.0, seed=12)
    batch = map_parse.run(constellation, scenes)
    for s in (0, 5):
        one = map_parse.run(constellation, scenes.take(s))
        assert one.elbo == pytest.approx(batch.elbo[s], rel=1e-12)
        np.testing.assert_array_equal(one.labels, batch.labels[s])
