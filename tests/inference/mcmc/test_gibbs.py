"""Gibbs sampling against brute force, on scenes with one mode and, with tempering, with many."""

import functools
import itertools

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.diagnostics import split_gelman_rubin

from inference import gibbs
from inference.mcmc import tempering
from inference.posterior.draws import frequent_partition
from models.distributions.likelihood import MatchedParts
from models.distributions.match import PermutationMatch
from models.errors import ConjugacyError, InputError
from models.scenes import Scene
from models.templates import Parts
from tests import oracle
from tests.agreement import assert_means, assert_posterior, standard_error
from tests.oracle_inference import object_posterior, posterior
from tests.problems import DESIGNS, make_problem, stack_problems

pytestmark = pytest.mark.slow  # compiles for minutes; `make test-all` runs it

# Random scenes of five points: the first has one match to speak of, the others several modes.
PROBLEMS = [
    make_problem(np.random.default_rng(seed), DESIGNS["similarity"], 5, precision=200.0)
    for seed in (0, 7, 2)
]
STACKED = stack_problems(PROBLEMS)
BUDGET = {"num_chains": 4, "num_warmup": 200, "num_samples": 800, "init_strategy": "prior"}


def parts_of(problem):
    return Parts(
        problem.F,
        problem.offset,
        problem.variance,
        problem.owner,
        np.zeros(len(problem.owner), int),
        problem.feature_mask,
    )


@functools.cache
def tempered(index):
    return gibbs.run(
        STACKED.program,
        STACKED.scenes.take(index),
        jax.random.key(1),
        num_temperatures=16,
        **BUDGET,
    )


def test_the_problems_have_one_mode_and_many():
    sharpest = [posterior(problem).match_probs.max(axis=1).min() for problem in PROBLEMS]
    assert sharpest[0] > 0.99
    assert max(sharpest[1:]) < 0.6


@pytest.mark.parametrize("index", [0, 1, 2])
def test_draws_agree_with_brute_force(index):
    result, exact = tempered(index), posterior(PROBLEMS[index])
    assert_posterior(result.draws, exact, result.scene.present)
    frequency = (result.draws["match"][..., None] == np.arange(5)).mean(axis=(0, 1))
    np.testing.assert_allclose(result.match_probs, frequency, atol=0.03)
    assert result.converged
    pose = result.draws["pose"].reshape(-1, *result.pose_mean.shape)
    np.testing.assert_allclose(result.pose_mean, pose.mean(axis=0))
    np.testing.assert_allclose(result.pose_covariance[0], np.cov(pose[:, 0].T))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_ladder_gives_the_log_evidence(index):
    result, exact = tempered(index), posterior(PROBLEMS[index])
    error = result.log_evidence_error
    assert 0 < error < 0.3
    assert abs(result.log_evidence - exact.log_evidence) < 5 * error


def test_the_error_of_the_evidence_is_honest_over_seeds():
    """Chains that mix slowly, over many modes: seed after seed, in units of the error reported."""
    exact = posterior(PROBLEMS[2]).log_evidence
    runs = [
        gibbs.run(
            STACKED.program,
            STACKED.scenes.take(2),
            jax.random.key(seed),
            num_temperatures=16,
            **BUDGET,
        )
        for seed in range(10, 22)
    ]
    errors = np.array([result.log_evidence_error for result in runs])
    scores = (np.array([result.log_evidence for result in runs]) - exact) / errors
    assert np.abs(scores).max() < 4, scores
    assert 0.4 < np.sqrt(np.mean(scores**2)) < 1.8, scores


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_partition_is_the_most_probable_one(index):
    result, exact = tempered(index), posterior(PROBLEMS[index])
    best = max(exact.partitions, key=exact.partitions.get)
    together = np.equal.outer(best, best)
    np.testing.assert_array_equal(np.equal.outer(result.labels, result.labels), together)


def test_the_log_density_is_that_of_the_joint():
    """log p(points | pose, match) + log p(pose) + log p(match), in plain numpy, at some draws."""
    result, problem = tempered(1), PROBLEMS[1]
    normaliser = oracle.log_permanent(problem.match_logits)
    for draw in (0, 500, 799):
        pose, match = result.draws["pose"][2, draw], result.draws["match"][2, draw]
        predicted = oracle.predicted_parts(problem.F, problem.offset, problem.owner, pose)
        residual = problem.points - predicted[match]
        variance = problem.variance[match]
        expected = -0.5 * np.sum(residual**2 / variance + np.log(2 * np.pi * variance))
        expected += problem.match_logits[np.arange(5), match].sum() - normaliser
        for k, y in enumerate(pose):
            shift, covariance = y - problem.prior_mean[k], problem.prior_covariance[k]
            expected -= 0.5 * shift @ np.linalg.solve(covariance, shift)
            expected -= 0.5 * np.linalg.slogdet(2 * np.pi * covariance)[1]
        np.testing.assert_allclose(result.sample_stats["lp"][2, draw], expected, rtol=1e-9)


def test_without_tempering_chains_stay_in_their_modes_and_r_hat_shows_it():
    scene = STACKED.scenes.take(2)
    alone = gibbs.run(STACKED.program, scene, jax.random.key(1), num_temperatures=1, **BUDGET)
    together = tempered(2)
    assert alone.log_evidence is None
    assert split_gelman_rubin(alone.draws["pose"]).max() > 1.2
    assert split_gelman_rubin(together.draws["pose"]).max() < 1.05
    assert not alone.converged
    assert alone.details["pose_r_hat"] > 1.2


# --- other programs -----------------------------------------------------------------------------


def test_a_mixture_agrees_with_brute_force():
    """Every assignment of three points to five parts, two points of the same part allowed."""
    problem = make_problem(np.random.default_rng(3), DESIGNS["similarity"], 3, precision=5.0)
    stacked = stack_problems([problem], "mixture")
    prior = problem.match_logits - np.logaddexp.reduce(problem.match_logits, axis=1, keepdims=True)
    log_weights, match_probs, means = [], [], []
    for columns in itertools.product(range(5), repeat=3):
        pairs = list(enumerate(columns))
        objects = [
            object_posterior(problem, k, tuple(p for p in pairs if problem.owner[p[1]] == k))
            for k in range(2)
        ]
        log_weights.append(sum(prior[p] for p in pairs) + sum(o[0] for o in objects))
        match_probs.append(np.eye(5)[list(columns)])
        means.append([o[1] for o in objects])
    log_evidence = np.logaddexp.reduce(log_weights)
    weights = np.exp(log_weights - log_evidence)
    result = gibbs.run(
        stacked.program, stacked.scenes.take(0), jax.random.key(0), num_temperatures=4, **BUDGET
    )
    assert_means(result.draws["pose"], np.tensordot(weights, means, 1))
    indicators = (result.draws["match"][..., :3, None] == np.arange(5)).astype(float)
    assert_means(indicators, np.tensordot(weights, match_probs, 1), floor=3 / 3200)
    assert (result.draws["match"][..., 3:] == -1).all()
    error = result.log_evidence_error
    assert abs(result.log_evidence - log_evidence) < 5 * error < 2


def test_an_unknown_precision_agrees_with_numerical_integration():
    problem = make_problem(np.random.default_rng(4), DESIGNS["one_object"], 3, precision=1.0)
    parts = parts_of(problem)

    def program(points=None, present=None):
        precision = numpyro.sample("precision", dist.Gamma(2.0, 0.5))
        with numpyro.plate("object", 1):
            prior = dist.MultivariateNormal(problem.prior_mean, problem.prior_covariance)
            pose = numpyro.sample("pose", prior)
        match = numpyro.sample("match", PermutationMatch(problem.match_logits))
        likelihood = MatchedParts(match, pose, parts, precision=precision, present=present)
        return numpyro.sample("points", likelihood, obs=points)

    grid = np.linspace(0.02, 30, 400)
    at = [posterior(problem._replace(variance=problem.variance / tau)) for tau in grid]
    log_weight = np.array([p.log_evidence for p in at]) + np.log(grid) - 0.5 * grid
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    scene = Scene(problem.points, problem.present)
    result = gibbs.run(program, scene, jax.random.key(0), num_temperatures=4, **BUDGET)
    assert_means(result.draws["precision"], weight @ grid)
    assert_means(result.draws["precision"] ** 2, weight @ grid**2)
    assert_means(result.draws["pose"], np.tensordot(weight, [p.pose_mean for p in at], 1))
    log_prior = 2 * np.log(0.5)  # of Gamma(2, 0.5), whose remaining terms are in log_weight
    log_evidence = np.log(np.sum(np.exp(log_weight)) * (grid[1] - grid[0])) + log_prior
    error = result.log_evidence_error
    assert abs(result.log_evidence - log_evidence) < 5 * error + 1e-3


# --- what is refused ----------------------------------------------------------------------------


def test_a_ladder_of_two_rungs_is_refused():
    with pytest.raises(InputError, match="at least 3, or 1 for no tempering, got 2"):
        gibbs.run(STACKED.program, STACKED.scenes.take(0), jax.random.key(0), num_temperatures=2)


def test_a_batch_and_an_empty_budget_are_refused():
    with pytest.raises(InputError, match=r"one scene, got a batch; use scene.take\(i\)"):
        gibbs.run(STACKED.program, STACKED.scenes, jax.random.key(0))
    with pytest.raises(InputError, match="num_chains must be at least 1"):
        gibbs.run(STACKED.program, STACKED.scenes.take(0), jax.random.key(0), num_chains=0)
    with pytest.raises(InputError, match="there is no start 'truth'"):
        gibbs.run(STACKED.program, STACKED.scenes.take(0), jax.random.key(0), init_strategy="truth")


def test_a_program_that_is_not_conjugate_is_refused():
    def program(points=None, present=None):
        with numpyro.plate("object", 1):
            pose = numpyro.sample("pose", dist.StudentT(3.0, np.zeros(4)).to_event(1))
        match = numpyro.sample("match", PermutationMatch(np.zeros((3, 3))))
        likelihood = MatchedParts(match, pose, parts, present=present)
        return numpyro.sample("points", likelihood, obs=points)

    parts = parts_of(make_problem(np.random.default_rng(4), DESIGNS["one_object"], 3))
    scene = Scene(np.zeros((3, 2)), np.ones(3, bool))
    with pytest.raises(ConjugacyError, match=r"ransac, gibbs.*takes any density \(nuts, svi with"):
        gibbs.run(program, scene, jax.random.key(0))


# --- what is made of draws ----------------------------------------------------------------------


def test_the_error_counts_what_rungs_have_in_common():
    """Three rungs whose draws are one and the same slow series: their errors add up."""
    rng = np.random.default_rng(1)
    estimates = []
    for _ in range(200):
        slow = rng.normal(size=(4, 400))
        for t in range(1, 400):
            slow[:, t] = 0.9 * slow[:, t - 1] + np.sqrt(1 - 0.9**2) * slow[:, t]
        shared = np.stack([slow - 0.5, slow + 0.5], axis=-1)  # exact: log ratio zero
        estimates.append(tempering.bridge(np.repeat(shared[:, :, None], 3, axis=2)))
    values, errors = np.array(estimates).T
    assert abs(values.mean()) < 5 * values.std() / np.sqrt(200)
    np.testing.assert_allclose(errors.mean(), values.std(), rtol=0.2)


def test_swapped_objects_are_one_partition():
    """Two of five draws have each labelling of the first partition, one alone is the second's."""
    owner = np.array([0, 0, 1, 1])
    match = np.array([[[0, 1, 2], [1, 0, 3], [2, 3, 0], [0, 2, 1], [0, 2, 1]]])
    present = np.ones(3, bool)
    assert frequent_partition(match, owner, present, 2).tolist() == [0, 0, 1]
    most = np.array([[[0, 1, 2], [2, 3, 0], [2, 3, 1], [0, 2, 1], [0, 2, 1]]])
    assert frequent_partition(most, owner, present, 2).tolist() == [1, 1, 0]
    assert frequent_partition(most, owner, np.array([True, True, False]), 2).tolist() == [1, 1, -1]


def test_the_standard_error_of_the_evidence_is_honest():
    """Between N(0, 1) and N(m, 1), both normalised: the log ratio of the normalisers is zero."""
    rng = np.random.default_rng(0)
    shift = np.array([0.5, 1.0, 2.0])
    estimates = []
    for _ in range(200):
        lower = rng.normal(-(shift**2) / 2, shift, size=(4, 100, 3))
        upper = rng.normal(shift**2 / 2, shift, size=(4, 100, 3))
        estimates.append(tempering.bridge(np.stack([lower, upper], axis=-1)))
    values, errors = np.array(estimates).T
    assert abs(values.mean()) < 5 * values.std() / np.sqrt(200)
    np.testing.assert_allclose(errors.mean(), values.std(), rtol=0.2)
    assert standard_error(np.zeros((2, 10, 1)))[0] == 0
