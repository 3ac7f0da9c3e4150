"""Batched elimination against numpy."""

import jax
import numpy as np
import pytest
from scipy import stats

from models.numerics.linalg import (
    cholesky,
    condition,
    covariance_of,
    innovations,
    inverse_and_log_det,
    largest,
    rounded_up,
    solve,
    total,
)


def positive_definite(size: int, batch: tuple[int, ...]) -> np.ndarray:
    factors = np.random.default_rng(size).normal(size=(*batch, size, 2 * size))
    return factors @ factors.swapaxes(-1, -2)


@pytest.mark.parametrize(("size", "batch"), [(1, ()), (4, (2, 3)), (11, (3,)), (20, ())])
def test_inverse_determinant_and_solution(size, batch):
    matrices = positive_definite(size, batch)
    right = np.random.default_rng(0).normal(size=(*batch, size))
    matrices_first = np.moveaxis(matrices, (-2, -1), (0, 1))
    right_first = np.moveaxis(right, -1, 0)

    inverse, log_det = jax.jit(inverse_and_log_det)(matrices_first)
    np.testing.assert_allclose(
        np.moveaxis(inverse, (0, 1), (-2, -1)), np.linalg.inv(matrices), rtol=1e-9, atol=1e-11
    )
    np.testing.assert_allclose(log_det, np.linalg.slogdet(matrices)[1], rtol=1e-11)

    factor = jax.jit(cholesky)(matrices_first)
    np.testing.assert_allclose(
        np.moveaxis(factor, (0, 1), (-2, -1)), np.linalg.cholesky(matrices), rtol=1e-9, atol=1e-11
    )

    solution = jax.jit(solve)(matrices_first, right_first)
    expected = np.linalg.solve(matrices, right[..., None])[..., 0]
    np.testing.assert_allclose(np.moveaxis(solution, 0, -1), expected, rtol=1e-9, atol=1e-11)


def test_the_inverse_of_a_nearly_singular_matrix_has_a_factor():
    """A precision matrix with two precise directions out of four, a thousand times."""
    rows = np.random.default_rng(0).normal(size=(2, 4, 1000))
    matrices = np.eye(4)[:, :, None] + 1e10 * np.einsum("rpi,rqi->pqi", rows, rows)
    inverse, _ = jax.jit(inverse_and_log_det)(matrices)
    assert np.isfinite(cholesky(inverse)).all()


def test_conditioning_one_number_after_another_is_conditioning_at_once():
    rng = np.random.default_rng(0)
    factor, rows = rng.normal(size=(3, 3, 5)), rng.normal(size=(4, 3, 5))
    numbers, mean = rng.normal(size=(4, 5)), rng.normal(size=(3, 5))
    steps = jax.jit(condition)(factor, rows)
    z, last = jax.jit(innovations)(steps, numbers, mean)
    for i in range(5):
        covariance, a = factor[..., i] @ factor[..., i].T, rows[..., i]
        joint = stats.multivariate_normal(a @ mean[:, i], a @ covariance @ a.T + np.eye(4))
        log_density = stats.norm.logpdf(z[:, i]).sum() - np.log(steps.deviation[:, i]).sum()
        np.testing.assert_allclose(log_density, joint.logpdf(numbers[:, i]), rtol=1e-12)
        gain = covariance @ a.T @ np.linalg.inv(joint.cov)
        expected = mean[:, i] + gain @ (numbers[:, i] - joint.mean)
        np.testing.assert_allclose(last[:, i], expected, rtol=1e-11)
        found = covariance_of(steps.factor[..., i])
        np.testing.assert_allclose(
            found, covariance - gain @ a @ covariance, rtol=1e-10, atol=1e-12
        )


def test_a_rounded_covariance_is_symmetric_and_has_a_factor():
    """Outer products of one vector are singular, and indefinite once they are rounded."""
    vectors = np.random.default_rng(0).normal(size=(4, 1000))
    crooked = vectors[:, None] * vectors * (1 + 1e-16 * np.arange(16).reshape(4, 4, 1))
    found = np.asarray(rounded_up(crooked))
    np.testing.assert_array_equal(found, found.swapaxes(0, 1))
    np.testing.assert_allclose(found, crooked, rtol=1e-13)
    assert np.isfinite(cholesky(found)).all()
    tilted = np.array([[2.0, 1.0], [0.5, 3.0]])
    np.testing.assert_allclose(rounded_up(tilted), [[2.0, 0.75], [0.75, 3.0]], rtol=1e-13)


@pytest.mark.parametrize("shape", [(3, 5, 2), (40, 5, 2), (5, 40, 2), (1, 1, 1)])
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_and_maxima_over_one_axis(shape, axis):
    values = np.random.default_rng(0).normal(size=shape)
    np.testing.assert_allclose(total(values, axis), values.sum(axis=axis), rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(largest(values, axis), values.max(axis=axis))
