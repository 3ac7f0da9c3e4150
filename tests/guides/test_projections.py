"""Projections of weights to match probabilities, each a maximiser and the right kind of bound."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from guides.projections import PROJECTIONS
from models.numerics.bethe import propagate
from tests import oracle, oracle_inference

pytestmark = pytest.mark.long

SIZE = 5


@functools.partial(jax.jit, static_argnums=0)
def project(name, log_rho):
    return PROJECTIONS[name].cold(log_rho, 1e-12)


def weights(count, scale, seed=0, size=SIZE):
    """Log weights with the batch last."""
    return np.random.default_rng(seed).normal(size=(size, size, count)) * scale


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_sinkhorn_is_the_scaling_of_the_plain_reference(scale):
    log_rho = weights(8, scale)
    found = project("sinkhorn", log_rho)
    for i in range(8):
        wanted = oracle_inference.sinkhorn(log_rho[..., i], 1e-12)
        np.testing.assert_allclose(found.match_probs[..., i], wanted, atol=1e-9)
        np.testing.assert_allclose(found.entropy[i], oracle.entropy(wanted), atol=1e-8)


def test_softmax_is_that_of_the_rows():
    log_rho = weights(8, 3.0)
    found = project("softmax", log_rho)
    for i in range(8):
        wanted = oracle_inference.softmax(log_rho[..., i])
        np.testing.assert_allclose(found.match_probs[..., i], wanted, atol=1e-12)
        np.testing.assert_allclose(found.entropy[i], oracle.entropy(wanted), atol=1e-9)


def bethe_entropy(r):
    return -np.sum(r * np.log(r)) + np.sum((1 - r) * np.log(1 - r))


@pytest.mark.parametrize("name", ["sinkhorn", "bethe"])
def test_the_projection_maximises_its_objective(name):
    """No doubly stochastic matrix nearby has more of sum r log rho + H(r)."""
    entropy = {"sinkhorn": oracle.entropy, "bethe": bethe_entropy}[name]
    log_rho = weights(6, 2.0, seed=1)
    found = project(name, log_rho)
    rng = np.random.default_rng(2)
    for i in range(6):
        r = np.asarray(found.match_probs[..., i])
        best = np.sum(r * log_rho[..., i]) + entropy(r)
        np.testing.assert_allclose(entropy(r), found.entropy[i], atol=1e-9)
        for _ in range(50):
            other = oracle.sinkhorn(np.log(r) + rng.normal(size=r.shape) * 10 ** rng.uniform(-2, 1))
            other = 0.999 * other + 0.001 / SIZE
            value = np.sum(other * log_rho[..., i]) + entropy(other)
            assert value <= best + 1e-9
        np.testing.assert_allclose(r.sum(axis=0), 1, atol=1e-9)
        np.testing.assert_allclose(r.sum(axis=1), 1, atol=1e-9)


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 20.0])
def test_both_are_lower_bounds_of_the_permanent(scale):
    """Van der Waerden's inequality for one, Gurvits' for the other.

    The first is exact for flat weights and the second for sharp ones, so each is the tighter
    where the other is not.
    """
    log_rho = weights(40, scale, seed=3)
    objective = {}
    for name, gain in (("sinkhorn", oracle.log_van_der_waerden(SIZE)), ("bethe", 0.0)):
        found = project(name, log_rho)
        np.testing.assert_allclose(PROJECTIONS[name].log_bound(SIZE), gain, rtol=1e-12)
        energy = np.where(found.match_probs > 0, found.match_probs * log_rho, 0).sum(axis=(0, 1))
        objective[name] = energy + np.asarray(found.entropy) + gain
    exact = np.array([oracle.log_permanent(log_rho[..., i]) for i in range(40)])
    for value in objective.values():
        assert (value <= exact + 1e-8).all()
    if scale == 0.1:
        assert (objective["sinkhorn"] > objective["bethe"] + 1).all()
    if scale == 20.0:
        assert (objective["bethe"] > objective["sinkhorn"] + 1).all()


@pytest.mark.parametrize("name", ["sinkhorn", "bethe"])
def test_sharp_weights_go_to_the_best_assignment(name):
    log_rho = weights(10, 1e6, seed=4)
    found = np.asarray(project(name, log_rho).match_probs)
    for i in range(10):
        rows, columns = linear_sum_assignment(log_rho[..., i], maximize=True)
        np.testing.assert_allclose(found[rows, columns, i], 1, atol=1e-6)


@pytest.mark.parametrize(
    "ties",
    [
        [[1, 0, 1], [0, 1, 1], [0, 1, 1]],
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 1]],
        [[1, 0, 0, 1, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0, 1, 0, 1, 1]],
    ],
)
def test_messages_settle_among_ties(ties):
    """Without damping they jump between two states for ever."""
    log_rho = np.where(ties, 0.0, -30.0)[..., None]
    found = propagate(jnp.asarray(log_rho), jnp.zeros(log_rho.shape), 1e-12)
    assert float(found.error[0]) <= 1e-12
    np.testing.assert_allclose(found.match_probs[..., 0].sum(axis=0), 1.0, atol=1e-12)
    assert (np.asarray(found.match_probs[..., 0])[np.array(ties) == 0] < 1e-6).all()


@pytest.mark.parametrize("name", ["sinkhorn", "bethe"])
def test_a_warm_start_ends_in_the_same_place(name):
    projection = PROJECTIONS[name]
    log_rho = weights(5, 2.0)
    cold = project(name, log_rho)
    warm = projection.project(jnp.asarray(log_rho), cold.carry, 1e-12)
    np.testing.assert_allclose(warm.match_probs, cold.match_probs, atol=1e-9)
    elsewhere = project(name, weights(5, 2.0, seed=9)).carry
    again = projection.project(jnp.asarray(log_rho), elsewhere, 1e-12)
    np.testing.assert_allclose(again.match_probs, cold.match_probs, atol=1e-9)
    values = [
        np.sum(p.match_probs * log_rho, axis=(0, 1)) + np.asarray(p.entropy) for p in (again, cold)
    ]
    np.testing.assert_allclose(values[0], values[1], atol=1e-8)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_single_part_is_certain(name):
    found = project(name, np.full((1, 1, 3), -7.0))
    np.testing.assert_allclose(found.match_probs, 1)
    np.testing.assert_allclose(found.entropy, 0, atol=1e-12)
