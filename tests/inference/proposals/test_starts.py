"""Where runs start: random, or on poses that the points suggest."""

import functools

import jax
import numpy as np
import pytest

from capsules.experiments.generator import sample_scenes
from inference import cavi
from inference.diagnostics.metrics import partition_metrics, same_partition
from inference.proposals import starts
from models.constellation import constellation
from models.program.batches import map_scenes, read_scenes, skeleton_of
from models.program.reading import read
from models.scenes import make_scene
from models.templates import shapes, stack
from tests.problems import DESIGNS, make_problem, stack_problems

pytestmark = pytest.mark.long

SQUARE = stack(shapes("square", "triangle"))
small = functools.partial(constellation, parts=SQUARE)


@pytest.fixture(scope="module")
def scenes():
    return sample_scenes(240, seed=0).take(slice(200))


@pytest.mark.parametrize(
    ("start", "low", "high"),
    [("poses", 0.88, 1.0), pytest.param("uniform", 0.36, 0.56, marks=pytest.mark.slow)],
)
def test_how_often_a_single_start_is_right(scenes, start, low, high):
    result = cavi.run(constellation, scenes, jax.random.key(0), num_restarts=1, init_strategy=start)
    right = partition_metrics(scenes.object, result.labels)["scene_accuracy"] == 1
    first = result.details["attempt"] == 0  # a sparse solution was started anew: that one was wrong
    assert len(scenes.points) == 200
    assert low <= (right & first).mean() <= high


def test_the_structure_of_a_program():
    found = starts.structure(skeleton_of(read(small, make_scene([[0.0, 0.0]], 7))))
    assert found.owner.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert found.members.tolist() == [[0, 1, 2, 3], [4, 5, 6, 4]]
    assert found.valid.tolist() == [[True] * 4, [True, True, True, False]]
    assert found.basis_size == 2  # two points of two features fix four numbers
    assert found.pose_dim == 4


def test_interleaved_parts_are_grouped():
    problem = make_problem(np.random.default_rng(0), DESIGNS["interleaved"], 4)
    stacked = stack_problems([problem])
    found = starts.structure(skeleton_of(read(stacked.program, stacked.scenes.take(0))))
    assert found.members.tolist() == [[0, 3, 0], [1, 2, 4]]
    assert found.basis_size == 1


def test_a_scene_without_noise_is_put_on_its_parts():
    """Every part of the square stands highest where its own point is (up to a turn)."""
    pose = np.array([[0.2, -0.1, 0.5, 0.3], [0.0] * 4])
    points = np.asarray(SQUARE.predict(pose))[:4]
    scene = make_scene(points, 7)
    model = read(small, scene)
    structure = starts.structure(skeleton_of(model))
    start = jax.jit(lambda key: starts.poses(key, model, structure, 0.05, 1.0))
    right = 0
    for seed in range(10):
        weights, beta = start(jax.random.key(seed))
        assert 0.05 <= beta <= 1.0
        assert np.isfinite(weights).all()
        part = np.asarray(weights)[:4].argmax(axis=1)
        right += sorted(part) == [0, 1, 2, 3]
    assert right >= 8


def test_the_uniform_start_is_between_zero_and_one_and_differs_by_key():
    model = read(small, make_scene([[0.0, 0.0]], 7))
    structure = starts.structure(skeleton_of(model))
    first, second = (starts.uniform(jax.random.key(i), model, structure, 0.05, 1.0) for i in (0, 1))
    assert (first.weights < 0).all()
    assert first.beta == 0.05
    assert (first.weights != second.weights).any()


@pytest.mark.parametrize("start", ["uniform", "poses"])
def test_forbidden_pairs_stay_forbidden(start):
    rng = np.random.default_rng(1)
    problem = make_problem(rng, DESIGNS["similarity"], 5, logits="typed")
    stacked = stack_problems([problem], "doubly_stochastic")
    model = read(stacked.program, stacked.scenes.take(0))
    structure = starts.structure(skeleton_of(model))
    make = jax.jit(lambda key: getattr(starts, start)(key, model, structure, 0.05, 1.0))
    made = make(jax.random.key(0))
    forbidden = problem.match_logits == -np.inf
    assert forbidden.any()
    assert (np.asarray(made.weights)[forbidden] == -np.inf).all()
    assert np.isfinite(np.asarray(made.weights)[~forbidden]).all()


def test_points_that_cannot_be_the_parts_suggest_no_pose():
    """A pose fitted to nothing is as uncertain as the prior, and would be close to everything."""
    problem = make_problem(
        np.random.default_rng(1), DESIGNS["similarity"], 5, logits="typed", precision=1e6
    )
    stacked = stack_problems([problem], "doubly_stochastic")
    model = read(stacked.program, stacked.scenes.take(0))
    structure = starts.structure(skeleton_of(model))
    seen = model.seen.any(axis=1)
    tuples = starts._tuples(jax.random.key(0), model.points, seen, structure.basis_size)
    suggest = jax.jit(functools.partial(starts._hypotheses, model, structure.basis_size))
    for k, (members, valid) in enumerate(zip(structure.members, structure.valid, strict=True)):
        closeness, possible = suggest(tuples, seen, jax.random.key(k), k, members, valid)
        allowed = np.isfinite(problem.match_logits[:, members]) & valid & np.asarray(seen)[:, None]
        everything = (np.asarray(closeness)[allowed] > 0).all(axis=0)
        assert np.asarray(possible).any()
        assert not (everything & possible).any()


@pytest.mark.parametrize("num_hypotheses", [90, 600])
def test_the_best_hypotheses_claim_different_points(num_hypotheses):
    """Against a dictionary of the first of each kind, in the order of the scores."""
    rng = np.random.default_rng(num_hypotheses)
    claims = rng.random((6, num_hypotheses)) < 0.5
    score = rng.integers(0, 40, num_hypotheses).astype(np.float32)  # with many ties
    first = {}
    for h in np.argsort(-score, kind="stable"):
        first.setdefault(claims[:, h].tobytes(), h)
    wanted = list(first.values())[:20]
    assert len(wanted) == 20
    found, which = starts._best(jax.random.key(0), claims, score, 20)
    assert which.tolist() == wanted
    assert found.tolist() == score[wanted].tolist()


def test_few_points_have_all_their_tuples_tried():
    few = starts._tuples(jax.random.key(0), np.zeros((4, 2)), np.ones(4, bool), 2)
    assert sorted(map(tuple, few.tolist())) == [(i, j) for i in range(4) for j in range(4)]


def test_objects_of_many_parts_are_placed_first():
    parts = stack(shapes("triangle", "square", "L", "triangle", "plane"))
    model = read(functools.partial(constellation, parts=parts), make_scene([[0.0, 0.0]], 22))
    order = starts.largest_first(starts.structure(skeleton_of(model)))
    assert order.tolist() == [2, 4, 1, 0, 3]


@pytest.mark.slow
def test_six_objects_are_mostly_right_from_a_single_start():
    """With the triangle placed second of six, one start of five was right."""
    names = ("square", "triangle", "trapezoid", "pentagon", "L", "plane")
    scenes = sample_scenes(12, seed=3, objects=names, presence=1.0)
    program = functools.partial(constellation, parts=stack(shapes(*names)))
    reading = read_scenes(program, scenes)
    model, structure = reading.model, starts.structure(reading.skeleton)

    @jax.jit
    def begin(model, keys):
        def one(model, key):
            return starts.poses(key, model, structure, 0.05, 1.0)

        return map_scenes(one, model, keys)

    weights = np.asarray(begin(model, jax.random.split(jax.random.key(0), 12)).weights)
    labels = structure.owner[weights.argmax(axis=2)]
    assert same_partition(labels, scenes.object).mean() >= 0.6


def test_of_many_points_near_ones_are_tried_more_often():
    """On a line; the other two points are no nearer to the first than the rank that they have."""
    points = np.c_[np.arange(100.0), np.zeros(100)]
    seen = np.arange(100) < 90
    many = np.asarray(starts._tuples(jax.random.key(0), points, seen, 3))
    assert many.shape == (2**18 // 100, 3)
    assert 0 <= many.min() < many.max() < 90
    assert len(np.unique(many[:, 0])) == 90
    apart = np.abs(many[:, 1:] - many[:, :1])
    assert apart.min() == 1
    inner = np.abs(many[:, 0] - 45) < 20  # far from the ends the ranks are 1, 1, 2, 2, ...
    for distance in (2, 5, 10):
        share = np.log(2 * distance + 1) / np.log(90)
        error = np.sqrt(share * (1 - share) / apart[inner].size)
        assert abs((apart[inner] <= distance).mean() - share) < 4 * error
