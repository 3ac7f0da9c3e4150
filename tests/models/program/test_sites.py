"""A site's density, compiled for its kind, is the one that NumPyro has without compilation."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import transforms
from numpyro.handlers import mask, scale, seed, trace

from models.errors import InputError
from models.program import sites
from models.program.sites import log_prob_of, trace_sites
from models.scenes import make_scene

VALUES = jnp.array([0.3, 0.8, 0.6])
NORMAL = dist.Normal(jnp.array([0.1, 0.5, 0.4]), 0.7)
PRIORS = {
    "expanded": dist.Normal(0.2, 0.5).expand([3]),
    "an event": NORMAL.to_event(1),
    "masked": NORMAL.mask(jnp.array([True, False, True])),
    "masked and an event": NORMAL.mask(jnp.array([True, False, True])).to_event(1),
    "transformed": dist.TransformedDistribution(NORMAL, transforms.AffineTransform(0.1, 2.0)),
    "log-normal": dist.LogNormal(0.1, 0.4).expand([3]),
    "truncated": dist.TruncatedNormal(0.3, 0.4, low=0.0, high=1.0).expand([3]),
    "a mixture": dist.MixtureSameFamily(
        dist.Categorical(jnp.array([0.3, 0.7])), dist.Normal(jnp.array([0.0, 1.0]), 0.5)
    ).expand([3]),
    "general mixture": dist.MixtureGeneral(
        dist.Categorical(jnp.array([0.3, 0.7])), [dist.Normal(0.0, 1.0), dist.Laplace(0.0, 1.0)]
    ).expand([3]),
    "zero-inflated": dist.ZeroInflatedDistribution(dist.Poisson(2.0), gate=0.3).expand([3]),
    "Delta": dist.Delta(VALUES, log_density=jnp.array([0.1, 0.2, 0.3])),
    "a factor": dist.Unit(jnp.array(0.7)),
    "Student's t": dist.StudentT(4.0, 0.1, 0.6).expand([3]),
    "correlated": dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3) + 0.3),
    "low rank": dist.LowRankMultivariateNormal(jnp.zeros(3), jnp.ones((3, 1)), jnp.ones(3)),
    "folded": dist.FoldedDistribution(dist.Normal(0.2, 0.5)).expand([3]),
}


class Own(dist.Normal):
    """With a number that its pytree does not have."""

    def __init__(self, shift):
        self.shift = shift
        super().__init__(0.0, 1.0)

    def log_prob(self, value, intermediates=None):
        return super().log_prob(value) + self.shift


def site_of(prior, *handlers):
    value = {"a factor": jnp.zeros(0), "zero-inflated": jnp.array([0, 2, 1])}

    def program():
        kind = next((name for name, x in PRIORS.items() if x is prior), "")
        numpyro.sample("site", prior, obs=value.get(kind, VALUES))

    for handler in handlers:
        program = handler(program)
    return trace(seed(program, 0)).get_trace()["site"]


@pytest.mark.parametrize("name", PRIORS)
def test_the_compiled_density_is_numpyros(name):
    site = site_of(PRIORS[name])
    expected = np.sum(site["fn"].log_prob(site["value"]))
    np.testing.assert_allclose(log_prob_of(site), expected, rtol=1e-12)


def test_compiled_code_is_the_same_whatever_numpyros_order_of_arguments(monkeypatch):
    """That order is one of a set, and so another one in each process."""
    given = []
    monkeypatch.setattr(sites, "_ordered_log_prob", lambda numbers, *others: given.append(numbers))
    for fields in [("loc", "scale"), ("scale", "loc")]:
        monkeypatch.setattr(dist.Normal, "gather_pytree_data_fields", lambda fields=fields: fields)
        log_prob_of(site_of(dist.Normal(0.3, 2.0).expand([3])))
    assert given == [[0.3, 2.0], [0.3, 2.0]]


def test_scales_and_masks_count():
    direct = NORMAL.log_prob(VALUES)
    scaled = site_of(NORMAL, lambda program: scale(program, scale=0.25))
    np.testing.assert_allclose(log_prob_of(scaled), 0.25 * direct.sum(), rtol=1e-12)
    hidden = site_of(NORMAL, lambda program: mask(program, mask=jnp.array([True, False, True])))
    np.testing.assert_allclose(log_prob_of(hidden), direct[0] + direct[2], rtol=1e-12)


@pytest.mark.filterwarnings("ignore:Out-of-support values")
def test_values_outside_of_the_support_are_impossible():
    site = site_of(dist.Beta(2.0, 2.0).expand([3])) | {"value": jnp.array([0.5, 1.5, 0.5])}
    assert log_prob_of(site) == -jnp.inf


BETA = dist.Beta(2.0, 2.0).expand([3])


@pytest.mark.parametrize("prior", [BETA, BETA.mask(jnp.array([True, False, True]))])
def test_in_a_batch_too_and_masked_ones_do_not_count(prior):
    site = site_of(prior)
    values = jnp.array([[0.5, 0.2, 0.5], [0.5, 1.5, 0.5], [1.5, 0.5, 0.5]])
    found = jax.vmap(lambda value: log_prob_of(site | {"value": value}))(values)
    with warnings.catch_warnings(action="ignore"):
        expected = prior.log_prob(values).sum(axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert list(jnp.isfinite(found)) == [True, isinstance(prior, dist.MaskedDistribution), False]


@pytest.mark.parametrize("module", ["tests", "models.constellation"])
def test_a_class_from_elsewhere_is_asked_itself(monkeypatch, module):
    """A user's own may stand in the file of a program."""
    monkeypatch.setattr(Own, "__module__", module)
    expected = dist.Normal(0.0, 1.0).log_prob(VALUES).sum() + 3 * 1.7
    np.testing.assert_allclose(log_prob_of(site_of(Own(1.7))), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("prior", "what"),
    [
        (lambda: dist.Normal(0.0, -1.0), "Normal distribution got invalid scale"),
        (lambda: dist.Normal(0.0, -1.0).expand([2]).to_event(1), "got invalid scale"),
        (lambda: dist.Normal(np.nan, 1.0).mask(False), "got invalid loc"),
        (
            lambda: dist.MultivariateNormal(jnp.zeros(2), jnp.array([[1.0, 2.0], [2.0, 1.0]])),
            "got invalid covariance_matrix",
        ),
    ],
)
def test_arguments_are_checked_as_numpyro_checks_them(prior, what):
    def program(points, present):
        numpyro.sample("further", prior())

    scene = make_scene(np.zeros((1, 2)), 2)
    with pytest.raises(InputError, match=what):
        trace_sites(program, scene)
