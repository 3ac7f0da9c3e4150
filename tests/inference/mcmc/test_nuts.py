"""NUTS against brute force, and what it says where a scene has several modes."""

import functools

import jax
import numpy as np
import pytest
from numpyro.diagnostics import split_gelman_rubin

from inference import nuts
from models.errors import InputError
from tests import oracle
from tests.agreement import assert_posterior
from tests.oracle_inference import posterior
from tests.problems import DESIGNS, make_problem, stack_problems

pytestmark = pytest.mark.slow  # compiles for minutes; `make test-all` runs it

# Random scenes of five points: the first has one match to speak of, the second several modes.
PROBLEMS = [
    make_problem(np.random.default_rng(seed), DESIGNS["similarity"], 5, precision=200.0)
    for seed in (0, 9)
]
STACKED = stack_problems(PROBLEMS)
BUDGET = {"num_chains": 4, "num_warmup": 200, "num_samples": 400}


@functools.cache
def answer(index):
    return nuts.run(STACKED.program, STACKED.scenes.take(index), jax.random.key(0), **BUDGET)


def test_draws_agree_with_brute_force_on_a_scene_with_one_mode():
    result, exact = answer(0), posterior(PROBLEMS[0])
    assert result.converged
    assert_posterior(result.draws, exact, result.scene.present)
    np.testing.assert_allclose(result.match_probs, exact.match_probs, atol=0.01)
    best = max(exact.partitions, key=exact.partitions.get)
    together = np.equal.outer(best, best)
    np.testing.assert_array_equal(np.equal.outer(result.labels, result.labels), together)


def test_the_log_density_is_that_of_poses_with_the_match_summed_out():
    """Brute force over all 120 matches, at some draws."""
    result, problem = answer(0), PROBLEMS[0]
    columns = oracle.permutations(5)
    for draw in (0, 399):
        pose = result.draws["pose"][1, draw]
        predicted = oracle.predicted_parts(problem.F, problem.offset, problem.owner, pose)
        residual = problem.points[:, None] - predicted
        table = -0.5 * (residual**2 / problem.variance + np.log(2 * np.pi * problem.variance))
        scores = oracle.scores(table.sum(axis=-1) + problem.match_logits, columns)
        expected = oracle.log_sum(scores) - oracle.log_sum(
            oracle.scores(problem.match_logits, columns)
        )
        for k, y in enumerate(pose):
            shift, covariance = y - problem.prior_mean[k], problem.prior_covariance[k]
            expected -= 0.5 * shift @ np.linalg.solve(covariance, shift)
            expected -= 0.5 * np.linalg.slogdet(2 * np.pi * covariance)[1]
        np.testing.assert_allclose(result.sample_stats["lp"][1, draw], expected, rtol=1e-8)


def test_the_statistics_are_those_of_a_healthy_sampler():
    stats = answer(0).sample_stats
    assert {x.shape for x in stats.values()} == {(4, 400)}
    assert stats["diverging"].mean() < 0.01
    assert 0.6 < stats["acceptance_rate"].mean() < 0.98
    np.testing.assert_array_equal(
        stats["tree_depth"], [[int(n).bit_length() for n in chain] for chain in stats["n_steps"]]
    )
    # The potential, and a kinetic energy that is half a sum of eight squares of unit Normals.
    kinetic = stats["energy"] + stats["lp"]
    assert kinetic.min() > 0
    assert 3 < kinetic.mean() < 5


def test_r_hat_shows_chains_that_stay_in_different_modes():
    scene = STACKED.scenes.take(1)
    result = nuts.run(STACKED.program, scene, jax.random.key(0), init_strategy="prior", **BUDGET)
    assert split_gelman_rubin(result.draws["pose"]).max() > 1.2
    assert result.details["pose_r_hat"] > 1.2  # no two of its objects can be swapped
    assert not result.converged
    assert split_gelman_rubin(answer(0).draws["pose"]).max() < 1.05


def test_the_same_key_gives_the_same_draws_and_progress_is_told():
    told = []
    again = nuts.run(
        STACKED.program,
        STACKED.scenes.take(0),
        jax.random.key(0),
        progress_bar=lambda done, total: told.append((done, total)),
        **BUDGET,
    )
    for name, draws in answer(0).draws.items():
        np.testing.assert_array_equal(again.draws[name], draws)
    assert told[-1] == (600, 600)
    assert told == sorted(told) and len(told) > 3


def test_what_is_refused():
    with pytest.raises(InputError, match=r"one scene, got a batch; use scene.take\(i\)"):
        nuts.run(STACKED.program, STACKED.scenes, jax.random.key(0))
    with pytest.raises(InputError, match=r"between 0 and 1, got 1\.5"):
        nuts.run(STACKED.program, STACKED.scenes.take(0), jax.random.key(0), target_accept_prob=1.5)
    with pytest.raises(InputError, match="num_samples at least 4"):
        nuts.run(STACKED.program, STACKED.scenes.take(0), jax.random.key(0), num_samples=0)
