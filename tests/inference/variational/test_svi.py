"""SVI climbs the ELBO of coordinate ascent along unbiased gradients; automatic guides bound too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from capsules.experiments.generator import sample_scenes
from guides import meanfield
from inference import svi
from inference.proposals.propose import propose_whole
from inference.result import partition
from inference.variational import families, pool
from inference.variational.ascent import Schedule
from models.constellation import constellation
from models.errors import InputError
from models.program.batches import read_scenes
from models.scenes import Scene
from models.templates import shapes, stack
from tests.agreement import assert_means
from tests.oracle_inference import posterior
from tests.problems import DESIGNS, make_problem, stack_problems

pytestmark = pytest.mark.slow  # compiles for minutes; `make test-all` runs it

NAMES = ("square", "triangle")
program = functools.partial(constellation, parts=stack(shapes(*NAMES)), precision=4e3)
COUNT = 20


@pytest.fixture(scope="module")
def scenes():
    return sample_scenes(64, 0.1, 5, NAMES).take(slice(COUNT))


@pytest.fixture(scope="module")
def result(scenes):
    return svi.run(program, scenes, jax.random.key(0), num_restarts=1, history=True)


def coordinate_ascent(scenes):
    """Coordinate ascent from the same R, at beta = 1 from the first step, to convergence."""
    schedule = Schedule(tolerance=1e-8)
    reading = read_scenes(program, scenes)
    engine = pool.engine(reading.skeleton, "sinkhorn", schedule)
    runs = np.c_[np.arange(COUNT), np.zeros(COUNT, int)]
    keys = pool.run_keys(jax.random.key(0), runs)
    begins = pool.begins_of(propose_whole(reading), runs)
    run = engine.start(reading.model, keys, *begins)
    one = jnp.ones(COUNT)
    precision = meanfield.fixed_precision(run.model, one)
    run = run._replace(state=run.state._replace(beta=one, precision=precision))
    while not run.state.done.all():
        run = engine.advance(run)
    return np.asarray(run.state.terms.elbo)


def test_svi_reaches_the_elbo_of_coordinate_ascent_from_the_same_start(scenes, result):
    gap = result.elbo - coordinate_ascent(scenes)
    assert len(gap) == COUNT
    assert result.converged.all()
    assert gap.min() > -0.01
    assert gap.max() < 1e-4


def test_a_match_that_is_not_doubly_stochastic_has_not_converged(monkeypatch, scenes, result):
    monkeypatch.setattr(svi, "LARGEST_ERROR", -1.0)
    again = svi.run(program, scenes, jax.random.key(0), num_restarts=1)
    assert result.converged.all()
    assert not again.converged.any()


def test_the_elbo_goes_up_and_the_loss_is_its_negative(result):
    elbo, loss = result.history["elbo"].T, result.history["loss"].T
    assert (elbo[-1] > elbo[0]).all()
    np.testing.assert_allclose(elbo[-1], result.elbo)
    np.testing.assert_allclose(-loss[-1], elbo[-1], atol=1.0)  # a mean over noisy estimates


def test_the_result_is_that_of_q(result):
    np.testing.assert_allclose(result.match_probs.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(result.match_probs.sum(axis=2), 1, atol=1e-6)
    assert np.linalg.eigvalsh(result.pose_covariance).min() > 0
    expected = partition(result.match_probs, result.owner, result.scene.present)
    np.testing.assert_array_equal(result.labels, expected)


def test_the_gradient_is_unbiased_against_the_closed_form(scenes):
    """At a random q, over thousands of estimates, in each of the parameters."""
    family = families.mean_field(program, "parses", 1, scenes.layout)
    params, frame = family.begin(scenes, jax.random.key(3), np.array([[0, 0]]))
    rng = np.random.default_rng(0)
    params, frame, scene = jax.tree.map(
        lambda x: jnp.asarray(x[0]), (params, frame, Scene(**scenes.observed))
    )
    params = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape), params)
    keys = jax.random.split(jax.random.key(4), 4000)
    gradients = jax.jit(jax.vmap(jax.grad(family.loss, argnums=1), in_axes=(0, None, None, None)))(
        keys, params, frame, scene
    )
    exact = jax.jit(jax.grad(family.elbo))(params, frame, scene)
    for name, value in exact.items():
        assert np.abs(value).max() > 0.1, name
        draws = np.asarray(gradients[name])
        error = draws.std(axis=0) / np.sqrt(len(draws))
        assert (np.abs(draws.mean(axis=0) + value) < 5 * error + 1e-6).all(), name


def test_draws_of_q_have_its_moments(scenes):
    result = svi.run(
        program, scenes.take(1), jax.random.key(0), num_restarts=2, num_steps=500, num_samples=4000
    )
    pose, match = result.draws["pose"], result.draws["match"]
    assert pose.shape == (1, 4000, 2, 4)
    spread = np.sqrt(np.diagonal(result.pose_covariance, axis1=1, axis2=2))
    assert_means(pose, result.pose_mean)
    np.testing.assert_allclose(pose[0].std(axis=0), spread, rtol=0.1)
    present = result.scene.present
    frequency = (match[0, :, :, None] == np.arange(7)).mean(axis=0)
    np.testing.assert_allclose(frequency[present], result.match_probs[present], atol=0.04)
    assert (match[..., ~present] == -1).all()


@pytest.mark.parametrize("guide", ["AutoMultivariateNormal", "AutoNormal"])
def test_an_automatic_guide_is_nearly_exact_on_a_scene_with_one_mode(guide):
    problem = make_problem(np.random.default_rng(0), DESIGNS["similarity"], 5, precision=200.0)
    stacked = stack_problems([problem])
    exact = posterior(problem)
    result = svi.run(
        stacked.program, stacked.scenes.take(0), jax.random.key(0), guide=guide, num_restarts=2
    )
    assert result.converged
    gap = exact.log_evidence - result.elbo
    if guide == "AutoMultivariateNormal":  # the posterior is nearly Normal
        assert -0.02 < gap < 0.05
        np.testing.assert_allclose(
            np.linalg.det(result.pose_covariance), np.linalg.det(exact.pose_covariance), rtol=0.5
        )
    else:
        assert 0.05 < gap < 10
    spread = np.sqrt(np.diagonal(exact.pose_covariance, axis1=1, axis2=2))
    assert (np.abs(result.pose_mean - exact.pose_mean) < 0.3 * spread).all()
    np.testing.assert_allclose(result.match_probs, exact.match_probs, atol=0.02)


FLOWS = stack_problems(
    [
        make_problem(np.random.default_rng(seed), DESIGNS["similarity"], 5, precision=200.0)
        for seed in (0, 3)
    ]
)


@pytest.mark.parametrize("index", [0, 1])
def test_a_flow_converges_close_to_the_exact_evidence(index):
    """Within 0.1 nats below it, and above by no more than 256 draws can be off.

    The log weights of a q that is 0.1 nats away spread by about sqrt(2 * 0.1), and the standard
    error of their mean is 0.03.
    """
    exact = posterior(FLOWS.problems[index])
    assert exact.match_probs.max(axis=1).min() > 0.9  # one mode: a flow has no more
    scene = FLOWS.scenes.take(index)
    result = svi.run(FLOWS.program, scene, jax.random.key(0), guide="AutoIAFNormal", num_restarts=2)
    assert result.converged
    assert -0.1 < exact.log_evidence - result.elbo < 0.1
    spread = np.sqrt(np.diagonal(exact.pose_covariance, axis1=1, axis2=2))
    assert (np.abs(result.pose_mean - exact.pose_mean) < 0.3 * spread).all()
    np.testing.assert_allclose(result.match_probs, exact.match_probs, atol=0.02)


def test_any_optimizer_serves(scenes):
    slow = svi.run(
        program,
        scenes.take(0),
        jax.random.key(0),
        num_restarts=1,
        optimizer=optax.sgd(0.0),
        num_steps=300,
    )
    fast = svi.run(
        program,
        scenes.take(0),
        jax.random.key(0),
        num_restarts=1,
        optimizer=optax.rmsprop(0.02),
        num_steps=300,
    )
    assert slow.converged  # nothing moves at all
    assert fast.elbo > slow.elbo + 0.1


def test_what_is_refused(scenes):
    with pytest.raises(InputError, match="fitted to one scene, got a batch"):
        svi.run(program, scenes, jax.random.key(0), guide="AutoNormal")
    with pytest.raises(InputError, match="no guide 'AutoMagic'; choose mean_field, AutoMulti"):
        svi.run(program, scenes.take(0), jax.random.key(0), guide="AutoMagic")
    with pytest.raises(InputError, match="cannot start from 'vi'; choose parses or uniform"):
        svi.run(program, scenes.take(0), jax.random.key(0), init_strategy="vi")
    with pytest.raises(InputError, match="num_restarts and num_particles must be at least 1"):
        svi.run(program, scenes.take(0), jax.random.key(0), num_restarts=0)
