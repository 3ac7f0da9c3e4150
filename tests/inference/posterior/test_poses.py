"""Poses that a program computes: polar coordinates, another name, a reparameterisation."""

import functools

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import reparam
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import log_density
from scipy import stats

from inference import exact, nuts, svi
from inference.diagnostics.importance import importance
from inference.diagnostics.to_arviz import to_arviz
from inference.posterior import poses, symmetry
from inference.posterior.densities import log_joint
from inference.result import Result
from inference.variational.beginnings import beginnings
from models.constellation import constellation, uniform_probs
from models.distributions.likelihood import MatchedParts
from models.distributions.match import PermutationMatch
from models.errors import InputError
from models.geometry import similarity_pose
from models.program.marginal import marginal
from models.scenes import make_scene
from models.templates import normalise, shapes, stack
from tests.agreement import standard_error

# The posterior of the angle is far from the ends of its interval.
pytestmark = pytest.mark.filterwarnings("ignore:Continuous inference poorly handles circular")

PARTS = stack([normalise([[0.0, 0.0], [2.0, 0.0], [3.0, 1.0], [0.5, 2.0], [-1.0, 1.5]])])
N, PRECISION = PARTS.num_parts, 100.0
TRUTH = similarity_pose(np.array([[0.4, -0.3]]), np.array([0.7]), np.array([0.5]))
NOISE = np.random.default_rng(0).normal(size=(N, 2)) / np.sqrt(PRECISION)
SCENE = make_scene(np.asarray(PARTS.predict(TRUTH)) + NOISE, N)
# Priors that the points have to be weighed against: they move the posterior by its own width.
CENTRE, CONCENTRATION, LOG_SCALE, SPREAD = 0.2, 50.0, -0.7, 0.15
# With so many draws five standard errors are 0.09 posterior standard deviations; leaving out the
# Jacobian of the polar coordinates would move a mean by 0.12.
BUDGET = {"num_chains": 4, "num_warmup": 300, "num_samples": 2000}


def points_given(pose, points, present, parts=PARTS):
    match = numpyro.sample("match", PermutationMatch(jnp.log(uniform_probs(parts.num_parts))))
    likelihood = MatchedParts(match, pose, parts, precision=PRECISION, present=present)
    return numpyro.sample("points", likelihood, obs=points)


def polar(points, present, name="pose", parts=PARTS):
    with numpyro.plate("object", parts.num_objects):
        angle = numpyro.sample("angle", dist.VonMises(CENTRE, CONCENTRATION))
        log_scale = numpyro.sample("log_scale", dist.Normal(LOG_SCALE, SPREAD))
        place = numpyro.sample("place", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    pose = similarity_pose(place, jnp.exp(log_scale), angle)
    return points_given(numpyro.deterministic(name, pose), points, present, parts)


def normal(points, present):
    with numpyro.plate("object", 1):
        pose = numpyro.sample("pose", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
    return points_given(pose, points, present)


decentred = reparam(normal, config={"pose": LocScaleReparam(0.0)})
unnamed = functools.partial(polar, name="where")
cartesian = functools.partial(constellation, parts=PARTS, precision=PRECISION)


@functools.cache
def drawn(program):
    return nuts.run(program, SCENE, jax.random.key(0), **BUDGET)


@functools.cache
def reference():
    """Exact draws under a Normal prior, and their weights under the polar one.

    The area element is dc ds = scale d(scale) d(angle) = scale^2 d(log scale) d(angle), so the
    density of (c, s) is p(angle) p(log scale) / scale^2.
    """
    pose = np.asarray(exact.sample(cartesian, SCENE, jax.random.key(1), 20_000).pose)
    cosine, sine = pose[:, 0, 2], pose[:, 0, 3]
    scale, angle = np.hypot(cosine, sine), np.arctan2(sine, cosine)
    log_weight = stats.vonmises(CONCENTRATION, loc=CENTRE).logpdf(angle)
    log_weight += stats.norm(LOG_SCALE, SPREAD).logpdf(np.log(scale)) - 2 * np.log(scale)
    log_weight -= stats.norm.logpdf(cosine) + stats.norm.logpdf(sine)
    weight = np.exp(log_weight - log_weight.max())
    return pose, weight / weight.sum()


def assert_polar_posterior(pose):
    """Means and squares of (chains, draws, K, p), within five standard errors of both."""
    reference_pose, weight = reference()
    for power in (1, 2):
        expected = np.einsum("s,skp->kp", weight, reference_pose**power)
        own = np.sqrt(np.einsum("s,skp->kp", weight**2, (reference_pose**power - expected) ** 2))
        error = np.hypot(own, standard_error(pose**power))
        distance = np.abs((pose**power).mean(axis=(0, 1)) - expected) / error
        assert distance.max() < 5, distance


@pytest.mark.slow
@pytest.mark.parametrize("program", [polar, unnamed], ids=["deterministic", "another name"])
def test_nuts_agrees_with_importance_sampling_under_polar_priors(program):
    result = drawn(program)
    assert result.converged
    sites = {name: result.draws[name] for name in ("pose", "angle", "log_scale", "place")}
    assert max(_r_hat(x) for x in sites.values()) < 1.01
    assert result.sample_stats["diverging"].mean() < 0.01
    assert_polar_posterior(result.draws["pose"])
    np.testing.assert_allclose(
        result.draws["pose"],
        similarity_pose(sites["place"], np.exp(sites["log_scale"]), sites["angle"]),
        rtol=1e-12,
    )
    np.testing.assert_allclose(result.pose_mean, TRUTH, atol=0.2)
    if program is unnamed:
        np.testing.assert_array_equal(result.draws["where"], result.draws["pose"])


def _r_hat(draws):
    flat = draws.reshape(*draws.shape[:2], -1)
    return max(float(az.rhat(flat[..., i])) for i in range(flat.shape[-1]))


@pytest.mark.slow
def test_a_reparameterised_pose_has_the_posterior_of_the_pose_itself():
    result = drawn(decentred)
    assert result.converged
    assert "pose_decentered" in result.draws
    pose = np.asarray(exact.sample(cartesian, SCENE, jax.random.key(1), 20_000).pose)
    error = np.hypot(pose.std(axis=0) / np.sqrt(len(pose)), standard_error(result.draws["pose"]))
    distance = np.abs(result.pose_mean - pose.mean(axis=0)) / error
    assert distance.max() < 5, distance


@pytest.mark.slow
@pytest.mark.parametrize("guide", ["AutoNormal", "AutoMultivariateNormal"])
def test_an_automatic_guide_finds_computed_poses(guide):
    result = svi.run(polar, SCENE, jax.random.key(0), guide=guide, num_restarts=2)
    assert result.converged
    pose, weight = reference()
    mean = np.einsum("s,skp->kp", weight, pose)
    spread = np.sqrt(np.einsum("s,skp->kp", weight, (pose - mean) ** 2))
    assert (np.abs(result.pose_mean - mean) < 0.3 * spread).all()
    assert {"angle", "log_scale", "place", "pose", "match"} <= set(result.draws)


@pytest.mark.slow
def test_chains_begin_at_the_points():
    """Few draws without warm-up: where the chains begin is where they should be."""
    result = nuts.run(polar, SCENE, jax.random.key(0), num_chains=4, num_warmup=0, num_samples=4)
    begin = result.draws["pose"][:, 0]
    pose, _ = reference()
    assert (np.abs(begin - pose.mean(axis=0)) < 6 * pose.std(axis=0)).all()


# --- what is made of the draws ------------------------------------------------------------------


def test_an_entry_for_a_computed_site_is_not_taken_for_a_value_of_it():
    values = {"angle": [0.5], "log_scale": [np.log(0.7)], "place": [[0.4, -0.3]]}
    given = {name: jnp.asarray(x) for name, x in values.items()}
    wanted, _ = log_density(marginal(polar), (), SCENE.observed, given)
    draws = {name: np.asarray(x)[None] for name, x in values.items()}
    found = log_joint(polar, SCENE, draws | {"pose": TRUTH[None] + 1.0})
    np.testing.assert_allclose(found, [wanted], rtol=1e-9)


@pytest.mark.slow
def test_the_density_is_that_of_the_latent_sites():
    flat = {name: x[0, :3] for name, x in drawn(polar).draws.items()}
    expected = drawn(polar).sample_stats["lp"][0, :3]
    found = log_joint(polar, SCENE, flat | {"pose": flat["pose"] + 1.0})
    jacobian = np.log(2 * np.pi) - 2 * np.log1p(np.exp(-np.abs(_logit(flat["angle"]))))
    jacobian -= np.abs(_logit(flat["angle"]))  # of the angle's interval, which `lp` has
    np.testing.assert_allclose(found + jacobian[:, 0], expected, rtol=1e-9)


def _logit(angle):
    share = (angle + np.pi) / (2 * np.pi)
    return np.log(share) - np.log1p(-share)


@pytest.mark.slow
def test_arviz_gets_poses_and_latents():
    data = to_arviz(drawn(polar), polar, jax.random.key(0), num_samples=50)
    assert {"pose", "angle", "log_scale", "place"} <= set(data.posterior)
    assert {"pose", "angle"} <= set(data.prior)
    assert data.posterior.pose.dims == ("chain", "draw", "object", "pose_dim")
    assert np.isfinite(data.log_likelihood.points).all()


SQUARES = stack(shapes("square", "square"))
FULL = make_scene(np.random.default_rng(1).normal(size=(8, 2)), 8)


def test_no_symmetry_is_assumed_of_computed_poses():
    """Turning a pose alone leaves angles as they are, so the density would not notice."""
    assert symmetry.find(functools.partial(polar, parts=SQUARES), FULL).order == 1
    cartesian_squares = functools.partial(constellation, parts=SQUARES)
    assert symmetry.find(cartesian_squares, FULL).order == 32


def test_importance_weights_say_what_they_need():
    fitted = Result(
        method="svi",
        scene=SCENE,
        match_probs=np.eye(N),
        pose_mean=TRUTH,
        pose_covariance=np.eye(4)[None],
        labels=np.zeros(N, int),
        owner=np.zeros(N, int),
        converged=np.array(True),
        steps=np.array(1),
        elbo=np.array(0.0),
    )
    with pytest.raises(InputError, match="require a latent site 'pose'"):
        importance(polar, fitted, jax.random.key(0))


# --- what poses depend on -----------------------------------------------------------------------


def test_the_sites_of_the_pose():
    def with_noise(points, present):
        numpyro.sample("unrelated", dist.Gamma(2.0, 1.0))
        return polar(points, present)

    assert poses.pose_sites(cartesian, SCENE) == ("pose",)
    assert poses.pose_sites(with_noise, SCENE) == ("angle", "log_scale", "place")
    assert poses.pose_sites(decentred, SCENE) == ("pose_decentered",)


def shifted(points, present):
    with numpyro.plate("object", 1):
        pose = numpyro.sample("pose", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
    return points_given(2.0 * pose, points, present)


def plain(points, present):
    pose = numpyro.sample("pose", dist.Normal(jnp.zeros((1, 4)), 1.0).to_event(2))
    noise = dist.StudentT(3.0, PARTS.predict(pose), 0.1).to_event(2)
    return numpyro.sample("points", noise, obs=points)


REFUSED = {
    "another value": (shifted, "'pose': the likelihood gets another pose"),
    "no MatchedParts": (plain, "'points': found StudentT, .* MatchedParts"),
}


@pytest.mark.parametrize("run", [nuts.run, functools.partial(svi.run, guide="AutoNormal")])
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what, run):
    program, sentence = REFUSED[what]
    with pytest.raises(InputError, match=f"^site {sentence}"):
        run(program, SCENE, jax.random.key(0))


def bounded(points, present):
    size = numpyro.sample("size", dist.Uniform(0.1, 2.0).expand([1]))
    cosine = numpyro.sample("direction", dist.Dirichlet(jnp.ones(2)).expand([1]))
    place = numpyro.sample("place", dist.Normal(jnp.zeros((1, 2)), 1.0).to_event(2))
    pose = jnp.concatenate([place, size[:, None] * jnp.sqrt(cosine)], axis=-1)
    return points_given(pose, points, present)


@pytest.mark.slow
@pytest.mark.long
def test_a_constrained_pose_begins_in_its_support():
    """Least squares in unconstrained values, of sites of any support."""
    begins = beginnings(bounded, SCENE, jax.random.key(0), 2)
    size, direction, place = (np.asarray(begins.values[x]) for x in ("size", "direction", "place"))
    assert (size > 0.1).all() and (size < 2.0).all() and (direction > 0).all()
    np.testing.assert_allclose(direction.sum(axis=-1), 1, rtol=1e-9)
    pose = np.concatenate([place, size[..., None] * np.sqrt(direction)], axis=-1)
    np.testing.assert_allclose(pose, np.broadcast_to(TRUTH, pose.shape), atol=0.2)


@pytest.mark.slow
def test_a_constrained_pose_is_sampled():
    result = nuts.run(
        bounded, SCENE, jax.random.key(0), num_chains=2, num_warmup=100, num_samples=100
    )
    np.testing.assert_allclose(result.pose_mean, TRUTH, atol=0.2)
    assert result.draws["direction"].shape == (2, 100, 1, 2)
