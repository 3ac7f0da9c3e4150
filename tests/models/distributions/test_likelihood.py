"""The likelihood given the match and with the match summed out, against brute force."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

from models.distributions.likelihood import MarginalParts, MatchedParts, seen_features
from models.distributions.match import DoublyStochasticMatch, MixtureMatch, PermutationMatch
from models.errors import InputError
from models.templates import Parts, shapes, stack
from tests import oracle

N, D, P, K = 4, 3, 2, 2
DRAWS = 20_000

ROWS_SEEN = np.array([True, False, True, True])
FEATURES_SEEN = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0], [1, 0, 1]], bool)
PRESENT = {"all": None, "rows": ROWS_SEEN, "features": FEATURES_SEEN}
each_mask = pytest.mark.parametrize("present", PRESENT.values(), ids=PRESENT.keys())


def some_parts(seed: int = 0) -> Parts:
    """Four parts of two objects, unequal in everything, one of them without its last feature."""
    rng = np.random.default_rng(seed)
    mask = np.ones((N, D), bool)
    mask[1, 2] = False
    return Parts(
        F=rng.normal(size=(N, D, P)),
        offset=rng.normal(size=(N, D)),
        variance=rng.uniform(0.5, 2, (N, D)),
        owner=np.array([0, 0, 1, 1]),
        type=np.zeros(N, int),
        feature_mask=mask,
    )


class Given(NamedTuple):
    """One scene, and the noise under which it is seen."""

    pose: np.ndarray
    points: np.ndarray
    precision: float
    beta: float


def some_scene(seed: int = 1) -> Given:
    rng = np.random.default_rng(seed)
    pose, points = rng.normal(size=(K, P)), 2 * rng.normal(size=(N, D))
    return Given(pose, points, precision=3.0, beta=0.5)


PARTS, SCENE = some_parts(), some_scene()
NOISE = {"precision": SCENE.precision, "beta": SCENE.beta}


def brute_force(pose=SCENE.pose, points=SCENE.points, present=None, parts=PARTS) -> np.ndarray:
    """Log density of each point as each part, (N, N)."""
    present = np.ones((N, D), bool) if present is None else present
    seen = np.repeat(present[:, None], D, axis=1) if present.ndim == 1 else present
    return oracle.log_likelihood(
        points,
        oracle.predicted_parts(parts.F, parts.offset, parts.owner, pose),
        parts.variance / (SCENE.precision * SCENE.beta),
        seen[:, None, :] & parts.feature_mask,
    )


def summed_out(prior, pose, parts=PARTS, **noise) -> MarginalParts:
    """The match of a likelihood summed out; the match that it has itself does not count."""
    return MarginalParts(prior, MatchedParts(np.full((N, N), np.nan), pose, parts, **noise))


LOGITS = np.random.default_rng(2).normal(size=(N, N))
PROBS = oracle.sinkhorn(LOGITS)
PRIORS = {
    "doubly_stochastic": (DoublyStochasticMatch(PROBS), np.log(PROBS), oracle.permutations(N)),
    "permutation": (PermutationMatch(LOGITS), LOGITS, oracle.permutations(N)),
    "mixture": (MixtureMatch(LOGITS), LOGITS, oracle.assignments(N, N)),
}
each_prior = pytest.mark.parametrize(
    ("prior", "log_weights", "matches"), PRIORS.values(), ids=PRIORS.keys()
)

# The distribution itself goes through jit, so one compilation serves many tests.
log_prob = jax.jit(lambda distribution, points: distribution.log_prob(points))
draw = jax.jit(lambda distribution, key: distribution.sample(key, (DRAWS,)))
posterior_mean = jax.jit(lambda marginal, points: marginal.match_posterior(points).mean)


# --- the match given ----------------------------------------------------------------------------


@each_mask
def test_density_of_every_match(present):
    table = brute_force(present=present)
    for columns in oracle.assignments(N, N)[::7]:
        match = oracle.as_matrices(columns, N)
        likelihood = MatchedParts(match, SCENE.pose, PARTS, **NOISE, present=present)
        expected = oracle.log_density_given_match(table, columns)
        np.testing.assert_allclose(log_prob(likelihood, SCENE.points), expected, rtol=1e-12)


@each_mask
def test_density_is_linear_in_the_match(present):
    """So at match probabilities it is the expected log likelihood."""
    shares = np.random.default_rng(3).dirichlet(np.ones(24))
    matrices = oracle.permutation_matrices(N)

    def density(match):
        likelihood = MatchedParts(match, SCENE.pose, PARTS, **NOISE, present=present)
        return log_prob(likelihood, SCENE.points)

    expected = sum(share * density(match) for share, match in zip(shares, matrices, strict=True))
    np.testing.assert_allclose(density(np.tensordot(shares, matrices, 1)), expected, rtol=1e-12)


def test_precision_and_beta_multiply():
    together = MatchedParts(np.eye(N), SCENE.pose, PARTS, precision=1.5)
    apart = MatchedParts(np.eye(N), SCENE.pose, PARTS, precision=3.0, beta=0.5)
    np.testing.assert_allclose(
        log_prob(together, SCENE.points), log_prob(apart, SCENE.points), rtol=1e-12
    )


@pytest.mark.parametrize("present", [ROWS_SEEN, FEATURES_SEEN], ids=["rows", "features"])
def test_what_is_not_seen_does_not_count(present):
    seen = np.asarray(seen_features(present, (N, D)))
    elsewhere = np.where(seen, SCENE.points, 1e6)
    likelihood = MatchedParts(np.eye(N), SCENE.pose, PARTS, **NOISE, present=present)
    assert log_prob(likelihood, elsewhere) == log_prob(likelihood, SCENE.points)

    @jax.jit
    @jax.grad
    def gradient(pose):
        return MatchedParts(np.eye(N), pose, PARTS, present=present).log_prob(elsewhere)

    assert np.abs(gradient(SCENE.pose)).max() < 1e3


@each_mask
def test_draws_given_the_match(present):
    columns = np.array([2, 0, 1, 3])
    likelihood = MatchedParts(
        oracle.as_matrices(columns, N), SCENE.pose, PARTS, **NOISE, present=present
    )
    predicted = oracle.predicted_parts(PARTS.F, PARTS.offset, PARTS.owner, SCENE.pose)
    seen = np.ones((N, D), bool) if present is None else seen_features(present, (N, D))
    counted = seen & PARTS.feature_mask[columns]
    mean = np.where(counted, predicted[columns], 0)
    variance = np.where(counted, PARTS.variance[columns], 0) / (SCENE.precision * SCENE.beta)
    np.testing.assert_allclose(likelihood.mean, mean, atol=1e-12)
    np.testing.assert_allclose(likelihood.variance, variance, atol=1e-12)

    draws = np.asarray(draw(likelihood, jax.random.key(0)))
    assert (draws[:, ~counted] == 0).all()
    assert (abs(draws.mean(axis=0) - mean) <= 5 * np.sqrt(variance / DRAWS)).all()
    standard_error = np.sqrt(2 / DRAWS) * variance
    assert (abs(((draws - mean) ** 2).mean(axis=0) - variance) <= 5 * standard_error).all()


# --- other noise --------------------------------------------------------------------------------

STUDENT = functools.partial(dist.StudentT, 3.0)
SCIPY = {"normal": stats.norm, "student": stats.t(3), "laplace": stats.laplace}
NOISES = {"normal": dist.Normal, "student": STUDENT, "laplace": dist.Laplace}
each_noise = pytest.mark.parametrize("noise", NOISES)


@each_noise
@each_mask
def test_the_table_of_pairs_has_the_density_of_the_noise(noise, present):
    likelihood = MatchedParts(
        np.eye(N), SCENE.pose, PARTS, **NOISE, present=present, noise=NOISES[noise]
    )
    predicted = oracle.predicted_parts(PARTS.F, PARTS.offset, PARTS.owner, SCENE.pose)
    scale = np.sqrt(PARTS.variance / (SCENE.precision * SCENE.beta))
    residual = (SCENE.points[:, None] - predicted) / scale
    seen = np.ones((N, D), bool) if present is None else np.asarray(likelihood.seen)
    counted = seen[:, None] & PARTS.feature_mask
    expected = np.where(counted, SCIPY[noise].logpdf(residual) - np.log(scale), 0).sum(axis=-1)
    np.testing.assert_allclose(likelihood.pair_log_likelihood(SCENE.points), expected, rtol=1e-12)


@each_noise
def test_draws_have_the_noise(noise):
    """Each feature by itself, by its distribution function."""
    columns = np.array([2, 0, 1, 3])
    likelihood = MatchedParts(
        oracle.as_matrices(columns, N), SCENE.pose, PARTS, **NOISE, noise=NOISES[noise]
    )
    predicted = oracle.predicted_parts(PARTS.F, PARTS.offset, PARTS.owner, SCENE.pose)[columns]
    scale = np.sqrt(PARTS.variance[columns] / (SCENE.precision * SCENE.beta))
    counted = PARTS.feature_mask[columns]
    draws = np.asarray(draw(likelihood, jax.random.key(0)))
    assert (draws[:, ~counted] == 0).all()
    for residual in ((draws - predicted) / scale)[:, counted].T:
        assert stats.kstest(residual, SCIPY[noise].cdf).pvalue > 1e-4
    variance = np.where(counted, scale**2 * SCIPY[noise].var(), 0)
    np.testing.assert_allclose(likelihood.mean, np.where(counted, predicted, 0), atol=1e-12)
    np.testing.assert_allclose(likelihood.variance, variance, atol=1e-12)


def test_noise_without_moments_has_none():
    likelihood = MatchedParts(np.eye(N), SCENE.pose, PARTS, noise=dist.Cauchy)
    assert np.isnan(likelihood.mean).all() and np.isnan(likelihood.variance).all()


@each_noise
def test_the_gradient_is_finite_where_nothing_is_seen(noise):
    points = np.where(ROWS_SEEN[:, None], SCENE.points, np.nan)

    @jax.grad
    def gradient(pose):
        likelihood = MatchedParts(np.eye(N), pose, PARTS, present=ROWS_SEEN, noise=NOISES[noise])
        return likelihood.pair_log_likelihood(points).sum()

    assert np.isfinite(gradient(SCENE.pose)).all()


def test_noise_that_is_not_of_each_feature_is_refused():
    def together(loc, scale):
        return dist.Normal(loc, scale).to_event(1)

    likelihood = MatchedParts(np.eye(N), SCENE.pose, PARTS, noise=together)
    with pytest.raises(InputError, match=r"each feature by itself, .* got Independent .* to_event"):
        likelihood.log_prob(SCENE.points)


# --- the match summed out -----------------------------------------------------------------------


@each_prior
@each_mask
def test_marginal_density(prior, log_weights, matches, present):
    marginal = summed_out(prior, SCENE.pose, PARTS, **NOISE, present=present)
    expected = oracle.log_marginal(log_weights, brute_force(present=present), matches)
    np.testing.assert_allclose(log_prob(marginal, SCENE.points), expected, rtol=1e-11)


@each_prior
@each_mask
def test_match_posterior(prior, log_weights, matches, present):
    marginal = summed_out(prior, SCENE.pose, PARTS, **NOISE, present=present)
    expected = oracle.marginals(log_weights + brute_force(present=present), matches)
    np.testing.assert_allclose(posterior_mean(marginal, SCENE.points), expected, atol=1e-11)


@each_prior
def test_density_of_a_point_given_the_others(prior, log_weights, matches):
    """The density of the scene over that of the scene without the point, whose row is a dummy."""
    marginal = summed_out(prior, SCENE.pose, PARTS, **NOISE)
    found = marginal.log_prob_given_others(SCENE.points)
    whole = oracle.log_marginal(log_weights, brute_force(), matches)
    for m in range(N):
        others = brute_force(present=np.arange(N) != m)
        wanted = whole - oracle.log_marginal(log_weights, others, matches)
        np.testing.assert_allclose(found[m], wanted, rtol=1e-11)


@each_prior
def test_gradient_of_the_marginal_density(prior, log_weights, matches):
    @jax.jit
    @jax.grad
    def gradient(pose):
        return summed_out(prior, pose, PARTS, **NOISE, present=FEATURES_SEEN).log_prob(SCENE.points)

    def density(pose):
        table = brute_force(pose, present=FEATURES_SEEN)
        return oracle.log_marginal(log_weights, table, matches)

    expected = oracle.finite_difference(density, SCENE.pose)
    np.testing.assert_allclose(gradient(SCENE.pose), expected, atol=1e-7)


UNIFORM = np.full((N, N), 1 / N)


@pytest.mark.parametrize(
    ("prior", "log_weights", "matches"),
    [
        # Its draws have mean A; only for the uniform A are they those of the normalised product.
        (DoublyStochasticMatch(UNIFORM), np.log(UNIFORM), oracle.permutations(N)),
        PRIORS["permutation"],
        PRIORS["mixture"],
    ],
    ids=PRIORS.keys(),
)
def test_draws_with_the_match_summed_out(prior, log_weights, matches):
    """Mean and covariance of the whole scene, by enumeration of the matches."""
    predicted = oracle.predicted_parts(PARTS.F, PARTS.offset, PARTS.owner, SCENE.pose)
    predicted = np.where(PARTS.feature_mask, predicted, 0)
    noise = np.where(PARTS.feature_mask, PARTS.variance, 0) / (SCENE.precision * SCENE.beta)
    probs = oracle.probabilities(log_weights, matches)
    centres = predicted[matches].reshape(len(matches), -1)
    mean = probs @ centres
    between = (probs[:, None] * centres).T @ centres - np.outer(mean, mean)
    covariance = between + np.diag(probs @ noise[matches].reshape(len(matches), -1))

    marginal = summed_out(prior, SCENE.pose, PARTS, **NOISE)
    draws = np.asarray(draw(marginal, jax.random.key(1))).reshape(DRAWS, -1)
    products = (draws - mean)[:, :, None] * (draws - mean)[:, None, :]
    assert_mean(draws, mean)
    assert_mean(products, covariance)


def assert_mean(draws, expected):
    standard_error = draws.std(axis=0) / np.sqrt(len(draws))
    assert (abs(draws.mean(axis=0) - expected) <= 5 * standard_error).all()


# --- relabelling --------------------------------------------------------------------------------


def with_logits(prior, logits):
    return type(prior)(oracle.sinkhorn(logits) if hasattr(prior, "probs") else logits)


@each_prior
def test_relabelling_the_points_permutes_the_answer(prior, log_weights, matches):
    order = np.array([2, 0, 3, 1])
    before = summed_out(prior, SCENE.pose, PARTS, **NOISE, present=ROWS_SEEN)
    after = summed_out(
        with_logits(prior, LOGITS[order]), SCENE.pose, PARTS, **NOISE, present=ROWS_SEEN[order]
    )
    points = SCENE.points[order]
    np.testing.assert_allclose(log_prob(after, points), log_prob(before, SCENE.points), rtol=1e-11)
    np.testing.assert_allclose(
        posterior_mean(after, points), posterior_mean(before, SCENE.points)[order], atol=1e-11
    )


@each_prior
def test_relabelling_the_parts_permutes_the_answer(prior, log_weights, matches):
    order = np.array([2, 0, 3, 1])
    parts = Parts(*(field[order] for field in PARTS))
    before = summed_out(prior, SCENE.pose, PARTS, **NOISE, present=ROWS_SEEN)
    after = summed_out(
        with_logits(prior, LOGITS[:, order]), SCENE.pose, parts, **NOISE, present=ROWS_SEEN
    )
    points = SCENE.points
    np.testing.assert_allclose(log_prob(after, points), log_prob(before, points), rtol=1e-11)
    np.testing.assert_allclose(
        posterior_mean(after, points), posterior_mean(before, points)[:, order], atol=1e-11
    )


# --- batches and transformations ----------------------------------------------------------------


class Batch(NamedTuple):
    """Three scenes that differ in everything that may differ."""

    pose: np.ndarray
    points: np.ndarray
    precision: np.ndarray
    beta: np.ndarray
    present: np.ndarray
    logits: np.ndarray


def some_batch() -> Batch:
    rng = np.random.default_rng(4)
    present = rng.random((3, N)) < 0.7
    present[:, 0] = True
    return Batch(
        pose=rng.normal(size=(3, K, P)),
        points=rng.normal(size=(3, N, D)),
        precision=np.array([0.5, 1.0, 2.0]),
        beta=np.array([1.0, 0.1, 0.5]),
        present=present,
        logits=rng.normal(size=(3, N, N)),
    )


def matched(scene: Batch, noise=dist.Normal) -> MatchedParts:
    return MatchedParts(
        jax.nn.softmax(scene.logits),
        scene.pose,
        PARTS,
        precision=scene.precision,
        beta=scene.beta,
        present=scene.present,
        noise=noise,
    )


def marginal(scene: Batch, noise=dist.Normal) -> MarginalParts:
    return MarginalParts(PermutationMatch(scene.logits), matched(scene, noise))


LIKELIHOODS = (matched, marginal, functools.partial(marginal, noise=STUDENT))


@pytest.mark.parametrize("make", LIKELIHOODS)
def test_a_batch_is_the_loop(make):
    batch = some_batch()
    likelihood = make(batch)
    assert (likelihood.batch_shape, likelihood.event_shape) == ((3,), (N, D))
    together = log_prob(likelihood, batch.points)
    alone = [log_prob(make(Batch(*scene)), scene[1]) for scene in zip(*batch, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-11)
    mapped = jax.jit(jax.vmap(lambda scene: make(scene).log_prob(scene.points)))(batch)
    np.testing.assert_allclose(mapped, alone, rtol=1e-11)
    assert likelihood.shape((2,)) == (2, 3, N, D)
    few = jax.jit(lambda likelihood, key: likelihood.sample(key, (2,)))
    assert few(likelihood, jax.random.key(0)).shape == (2, 3, N, D)


@pytest.mark.parametrize("make", LIKELIHOODS)
def test_a_likelihood_is_a_pytree(make):
    likelihood = make(some_batch())
    points = some_batch().points
    leaves, structure = jax.tree.flatten(likelihood)
    for copy in (jax.tree.unflatten(structure, leaves), jax.jit(lambda x: x)(likelihood)):
        assert type(copy) is type(likelihood)
        assert (copy.batch_shape, copy.event_shape) == ((3,), (N, D))
        np.testing.assert_array_equal(log_prob(copy, points), log_prob(likelihood, points))


def test_draws_of_a_batch_under_one_prior_are_independent():
    """A prior of batch shape (1,) stands for one match for each scene, not one for all."""
    prior = PermutationMatch(np.zeros((1, N, N)))
    poses = np.broadcast_to(SCENE.pose, (50, K, P))
    sample = jax.jit(lambda likelihood, key: likelihood.sample(key))
    draws = sample(summed_out(prior, poses, PARTS, precision=1e12), jax.random.key(0))
    assert len(np.unique(np.round(draws, 3), axis=0)) > 10


def test_a_mask_for_each_scene_makes_a_batch():
    likelihood = MatchedParts(np.eye(N), SCENE.pose, PARTS, present=np.ones((3, N), bool))
    assert likelihood.batch_shape == (3,)


# --- masks and bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "event_shape"),
    [((4,), (4, 3)), ((2, 4), (4, 3)), ((3,), (3, 3)), ((4, 3), (4, 3)), ((2, 4, 3), (4, 3))],
)
def test_masks_over_rows_and_over_features(shape, event_shape):
    mask = np.random.default_rng(5).random(shape) < 0.5
    over_features = shape[-2:] == event_shape
    expected = mask if over_features else np.repeat(mask[..., None], event_shape[1], axis=-1)
    np.testing.assert_array_equal(seen_features(mask, event_shape), expected)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"precision": -2.0}, "precision must be positive, got -2.0"),
        ({"precision": np.nan}, "precision must be positive, got nan"),
        ({"precision": np.array([1.0, 0.0])}, r"precision must be positive, got \[1. 0.\]"),
        ({"beta": 0.0}, "beta must be positive, got 0.0"),
    ],
)
def test_a_bad_noise_level_is_named(arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        MatchedParts(np.eye(N), SCENE.pose, PARTS, **arguments)


@pytest.mark.parametrize("shape", [(5,), (3, 4, 2), ()])
def test_a_mask_of_the_wrong_shape_is_named(shape):
    with pytest.raises(InputError, match=r"which of the 4 rows are points, .* got \("):
        MatchedParts(np.eye(N), SCENE.pose, PARTS, present=np.ones(shape, bool))


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("of", [lambda x: x, lambda x: 2 * x], ids=["one", "two"])
def test_a_mask_of_numbers_says_the_same_as_one_of_booleans(kind, of):
    """As NumPyro's own masks may be: 2 is true, although its lowest bit is zero."""
    parts = stack(shapes("triangle"))
    points, present = np.random.default_rng(0).normal(size=(3, 2)), np.array([True, True, False])
    pose = np.array([[0.1, 0.2, 0.5, 0.4]])
    tables = [
        MatchedParts(np.eye(3), pose, parts, precision=10.0, present=mask).log_prob(points)
        for mask in (present, of(present.astype(kind)))
    ]
    np.testing.assert_array_equal(*tables)
