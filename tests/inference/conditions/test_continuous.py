"""Unknown scalars under exact inference and coordinate ascent, against grids in plain numpy."""

from functools import partial

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints

from inference import cavi, exact
from models.constellation import constellation
from models.errors import InputError
from tests.inference.unknown_scalars import (
    NAMES,
    OWNERS,
    case,
    log_evidence_by_betas,
    one_object,
    scene_of_one_object,
)

pytestmark = pytest.mark.long

IN_MAKE_TEST = {("sigma ~ HalfNormal", 1)}
CASES = [
    pytest.param(name, size, marks=[pytest.mark.slow] * ((name, size) not in IN_MAKE_TEST))
    for size in (1, 3, 10, 40)
    for name in NAMES
]
"""Scenes of 4, 12, 40 and 160 features."""


@pytest.mark.parametrize(("name", "num_features"), CASES)
def test_an_unknown_scalar_is_integrated_over(name, num_features):
    site, program, scene, grid = case(name, num_features)
    found = exact.run(program, scene)
    assert found.converged
    np.testing.assert_allclose(found.log_evidence, grid.log_evidence, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.details[site], grid.mean(), rtol=1e-6)
    # Some scenes have an object of one point, which the rule against sparse solutions passes over.
    bound = cavi.run(program, scene, jax.random.key(0), num_restarts=4, fewest_points=0)
    assert bound.elbo <= grid.log_evidence + 1e-6
    assert bound.elbo > grid.log_evidence - 12.0


@pytest.mark.parametrize("name", OWNERS)
def test_the_grid_of_a_visibility_has_a_closed_form(name):
    """Every way to read a scene is a power of the visibility and of its complement."""
    grid = case(name, 1).grid
    np.testing.assert_allclose(grid.log_evidence, log_evidence_by_betas(name, 1), atol=1e-9)


def test_an_improper_prior_is_that_of_its_factor():
    """It has no draws to begin with, and a posterior that can be integrated."""
    scene, parts = scene_of_one_object(4, 0.1)

    def program(points, present, improper):
        prior = dist.ImproperUniform(constraints.positive, (), ()) if improper else None
        precision = numpyro.sample("precision_of_points", prior or dist.Exponential(0.1))
        numpyro.factor("weight", np.log(0.1) - 0.1 * precision if improper else 0.0)
        return constellation(points, present, parts=parts, precision=precision)

    found, wanted = (exact.run(partial(program, improper=x), scene) for x in (True, False))
    np.testing.assert_allclose(found.log_evidence, wanted.log_evidence, atol=1e-7)


@pytest.mark.slow
def test_points_that_fit_perfectly_leave_no_end_to_the_noise():
    """A density that grows without end as the noise vanishes has no integral."""
    scene, parts = scene_of_one_object(40, 0.0)
    program = partial(one_object, parts=parts, prior="sigma ~ HalfNormal")
    with pytest.raises(InputError, match=r"never falls off|standard deviations of the noise"):
        exact.run(program, scene)
