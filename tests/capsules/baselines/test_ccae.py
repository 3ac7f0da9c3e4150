"""CCAE: its likelihood against plain numpy, its gradients against differences, on a tiny net."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capsules.baselines import ccae
from capsules.baselines.ccae import Ccae, Votes
from capsules.experiments.simulator import FIRST_SEED, paper_simulator
from guides.simulation import as_arrays
from models.constellation import PARTS

pytestmark = pytest.mark.long

OWNER = np.asarray(PARTS.owner)


def some_votes(seed=0):
    rng = np.random.default_rng(seed)
    return Votes(
        rng.normal(size=(3, 4, 2)),
        rng.uniform(0.2, 1.0, (3, 4)),
        rng.normal(size=3),
        rng.normal(size=(3, 4)),
        rng.normal(size=(3, 4, 6)),
        rng.normal(size=(3, 6)),
    )


def points(seed=0, count=5):
    rng = np.random.default_rng([seed, 1])
    return rng.normal(size=(count, 2)), np.arange(count) != 3


@functools.cache
def tiny(seed=0):
    return Ccae(16, 1, 0.01, jax.random.key(seed))


votes_of = eqx.filter_jit(lambda network, places, present: network(places, present))


def test_the_likelihood_is_that_of_a_loop():
    votes, (places, present) = some_votes(), points()
    logistic = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    weights = [
        logistic(votes.capsule_logit[k]) * logistic(votes.vote_logit[k, n])
        for k in range(3)
        for n in range(4)
    ]
    total = sum(weights) + 0.01
    expected, winners = 0.0, []
    for point, there in zip(places, present, strict=True):
        shares = []
        for i, weight in enumerate(weights):
            scale = votes.scale[i // 4, i % 4]
            square = np.sum((point - votes.place[i // 4, i % 4]) ** 2)
            shares.append(
                weight / total * np.exp(-square / (2 * scale**2)) / (2 * np.pi * scale**2)
            )
        winners.append(int(np.argmax(shares)) // 4)
        expected += np.log(sum(shares) + 0.01 / total * 0.01) if there else 0.0
    np.testing.assert_allclose(ccae.log_likelihood(votes, places, present), expected)
    np.testing.assert_array_equal(ccae.winners(votes, jnp.asarray(places)), winners)


def test_sparsity_is_that_of_a_loop():
    votes, (places, present) = some_votes(3), points(3)
    winners = np.asarray(ccae.winners(votes, jnp.asarray(places)))
    won = [np.sum(winners[present] == k) for k in range(3)]
    assert sorted(won) != [0, 0, 4]  # several capsules win something
    expected = 0.0
    for k in range(3):
        presence = 1 / (1 + np.exp(-votes.capsule_logit[k]))
        if won[k] > 0:
            expected -= np.log(presence if won[k] > 1 else 1 - presence)
    np.testing.assert_allclose(ccae.sparsity(votes, jnp.asarray(places), present), expected)


@pytest.mark.parametrize("name", ["place", "scale", "capsule_logit", "vote_logit"])
def test_gradients_of_the_likelihood_are_differences(name):
    votes, (places, present) = some_votes(), points()

    def value(x):
        return ccae.log_likelihood(votes._replace(**{name: x}), places, present)

    at = np.asarray(getattr(votes, name))
    gradient = jax.grad(value)(jnp.asarray(at))
    for place in (0, at.size - 1):
        step = np.zeros(at.size)
        step[place] = 1e-5
        step = step.reshape(at.shape)
        slope = (value(at + step) - value(at - step)) / 2e-5
        np.testing.assert_allclose(np.ravel(gradient)[place], slope, rtol=1e-5, atol=1e-8)


def test_votes_are_templates_under_a_similarity():
    network, (places, present) = tiny(), points()
    votes = votes_of(network, places, present)
    for k in range(3):
        theta = np.asarray(votes.pose, float)[k]
        scale, angle = 1 / (1 + np.exp(-theta[0])) + 0.01, 2 * np.pi * theta[2]
        turned = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        relation = np.asarray(network.static[k] + votes.dynamic[k], float)
        expected = np.tanh(5 * relation[:, 4:]) @ turned.T + np.tanh(5 * theta[4:])
        np.testing.assert_allclose(votes.place[k], expected, atol=1e-5)


def test_votes_are_not_narrower_than_the_variant_allows():
    places, present = points()
    wide = eqx.tree_at(lambda n: n.bias, Ccae(16, 1, 0.1, jax.random.key(0)), tiny().bias - 20.0)
    np.testing.assert_allclose(votes_of(wide, places, present).scale, 0.1, atol=1e-3)


def test_padded_and_permuted_points_change_nothing():
    network, (places, present) = tiny(), points()
    votes = votes_of(network, places, present)
    order = np.random.default_rng(1).permutation(5)
    padded = np.concatenate([places[order], 7 * np.ones((3, 2))])
    there = np.append(present[order], [False] * 3)
    for first, second in zip(votes, votes_of(network, padded, there), strict=True):
        np.testing.assert_allclose(first, second, atol=1e-5)


def test_noise_is_on_presences_alone_and_within_two():
    votes = some_votes()
    noisy = votes.noisy(jax.random.key(0))
    for name in ("capsule_logit", "vote_logit"):
        apart = np.asarray(getattr(noisy, name)) - getattr(votes, name)
        assert 0 < np.abs(apart).max() < 2
    assert noisy.place is votes.place and noisy.scale is votes.scale


def test_the_loss_has_three_terms():
    draws = as_arrays(paper_simulator(0.0)(jax.random.key(0), 3))
    key = jax.random.key(1)
    expected = []
    for place, there, noise in zip(
        draws.points, draws.present, jax.random.split(key, 3), strict=True
    ):
        votes = votes_of(tiny(), place, there).noisy(noise)
        square = np.sum(np.asarray(votes.dynamic, float) ** 2)
        sparse = ccae.sparsity(votes, place, there)
        expected.append(10 * sparse + 5 * square - ccae.log_likelihood(votes, place, there))
    loss = eqx.filter_jit(ccae.loss)
    np.testing.assert_allclose(loss(tiny(), draws, key), np.mean(expected), rtol=1e-5)


def test_capsules_get_the_names_of_the_objects_that_they_win(monkeypatch):
    draws = paper_simulator(0.0)(jax.random.key(0), 20)
    named = np.array([2, 0, 1])  # the object of each capsule
    capsule = np.argsort(named)[OWNER]
    mass = np.broadcast_to(np.eye(3)[capsule], (20, 11, 3))
    monkeypatch.setattr(ccae, "read_out", lambda network, scenes: (mass, None))
    np.testing.assert_array_equal(ccae.objects_of_capsules(tiny(), draws, OWNER), named)


def test_the_sizes_are_those_that_were_published():
    def count(variant):
        shapes = eqx.filter_eval_shape(variant.network, jax.random.key(0))
        return sum(x.size for x in jax.tree.leaves(shapes) if hasattr(x, "size"))

    assert count(ccae.VARIANTS["published"]) == pytest.approx(592_000, rel=0.01)
    assert count(ccae.VARIANTS["small"]) == pytest.approx(160_000, rel=0.01)


def test_training_scenes_have_seeds_of_their_own():
    draws = paper_simulator(0.1)(jax.random.key(3), 50)
    again = paper_simulator(0.1)(jax.random.key(3), 50)
    np.testing.assert_array_equal(draws.points, again.points)
    assert draws.present.any(axis=1).all()
    assert (draws.part == np.arange(11)).all()
    assert FIRST_SEED > 1 << 31
