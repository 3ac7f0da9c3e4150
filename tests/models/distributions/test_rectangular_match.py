"""Permutation matches of fewer rows than columns, and with the Bethe normaliser."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions.kl import kl_divergence

from models.constellation import PARTS
from models.distributions.likelihood import MatchedParts
from models.distributions.match import PermutationMatch
from models.errors import ConjugacyError
from models.program.reading import read
from models.scenes import make_scene
from tests import oracle

pytestmark = pytest.mark.long

SHAPE = (3, 5)
MATCHES = oracle.injections(*SHAPE)


def some_logits(seed, batch=(), forbidden=False, scale=1.5):
    logits = np.random.default_rng(seed).normal(scale=scale, size=(*batch, *SHAPE))
    return np.where(np.eye(*SHAPE) > 0, -np.inf, logits) if forbidden else logits


@pytest.mark.parametrize("forbidden", [False, True], ids=["dense", "forbidden"])
def test_everything_against_a_list_of_injections(forbidden):
    logits, others = (some_logits(seed, forbidden=forbidden) for seed in (0, 1))
    match = PermutationMatch(jnp.asarray(logits))
    probs = oracle.probabilities(logits, MATCHES)
    close = {"rtol": 1e-10, "atol": 1e-10}
    assert match.event_shape == SHAPE
    np.testing.assert_array_equal(match.enumerate_support(), oracle.as_matrices(MATCHES, 5))
    np.testing.assert_allclose(match.log_normalizer, oracle.log_normaliser(logits, MATCHES))
    np.testing.assert_allclose(np.exp(match.log_prob(match.enumerate_support())), probs, **close)
    np.testing.assert_allclose(match.mean, oracle.marginals(logits, MATCHES), **close)
    np.testing.assert_allclose(match.entropy(), oracle.entropy(probs), **close)
    np.testing.assert_array_equal(match.mode[..., :], np.eye(5)[MATCHES[probs.argmax()]])
    divergence = kl_divergence(match, PermutationMatch(jnp.asarray(others)))
    expected = oracle.kl(probs, oracle.probabilities(others, MATCHES))
    np.testing.assert_allclose(divergence, expected, **close)
    tilted = match.tilt(jnp.asarray(some_logits(2)))
    np.testing.assert_allclose(
        tilted.mean, oracle.marginals(logits + some_logits(2), MATCHES), **close
    )


def test_draws_have_the_frequencies_of_whole_matches():
    logits = some_logits(3)
    draws = np.asarray(PermutationMatch(logits).sample(jax.random.key(0), (20_000,)))
    frequency = (draws.argmax(axis=-1)[:, None] == MATCHES).all(axis=-1).mean(axis=0)
    probs = oracle.probabilities(logits, MATCHES)
    assert (abs(frequency - probs) <= 5 * np.sqrt(probs / 20_000)).all()


# --- the Bethe normaliser -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (1, 5)])
def test_it_is_below_the_permanent_and_near_it(shape):
    """It loses at most a factor of sqrt(2)^rows; for one row it is exact."""
    rows = shape[0]
    logits = 2.0 * np.random.default_rng(4).normal(size=(200, *shape))
    found = np.asarray(PermutationMatch(logits, normalizer="bethe").log_normalizer)
    matches = oracle.injections(*shape)
    exact = np.array([oracle.log_normaliser(one, matches) for one in logits])
    assert (found <= exact + 1e-8).all()
    assert (found >= exact - 0.5 * rows * np.log(2) - 1e-8).all()
    if rows == 1:
        np.testing.assert_allclose(found, exact, atol=1e-8)


@pytest.mark.parametrize("shape", [(4, 4), (3, 5)])
def test_its_mean_is_its_gradient_and_has_the_right_sums(shape):
    logits = np.random.default_rng(5).normal(size=shape)

    def log_normalizer(logits):
        return PermutationMatch(logits, normalizer="bethe").log_normalizer

    mean = np.asarray(PermutationMatch(logits, normalizer="bethe").mean)
    slope = oracle.finite_difference(log_normalizer, logits)
    np.testing.assert_allclose(mean, slope, atol=1e-6)
    np.testing.assert_allclose(jax.grad(log_normalizer)(jnp.asarray(logits)), mean, atol=1e-8)
    np.testing.assert_allclose(mean.sum(axis=1), 1, atol=1e-8)
    assert (mean.sum(axis=0) <= 1 + 1e-8).all()


def test_forbidden_pairs_have_no_share():
    logits = some_logits(6, forbidden=True)
    match = PermutationMatch(jnp.asarray(logits), normalizer="bethe")
    assert (np.asarray(match.mean)[np.isinf(logits)] == 0).all()
    impossible = PermutationMatch(jnp.full((2, 2), -jnp.inf), normalizer="bethe")
    assert impossible.log_normalizer == -np.inf


@pytest.mark.slow
def test_many_rows():
    """Forty rows that each clearly have their column: the permanent is that of one match."""
    columns = np.random.default_rng(7).permutation(60)[:40]
    logits = np.full((40, 60), -20.0)
    logits[np.arange(40), columns] = 5.0
    match = PermutationMatch(jnp.asarray(logits), normalizer="bethe")
    assert match.log_normalizer == pytest.approx(200, abs=1e-6)
    draw = match.sample(jax.random.key(0))
    np.testing.assert_array_equal(np.asarray(draw).argmax(axis=1), columns)
    np.testing.assert_array_equal(draw, match.mode)
    assert match.log_prob(draw) == pytest.approx(0, abs=1e-6)


def test_draws_have_the_mean():
    match = PermutationMatch(some_logits(8), normalizer="bethe")
    mean = np.asarray(match.mean)
    draws = match.sample(jax.random.key(0), (4000,))
    assert match.support(draws).all()
    error = 5 * np.sqrt(mean * (1 - mean) / 4000) + 1e-9
    assert (abs(np.asarray(draws).mean(axis=0) - mean) <= error).all()


def test_batches_trees_and_tilts_keep_the_normaliser():
    logits = some_logits(9, batch=(2,))
    match = PermutationMatch(jnp.asarray(logits), normalizer="bethe")
    one_by_one = [PermutationMatch(one, normalizer="bethe").log_normalizer for one in logits]
    np.testing.assert_allclose(match.log_normalizer, one_by_one, atol=1e-8)
    through_jit = jax.jit(lambda match: match)(match)
    assert (through_jit.normalizer, match.tilt(0.0).normalizer) == ("bethe", "bethe")
    by_vmap = jax.vmap(lambda x: PermutationMatch(x, normalizer="bethe").log_normalizer)(logits)
    np.testing.assert_allclose(by_vmap, one_by_one, atol=1e-8)


# --- in a program of capsules -------------------------------------------------------------------


@pytest.mark.parametrize(
    "prior",
    [
        PermutationMatch(jnp.zeros((11, 11)), normalizer="bethe"),
        PermutationMatch(jnp.zeros((5, 11))),
    ],
    ids=["bethe", "rectangle"],
)
def test_the_closed_forms_refuse_it(prior):
    """They have the exact normaliser, and a row for each part."""

    def program(points, present):
        with numpyro.plate("object", 3):
            pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.zeros(4), jnp.eye(4)))
        match = numpyro.sample("match", prior)
        numpyro.sample("points", MatchedParts(match, pose, PARTS, present=present), obs=points)

    scene = make_scene(np.random.default_rng(0).normal(size=(5, 2)), 11)
    with pytest.raises(ConjugacyError, match=r"'match': found a PermutationMatch of .* normalizer"):
        read(program, scene)
