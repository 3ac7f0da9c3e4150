"""Sinkhorn scaling against plain sweeps, the assignment algorithm and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linear_sum_assignment

from models.numerics.sinkhorn import log_sinkhorn, refine, scale, swept
from tests import oracle

SIZE = 5
scaled = jax.jit(log_sinkhorn)
jacobian_forward = jax.jit(jax.jacfwd(log_sinkhorn))
jacobian_reverse = jax.jit(jax.jacrev(log_sinkhorn))

entries = st.floats(-0.5, 0.5).map(lambda x: round(x, 6))
sharp_logits = st.builds(
    lambda matrix, exponent: matrix * 10.0**exponent,
    arrays(float, (SIZE, SIZE), elements=entries),
    st.floats(0, 6),
)


def assert_doubly_stochastic(matrix, tolerance=1e-10):
    matrix = np.asarray(matrix)
    assert (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(axis=-1), 1, atol=tolerance)
    np.testing.assert_allclose(matrix.sum(axis=-2), 1, atol=tolerance)


def contrasts(log_matrix):
    """log of the cross ratios with the last row and column, which scaling does not change."""
    rows = log_matrix - log_matrix[:, -1:]
    return (rows - rows[-1:])[:-1, :-1]


@given(logits=sharp_logits)
def test_rows_and_columns_sum_to_one_at_any_sharpness(logits):
    """From 1 to 1e6 nats between the entries."""
    assert_doubly_stochastic(np.exp(scaled(logits)))


@given(logits=sharp_logits)
def test_scaling_keeps_the_contrasts(logits):
    result = np.asarray(scaled(logits))
    tolerance = 1e-12 + 1e-14 * np.ptp(logits)
    np.testing.assert_allclose(contrasts(result), contrasts(logits), atol=tolerance)


@given(logits=sharp_logits, rows=arrays(float, SIZE, elements=st.floats(-100, 100)))
def test_constants_of_rows_and_columns_do_not_matter(logits, rows):
    moved = logits + rows[:, None] + rows[::-1]
    np.testing.assert_allclose(np.exp(scaled(moved)), np.exp(scaled(logits)), atol=1e-8)


def test_agrees_with_a_hundred_thousand_plain_sweeps():
    logits = np.random.default_rng(0).normal(scale=2, size=(6, SIZE, SIZE))
    expected = oracle.sinkhorn(logits, sweeps=100_000)
    np.testing.assert_allclose(np.exp(scaled(logits)), expected, atol=1e-11)


@pytest.mark.parametrize("seed", range(5))
def test_low_temperature_is_the_best_assignment(seed):
    scores = np.random.default_rng(seed).uniform(size=(SIZE, SIZE))
    rows, columns = linear_sum_assignment(scores, maximize=True)
    best = np.zeros((SIZE, SIZE))
    best[rows, columns] = 1
    np.testing.assert_allclose(np.exp(scaled(scores / 1e-5)), best, atol=1e-9)


def test_two_points_that_want_one_part():
    """The scene that plain sweeps take millions of steps for."""
    logits = np.array([[0.0, -5e3], [-1.0, -5e3 - 3.0]])
    result = np.exp(scaled(logits))
    odds = np.exp(0.5 * (-3.0 + 1.0))  # of a 2 x 2 matrix, the root of its cross ratio
    np.testing.assert_allclose(result[0], [odds / (1 + odds), 1 / (1 + odds)], rtol=1e-10)
    assert_doubly_stochastic(result)


@pytest.mark.parametrize("jacobian", [jacobian_forward, jacobian_reverse], ids=["jvp", "vjp"])
def test_implicit_derivative_of_a_mild_matrix(jacobian):
    """Against differences of plain sweeps, a wholly independent route."""
    logits = np.random.default_rng(1).normal(size=(SIZE, SIZE))
    expected = oracle.finite_difference(lambda x: np.log(oracle.sinkhorn(x)), logits)
    np.testing.assert_allclose(jacobian(logits), expected, atol=1e-9)


@pytest.mark.parametrize("transform", [jax.jacfwd, jax.jacrev], ids=["jvp", "vjp"])
def test_implicit_derivative_of_a_sharp_matrix(transform):
    """Entries far below the tolerance are not told apart in their logs, only as what they are."""
    logits = np.random.default_rng(1).normal(scale=30, size=(SIZE, SIZE))
    jacobian = jax.jit(transform(lambda x: jnp.exp(log_sinkhorn(x))))(logits)
    expected = oracle.finite_difference(lambda x: np.exp(scaled(x)), logits, step=1e-4)
    np.testing.assert_allclose(jacobian, expected, atol=1e-9)


def test_second_derivatives():
    logits, weights = np.random.default_rng(3).normal(size=(2, SIZE, SIZE))

    def objective(x):
        return jnp.sum(weights * log_sinkhorn(x))

    gradient = jax.jit(jax.grad(objective))
    expected = oracle.finite_difference(lambda x: np.asarray(gradient(x)), logits)
    np.testing.assert_allclose(jax.jit(jax.hessian(objective))(logits), expected, atol=1e-7)


class TestForbiddenEntries:
    logits = np.random.default_rng(4).normal(size=(SIZE, SIZE))
    forbidden = (np.eye(SIZE) + np.eye(SIZE, k=2)) > 0
    logits[forbidden] = -np.inf

    def test_stay_forbidden(self):
        result = np.exp(scaled(self.logits))
        assert (result[self.forbidden] == 0).all()
        np.testing.assert_allclose(result, oracle.sinkhorn(self.logits, 10_000), atol=1e-11)

    @pytest.mark.parametrize("transform", [jax.jacfwd, jax.jacrev], ids=["jvp", "vjp"])
    def test_have_derivatives(self, transform):
        jacobian = jax.jit(transform(lambda logits: jnp.exp(log_sinkhorn(logits))))(self.logits)
        differences = oracle.finite_difference(oracle.sinkhorn, self.logits)
        np.testing.assert_allclose(jacobian, differences, atol=1e-8)
        assert (np.asarray(jacobian)[..., self.forbidden] == 0).all()

    def test_may_split_the_matrix_in_blocks(self):
        """Points of two types, say: each block is scaled by itself."""
        logits = np.full((SIZE, SIZE), -np.inf)
        logits[:2, :2] = self.logits[3:, :2]
        logits[2:, 2:] = np.arange(9).reshape(3, 3) ** 2 / 10
        result, jacobian = np.exp(scaled(logits)), jacobian_forward(logits)
        np.testing.assert_allclose(result[:2, :2], oracle.sinkhorn(logits[:2, :2]), atol=1e-11)
        np.testing.assert_allclose(result[2:, 2:], oracle.sinkhorn(logits[2:, 2:]), atol=1e-11)
        block = oracle.finite_difference(lambda x: np.log(oracle.sinkhorn(x)), logits[2:, 2:])
        np.testing.assert_allclose(jacobian[2:, 2:, 2:, 2:], block, atol=1e-8)


def test_a_single_entry():
    np.testing.assert_array_equal(scaled(np.array([[3.0]])), [[0.0]])


def test_a_batch_is_the_loop():
    batch = np.random.default_rng(5).normal(scale=20, size=(2, 3, SIZE, SIZE))
    batch[1, 1] *= 1e3  # one sharp matrix among mild ones
    result = np.asarray(scaled(batch))
    assert result.shape == batch.shape
    for index in np.ndindex(2, 3):
        np.testing.assert_allclose(result[index], scaled(batch[index]), rtol=1e-9, atol=1e-9)
    mapped = jax.jit(jax.vmap(jax.vmap(log_sinkhorn)))(batch)
    np.testing.assert_allclose(mapped, result, rtol=1e-9, atol=1e-9)


def test_a_warm_start_arrives_at_the_same_matrix():
    logits = np.random.default_rng(6).normal(scale=50, size=(SIZE, SIZE))
    nearby = logits + np.random.default_rng(7).normal(scale=0.1, size=(SIZE, SIZE))
    start = jax.jit(scale)(logits)
    result = jax.jit(refine)(nearby, start.potentials)
    assert max(start.error, result.error) < 1e-10
    expected = np.exp(scaled(nearby))
    potentials = np.asarray(result.potentials)
    unnormalised = np.exp(nearby + potentials - np.max(nearby + potentials, axis=1, keepdims=True))
    matrix = unnormalised / unnormalised.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(matrix, expected, atol=1e-9)


@pytest.mark.parametrize("count", [10, 100])
def test_a_batch_of_warm_starts_has_the_batch_last(count):
    """Matrices of which some are much sharper than the others; few and many go different ways."""
    rng = np.random.default_rng(8)
    logits = rng.normal(size=(count, SIZE, SIZE)) * 10.0 ** rng.uniform(0, 4, (count, 1, 1))
    result = jax.jit(refine)(np.moveaxis(logits, 0, -1), np.zeros((SIZE, count)))
    assert result.error.shape == (count,)
    assert np.max(result.error) < 1e-10
    expected = np.exp(scaled(logits))
    np.testing.assert_allclose(np.moveaxis(result.matrix, -1, 0), expected, atol=1e-9)


def test_ten_sweeps_are_those_of_a_loop():
    logits = np.random.default_rng(4).normal(size=(SIZE, SIZE, 3))
    for k in range(3):
        matrix = np.exp(logits[..., k])
        columns = np.ones(SIZE)
        for _ in range(10):
            rows = 1 / (matrix @ columns)
            columns = 1 / (rows @ matrix)
        expected = np.log(columns)
        found = np.asarray(swept(jnp.asarray(logits)))[:, k]
        np.testing.assert_allclose(found - found[0], expected - expected[0], atol=1e-12)


def test_sweeps_of_a_matrix_that_is_too_sharp_for_them_stay_finite():
    logits = np.where(np.eye(SIZE, dtype=bool), 0.0, -np.inf)
    logits[0, 1], logits[1] = 1e6, [-1e6, 0.0, 0.0, 0.0, 0.0]
    start = swept(jnp.asarray(logits))
    assert np.isfinite(start).all()
    np.testing.assert_allclose(
        refine(jnp.asarray(logits), start).matrix, scale(jnp.asarray(logits)).matrix, atol=1e-9
    )
