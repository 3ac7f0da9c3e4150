"""NUTS on programs with an unknown scalar, against grids of 2,000 nodes in plain numpy.

Scenes of 12 features, which nearly fix the match: the chains mix, and MCSE is to be relied on.
"""

import arviz as az
import jax
import numpy as np
import pytest

from inference import nuts
from tests.inference.unknown_scalars import PRIORS, case

pytestmark = pytest.mark.long


def agrees(name, max_error, **budget):
    """The scalar, its logarithm and its square have the means that the grid has.

    Args:
        max_error: largest MCSE of a mean, in posterior standard deviations.
    """
    site, program, scene, grid = case(name, 3)
    draws = nuts.run(program, scene, jax.random.key(0), **budget).draws[site]
    for function in (np.asarray, np.log, np.square):
        values = function(draws)
        error = float(az.mcse(values))
        assert az.rhat(values) < 1.01
        assert error < max_error * grid.deviation(function)
        assert abs(values.mean() - grid.mean(function)) < 5 * error


@pytest.mark.slow
def test_an_unknown_noise_has_its_posterior():
    agrees("sigma ~ HalfNormal", 0.03, num_samples=2000, init_strategy="prior")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PRIORS, "visibility ~ Beta"])
def test_an_unknown_scalar_has_its_posterior(name):
    agrees(name, 0.015, num_samples=8000)
