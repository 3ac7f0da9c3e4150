"""Every method on every kind of scene: the same contract. A new method adds a row to METHODS."""

import functools

import jax
import numpy as np
import pytest

from inference import cavi, exact, gibbs, map_parse, nuts, ransac, svi, to_arviz
from models.constellation import constellation, mixture_constellation
from models.errors import InputError
from models.scenes import Scene, make_scene
from models.templates import shapes, stack

pytestmark = pytest.mark.long

PARTS = stack(shapes("square", "triangle"))
N, K, P = PARTS.num_parts, PARTS.num_objects, PARTS.pose_dim
options = {"parts": PARTS, "precision": 1e3}
uniform = functools.partial(constellation, **options)
mixture = functools.partial(mixture_constellation, **options)

KEY = {"rng_key": jax.random.key(0)}
BUDGET = KEY | {"num_chains": 2, "num_warmup": 10, "num_samples": 10}
METHODS = {
    "ds": functools.partial(cavi.run, uniform, **KEY, num_restarts=4),
    "ds uniform": functools.partial(
        cavi.run, uniform, **KEY, num_restarts=4, init_strategy="uniform"
    ),
    "bethe": functools.partial(cavi.run, uniform, **KEY, num_restarts=4, projection="bethe"),
    "gmm": functools.partial(cavi.run, mixture, **KEY, num_restarts=4),
    "map": functools.partial(map_parse.run, uniform),
    "exact": functools.partial(exact.run, uniform),
    "ransac": functools.partial(ransac.run, uniform, **KEY),
    "svi": functools.partial(svi.run, uniform, **KEY, num_restarts=1, num_steps=200),
    "gibbs": functools.partial(gibbs.run, uniform, **BUDGET, num_temperatures=3),
    "nuts": functools.partial(nuts.run, uniform, **BUDGET, num_temperatures=1),
}
DRAWING = ("svi", "gibbs", "nuts")
"""Methods whose results have draws; short runs, so nothing is asked of their numbers here."""
LONG = ("ds uniform", "bethe")


def table(names):
    slow = [pytest.mark.slow]
    return pytest.mark.parametrize(
        "method", [pytest.param(name, marks=slow * (name in LONG)) for name in names]
    )


every_method = table(METHODS)
of_batches = table([name for name in METHODS if name not in DRAWING])
drawing = table(DRAWING)
POSES = np.array([[0.3, 0.2, 0.4, 0.1], [-0.5, -0.3, 0.2, 0.3]])
FULL = np.asarray(PARTS.predict(POSES))
LINE = np.linspace(-1, 1, 4)
SCENES = {
    "full": FULL,
    "a missing part": FULL[[0, 1, 2, 4, 5, 6]],
    "one object": FULL[:4],
    "one point": FULL[:1],
    "duplicates": np.repeat(FULL[:2], 2, axis=0),
    "collinear": np.stack([LINE, LINE], axis=1),
}


def batch():
    made = [make_scene(points, N) for points in SCENES.values()]
    return Scene(np.stack([s.points for s in made]), np.stack([s.present for s in made]))


@functools.cache
def answer(method):
    return METHODS[method](scene=batch())


@of_batches
def test_the_shapes_are_those_of_the_result_type(method):
    result, count = answer(method), len(SCENES)
    assert result.match_probs.shape == (count, N, N)
    assert result.pose_mean.shape == (count, K, P)
    assert result.pose_covariance.shape == (count, K, P, P)
    assert result.labels.shape == (count, N)
    assert result.converged.shape == result.steps.shape == (count,)
    bounds = [result.elbo, result.log_evidence]
    assert sum(bound is not None for bound in bounds) == (method != "ransac")
    assert result.seconds > 0
    assert result.status


@pytest.mark.parametrize("scene", SCENES)
@of_batches
def test_the_answer_is_finite_and_sums_to_one(method, scene):
    result = answer(method).take(list(SCENES).index(scene))
    for name in ("match_probs", "pose_mean", "pose_covariance"):
        assert np.isfinite(getattr(result, name)).all(), name
    bounds = [x for x in (result.elbo, result.log_evidence) if x is not None]
    assert np.isfinite(bounds).all()
    if method not in ("ransac", "map"):  # which say so where they leave a point unexplained
        assert result.converged
    assert result.match_probs.min() >= 0
    np.testing.assert_allclose(result.match_probs.sum(axis=1), 1, atol=1e-6)
    if method != "gmm":
        np.testing.assert_allclose(result.match_probs.sum(axis=0), 1, atol=1e-6)
    assert np.linalg.eigvalsh(result.pose_covariance).min() > 0
    assert ((result.labels == -1) == ~result.scene.present).all()


@of_batches
def test_the_full_scene_is_parsed(method):
    found = answer(method).take(0).labels
    if method in ("ds", "map", "exact", "ransac"):
        assert found.tolist() == [0, 0, 0, 0, 1, 1, 1]


@of_batches
def test_one_scene_is_the_first_of_a_batch(method):
    single = METHODS[method](scene=make_scene(FULL, N))
    first = answer(method).take(0)
    for name in ("match_probs", "pose_mean", "pose_covariance", "labels"):
        np.testing.assert_allclose(getattr(single, name), getattr(first, name), atol=1e-8)


@of_batches
def test_relabelling_the_points_permutes_the_answer(method):
    """Only scenes with a single good answer, as starts are random."""
    order = np.array([5, 2, 0, 6, 3, 1, 4])
    scenes = batch()
    moved = METHODS[method](scene=Scene(scenes.points[:, order], scenes.present[:, order]))
    result = answer(method)
    np.testing.assert_array_equal(moved.scene.present, scenes.present[:, order])
    if method == "exact":
        np.testing.assert_allclose(moved.log_evidence, result.log_evidence, rtol=1e-10)
        np.testing.assert_allclose(moved.match_probs, result.match_probs[:, order], atol=1e-8)
    if method in ("ds", "map", "exact", "ransac"):
        for i, name in enumerate(SCENES):
            if name in ("full", "a missing part"):
                mass = [
                    r.match_probs[i] @ np.eye(K)[r.owner] for r in (moved, result)
                ]  # a square may be turned
                np.testing.assert_allclose(mass[0], mass[1][order], atol=1e-3)


# --- methods that draw --------------------------------------------------------------------------


@functools.cache
def drawn(method, seed=0):
    return METHODS[method](scene=make_scene(FULL, N), rng_key=jax.random.key(seed))


@drawing
def test_draws_have_their_shapes_and_say_what_the_result_says(method):
    result = drawn(method)
    pose, match = result.draws["pose"], result.draws["match"]
    chains, count = match.shape[:2]
    assert pose.shape == (chains, count, K, P)
    assert match.shape == (chains, count, N)
    assert np.isfinite(pose).all()
    assert all(sorted(row) == list(range(N)) for row in match.reshape(-1, N).tolist())
    np.testing.assert_allclose(result.match_probs.sum(axis=1), 1, atol=1e-6)
    assert result.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    if method != "svi":  # which knows its moments, and draws for pictures
        frequency = np.eye(N)[match].mean(axis=(0, 1))
        np.testing.assert_allclose(result.match_probs, frequency, atol=1e-9)
        np.testing.assert_allclose(result.pose_mean, pose.mean(axis=(0, 1)), atol=1e-9)


@drawing
def test_a_key_decides_the_draws(method):
    again = METHODS[method](scene=make_scene(FULL, N))
    other = drawn(method, seed=1)
    np.testing.assert_array_equal(drawn(method).draws["pose"], again.draws["pose"])
    assert not np.array_equal(drawn(method).draws["pose"], other.draws["pose"])


@drawing
def test_draws_go_to_arviz(method):
    result = drawn(method)
    data = to_arviz(result, uniform, jax.random.key(0), relabel=False, predictive=False)
    pose = result.draws["pose"]  # the draws of q are one chain, cut into several
    np.testing.assert_array_equal(data.posterior["pose"].values.reshape(pose.shape), pose)


@pytest.mark.parametrize("method", ["gibbs", "nuts"])
def test_a_chain_takes_one_scene(method):
    with pytest.raises(InputError, match="one scene"):
        METHODS[method](scene=batch())


# --- what no method takes -----------------------------------------------------------------------


@every_method
def test_an_empty_scene_is_refused(method):
    with pytest.raises(InputError, match="no points, but each must have at least one"):
        METHODS[method](scene=Scene(np.zeros((N, 2)), np.zeros(N, bool)))


@every_method
def test_points_that_are_not_numbers_are_refused(method):
    points = np.zeros((N, 2))
    points[0, 0] = np.nan
    with pytest.raises(InputError, match="NaN or infinite, but must be finite"):
        METHODS[method](scene=Scene(points, np.ones(N, bool)))


@every_method
@pytest.mark.parametrize("rows", [N - 1, N + 1])
def test_a_scene_with_other_rows_is_refused(method, rows):
    with pytest.raises(InputError, match=f"{rows} rows but the program has {N} parts; pad"):
        METHODS[method](scene=Scene(np.zeros((rows, 2)), np.ones(rows, bool)))


@every_method
def test_points_of_another_dimension_are_refused(method):
    with pytest.raises(InputError, match="3 features but the program's parts have 2"):
        METHODS[method](scene=Scene(np.zeros((N, 3)), np.ones(N, bool)))


@every_method
def test_a_program_that_is_none_is_refused(method):
    run = METHODS[method]
    other = functools.partial(run.func, lambda x: x, **run.keywords)
    with pytest.raises(InputError, match="does not take the scene's points, present"):
        other(scene=make_scene(FULL, N))
