"""NUTS with tempering against brute force, on scenes with several modes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.hmc_util import IntegratorState
from numpyro.infer.util import log_density
from scipy.stats import gamma

from inference import nuts
from inference.mcmc import chains, tempering
from models.distributions.likelihood import MatchedParts
from models.distributions.match import PermutationMatch
from models.errors import InputError
from models.program.marginal import marginal, tempered
from models.scenes import Scene
from models.templates import Parts
from tests import oracle
from tests.agreement import assert_means, assert_posterior
from tests.oracle_inference import posterior
from tests.problems import DESIGNS, Design, make_problem, stack_problems, translation

pytestmark = pytest.mark.long

TWO = 0.1
"""Weight that two partitions have at least in a scene of several modes."""


def several_modes(design, num_points, precision, count):
    """Random scenes by the first seeds, from 0, with two partitions of weight above 0.1.

    No template of a random problem is like another one or like itself turned, so no partition is
    the image of another one.
    """
    problems = (
        make_problem(np.random.default_rng(seed), design, num_points, precision=precision)
        for seed in itertools.count()
    )
    return list(itertools.islice(filter(_is_mixed, problems), count))


def _is_mixed(problem):
    return sorted(posterior(problem).partitions.values())[-2] > TWO


def assert_exact(result, exact):
    assert result.converged, result.details
    assert_posterior(result.draws, exact, result.scene.present)
    error = result.log_evidence_error
    assert 0 < error < 0.2
    assert abs(result.log_evidence - exact.log_evidence) < 5 * error


def test_there_is_no_evidence_where_steps_diverge():
    """A noise that may be close to zero: the estimate was six nats off, with an error of .18."""
    often = np.arange(400).reshape(4, 100) % 20 == 0
    assert not chains.is_followed({"diverging": often})
    assert chains.is_followed({"diverging": np.arange(400).reshape(4, 100) % 200 == 0})
    assert chains.is_followed({})  # of Gibbs sampling nothing diverges


# --- agreement with exact inference -------------------------------------------------------------

PROBLEMS = several_modes(DESIGNS["similarity"], 5, precision=200.0, count=2)
STACKED = stack_problems(PROBLEMS)
SMALL = several_modes(Design((0, 0, 1), 2, 2, translation), 3, precision=50.0, count=1)
"""Three points, of a pair of parts and a lone part that can only be moved."""


def test_a_small_scene_agrees_with_brute_force():
    stacked, exact = stack_problems(SMALL), posterior(SMALL[0])
    budget = {"num_warmup": 300, "num_samples": 1500, "num_temperatures": 6}
    result = nuts.run(
        stacked.program, stacked.scenes.take(0), jax.random.key(0), init_strategy="prior", **budget
    )
    assert_exact(result, exact)
    np.testing.assert_allclose(result.match_probs, exact.match_probs, atol=0.05)


@functools.cache
def answer(index):
    budget = {"num_warmup": 300, "num_samples": 2000, "num_temperatures": 14}
    return nuts.run(STACKED.program, STACKED.scenes.take(index), jax.random.key(0), **budget)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_draws_and_evidence_agree_with_brute_force(index):
    result, exact = answer(index), posterior(PROBLEMS[index])
    assert sorted(exact.partitions.values())[-2] > TWO
    assert_exact(result, exact)
    np.testing.assert_allclose(result.match_probs, exact.match_probs, atol=0.1)
    assert result.draws["pose"].shape == (4, 2000, 2, 4)
    assert result.details["betas"].shape == (14,)
    assert result.details["swap_rate"].shape == (13,)
    assert 0.2 < result.details["swap_rate"].min() < result.details["swap_rate"].max() < 1


@pytest.mark.slow
def test_without_tempering_r_hat_shows_that_chains_stay_in_their_modes():
    budget = {"num_warmup": 300, "num_samples": 500, "num_chains": 8}
    for index in (0, 1):
        scene = STACKED.scenes.take(index)
        result = nuts.run(
            STACKED.program, scene, jax.random.key(0), init_strategy="prior", **budget
        )
        assert result.details["pose_r_hat"] > 1.05
        assert not result.converged
        assert result.log_evidence is None


@pytest.mark.slow
def test_without_tempering_chains_stay_in_the_parses_that_they_begin_at():
    """Those are drawn by their weights, so that R-hat shows it; with tempering they move."""
    scene, exact = STACKED.scenes.take(0), posterior(PROBLEMS[0])
    result = nuts.run(
        STACKED.program, scene, jax.random.key(0), num_warmup=300, num_samples=500, num_chains=8
    )
    assert result.details["pose_r_hat"] > 1.05
    assert not result.converged
    assert np.abs(answer(0).match_probs - exact.match_probs).max() < TWO / 2


@pytest.mark.slow
def test_a_prior_without_a_closed_form_agrees_with_numerical_integration():
    """A Student-t pose is a Normal one with a Gamma variable that divides its covariance.

    The first scene, by seeds from 0, whose most probable match has less than half of the weight.
    """
    problems = (
        make_problem(np.random.default_rng(seed), DESIGNS["one_object"], 3, precision=20.0)
        for seed in itertools.count()
    )
    problem = next(p for p in problems if posterior(p).match_probs.max(axis=1).min() < 0.5)
    parts = parts_of(problem)
    scale = np.linalg.cholesky(problem.prior_covariance)

    def program(points=None, present=None):
        with numpyro.plate("object", 1):
            prior = dist.MultivariateStudentT(3.0, problem.prior_mean, scale)
            pose = numpyro.sample("pose", prior)
        match = numpyro.sample("match", PermutationMatch(problem.match_logits))
        likelihood = MatchedParts(match, pose, parts, present=present)
        return numpyro.sample("points", likelihood, obs=points)

    grid = np.geomspace(1e-3, 30, 600)
    at = [posterior(problem._replace(prior_covariance=problem.prior_covariance / w)) for w in grid]
    density = np.exp([p.log_evidence for p in at]) * gamma(1.5, scale=1 / 1.5).pdf(grid) * grid
    weight = density / density.sum()
    log_evidence = np.log(np.trapezoid(density, np.log(grid)))
    result = nuts.run(
        program,
        Scene(problem.points, problem.present),
        jax.random.key(0),
        num_samples=2000,
        num_warmup=300,
        num_temperatures=8,
    )
    assert result.converged, result.details
    assert_means(result.draws["pose"], np.tensordot(weight, [p.pose_mean for p in at], 1))
    indicators = (result.draws["match"][..., None] == np.arange(3)).astype(float)
    assert_means(indicators, np.tensordot(weight, [p.match_probs for p in at], 1))
    error = result.log_evidence_error
    assert 0 < error < 0.1
    assert abs(result.log_evidence - log_evidence) < 5 * error


def parts_of(problem):
    rows = len(problem.owner)
    numbers = (problem.F, problem.offset, problem.variance)
    return Parts(*numbers, problem.owner, np.zeros(rows, int), problem.feature_mask)


# --- the pieces ---------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_tempered_density_is_the_prior_times_a_power_of_the_likelihood(beta):
    """By a sum over all matches in plain numpy."""
    problem = PROBLEMS[0]
    pose = problem.prior_mean + 0.3
    predicted = oracle.predicted_parts(problem.F, problem.offset, problem.owner, pose)
    residual = problem.points[:, None] - predicted
    table = -0.5 * (residual**2 / problem.variance + np.log(2 * np.pi * problem.variance))
    columns = oracle.permutations(5)
    prior = oracle.scores(problem.match_logits, columns)
    scores = oracle.scores(table.sum(axis=-1) + problem.match_logits, columns)
    expected = beta * (oracle.log_sum(scores) - oracle.log_sum(prior))
    for shift, covariance in zip(pose - problem.prior_mean, problem.prior_covariance, strict=True):
        expected -= 0.5 * shift @ np.linalg.solve(covariance, shift)
        expected -= 0.5 * np.linalg.slogdet(2 * np.pi * covariance)[1]
    model = tempered(marginal(STACKED.program), beta)
    found, _ = log_density(model, (), STACKED.scenes.take(0).observed, {"pose": jnp.asarray(pose)})
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_further_observed_sites_are_tempered_too():
    def program(points=None, present=None):
        x = numpyro.sample("x", dist.Normal(0.0, 2.0))
        numpyro.sample("count", dist.Poisson(jnp.exp(x)), obs=3)
        numpyro.factor("bonus", -x)

    def density(beta):
        return log_density(tempered(program, beta), (), {}, {"x": 0.7})[0]

    prior = dist.Normal(0.0, 2.0).log_prob(0.7)
    likelihood = dist.Poisson(np.exp(0.7)).log_prob(3) - 0.7
    np.testing.assert_allclose(density(0.0), prior, rtol=1e-6)
    np.testing.assert_allclose(density(0.3), prior + 0.3 * likelihood, rtol=1e-6)


@pytest.mark.parametrize("turn", [0, 1])
def test_exchanges_leave_the_distribution_of_every_rung_as_it_is(turn):
    """Four rungs of five states: frequencies before and after, over many independent ladders."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(5), size=4)
    which, where = tempering.trials(4)
    count = 100_000
    state = np.stack([rng.choice(5, size=count, p=p) for p in probs], axis=1)
    densities = np.log(probs)[where, state[:, which]]
    keys = jax.random.split(jax.random.key(0), count)
    swap = jax.vmap(tempering.propose, in_axes=(0, 0, None))(keys, densities, jnp.array(turn))
    after = np.take_along_axis(state[:, which], np.asarray(swap.chosen), axis=1)
    frequency = (after[..., None] == np.arange(5)).mean(axis=0)
    assert (np.abs(frequency - probs) < 5 * np.sqrt(probs * (1 - probs) / count)).all()
    accept = np.asarray(swap.accept_prob)
    pairs = [0, 2] if turn == 0 else [1]
    assert np.isnan(np.delete(accept, pairs, axis=1)).all()
    for i in pairs:
        # A pair is exchanged as a whole, and no state is lost.
        moved = (after[:, [i, i + 1]] == state[:, [i + 1, i]]).all(axis=1)
        stayed = (after[:, [i, i + 1]] == state[:, [i, i + 1]]).all(axis=1)
        assert (moved | stayed).all()
        same = probs[i, state[:, i]] * probs[i + 1, state[:, i + 1]]
        crossed = probs[i, state[:, i + 1]] * probs[i + 1, state[:, i]]
        np.testing.assert_allclose(accept[:, i], np.minimum(crossed / same, 1), rtol=1e-9)
    np.testing.assert_array_equal(  # at the states of the lower replica, and of the upper one
        swap.log_ratio[:, 1, 0], np.log(probs)[2, state[:, 1]] - np.log(probs)[1, state[:, 1]]
    )
    np.testing.assert_array_equal(
        swap.log_ratio[:, 1, 1], np.log(probs)[2, state[:, 2]] - np.log(probs)[1, state[:, 2]]
    )


def test_places_are_exchanged_with_the_energies_and_gradients_of_their_new_betas():
    betas, z = jnp.array([0.0, 0.5, 1.0]), jnp.array([0.5, 1.0, 2.0])

    def potential(z, beta):
        return (1 + beta) * z["x"] ** 2

    place = IntegratorState(z={"x": z}, z_grad={"x": z}, potential_energy=z)
    key = jax.random.key(0)
    for turn, order in ((0, [1, 0, 2]), (1, [0, 2, 1])):
        after, swap = tempering.exchange_places(key, potential, place, betas, jnp.array(turn))
        assert swap.accept_prob[turn] == 1
        x = after.z["x"]
        np.testing.assert_array_equal(x, z[jnp.array(order)])
        np.testing.assert_allclose(after.potential_energy, (1 + betas) * x**2)
        np.testing.assert_allclose(after.z_grad["x"], 2 * (1 + betas) * x)


def test_the_ladder_begins_where_half_of_the_draws_of_the_prior_are_effective():
    """A unit Normal pose seen at 0 with precision t: (1 + 2 b t)^1/2 / (1 + b t) are effective."""
    precision = 1e3
    parts = Parts(
        np.ones((1, 1, 1)),
        np.zeros((1, 1)),
        np.full((1, 1), 1 / precision),
        np.zeros(1, int),
        np.zeros(1, int),
        np.ones((1, 1), bool),
    )

    def program(points=None, present=None):
        with numpyro.plate("object", 1):
            pose = numpyro.sample("pose", dist.MultivariateNormal(np.zeros(1), np.eye(1)))
        match = numpyro.sample("match", PermutationMatch(np.zeros((1, 1))))
        return numpyro.sample("points", MatchedParts(match, pose, parts), obs=points)

    scene = Scene(np.zeros((1, 1)), np.ones(1, bool))
    betas = tempering.prior_ladder(program, scene, 7)
    assert betas[0] == 0
    assert betas[-1] == 1
    np.testing.assert_allclose(np.diff(np.log(betas[1:]), 2), 0, atol=1e-9)
    half = (3 + np.sqrt(12)) / precision  # where that is 1/2
    assert 0.7 < betas[1] / half < 1.4


def test_a_ladder_of_two_rungs_is_refused():
    for rungs in (0, 2):
        with pytest.raises(InputError, match=f"at least 3, or 1 for no tempering, got {rungs}"):
            nuts.run(
                STACKED.program, STACKED.scenes.take(0), jax.random.key(0), num_temperatures=rungs
            )
