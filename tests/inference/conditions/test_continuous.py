"""Unknown scalars under exact inference and coordinate ascent, against grids in plain numpy."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from inference import cavi, exact
from models.distributions.likelihood import MatchedParts
from models.distributions.match import PermutationMatch
from models.errors import InputError
from models.scenes import make_scene
from models.templates import Parts

pytestmark = pytest.mark.long

ROWS, POSE = 4, 2


def parts_of(num_features):
    F = np.random.default_rng(num_features).normal(size=(ROWS, num_features, POSE))
    return Parts(
        F=jnp.asarray(F),
        offset=jnp.zeros((ROWS, num_features)),
        variance=jnp.ones((ROWS, num_features)),
        owner=np.zeros(ROWS, int),
        type=np.zeros(ROWS, int),
        feature_mask=np.ones((ROWS, num_features), bool),
    )


def scene_of(parts, noise):
    rng = np.random.default_rng(7)
    pose = np.array([[0.7, -0.4]])
    points = np.asarray(parts.predict(pose)) + noise * rng.normal(size=(ROWS, parts.num_features))
    return make_scene(points[rng.permutation(ROWS)], ROWS)


PRIORS = {
    "precision ~ Gamma": ("precision", dist.Gamma(2.0, 2.0), lambda x: (x, 1.0)),
    "precision ~ LogNormal": ("precision", dist.LogNormal(1.0, 1.0), lambda x: (x, 1.0)),
    "sigma ~ HalfNormal": ("sigma", dist.HalfNormal(1.0), lambda x: (x**-2, 1.0)),
    "pose scale ~ HalfNormal": ("scale", dist.HalfNormal(1.0), lambda x: (50.0, x)),
}
LOG_PRIORS = {
    "precision ~ Gamma": stats.gamma(2.0, scale=0.5).logpdf,
    "precision ~ LogNormal": stats.lognorm(1.0, scale=np.e).logpdf,
    "sigma ~ HalfNormal": stats.halfnorm(scale=1.0).logpdf,
    "pose scale ~ HalfNormal": stats.halfnorm(scale=1.0).logpdf,
}


def program(points, present, *, parts, prior):
    name, distribution, numbers = PRIORS[prior]
    precision, scale = numbers(numpyro.sample(name, distribution))
    with numpyro.plate("object", 1):
        covariance = scale**2 * jnp.eye(POSE)
        pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.zeros(POSE), covariance))
    match = numpyro.sample("match", PermutationMatch(jnp.zeros((ROWS, ROWS))))
    likelihood = MatchedParts(match, pose, parts, precision=precision, present=present)
    numpyro.sample("points", likelihood, obs=points)


def on_a_grid(parts, scene, prior):
    """Log evidence and posterior mean of the site, by 2,000 nodes in its logarithm."""
    _, _, numbers = PRIORS[prior]
    F = np.asarray(parts.F)
    orders = list(itertools.permutations(range(ROWS)))
    stacked = np.stack([F[list(order)].reshape(-1, POSE) for order in orders])
    x = np.asarray(scene.points).ravel()

    def log_integrand(u):
        value = np.exp(u)
        precision, scale = numbers(value)
        # N(x; 0, scale^2 F F' + I / precision), by the matrix determinant lemma and Woodbury.
        inner = np.eye(POSE) / scale**2 + precision * np.einsum("odp,odq->opq", stacked, stacked)
        votes = precision * np.einsum("odp,d->op", stacked, x)
        log_det = np.linalg.slogdet(inner)[1] + 2 * POSE * np.log(scale)
        mean = np.linalg.solve(inner, votes[..., None])[..., 0]
        residual = x - np.einsum("odp,op->od", stacked, mean)
        distance = precision * np.sum(residual**2, axis=1) + np.sum(mean**2, axis=1) / scale**2
        log_density = -0.5 * (distance + log_det + len(x) * np.log(2 * np.pi / precision))
        highest = log_density.max()
        summed = highest + np.log(np.mean(np.exp(log_density - highest)))
        return summed + LOG_PRIORS[prior](value) + u

    coarse = np.linspace(-12, 12, 481)
    values = np.array([log_integrand(u) for u in coarse])
    near = coarse[values > values.max() - 45]
    nodes = np.linspace(near.min() - 0.05, near.max() + 0.05, 2000)
    values = np.array([log_integrand(u) for u in nodes])
    weights = np.exp(values - values.max())
    evidence = values.max() + np.log(weights.sum() * (nodes[1] - nodes[0]))
    return evidence, np.sum(weights * np.exp(nodes)) / weights.sum()


IN_MAKE_TEST = {("sigma ~ HalfNormal", 1)}


@pytest.mark.parametrize(
    ("prior", "num_features"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in IN_MAKE_TEST))
        for case in itertools.product(PRIORS, (1, 40))
    ],
)
def test_an_unknown_scalar_is_integrated_over(prior, num_features):
    """With 160 clean features the posterior of the noise is far from where its prior is."""
    parts = parts_of(num_features)
    scene = scene_of(parts, 0.03 if num_features == 40 else 0.3)
    this = partial(program, parts=parts, prior=prior)
    expected, mean = on_a_grid(parts, scene, prior)
    found = exact.run(this, scene)
    assert found.converged
    np.testing.assert_allclose(found.log_evidence, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.details[PRIORS[prior][0]], mean, rtol=1e-6)
    bound = cavi.run(this, scene, jax.random.key(0), num_restarts=4)
    assert bound.elbo <= expected + 1e-6
    assert bound.elbo > expected - 12.0


def test_points_that_fit_perfectly_leave_no_end_to_the_noise():
    """A density that grows without end as the noise vanishes has no integral."""
    parts = parts_of(40)
    this = partial(program, parts=parts, prior="sigma ~ HalfNormal")
    with pytest.raises(InputError, match=r"never falls off|standard deviations of the noise"):
        exact.run(this, scene_of(parts, 0.0))
