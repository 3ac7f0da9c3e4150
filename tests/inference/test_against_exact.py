"""Samplers and guides against brute force, on problems of three points that compile in seconds.

Long runs, more points and further sites are in the file of each method, mostly in `make test-all`.
NUTS, with tempering, is in `tests.inference.mcmc.test_tempered_nuts`. RANSAC has no posterior: it
is held to plain loops in `tests.inference.test_ransac`.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

from inference import exact, gibbs, nuts, svi
from inference.conditions.sets import possible_values
from models.constellation import presence_constellation
from models.geometry import translation as translated
from models.scenes import make_scene
from models.templates import stack
from tests.agreement import assert_means, assert_posterior
from tests.oracle_inference import posterior
from tests.problems import Design, make_problem, stack_problems, translation

pytestmark = pytest.mark.long

DESIGN = Design((0, 0, 1), 2, 2, translation)
"""A pair of parts and a lone part, which can only be moved."""


def first_problem(wanted):
    """By seeds from 0."""
    problems = (
        make_problem(np.random.default_rng(seed), DESIGN, 3, precision=50.0)
        for seed in itertools.count()
    )
    return next(problem for problem in problems if wanted(posterior(problem)))


ONE_MODE = first_problem(lambda exact: exact.match_probs.max(axis=1).min() > 0.99)
MODES = first_problem(lambda exact: sorted(exact.partitions.values())[-2] > 0.1)
PROBLEMS = stack_problems([ONE_MODE, MODES])
ONE_SCENE, MODES_SCENE = (PROBLEMS.scenes.take(i) for i in (0, 1))
KEY = jax.random.key(0)
BUDGET = {"num_chains": 4, "num_warmup": 100, "num_samples": 800, "init_strategy": "prior"}


def test_the_mean_field_guide():
    """With one match to speak of, what is missing is van der Waerden's inequality, log(27/6)."""
    found = svi.run(PROBLEMS.program, ONE_SCENE, KEY, num_restarts=2, num_samples=100)
    wanted = posterior(ONE_MODE)
    assert 0 < wanted.log_evidence - found.elbo < np.log(27 / 6) + 0.1
    np.testing.assert_allclose(found.match_probs, wanted.match_probs, atol=0.02)
    np.testing.assert_allclose(found.pose_mean, wanted.pose_mean, atol=0.02)


def test_an_automatic_guide_is_nearly_exact():
    wanted = posterior(ONE_MODE)
    options = {"guide": "AutoMultivariateNormal", "num_restarts": 2, "init_strategy": "prior"}
    found = svi.run(PROBLEMS.program, ONE_SCENE, KEY, **options)
    assert -0.05 < wanted.log_evidence - found.elbo < 0.1
    spread = np.sqrt(np.diagonal(wanted.pose_covariance, axis1=1, axis2=2))
    assert (np.abs(found.pose_mean - wanted.pose_mean) < 0.3 * spread).all()


def test_gibbs_sampling_with_tempering():
    found = gibbs.run(PROBLEMS.program, MODES_SCENE, KEY, num_temperatures=4, **BUDGET)
    wanted = posterior(MODES)
    assert_posterior(found.draws, wanted, found.scene.present)
    error = found.log_evidence_error
    assert 0 < error < 0.2
    assert abs(found.log_evidence - wanted.log_evidence) < 5 * error


# --- which objects are there ----------------------------------------------------------------------

PARTS = stack([[[0.0, 0.0], [1.0, 0.2]], [[0.0, 0.0], [0.3, -0.9]]], design=translated)
program = functools.partial(presence_constellation, parts=PARTS, visibility=0.7, precision=4.0)
SCENE = make_scene(np.array([[0.4, 0.3], [-0.2, 0.7]]), 4)


@functools.cache
def presence_truth():
    """Exact inference, which `tests.inference.conditions.test_presence` holds to brute force."""
    found = exact.run(program, SCENE)
    assert (found.details["presence"] > 0.2).all() and (found.details["presence"] < 0.98).all()
    return found


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(functools.partial(gibbs.run, num_temperatures=4), id="gibbs"),
        pytest.param(nuts.run, id="nuts", marks=pytest.mark.slow),
    ],
)
def test_presence_is_sampled(run):
    found, wanted = run(program, SCENE, KEY, **BUDGET), presence_truth()
    sets = possible_values(program, SCENE)["presence"]
    given = SCENE.batch().take(np.zeros(len(sets), int))._replace(presence=sets)
    weight = np.exp(exact.run(program, given).log_evidence - wanted.log_evidence)
    of_set = (found.draws["presence"][..., None, :] == sets).all(axis=-1)
    assert_means(of_set.astype(float), weight)
    assert_means(found.draws["pose"], wanted.pose_mean)
    indicators = (found.draws["match"][..., :2, None] == np.arange(4)).astype(float)
    assert_means(indicators, wanted.match_probs[:2], floor=3 / indicators[..., 0, 0].size)
