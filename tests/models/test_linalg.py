"""Batched elimination against numpy."""

import jax
import numpy as np
import pytest

from models.linalg import cholesky, inverse_and_log_det, largest, solve, total


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


@pytest.mark.parametrize("shape", [(3, 5, 2), (40, 5, 2), (1, 1, 1)])
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_and_maxima_over_one_axis(shape, axis):
    values = np.random.default_rng(0).normal(size=shape)
    np.testing.assert_allclose(total(values, axis), values.sum(axis=axis), rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(largest(values, axis), values.max(axis=axis))
