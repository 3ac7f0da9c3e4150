"""The greedy search among sets of present objects, against going through all of them."""

import functools
import itertools
import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from capsules.cli import app
from capsules.experiments.generator import sample_scenes
from capsules.files.scenes import save_scenes
from inference import cavi
from inference.conditions import search
from inference.conditions.problem import read_problem
from inference.conditions.search import Objects
from inference.conditions.sets import possible_values
from inference.diagnostics.metrics import partition_metrics
from models.constellation import presence_constellation
from models.scenes import Scene, make_scene
from models.templates import shapes, stack

pytestmark = pytest.mark.long

NAMES = ("square", "triangle", "triangle")
program = functools.partial(presence_constellation, parts=stack(shapes(*NAMES)))
MANY = ("square", "triangle") * 6
STATES = Objects(np.array([0, 1, 1, 1]), np.array([0, 1, 2]))


def test_neighbours_are_all_sets_with_few_changes_up_to_swaps():
    centre = np.array([1, 2, 0, 0])
    found = {tuple(flags) for flags in search._neighbours(STATES, centre)}
    wanted = set()
    for flags in itertools.product(range(3), repeat=4):
        if sum(a != b for a, b in zip(flags, centre, strict=True)) <= search.CHANGES:
            wanted.add((flags[0], *sorted(flags[1:], reverse=True)))
    assert found == wanted


def test_ways_count_the_sets_that_a_set_stands_for():
    for flags in itertools.product(range(3), repeat=4):
        wanted = len({(flags[0], *order) for order in itertools.permutations(flags[1:])})
        assert search._ways(STATES, np.array(flags)) == wanted


def test_objects_with_another_chance_of_being_there_are_not_alike():
    scenes = make_scene(np.eye(3)[:, :2], 10).batch()
    unlike = functools.partial(program, presence_prob=np.array([0.5, 0.2, 0.4]))
    for this, template in ((program, [0, 1, 1]), (unlike, [0, 1, 2])):
        left_open = read_problem(this, scenes)
        problem = read_problem(this, scenes, {"presence": np.ones((1, 3), int)})
        prior = left_open["presence"]
        objects = search._objects(problem, prior, np.arange(2), left_open)
        assert objects.template.tolist() == template


def test_the_loosened_problem_lets_dummies_have_any_part():
    scenes = make_scene(np.eye(3)[:, :2], 10).batch()
    problem = read_problem(program, scenes, {"presence": np.ones((1, 3), int)})
    logits = problem.reading.model.match_logits
    assert (logits[3:] == -np.inf).all()  # all parts would be seen
    assert (search._loosened(problem).reading.model.match_logits == 0).all()


@pytest.mark.parametrize("visibility", [1.0, 0.9])
def test_possible_sets_are_those_of_the_enumeration(visibility):
    given = functools.partial(program, visibility=visibility)
    scenes = sample_scenes(6, seed=4, objects=NAMES)
    sets = np.array(list(itertools.product([False, True], repeat=3)))
    for s in range(len(scenes.points)):
        where = np.full(len(sets), s)
        read = functools.partial(search._read, given, scenes, "presence")
        found = sets[search._possible(read, scenes, where, sets)]
        wanted = possible_values(given, scenes.take(s))["presence"]
        assert {tuple(x) for x in found} == {tuple(x) for x in wanted}


@pytest.mark.slow
@pytest.mark.parametrize("visibility", [1.0, 0.9])
def test_the_search_finds_what_going_through_all_sets_finds(visibility, monkeypatch):
    given = functools.partial(program, visibility=visibility)
    scenes = sample_scenes(40, seed=5, objects=NAMES).take(slice(24))
    rng = np.random.default_rng(0)
    if visibility < 1:
        present = scenes.present & (rng.random(scenes.present.shape) < visibility)
        scenes = Scene(scenes.points * present[..., None], present).take(present.sum(axis=1) > 2)
    every = cavi.run(given, scenes, jax.random.key(0))
    monkeypatch.setattr(cavi, "MAX_TRIED", 1)
    found = cavi.run(given, scenes, jax.random.key(0))
    # A sum over fewer sets, none of them twice; a run's chance depends on its place in the batch.
    assert (found.elbo <= every.elbo + 0.05).all()
    assert np.mean(found.elbo > every.elbo - 0.1) >= 0.9
    pairs = zip(every.details["presence_sets"], found.details["presence_sets"], strict=True)
    assert np.mean([(a[0][0] == b[0][0]).all() for a, b in pairs]) >= 0.9
    assert "presence_search" not in every.details
    assert found.details["presence_search"] == "greedy"


@pytest.mark.slow
def test_twelve_objects_of_which_three_are_there(tmp_path):
    """Their 4096 sets are not gone through; the command line says so."""
    drawn = sample_scenes(4, seed=6, objects=MANY, presence=1.0)
    owner = np.repeat(np.arange(12), [4, 3] * 6)
    present = np.tile(np.isin(owner, (0, 1, 2)), (4, 1))
    truth = np.where(present, owner, -1)
    scenes = Scene(np.where(present[..., None], drawn.points, 0.0), present, truth)
    many = functools.partial(presence_constellation, parts=stack(shapes(*MANY)))
    result = cavi.run(many, scenes, jax.random.key(0))
    assert result.details["presence_search"] == "greedy"
    assert partition_metrics(truth, result.labels)["scene_accuracy"].mean() >= 0.75
    wanted = np.isin(np.arange(12), (0, 1, 2))
    right = [(sets[0][0] == wanted).all() for sets in result.details["presence_sets"]]
    assert np.mean(right) >= 0.75
    save_scenes(tmp_path / "scenes.npz", scenes)
    options = ["--prior", "presence", "--shapes", ",".join(MANY), "--json", "-"]
    done = CliRunner().invoke(app, ["infer", str(tmp_path / "scenes.npz"), *options])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["presence_search"] == "greedy"
