"""The published procedures: step by step against plain loops, and the numbers of their reruns."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capsules.experiments.generator import sample_scenes
from capsules.experiments.paper import RERUN, SIGMAS
from capsules.files.inputs import load_scenes
from capsules.methods import infer
from inference.diagnostics.metrics import partition_metrics
from inference.variational import published
from models.constellation import constellation, mixture_constellation
from models.errors import InputError
from models.program.batches import read_scenes
from tests import oracle, oracle_inference
from tests.problems import DESIGNS, make_problem, stack_problems


@pytest.mark.parametrize("scale", [1e-5, 2.0])
def test_sweeps_are_two_of_the_reference_or_none(scale):
    """Rows that sum to one from the start, as closely as counts, are left alone."""
    log_rho = scale * np.random.default_rng(0).normal(size=(5, 5, 4)) - np.log(5)
    found = np.exp(published.sweep(jnp.asarray(log_rho)))
    for i in range(4):
        reference = oracle_inference.sinkhorn(log_rho[..., i], 0.0, max_sweeps=2)
        wanted = np.exp(log_rho[..., i]) if scale < 1e-3 else reference
        np.testing.assert_allclose(found[..., i], wanted, atol=1e-12)


def test_a_step_is_that_of_plain_loops():
    """Weights without the constant of the density, two sweeps, and the ELBO that has it."""
    problems = [make_problem(np.random.default_rng(s), DESIGNS["similarity"], 3) for s in range(2)]
    model = stack_problems(problems).conjugate()
    rng = np.random.default_rng(5)
    step = jax.jit(lambda *given: published.step(model, problems[0].owner, *given))
    for beta in (0.05, 1.6):
        starts = [oracle_inference.uniform_start(rng, len(p.points)) for p in problems]
        match_probs = jnp.asarray(np.stack(starts, axis=-1))
        betas, before = jnp.full(2, beta), jnp.asarray([0.0, 1e9])
        found = step(match_probs, betas, before)
        for i, (problem, start) in enumerate(zip(problems, starts, strict=True)):
            mean, covariance = oracle_inference.update_pose(problem, start, beta)
            density = oracle_inference.expected_log_likelihood(problem, mean, covariance, beta)
            constant = np.zeros_like(density)
            for m, n in itertools.product(*map(range, density.shape)):
                counted = problem.seen[m] & problem.feature_mask[n]
                variance = problem.variance[n][counted] / beta
                constant[m, n] = -0.5 * np.sum(np.log(2 * np.pi * variance))
            log_rho = problem.match_logits + density - constant
            wanted = oracle_inference.sinkhorn(log_rho, 0.0, max_sweeps=2)
            terms = oracle_inference.elbo_terms(problem, wanted, mean, covariance, density)
            np.testing.assert_allclose(found.match_probs[..., i], wanted, atol=1e-10)
            np.testing.assert_allclose(found.elbo[i], terms.total, rtol=1e-9)
    assert not found.settled.any()


def test_sparse_are_objects_that_surely_have_one_point():
    scenes = sample_scenes(8, seed=2).take(slice(4))
    model = jax.tree.map(jnp.asarray, read_scenes(constellation, scenes).model)
    owner = np.asarray(model.parts.owner)[..., 0]
    assert not scenes.present[1].all()
    match_probs = np.zeros((11, 11, 4))
    first = [int(np.flatnonzero(scenes.present[i])[0]) for i in range(4)]
    absent = int(np.flatnonzero(~scenes.present[1])[0])
    match_probs[first[0], 0, 0] = 0.95  # one point, and nothing else
    match_probs[absent, 0, 1] = 1.0  # a dummy row is no point
    match_probs[first[2], 0, 2] = 0.85  # not surely
    match_probs[first[3], 0, 3] = match_probs[first[3] + 1, 1, 3] = 1.0  # two points
    found = published.is_sparse(model, owner, jnp.asarray(match_probs))
    np.testing.assert_array_equal(found, [True, False, False, False])


@pytest.mark.long
def test_runs_are_chosen_by_the_elbo_and_always_take_500_steps():
    scenes = sample_scenes(12, seed=4).take(slice(4))
    found = published.run(constellation, scenes, jax.random.key(3), num_restarts=2)
    assert (found.steps == 500).all()
    rows = np.where(scenes.present[..., None], found.match_probs, 0).sum(axis=2)
    np.testing.assert_allclose(rows, scenes.present, atol=1e-12)
    more = published.run(constellation, scenes, jax.random.key(3), num_restarts=6)
    assert not np.array_equal(found.elbo, more.elbo)
    again = published.run(constellation, scenes, jax.random.key(3), num_restarts=2)
    np.testing.assert_array_equal(found.elbo, again.elbo)


def test_a_start_has_rows_that_sum_to_one_and_no_dummies():
    scenes = sample_scenes(8, seed=1).take(slice(4))
    model = jax.tree.map(jnp.asarray, read_scenes(constellation, scenes).model)
    start = np.moveaxis(np.asarray(published.random_rows(jax.random.key(0), model)), -1, 0)
    np.testing.assert_allclose(start.sum(axis=2), scenes.present, atol=1e-12)
    assert start[scenes.present].std() > 0.02
    assert oracle.entropy(start[0][scenes.present[0]]) > 0


def test_other_programs_are_refused():
    scenes = sample_scenes(4, seed=1)
    with pytest.raises(InputError, match="a match prior over permutations"):
        published.run(mixture_constellation, scenes, jax.random.key(0))
    with pytest.raises(InputError, match="restarts must be at least 1, got 0"):
        published.run(constellation, scenes, jax.random.key(0), num_restarts=0)
    with pytest.raises(
        InputError, match="ds under the preset 'published' has no option 'init_strategy'"
    ):
        infer("ds", scenes, preset="published", init_strategy="parses")


@pytest.mark.slow
@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("method", ["ds", "gmm"])
def test_the_numbers_of_a_rerun_within_two_standard_errors(shared_data, method, sigma):
    scenes = load_scenes(shared_data / f"constellations_{sigma:.2f}.npz", limit=512)
    found = infer(method, scenes, preset="published")
    metrics = partition_metrics(scenes.object, found.labels)
    names = ("sa", "ari", "vi", "scene_accuracy")
    for name, value in zip(names, RERUN[method, sigma], strict=True):
        error = metrics[name].std(ddof=1) / np.sqrt(len(metrics[name]))
        assert abs(metrics[name].mean() - value) <= 2 * error, name
