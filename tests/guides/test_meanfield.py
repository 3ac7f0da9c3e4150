"""The coordinate updates and the closed-form ELBO: against plain numpy, and never downhill."""

import dataclasses
import functools
from math import lgamma, log

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.distributions import biject_to, kl_divergence

from guides import meanfield
from guides.meanfield import PoseFactor
from guides.projections import PROJECTIONS
from inference import cavi
from inference.proposals import starts
from inference.proposals.starts import Start
from inference.variational import ascent
from inference.variational.ascent import Schedule
from models.distributions.likelihood import MatchedParts
from models.distributions.match import (
    DoublyStochasticMatch,
    MixtureMatch,
    PermutationMatch,
    doubly_stochastic,
)
from models.distributions.match_priors import typed_probs
from models.numerics.linalg import inverse_and_log_det
from models.program.batches import map_scenes, read_scenes, skeleton_of
from models.program.reading import read
from models.scenes import Scene
from models.templates import shapes, stack
from tests import oracle_inference
from tests.problems import DESIGNS, make_problem, random_match, stack_problems

PARTS = stack(shapes("square", "triangle", "square"))
N, K, P = PARTS.num_parts, PARTS.num_objects, PARTS.pose_dim


def problems_of(name, count, *, seed=0, **options):
    rng = np.random.default_rng(seed)
    rows = len(DESIGNS[name].owner)
    kinds = ("uniform", "random", "typed")
    return [
        make_problem(
            rng,
            DESIGNS[name],
            int(rng.integers(1, rows + 1)),
            logits=kinds[i % 3],
            precision=float(10 ** rng.uniform(-0.7, 0.7)),
            **options,
        )
        for i in range(count)
    ]


# --- one coordinate step ------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(1, 2))
def one_round(model, owner, projection_name, match_probs, beta):
    """Poses, weights, R and ELBO by the functions of the guide, put together here."""
    owner, projection = np.array(owner), PROJECTIONS[projection_name]
    precision = meanfield.fixed_precision(model, beta)
    pose = meanfield.update_pose(model, owner, match_probs, precision)
    energy = meanfield.expected_energy(model, owner, pose)
    log_likelihood = meanfield.expected_log_likelihood(model, energy, precision)
    log_rho = meanfield.match_log_weights(model, log_likelihood, None)
    projected = projection.cold(log_rho, 1e-13)
    terms = meanfield.elbo_terms(
        model, projected.match_probs, projected.entropy, 0.0, pose, log_likelihood, precision, None
    )
    return pose, log_likelihood, projected.match_probs, terms


@pytest.mark.parametrize("projection", ["sinkhorn", "softmax"])
@pytest.mark.parametrize("missing_features", [False, True])
@pytest.mark.parametrize(
    "design",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("similarity", "interleaved")))
        for name in DESIGNS
    ],
)
def test_a_step_is_that_of_the_plain_reference(design, missing_features, projection):
    problems = problems_of(design, 12, missing_features=missing_features)
    family = "mixture" if projection == "softmax" else "permutation"
    model = stack_problems(problems, family).conjugate()
    rng = np.random.default_rng(1)
    match_probs = random_match(rng, len(problems[0].points), len(problems))
    beta = rng.uniform(0.1, 2.0, len(problems))
    pose, log_likelihood, new_match, terms = one_round(
        model, DESIGNS[design].owner, projection, match_probs, beta
    )
    slow = 0
    for i, problem in enumerate(problems):
        mean, covariance = oracle_inference.update_pose(problem, match_probs[..., i], beta[i])
        np.testing.assert_allclose(pose.mean[..., i].T, mean, atol=1e-9, rtol=1e-9)
        np.testing.assert_allclose(
            np.moveaxis(pose.covariance[..., i], 2, 0), covariance, atol=1e-9, rtol=1e-9
        )
        table = oracle_inference.expected_log_likelihood(problem, mean, covariance, beta[i])
        np.testing.assert_allclose(log_likelihood[..., i], table, atol=1e-9, rtol=1e-9)
        step = oracle_inference.coordinate_step(
            problem,
            match_probs[..., i],
            beta[i],
            log_normaliser=0.0,
            tolerance=1e-12,
            projection=projection,
        )
        if np.abs(step.match_probs.sum(axis=0) - 1).max() > 1e-11 and projection == "sinkhorn":
            slow += 1  # plain sweeps would take millions here
            continue
        np.testing.assert_allclose(new_match[..., i], step.match_probs, atol=1e-9)
        np.testing.assert_allclose(terms.log_likelihood[i], step.elbo.log_likelihood, rtol=1e-9)
        np.testing.assert_allclose(terms.pose[i], step.elbo.pose, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(terms.match[i], step.elbo.match, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(terms.elbo[i], step.elbo.total, rtol=1e-9)
        assert terms.precision[i] == 0
    assert slow <= 2


# --- never downhill -----------------------------------------------------------------------------


def program(
    points=None,
    present=None,
    point_type=None,
    *,
    family="doubly_stochastic",
    typed=False,
    precision=None,
    gamma=None,
    dirichlet=None,
    logits=None,
    pose_mean=0.0,
    pose_variance=1.0,
):
    """The constellations with every piece exchangeable; the precision may be the scene's own.

    Where `precision` is None it is 10 to the power of the first row's type.
    """
    with numpyro.plate("object", K):
        prior = dist.MultivariateNormal(np.full(P, pose_mean), pose_variance * np.eye(P))
        pose = numpyro.sample("pose", prior)
    if gamma is not None:
        precision = numpyro.sample("precision", dist.Gamma(*gamma))
    elif precision is None:
        precision = 10.0 ** point_type[0]
    if dirichlet is not None:
        part_probs = numpyro.sample("part_probs", dist.Dirichlet(np.full(N, dirichlet)))
        prior = MixtureMatch(jnp.broadcast_to(jnp.log(part_probs), (N, N)))
    elif typed:
        probs = typed_probs(point_type, present, np.arange(N) % 3)
        prior = DoublyStochasticMatch(probs)
    else:
        weights = np.full((N, N), -np.log(N)) if logits is None else logits
        prior = {
            "doubly_stochastic": lambda: DoublyStochasticMatch(jnp.exp(weights)),
            "permutation": lambda: PermutationMatch(weights),
            "mixture": lambda: MixtureMatch(weights),
        }[family]()
    match = numpyro.sample("match", prior)
    likelihood = MatchedParts(match, pose, PARTS, precision=precision, present=present)
    return numpyro.sample("points", likelihood, obs=points)


def random_scenes(count, *, seed=0, typed=False):
    """Constellations of some of the parts, with noise, stray points and duplicates among them."""
    rng = np.random.default_rng(seed)
    poses = rng.normal(size=(count, K, P)) * [1, 1, 0.5, 0.5]
    predicted = np.asarray(PARTS.predict(jnp.asarray(poses)))
    points = predicted + rng.normal(size=predicted.shape) * 10.0 ** -rng.uniform(
        0, 4, (count, 1, 1)
    )
    points[rng.uniform(size=count) < 0.2] = rng.normal(size=points.shape[1:])
    double = rng.uniform(size=count) < 0.1
    points[double, 1] = points[double, 0]
    present = rng.uniform(size=(count, N)) < rng.uniform(0.2, 1, (count, 1))
    present[np.arange(count), rng.integers(N, size=count)] = True
    kind = np.broadcast_to(np.arange(N) % 3, (count, N))
    exponent = np.broadcast_to(rng.integers(0, 9, size=(count, 1)), (count, N))
    points = np.where(present[..., None], points, 0.0)
    return Scene(points, present, point_type=kind if typed else exponent)


MONOTONE = {
    "sinkhorn": ("sinkhorn", {}),
    "bethe": ("bethe", {}),
    "softmax": ("softmax", {"family": "mixture"}),
    "sinkhorn, random prior": ("sinkhorn", {"family": "permutation", "random_prior": True}),
    "sinkhorn, typed": ("sinkhorn", {"typed": True}),
    "bethe, typed": ("bethe", {"typed": True}),
    "sinkhorn, gamma": ("sinkhorn", {"gamma": True}),
    "softmax, gamma": ("softmax", {"family": "mixture", "gamma": True}),
    "softmax, dirichlet": ("softmax", {"dirichlet": True}),
    "softmax, dirichlet, gamma": ("softmax", {"dirichlet": True, "gamma": True}),
}
STEPS = 20


@st.composite
def priors(draw, random_prior=False, typed=False, gamma=False, dirichlet=False, family=None):
    """Numbers for the priors of `program`."""
    options = {"typed": typed} | ({} if family is None else {"family": family})
    positive = st.floats(0.1, 10.0)
    if random_prior:
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        options["logits"] = rng.normal(size=(N, N)) * draw(positive)
    if gamma:
        options["gamma"] = (draw(positive), draw(positive) / 10)
    elif typed:
        options["precision"] = 10 ** draw(st.floats(0, 8))
    if dirichlet:
        options["dirichlet"] = draw(positive)
    spread = draw(positive)
    return options | {"pose_mean": draw(st.floats(-1, 1)), "pose_variance": spread}


@pytest.mark.long
@pytest.mark.parametrize("case", ["sinkhorn, typed", "softmax, dirichlet, gamma"])
def test_no_step_at_fixed_beta_lowers_the_elbo(case):
    """Every kind of factor; typed and missing parts too."""
    check_steps(case, max_examples=2, num_scenes=16)


@pytest.mark.slow
@pytest.mark.parametrize("case", MONOTONE)
def test_no_step_lowers_the_elbo_under_any_prior(case):
    """Some hundred scenes under each of many priors, 64 at a time."""
    check_steps(case, max_examples=3 if "bethe" in case else 5, num_scenes=64)


def check_steps(case, max_examples, num_scenes):
    projection_name, choices = MONOTONE[case]

    @settings(max_examples=max_examples)
    @given(priors(**choices), st.integers(0, 2**32 - 1))
    def check(options, seed):
        this = functools.partial(program, **options)
        scenes = random_scenes(num_scenes, seed=seed, typed=options["typed"])
        beta = 10.0 ** np.random.default_rng(seed).uniform(-2, 0, num_scenes)
        model = jax.tree.map(jnp.asarray, read_scenes(this, scenes).model)
        states = follow(model, projection_name, beta, seed)
        assert_climbs(states, projection_name, model)

    check()


def assert_climbs(states, projection_name, model):
    match_probs, elbo = np.asarray(states.match_probs), np.asarray(states.terms.elbo)
    assert np.isfinite(elbo).all()
    fall = elbo[:-1] - elbo[1:]
    assert (fall <= 1e-8 * np.maximum(1, np.abs(elbo[1:]))).all()
    assert (elbo[-1] > elbo[0] + 1e-3).mean() > 0.3  # something happened
    assert match_probs.min() >= 0
    np.testing.assert_allclose(match_probs.sum(axis=2), 1, atol=1e-6)
    if projection_name != "softmax":
        np.testing.assert_allclose(match_probs.sum(axis=1), 1, atol=1e-6)
    forbidden = ~np.isfinite(np.broadcast_to(model.match_logits, match_probs.shape[1:]))
    assert (match_probs[:, forbidden] < 1e-12).all()


def follow(model, projection_name, beta, seed):
    """The states after each of some steps, each scene at a beta of its own."""
    keys = jax.random.split(jax.random.key(seed), len(beta))
    return _states(projection_name, skeleton_of(first_scene(model)))(model, keys, beta)


def first_scene(model):
    return jax.tree.map(lambda x: x[..., 0], model)


@functools.cache
def _states(projection_name, skeleton):
    projection, structure = PROJECTIONS[projection_name], starts.structure(skeleton)
    # Never settled, so beta stays where it is.
    schedule = Schedule(beta_start=1.0, beta_max=np.inf, tolerance=0.0, max_steps=10_000)

    @jax.jit
    def states(model, keys, beta):
        def start(model, key):
            return starts.uniform(key, model, 1.0).weights

        weights = map_scenes(start, model, keys, axis=-1)
        first = ascent.begin(model, projection, Start(weights, beta))

        def one(state, _):
            new = ascent.step(model, structure, projection, state, schedule, 1e-12)
            return new, new

        return jax.lax.scan(one, first, None, STEPS)[1]

    return states


# --- stationary ---------------------------------------------------------------------------------


@pytest.mark.long
def test_the_gradient_vanishes_at_a_fixed_point():
    rng = np.random.default_rng(5)
    design = DESIGNS["similarity"]
    problems = [
        make_problem(rng, design, int(m), logits=kind, precision=0.2)
        for m in (3, 5)
        for kind in ("uniform", "random")
    ]
    stacked = stack_problems(problems, "doubly_stochastic")
    schedule = Schedule(beta_start=0.5, tolerance=1e-12, max_steps=5_000)
    result = cavi.run(
        stacked.program, stacked.scenes, jax.random.key(0), num_restarts=1, schedule=schedule
    )
    transform = biject_to(doubly_stochastic)
    owner = np.array(design.owner)

    @jax.jit
    @functools.partial(jax.grad, argnums=1)
    def gradient(scene, parameters):
        model = read(stacked.program, scene)
        free, mean, factor = parameters
        match_probs = transform(free)
        covariance = jnp.einsum("kpr,kqr->kpq", factor, factor)
        _, log_det = inverse_and_log_det(jnp.moveaxis(covariance, 0, -1))
        pose = PoseFactor(mean.T, jnp.moveaxis(covariance, 0, -1), -log_det)
        precision = meanfield.fixed_precision(model, jnp.ones(()))
        energy = meanfield.expected_energy(model, owner, pose)
        log_likelihood = meanfield.expected_log_likelihood(model, energy, precision)
        entropy = -(match_probs * jnp.log(match_probs)).sum()
        terms = meanfield.elbo_terms(
            model, match_probs, entropy, jnp.zeros(()), pose, log_likelihood, precision, None
        )
        return terms.elbo

    for i in range(len(problems)):
        match_probs = result.match_probs[i]
        assert match_probs.min() > 1e-12, "choose a lower precision: R is not in the interior"
        parameters = (
            transform.inv(jnp.asarray(match_probs)),
            jnp.asarray(result.pose_mean[i]),
            jnp.linalg.cholesky(result.pose_covariance[i]),
        )
        scene = Scene(**stacked.scenes.take(i).observed)
        for piece in gradient(scene, parameters):
            np.testing.assert_allclose(piece, 0, atol=1e-5)
        elsewhere = jax.tree.map(lambda x: x + 0.01, parameters)
        assert max(float(np.abs(g).max()) for g in gradient(scene, elsewhere)) > 1e-4


# --- unknown precision, unknown part probabilities ----------------------------------------------


def test_the_precision_factor_is_the_one_derived_by_hand():
    problems = problems_of("interleaved", 6, missing_features=True)
    model = stack_problems(problems).conjugate()
    prior = (2.0, 0.7)
    model = dataclasses.replace(model, precision_prior=np.array(prior)[:, None])
    rng = np.random.default_rng(2)
    match_probs = jnp.asarray(random_match(rng, 5, 6))
    beta = rng.uniform(0.2, 1.5, 6)
    owner = np.array(DESIGNS["interleaved"].owner)

    @jax.jit
    def update(model, match_probs, beta):
        start = meanfield.fixed_precision(model, beta)
        pose = meanfield.update_pose(model, owner, match_probs, start)
        energy = meanfield.expected_energy(model, owner, pose)
        return pose, meanfield.update_precision(model, match_probs, energy, beta)

    pose, found = update(model, match_probs, beta)
    for i, problem in enumerate(problems):
        scaled = beta[i] * prior[0] / prior[1]
        mean, covariance = oracle_inference.update_pose(problem, match_probs[..., i], scaled)
        np.testing.assert_allclose(pose.mean[..., i].T, mean, rtol=1e-9)
        a, b = oracle_inference.precision_factor(
            problem, match_probs[..., i], mean, covariance, prior, beta[i]
        )
        np.testing.assert_allclose(found.mean[i], beta[i] * a / b, rtol=1e-9)
        np.testing.assert_allclose(found.kl[i], oracle_inference.gamma_kl(a, b, *prior), atol=1e-6)
        step = 1e-5  # E log tau = d/da log integral tau^(a-1) exp(-b tau)
        log_mean = (lgamma(a + step) - lgamma(a - step)) / (2 * step) - log(b)
        np.testing.assert_allclose(found.log_mean[i], log(beta[i]) + log_mean, atol=1e-8)


def test_the_part_probabilities_count_the_points_of_each_part():
    this = functools.partial(program, dirichlet=0.7, precision=10.0)
    scenes = random_scenes(4)
    model = jax.tree.map(jnp.asarray, read_scenes(this, scenes).model)
    rng = np.random.default_rng(0)
    match_probs = random_match(rng, N, 4)
    found = meanfield.update_part_probs(model, jnp.asarray(match_probs))
    for i in range(4):
        counts = match_probs[scenes.present[i], :, i].sum(axis=0)
        posterior = dist.Dirichlet(0.7 + counts)
        draws = np.random.default_rng(0).dirichlet(0.7 + counts, 200_000)
        logs = np.log(np.maximum(draws, 1e-300))
        error = logs.std(axis=0) / np.sqrt(len(draws))
        assert (np.abs(found.log_mean[:, i] - logs.mean(axis=0)) < 5 * error).all()
        prior = dist.Dirichlet(np.full(N, 0.7))
        np.testing.assert_allclose(found.kl[i], kl_divergence(posterior, prior), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("truth", [pytest.param(30.0, marks=pytest.mark.slow), 3000.0])
def test_with_much_data_the_precision_is_found(truth):
    """Forty parts of one object, matched as they are: half a unit of tau for each coordinate."""
    rng = np.random.default_rng(0)
    template = rng.normal(size=(40, 2))
    parts = stack([template])

    def unknown_noise(points=None, present=None):
        with numpyro.plate("object", 1):
            pose = numpyro.sample("pose", dist.MultivariateNormal(np.zeros(4), np.eye(4)))
        precision = numpyro.sample("precision", dist.Gamma(1.0, 1e-3))
        match = numpyro.sample("match", PermutationMatch(30.0 * np.eye(40)))
        likelihood = MatchedParts(match, pose, parts, precision=precision, present=present)
        return numpyro.sample("points", likelihood, obs=points)

    exact_points = np.asarray(parts.predict(jnp.array([[0.3, -0.2, 0.8, 0.5]])))
    points = exact_points + rng.normal(size=(40, 2)) / np.sqrt(truth)
    scene = Scene(points, np.ones(40, bool))
    result = cavi.run(unknown_noise, scene, jax.random.key(0), num_restarts=1)
    assert result.converged
    np.testing.assert_allclose(np.diag(result.match_probs), 1, atol=1e-3)
    residual = points - np.asarray(parts.predict(jnp.asarray(result.pose_mean)))
    # 76 degrees of freedom: their own standard error is 16 %.
    np.testing.assert_allclose(76 / np.sum(residual**2), truth, rtol=0.5)
    spread = np.sqrt(np.trace(result.pose_covariance[0][:2, :2]) / 2)
    np.testing.assert_allclose(spread, 1 / np.sqrt(40 * truth), rtol=0.3)
