"""Amortised inference: its ELBO, its use as a start of ds and as a proposal of importance."""

import functools

import jax
import numpy as np
import pytest

from inference import cavi, exact
from inference.diagnostics.importance import importance
from inference.variational import amortised
from models.constellation import presence_constellation
from models.scenes import Scene
from tests.inference.two_triangles import PARTS, POSES, PROGRAM, SCENE, scene_at

pytestmark = pytest.mark.long

NEAREST = np.asarray(PARTS.predict(POSES))


def truth(scenes):
    """Logits of what is known here: each point is the part that it lies at."""
    apart = np.linalg.norm(np.asarray(scenes.points)[:, :, None] - NEAREST, axis=-1)
    logits = -((apart / 0.05) ** 2)
    return np.where(scenes.present[..., None], logits, 0.0)


def wrong(scenes):
    """Each point is a part of the other triangle in every second row."""
    rows = np.arange(truth(scenes).shape[1])[:, None] % 2 == 0
    return np.where(rows, np.roll(truth(scenes), 3, axis=-1), truth(scenes))


@functools.cache
def results():
    key = jax.random.key(0)
    return {
        "ds": cavi.run(PROGRAM, SCENE, key, num_restarts=8),
        "exact": exact.run(PROGRAM, SCENE),
        "amortised": amortised.run(PROGRAM, SCENE, key, match_logits=truth),
        "started": cavi.run(PROGRAM, SCENE, key, init_strategy=truth, num_restarts=1),
    }


def test_at_the_right_match_it_is_what_coordinate_ascent_ends_in():
    found, best = results()["amortised"], results()["ds"]
    assert found.elbo is not None and best.elbo is not None
    assert best.elbo - 0.1 < found.elbo < best.elbo + 1e-3
    np.testing.assert_array_equal(found.labels, PARTS.owner[found.match_probs.argmax(axis=1)])
    np.testing.assert_allclose(found.pose_mean, POSES, atol=0.1)


def test_its_elbo_is_below_the_evidence_and_falls_with_a_worse_match():
    worse = amortised.run(PROGRAM, SCENE, jax.random.key(0), match_logits=lambda s: 0.0 * truth(s))
    evidence, elbo = results()["exact"].log_evidence, results()["amortised"].elbo
    assert evidence is not None and worse.elbo is not None
    assert worse.elbo < elbo < evidence


def test_coordinate_ascent_begins_with_it():
    started, best = results()["started"], results()["ds"]
    np.testing.assert_allclose(started.elbo, best.elbo, atol=1e-2)
    np.testing.assert_allclose(started.pose_mean, POSES, atol=0.1)  # and not their images


@pytest.mark.parametrize("network", [wrong, truth], ids=lambda x: x.__name__)
def test_further_runs_begin_with_parses(network):
    runs = {
        number: cavi.run(
            PROGRAM, SCENE, jax.random.key(0), init_strategy=network, num_restarts=number
        )
        for number in (1, 3)
    }
    best = results()["ds"].elbo
    assert (runs[1].elbo < best - 1) == (network is wrong)
    assert runs[3].elbo > best - 1e-2
    assert (runs[3].details["attempt"] > 0) == (network is wrong)


def test_the_history_of_a_run_from_a_parse_ends_as_it_does():
    found = cavi.run(
        PROGRAM, SCENE, jax.random.key(0), init_strategy=wrong, num_restarts=3, history=True
    )
    assert found.details["attempt"] > 0
    np.testing.assert_allclose(found.history["elbo"][-1], found.elbo, atol=1e-6)


def test_importance_weights_take_it_as_a_proposal():
    trust = importance(PROGRAM, results()["amortised"], jax.random.key(1), 500)
    assert trust.pareto_k < 0.7
    evidence = results()["exact"].log_evidence
    assert abs(trust.log_evidence - evidence) < 5 * trust.standard_error + 0.05


def test_a_network_may_name_identical_objects_as_it_likes():
    """A lone triangle is the first one for a condition, and the second one for the network."""
    program = functools.partial(presence_constellation, parts=PARTS, precision=1e3)
    scene = scene_at(POSES, seed=0, rows=range(3))

    def as_the_first(scenes):
        return np.where(np.arange(6) < 3, truth(scenes), -50.0)

    def as_the_second(scenes):
        return np.roll(as_the_first(scenes), 3, axis=-1)

    first, second = (
        amortised.run(program, scene, jax.random.key(0), match_logits=logits)
        for logits in (as_the_first, as_the_second)
    )
    np.testing.assert_allclose(first.elbo, second.elbo, rtol=1e-9)
    np.testing.assert_array_equal(first.labels, second.labels)


@pytest.mark.slow
def test_a_batch_of_any_numbers_of_points_and_unknown_presence():
    program = functools.partial(presence_constellation, parts=PARTS, precision=1e3)
    scenes = [scene_at(POSES, seed=0), scene_at(POSES, seed=1, rows=range(3))]
    batch = Scene(np.stack([s.points for s in scenes]), np.stack([s.present for s in scenes]))
    result = amortised.run(program, batch, jax.random.key(0), match_logits=truth)
    nearest = np.asarray(PARTS.owner)[truth(batch).argmax(axis=2)]
    np.testing.assert_array_equal(result.labels, np.where(batch.present, nearest, -1))
    np.testing.assert_allclose(result.details["presence"][0], 1)
    assert result.details["presence"][1, 0] > 0.99 > 0.01 > result.details["presence"][1, 1]
    assert np.isfinite(result.elbo).all()
