"""Routing by agreement: both algorithms step by step against plain numpy loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capsules.baselines import dynamic_routing, em_routing
from capsules.baselines.em_routing import Capsules, Settings
from capsules.baselines.votes import Votes, match_probs_of, pairs_of_points, votes_of, ways_of
from capsules.methods import infer
from models.constellation import constellation, presence_constellation
from models.errors import ConjugacyError, InputError
from models.geometry import affine
from models.scenes import Scene, make_scene
from models.templates import shapes, stack, with_clutter

PARTS = stack(shapes("square", "triangle"))
PROGRAM = functools.partial(constellation, parts=PARTS)
POSES = np.array([[0.3, 0.2, 0.4, 0.1], [-0.5, -0.3, 0.2, 0.3]])
POINTS = np.asarray(PARTS.predict(POSES))
WAYS = ways_of(PARTS)


def some_votes(seed=0):
    """Votes of four points, one of which is absent, and routing that sums to less than one."""
    rng = np.random.default_rng(seed)
    present = np.array([True, True, False, True])
    votes = votes_of(WAYS, jnp.asarray(rng.normal(size=(4, 2))), jnp.asarray(present))
    routing = rng.dirichlet(np.ones(len(WAYS.object) + 1), size=6)[:, :-1]
    routing[~np.asarray(votes.valid)] = 0.0
    mean, variance = rng.normal(size=(2, 4)), rng.uniform(0.5, 2.0, (2, 4))
    capsules = Capsules(mean, variance, np.array([0.9, 0.2]))
    return votes, routing, capsules


def test_ways_are_all_ordered_pairs_of_parts_of_one_object():
    assert len(WAYS.object) == 4 * 3 + 3 * 2
    owner = np.asarray(PARTS.owner)
    assert (owner[WAYS.parts[:, 0]] == owner[WAYS.parts[:, 1]]).all()
    assert len(np.unique(WAYS.parts, axis=0)) == len(WAYS.parts)


def test_a_vote_puts_both_parts_on_both_points():
    points = np.random.default_rng(1).normal(size=(3, 2))
    votes = votes_of(WAYS, jnp.asarray(points), jnp.ones(3, bool))
    for i, pair in enumerate([(0, 1), (0, 2), (1, 2)]):
        for way, parts in enumerate(WAYS.parts):
            predicted = np.asarray(PARTS.F)[parts] @ np.asarray(votes.pose)[i, way]
            np.testing.assert_allclose(predicted, points[list(pair)], atol=1e-9)


def test_the_e_step_is_that_of_a_loop():
    votes, _, capsules = some_votes()
    routing, value = em_routing.e_step(votes, jnp.asarray(WAYS.object), capsules, 0.01)
    pose, log_density = np.asarray(votes.pose), 0.0
    for i, valid in enumerate(np.asarray(votes.valid)):
        weights = []
        for way, k in enumerate(WAYS.object):
            density = capsules.activation[k]
            for h in range(4):
                variance = capsules.variance[k, h]
                apart = pose[i, way, h] - capsules.mean[k, h]
                density *= np.exp(-(apart**2) / (2 * variance)) / np.sqrt(2 * np.pi * variance)
            weights.append(density)
        expected = np.array(weights) / (sum(weights) + 0.01) if valid else np.zeros(len(weights))
        np.testing.assert_allclose(routing[i], expected, atol=1e-12)
        log_density += np.log(sum(weights) + 0.01) if valid else 0.0
    np.testing.assert_allclose(value, log_density)


def test_the_m_step_is_that_of_a_loop():
    votes, routing, _ = some_votes()
    settings = Settings(vote_cost=0.7, capsule_cost=0.4, floor=0.02)
    found = em_routing.m_step(votes, jnp.asarray(WAYS.object), 2, routing, 0.3, settings)
    pose = np.asarray(votes.pose)
    for k in range(2):
        own = [(i, way) for i in range(6) for way in np.flatnonzero(WAYS.object == k)]
        mass = sum(routing[place] for place in own)
        mean = sum(routing[place] * pose[place] for place in own) / mass
        variance = sum(routing[place] * (pose[place] - mean) ** 2 for place in own) / mass + 0.02**2
        cost = sum((0.7 + np.log(np.sqrt(v))) * mass for v in variance)
        np.testing.assert_allclose(found.mean[k], mean)
        np.testing.assert_allclose(found.variance[k], variance)
        np.testing.assert_allclose(found.activation[k], 1 / (1 + np.exp(-0.3 * (0.4 - cost))))


def test_a_step_of_dynamic_routing_is_that_of_a_loop():
    votes, logits, _ = some_votes()
    ahead, routing, capsules = dynamic_routing.iterate(votes, jnp.asarray(WAYS.object), 2, logits)
    pose, valid = np.asarray(votes.pose), np.asarray(votes.valid)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) * valid[:, None]
    np.testing.assert_allclose(routing, shares)
    for k in range(2):
        own = WAYS.object == k
        total = sum(shares[i, way] * pose[i, way] for i in range(6) for way in np.flatnonzero(own))
        length = np.linalg.norm(total)
        squashed = length**2 / (1 + length**2) * total / length
        np.testing.assert_allclose(capsules[k], squashed)
        np.testing.assert_allclose(ahead[:, own], logits[:, own] + pose[:, own] @ squashed)


def test_standardised_votes_have_mean_zero_and_variance_one():
    votes = dynamic_routing.standardised(some_votes()[0])
    valid = np.asarray(votes.pose)[np.asarray(votes.valid)].reshape(-1, 4)
    np.testing.assert_allclose(valid.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(valid.std(axis=0), 1)


def test_points_are_the_parts_that_their_pairs_were_taken_for():
    pairs = pairs_of_points(3)
    routing = np.zeros((3, len(WAYS.object)))
    way = int(np.flatnonzero((WAYS.parts == [2, 0]).all(axis=1))[0])
    routing[list(map(tuple, pairs)).index((0, 1)), way] = 0.5
    probs = match_probs_of(WAYS, jnp.asarray(routing), jnp.array([True, True, True]))
    np.testing.assert_allclose(probs[0], np.eye(3)[2])
    np.testing.assert_allclose(probs[1], np.eye(3)[0])
    np.testing.assert_allclose(probs[2], 1 / 3)


def test_em_routing_stays_at_the_truth():
    order = np.random.default_rng(3).permutation(7)
    votes = votes_of(WAYS, jnp.asarray(POINTS[order]), jnp.ones(7, bool))
    begin = em_routing.begin_at(jnp.asarray(POSES), Settings())
    _, routed = em_routing.settle(votes, WAYS, begin, Settings())
    np.testing.assert_allclose(routed.pose, POSES, atol=1e-3)
    assert (np.asarray(routed.activation) > 0.9).all()
    part = match_probs_of(WAYS, routed.routing, jnp.ones(7, bool)).argmax(axis=1)
    np.testing.assert_array_equal(part, order)


def test_em_routing_explains_what_it_can():
    scenes = [make_scene(POINTS[:4], 7), make_scene(POINTS[:1], 7)]
    batch = Scene(*(np.stack([getattr(s, n) for s in scenes]) for n in ("points", "present")))
    result = em_routing.run(PROGRAM, batch, jax.random.key(0), num_restarts=16)
    np.testing.assert_array_equal(result.labels[0], [0, 0, 0, 0, -1, -1, -1])
    assert result.details["activation"][0, 0] > 0.9 > result.details["activation"][0, 1]
    np.testing.assert_allclose(result.match_probs[1], 1 / 7)  # a point alone has no pair
    assert np.isfinite(result.pose_mean).all()
    assert result.elbo is None and result.log_evidence is None


def test_the_order_of_the_votes_does_not_count():
    votes, _, capsules = some_votes()
    order = np.random.default_rng(5).permutation(6)
    moved = Votes(votes.pose[order], votes.valid[order])
    object = jnp.asarray(WAYS.object)
    routing, value = em_routing.e_step(votes, object, capsules, 1.0)
    other, same = em_routing.e_step(moved, object, capsules, 1.0)
    np.testing.assert_allclose(other, np.asarray(routing)[order])
    np.testing.assert_allclose(same, value)


@pytest.mark.parametrize("routing", [em_routing, dynamic_routing])
def test_restarts_must_be_some(routing):
    with pytest.raises(InputError, match="num_restarts must be at least 1, got 0"):
        routing.run(PROGRAM, make_scene(POINTS, 7), jax.random.key(0), num_restarts=0)


def test_what_cannot_be_routed_is_refused_in_a_sentence():
    scene, key = make_scene(POINTS, 7), jax.random.key(0)
    with pytest.raises(ConjugacyError, match="presence"):
        em_routing.run(functools.partial(presence_constellation, parts=PARTS), scene, key)
    with pytest.raises(InputError, match="does not model clutter"):
        em_routing.run(
            functools.partial(constellation, parts=with_clutter(PARTS, 1)),
            make_scene(POINTS, 8),
            key,
        )
    with pytest.raises(InputError, match="two points determine, with 4 numbers, got 6"):
        ways_of(stack(shapes("square"), affine))


def test_dynamic_routing_is_a_method_by_name():
    result = infer("dynamic_routing", make_scene(POINTS, 7), objects=("square", "triangle"))
    np.testing.assert_allclose(result.match_probs.sum(axis=1), 1)
    assert (result.details["activation"] < 1).all()
