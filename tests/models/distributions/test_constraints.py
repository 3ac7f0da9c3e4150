"""Constraints on match matrices, and the bijection onto doubly stochastic ones."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to
from numpyro.infer import SVI, Trace_ELBO

from models.distributions.match import (
    assignment_matrix,
    doubly_stochastic,
    permutation_matrix,
)
from models.distributions.transforms import DoublyStochasticTransform
from models.numerics.enumeration import all_injection_matrices
from tests import oracle

SWAP = np.array([[0.0, 1.0], [1.0, 0.0]])
SHARED = np.array([[1.0, 0.0], [1.0, 0.0]])
HALVES = np.full((2, 2), 0.5)
ROWS_ONLY = np.array([[0.7, 0.3], [0.6, 0.4]])
NEGATIVE = np.array([[1.5, -0.5], [-0.5, 1.5]])
EMPTY_ROW = np.array([[1.0, 0.0], [0.0, 0.0]])
EXAMPLES = np.stack([SWAP, SHARED, HALVES, ROWS_ONLY, ROWS_ONLY.T, NEGATIVE, EMPTY_ROW])

transform = DoublyStochasticTransform()
forward = jax.jit(lambda matrix: transform(matrix))
log_jacobian = jax.jit(lambda matrix, image: transform.log_abs_det_jacobian(matrix, image))


@pytest.mark.parametrize(
    ("constraint", "satisfied"),
    [
        (permutation_matrix, [True, False, False, False, False, False, False]),
        (assignment_matrix, [True, True, False, False, False, False, False]),
        (doubly_stochastic, [True, False, True, False, False, False, False]),
    ],
)
def test_each_matrix_of_a_batch_is_judged_by_itself(constraint, satisfied):
    np.testing.assert_array_equal(constraint(EXAMPLES), satisfied)
    np.testing.assert_array_equal(jax.jit(lambda x: constraint(x))(EXAMPLES), satisfied)
    assert constraint.event_dim == 2


@pytest.mark.parametrize("constraint", [permutation_matrix, assignment_matrix, doubly_stochastic])
def test_a_feasible_value_satisfies_the_constraint(constraint):
    value = constraint.feasible_like(jnp.zeros((4, 3, 3)))
    assert value.shape == (4, 3, 3)
    assert constraint(value).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 2), (4, 4), (5, 5), (1, 4), (3, 5)])
def test_all_injections_are_listed_in_order(rows, columns):
    listed = all_injection_matrices(rows, columns)
    expected = oracle.as_matrices(oracle.injections(rows, columns), columns)
    np.testing.assert_array_equal(listed, expected)
    assert permutation_matrix(listed).all()


def test_two_rows_may_not_share_a_column_of_a_rectangle():
    rectangles = np.array([[[1, 0, 0], [0, 0, 1]], [[1, 0, 0], [1, 0, 0]], [[1, 0, 0], [0, 0, 0]]])
    np.testing.assert_array_equal(permutation_matrix(rectangles), [True, False, False])


@given(matrix=arrays(float, (4, 4), elements=st.floats(-20, 20)))
def test_there_and_back(matrix):
    image = forward(matrix)
    assert doubly_stochastic(image)
    np.testing.assert_allclose(transform.inv(image), matrix, atol=1e-8)


@given(logits=arrays(float, (5, 5), elements=st.floats(-3, 3)))
def test_back_and_there(logits):
    matrix = oracle.sinkhorn(logits)
    np.testing.assert_allclose(forward(transform.inv(matrix)), matrix, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_jacobian_is_that_of_the_free_block(size):
    rng = np.random.default_rng(size)

    def free_block(flat):
        return transform(flat.reshape(size, size))[:-1, :-1].ravel()

    jacobian = jax.jit(jax.jacfwd(free_block))
    for matrix in rng.normal(scale=2, size=(5, size, size)):
        _, expected = np.linalg.slogdet(jacobian(matrix.ravel()))
        result = log_jacobian(matrix, forward(matrix))
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-9)


def test_the_jacobian_against_finite_differences_of_plain_sweeps():
    matrix = np.random.default_rng(0).normal(size=(3, 3))

    def free_block(flat):
        return oracle.sinkhorn(np.pad(flat.reshape(3, 3), (0, 1)))[:-1, :-1].ravel()

    _, expected = np.linalg.slogdet(oracle.finite_difference(free_block, matrix.ravel()))
    np.testing.assert_allclose(log_jacobian(matrix, forward(matrix)), expected, atol=1e-7)


def test_shapes_and_batches():
    batch = np.random.default_rng(1).normal(size=(2, 3, 4, 4))
    images = forward(batch)
    assert images.shape == transform.forward_shape(batch.shape) == (2, 3, 5, 5)
    assert transform.inv(images).shape == transform.inverse_shape(images.shape) == batch.shape
    jacobians = np.asarray(log_jacobian(batch, images))
    for index in np.ndindex(2, 3):
        np.testing.assert_allclose(images[index], forward(batch[index]), atol=1e-10)
        one = log_jacobian(batch[index], images[index])
        np.testing.assert_allclose(jacobians[index], one, rtol=1e-9)


def test_the_registry_knows_the_bijection():
    registered = biject_to(doubly_stochastic)
    assert isinstance(registered, DoublyStochasticTransform)
    assert registered.codomain is doubly_stochastic
    assert registered.domain is constraints.real_matrix


def test_a_parameter_of_svi_stays_doubly_stochastic():
    """max over R of sum r c - sum r log r is Sinkhorn(c): SVI finds it through the bijection."""
    weights = np.random.default_rng(2).normal(size=(3, 3))
    start = np.array([[0.5, 0.3, 0.2], [0.3, 0.3, 0.4], [0.2, 0.4, 0.4]])

    def model():
        probs = numpyro.param("probs", jnp.asarray(start), constraint=doubly_stochastic)
        numpyro.factor("objective", jnp.sum(probs * weights) - jnp.sum(probs * jnp.log(probs)))

    svi = SVI(model, lambda: None, optax.adam(0.1), Trace_ELBO())
    state = svi.init(jax.random.key(0))
    np.testing.assert_allclose(svi.get_params(state)["probs"], start, atol=1e-10)
    update = jax.jit(lambda state, _: (svi.update(state)[0], svi.get_params(state)["probs"]))
    state, history = jax.lax.scan(update, state, length=300)
    assert doubly_stochastic(history).all()
    np.testing.assert_allclose(history[-1], oracle.sinkhorn(weights), atol=1e-4)
