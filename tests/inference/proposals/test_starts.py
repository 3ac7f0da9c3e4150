"""Where runs start: at random, or with a parse."""

import functools

import jax
import numpy as np
import pytest

from capsules.experiments.generator import sample_scenes
from inference import cavi
from inference.diagnostics.metrics import partition_metrics
from inference.proposals import starts
from inference.proposals.propose import drawn, propose_whole
from models.constellation import constellation
from models.program.batches import read_scenes, skeleton_of
from models.program.reading import read
from models.scenes import make_scene
from models.templates import shapes, stack
from tests.problems import DESIGNS, make_problem, stack_problems

pytestmark = pytest.mark.long

SQUARE = stack(shapes("square", "triangle"))
small = functools.partial(constellation, parts=SQUARE)


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


def test_a_parse_puts_every_point_on_its_part_and_the_rest_anywhere():
    model = read(small, make_scene(np.zeros((3, 2)), 7))
    match = np.array([2, -1, 0, -1, -1, -1, -1])
    start = starts.parse(jax.random.key(0), model, match, 1.0)
    weights = np.asarray(start.weights)
    assert start.beta == 1.0
    assert weights.argmax(axis=0)[[0, 2]].tolist() == [2, 0]
    others = np.delete(weights, [0, 2], axis=1)  # parts without a point
    assert (others[[0, 2]] < others[1].min() - 10).all()  # points that have a part
    np.testing.assert_array_equal(others[3:], others[3, 0])  # dummy rows: all alike


def test_the_uniform_start_is_between_zero_and_one_and_differs_by_key():
    model = read(small, make_scene([[0.0, 0.0]], 7))
    first, second = (starts.uniform(jax.random.key(i), model, 0.05) for i in (0, 1))
    assert (first.weights < 0).all()
    assert first.beta == 0.05
    assert (first.weights != second.weights).any()


@pytest.mark.parametrize("start", ["uniform", "parse"])
def test_forbidden_pairs_stay_forbidden(start):
    rng = np.random.default_rng(1)
    problem = make_problem(rng, DESIGNS["similarity"], 5, logits="typed")
    stacked = stack_problems([problem], "doubly_stochastic")
    model = read(stacked.program, stacked.scenes.take(0))
    nothing = np.full(len(model.points), -1)
    made = {
        "uniform": lambda: starts.uniform(jax.random.key(0), model, 0.05),
        "parse": lambda: starts.parse(jax.random.key(0), model, nothing, 1.0),
    }[start]()
    forbidden = problem.match_logits == -np.inf
    assert forbidden.any()
    assert (np.asarray(made.weights)[forbidden] == -np.inf).all()
    assert np.isfinite(np.asarray(made.weights)[~forbidden]).all()


@pytest.mark.slow
def test_how_often_a_uniform_start_is_right():
    scenes = sample_scenes(240, seed=0).take(slice(200))
    found = cavi.run(
        constellation, scenes, jax.random.key(0), num_restarts=1, init_strategy="uniform"
    )
    right = partition_metrics(scenes.object, found.labels)["scene_accuracy"] == 1
    first = found.details["attempt"] == 0  # a retry follows a sparse solution
    assert len(scenes.points) == 200
    assert 0.36 <= (right & first).mean() <= 0.56


def test_points_that_fit_any_parts_of_an_object_are_put_on_any():
    """Two points of a triangle have six places on it; the four of a square have the best one."""
    parts = stack(shapes("square", "triangle"))
    pose = np.array([[0.5, 0.2, 0.4, 0.1], [-0.5, -0.3, 0.2, 0.3]])
    points = np.asarray(parts.predict(pose))[[0, 1, 2, 3, 5, 6]]
    program = functools.partial(constellation, parts=parts)
    reading = read_scenes(program, make_scene(points, 7).batch())
    found = drawn(propose_whole(reading), jax.random.key(0), 200, reading.skeleton).match[0]
    assert len(np.unique(found[:, 4:], axis=0)) == 6
    assert set(map(tuple, np.sort(found[:, 4:], axis=1))) == {(-1, 4, 5)}
    square = np.unique(found[:, :4], axis=0)
    assert (np.sort(square, axis=1) == np.arange(4)).all()
