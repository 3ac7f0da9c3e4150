"""What cannot be learnt is refused by a sentence that says what to do."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints

from inference.learning import learn
from models import constellation
from models.errors import InputError
from tests.inference.learning.test_learning import (
    KEY,
    PARTS,
    scenes_for,
    simple,
    with_precision,
    with_templates,
)

pytestmark = pytest.mark.long


def without_params(points=None, present=None):
    simple(points, present)


def with_one_that_does_nothing(points=None, present=None):
    numpyro.param("idle", 1.0)
    with_precision(points, present)


def beginning_where_it_may_not(points=None, present=None):
    mean = numpyro.param("mean", -1.0, constraint=constraints.positive)
    simple(points, present, pose_prior=dist.Normal(mean, jnp.ones(4)).to_event(1))


def with_a_mixture(points=None, present=None):
    precision = numpyro.param("precision", 20.0, constraint=constraints.positive)
    constellation(points, present, match_prior="mixture", precision=precision, parts=PARTS)


def with_heavy_tails(points=None, present=None):
    precision = numpyro.param("precision", 20.0, constraint=constraints.positive)
    prior = dist.MultivariateStudentT(3.0, jnp.zeros(4), jnp.eye(4))
    simple(points, present, precision, prior)


def with_a_support_that_depends(points=None, present=None):
    widest = numpyro.param("widest", 0.6, constraint=constraints.positive)
    sigma = numpyro.sample("sigma", dist.Uniform(0.05, widest + 0.05))
    simple(points, present, sigma**-2)


def with_data_that_depend(points=None, present=None):
    scale = numpyro.param("scale", 1.0)
    with_precision(points * scale, present)


@pytest.mark.parametrize(
    "program, options, sentence",
    [
        (without_params, {}, "nothing to learn: the program has no numpyro.param"),
        (with_one_that_does_nothing, {}, "no scene informs the parameter 'idle'"),
        (beginning_where_it_may_not, {}, "'mean' begins at -1.0"),
        (with_data_that_depend, {}, "site 'points'.*depend on a numpyro.param"),
        (with_a_support_that_depends, {}, "'sigma': its support depends on a numpyro.param"),
        (with_templates, {}, "6 scenes are too few to learn 10 numbers"),
        (with_precision, {"e_step": "em"}, "no E-step 'em'; choose from exact, ds, map"),
        (with_a_mixture, {}, "'match': a MixtureMatch has no exact E-step; use the E-step 'ds'"),
        (with_heavy_tails, {}, "'pose'.*MultivariateStudentT"),
        (with_heavy_tails, {"e_step": "ds"}, "'pose'.*MultivariateStudentT"),
        (with_heavy_tails, {"e_step": "map"}, "'pose'.*MultivariateStudentT"),
        (with_precision, {"holdout": 1.0}, "holdout must be a share"),
        (with_precision, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
    ids=lambda x: x.__name__ if callable(x) else None,
)
def test_what_cannot_be_learnt_is_said(program, options, sentence):
    options = {"e_step": "exact", "num_steps": 1} | options
    with pytest.raises(InputError, match=sentence):
        learn(program, scenes_for(program), KEY, **options)
