"""The log permanent, its gradient and its draws, against brute force and Ryser's formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from models.errors import InputError
from models.numerics.permanent import (
    injection_marginals,
    log_cofactors,
    log_permanent,
    sample_injection,
)
from tests import oracle

SHAPES = [
    pytest.param((m, n), marks=[pytest.mark.slow] * (n > 4 and (m, n) not in ((3, 6), (7, 7))))
    for n in range(1, 8)
    for m in range(1, n + 1)
]

# One compilation for each shape; op by op it takes far longer.
value_of = jax.jit(log_permanent)
value_and_gradient = jax.jit(jax.value_and_grad(log_permanent))
marginals_of = jax.jit(injection_marginals)
draw = jax.jit(sample_injection, static_argnums=2)


@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradient(shape):
    log_weights = np.random.default_rng(shape).normal(scale=3, size=shape)
    value, gradient = value_and_gradient(log_weights)
    np.testing.assert_allclose(value, oracle.log_permanent(log_weights), rtol=1e-12, atol=1e-12)
    expected = oracle.marginals(log_weights, oracle.injections(*shape))
    np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_eleven_points_against_ryser():
    matrix = np.random.default_rng(0).uniform(0.5, 1.5, (11, 11))
    value, gradient = value_and_gradient(np.log(matrix))
    permanent = oracle.ryser(matrix)
    np.testing.assert_allclose(value, np.log(permanent), rtol=1e-10)
    np.testing.assert_allclose(gradient.sum(axis=0), 1, atol=1e-10)
    np.testing.assert_allclose(gradient.sum(axis=1), 1, atol=1e-10)
    minor = np.delete(np.delete(matrix, 3, axis=0), 7, axis=1)
    np.testing.assert_allclose(
        gradient[3, 7], matrix[3, 7] * oracle.ryser(minor) / permanent, rtol=1e-8
    )


@pytest.mark.parametrize("seed", range(5))
def test_very_sharp_entries(seed):
    """Log weights that are spread over 1e4 nats neither overflow nor vanish."""
    log_weights = np.random.default_rng(seed).uniform(-5e3, 5e3, (5, 5))
    value, gradient = value_and_gradient(log_weights)
    np.testing.assert_allclose(value, oracle.log_permanent(log_weights), rtol=1e-14)
    rows, columns = linear_sum_assignment(log_weights, maximize=True)
    np.testing.assert_allclose(value, log_weights[rows, columns].sum(), atol=np.log(120))
    np.testing.assert_allclose(
        gradient, oracle.marginals(log_weights, oracle.permutations(5)), atol=1e-9
    )


def test_sharp_entries_that_tie():
    """Two best permutations, 1e4 nats above all others: half of the probability each."""
    log_weights = np.full((5, 5), -1e4)
    log_weights[np.arange(5), np.arange(5)] = 0
    log_weights[0, 1] = log_weights[1, 0] = 0
    value, gradient = value_and_gradient(log_weights)
    np.testing.assert_allclose(value, np.log(2), atol=1e-12)
    np.testing.assert_allclose(gradient[0], [0.5, 0.5, 0, 0, 0], atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 3), (3, 5)])
def test_forbidden_pairs(shape):
    rng = np.random.default_rng(1)
    log_weights = np.where(rng.random(shape) < 0.4, -np.inf, rng.normal(size=shape))
    expected = oracle.log_permanent(log_weights)
    assert np.isfinite(expected)
    np.testing.assert_allclose(value_of(log_weights), expected, rtol=1e-12)
    marginals = marginals_of(log_weights)
    expected_marginals = oracle.marginals(log_weights, oracle.injections(*shape))
    np.testing.assert_allclose(marginals, expected_marginals, atol=1e-12)
    hessian = jax.jit(jax.hessian(log_permanent))(log_weights)
    assert np.isfinite(hessian).all()


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (2, 4)])
def test_no_injection_has_no_weight(shape):
    log_weights = np.full(shape, -np.inf)
    log_weights[:, 0] = 0.0  # all rows want the first column
    assert value_of(log_weights) == -np.inf
    assert np.isfinite(marginals_of(log_weights)).all()


def test_a_batch_is_the_loop():
    batch = np.random.default_rng(2).normal(size=(2, 3, 4, 5))
    flat = batch.reshape(-1, 4, 5)
    np.testing.assert_allclose(
        np.ravel(value_of(batch)), [oracle.log_permanent(one) for one in flat], rtol=1e-12
    )
    expected = [oracle.marginals(one, oracle.injections(4, 5)) for one in flat]
    marginals = marginals_of(batch)
    np.testing.assert_allclose(marginals.reshape(-1, 4, 5), expected, atol=1e-12)
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.vmap(log_permanent)))(batch), value_of(batch))


@pytest.mark.parametrize("shape", [(3, 3), (2, 4)])
def test_draws_have_the_exact_frequencies(shape):
    draws = 20_000
    log_weights = np.random.default_rng(3).normal(size=shape)
    log_weights[0, 0] = -np.inf
    injections = oracle.injections(*shape)
    expected = oracle.probabilities(log_weights, injections)
    columns = np.asarray(draw(jax.random.key(0), log_weights, (draws,)))
    counts = (columns[:, None] == injections).all(axis=-1).sum(axis=0)
    assert counts.sum() == draws  # nothing but injections
    standard_error = np.sqrt(expected * (1 - expected) / draws)
    assert (abs(counts / draws - expected) <= 5 * standard_error).all()


def test_draws_of_a_batch_have_sample_axes_first():
    log_weights = jnp.log(jnp.stack([jnp.eye(3), jnp.eye(3)[::-1]]))
    columns = draw(jax.random.key(0), log_weights, (4, 5))
    assert columns.shape == (4, 5, 2, 3)
    np.testing.assert_array_equal(columns[..., 0, :], np.broadcast_to([0, 1, 2], (4, 5, 3)))
    np.testing.assert_array_equal(columns[..., 1, :], np.broadcast_to([2, 1, 0], (4, 5, 3)))


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ((4, 3), r"at most as many rows as columns, got shape \(4, 3\)"),
        ((3,), r"got shape \(3,\)"),
        ((21, 21), r"21 rows needs 2\^21 = 2,097,152 sums"),
    ],
)
def test_bad_shapes_are_explained(shape, sentence):
    with pytest.raises(InputError, match=sentence):
        log_permanent(jnp.zeros(shape))
    with pytest.raises(InputError, match=sentence):
        injection_marginals(jnp.zeros(shape))


def test_bad_shapes_are_explained_when_drawing():
    with pytest.raises(InputError, match=r"got shape \(4, 3\)"):
        sample_injection(jax.random.key(0), jnp.zeros((4, 3)))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_cofactors_are_permanents_without_a_row_and_a_column(size):
    log_weights = np.random.default_rng(size).normal(scale=300, size=(size, size))
    log_weights[0, -1] = -np.inf
    found = log_cofactors(jnp.asarray(log_weights))
    for m, n in np.ndindex(size, size):
        minor = np.delete(np.delete(log_weights, m, axis=0), n, axis=1)
        np.testing.assert_allclose(found[m, n], oracle.log_permanent(minor), rtol=1e-12)


def test_cofactors_want_a_square_matrix():
    with pytest.raises(InputError, match="cofactors require a square matrix, got shape"):
        log_cofactors(jnp.zeros((2, 3)))
