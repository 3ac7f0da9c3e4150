"""Coordinate ascent from the best parses: parts that are missing, and states of objects."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import trace

from capsules.experiments.generator import sample_scenes
from inference import cavi, exact, map_parse
from inference.conditions.problem import read_problem
from inference.diagnostics.metrics import partition_metrics, same_partition
from inference.proposals import states
from models.constellation import constellation, presence_constellation, uniform_match
from models.distributions.likelihood import MatchedParts
from models.scenes import Scene
from models.templates import SHAPES, shapes, stack
from tests import oracle

pytestmark = pytest.mark.long

KEY = jax.random.key(0)
TRAPEZOIDS = stack(shapes("trapezoid", "trapezoid"))
NAMES = ("square", "triangle", "square")


def with_parts_missing(names: tuple[str, ...], count: int, seed: int) -> Scene:
    """Scenes of all objects, each part missing with probability .1, three or more of each seen."""
    drawn = sample_scenes(count, seed=seed, objects=names, presence=1.0)
    owner = np.repeat(np.arange(len(names)), [len(SHAPES[name]) for name in names])
    rng = np.random.default_rng(seed)
    present = np.zeros((count, len(owner)), bool)
    for row, k in itertools.product(present, range(len(names))):
        own = owner == k
        while row[own].sum() < 3:
            row[own] = rng.random(own.sum()) >= 0.1
    assert drawn.object is not None
    points = np.where(present[..., None], drawn.points, 0.0)
    return Scene(points, present, np.where(present, drawn.object, -1))


def right(scenes: Scene, labels: np.ndarray) -> float:
    return float(partition_metrics(scenes.object, labels)["scene_accuracy"].mean())


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (NAMES, 24),
        pytest.param(NAMES, 400, marks=pytest.mark.slow),
        pytest.param(tuple(SHAPES), 64, marks=pytest.mark.slow),
    ],
    ids=["three", "three, many scenes", "six"],
)
def test_scenes_with_parts_missing_are_parsed(names, count):
    """From random poses .54 to .96 of such scenes with three objects are right, .42 with six."""
    scenes = with_parts_missing(names, count, seed=31)
    if count == 24:  # each number of points is compiled
        scenes = scenes.take(scenes.present.sum(axis=1) == 10)
    assert not scenes.present.all()
    program = functools.partial(
        presence_constellation, parts=stack(shapes(*names)), visibility=0.9, precision=1e6
    )
    found = cavi.run(program, scenes, KEY)
    assert right(scenes, found.labels) == 1.0
    assert found.converged.all()


@pytest.mark.slow
def test_of_twelve_objects_nothing_less_probable_than_the_truth_is_found():
    """Points within a tight gate say more than the program's own noise: without that .19 are."""
    names = tuple(SHAPES) * 2
    scenes = with_parts_missing(names, 24, seed=38)
    program = functools.partial(presence_constellation, parts=stack(shapes(*names)), visibility=0.9)
    everything = {"presence": np.ones((24, len(names)), int)}
    problem = read_problem(program, scenes, everything, or_bound=True)
    truth = np.where(scenes.present, np.arange(scenes.present.shape[1]), -1)  # row n is part n
    judged = map_parse.judged(problem, map_parse.completed(problem, truth))
    found = map_parse.run(program, scenes)
    assert (found.elbo >= judged.log_density + problem.log_constant - 1e-6).all()


@pytest.mark.slow
def test_noisy_scenes_have_the_exact_partition():
    scenes = sample_scenes(96, sigma=0.1, seed=32)
    certain = exact.run(presence_constellation, scenes)
    found = cavi.run(presence_constellation, scenes, KEY)
    assert same_partition(found.labels, certain.labels).mean() >= 0.98
    assert (found.elbo <= certain.log_evidence + 1e-6).all()


@pytest.fixture
def every_state(monkeypatch):
    """A function like `cavi.run` that goes through all states of the objects."""

    def run(*args):
        with monkeypatch.context() as patch:
            patch.setattr(cavi, "solve_likely_states", lambda *args: None)
            return cavi.run(*args)

    return run


@pytest.mark.slow
def test_the_states_that_are_solved_weigh_as_all_of_them_do(every_state):
    """The sum over the states of close parses is that over all states, to a thousandth of a nat."""
    scenes = with_parts_missing(NAMES, 6, seed=33)
    program = functools.partial(presence_constellation, visibility=0.9, precision=1e6)
    some = cavi.run(program, scenes, KEY)
    every = every_state(program, scenes, KEY)
    np.testing.assert_allclose(some.elbo, every.elbo, atol=1e-3)


def test_a_program_without_states_begins_with_whole_objects():
    scenes = sample_scenes(64, seed=34)
    scenes = scenes.take(np.isin(scenes.present.sum(axis=1), (7, 11)))  # each number is compiled
    found = cavi.run(constellation, scenes, KEY)
    assert right(scenes, found.labels) == 1.0
    # The best parse is where the first run begins, and it is the one that wins.
    assert (found.details["attempt"] == 0).all()


def test_neighbours_are_all_states_with_few_changes():
    flags = np.array([1, 0, 2, 0, 1])
    found = {tuple(row) for row in states._neighbours(flags, 3)}
    wanted = {
        other
        for other in itertools.product(range(3), repeat=5)
        if 0 < sum(a != b for a, b in zip(other, flags, strict=True)) <= states.CHANGES
    }
    assert found == wanted | {(2, 2, 2, 2, 2)}


@pytest.mark.slow
def test_a_factor_that_tells_identical_objects_apart_counts_where_it_is(every_state):
    """To count its twin as much would be log 2 more than the sum over all states has."""

    def preferring_the_first(points=None, present=None):
        with trace() as sites:
            result = presence_constellation(points, present)
        numpyro.factor("first", 9.0 * sites["presence"]["value"][0])
        return result

    scenes = sample_scenes(24, seed=35)
    some = cavi.run(preferring_the_first, scenes, KEY)
    every = every_state(preferring_the_first, scenes, KEY)
    np.testing.assert_allclose(some.elbo, every.elbo, atol=1e-3)
    one_square = scenes.present.sum(axis=1) <= 7
    assert one_square.any()
    assert (points_of_objects(some)[one_square, 2] < 1e-3).all()


def two_kinds(points=None, present=None):
    """Two identical objects, each of one of two kinds that the scene hardly tells apart."""
    with numpyro.plate("object", 2):
        kind = numpyro.sample("kind", dist.Categorical(jnp.array([0.5, 0.5])))
        covariance = (0.5 + 0.5 * kind)[:, None, None] * jnp.eye(4)
        pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.zeros(4), covariance))
    match = numpyro.sample("match", uniform_match("permutation", TRAPEZOIDS.num_parts))
    likelihood = MatchedParts(match, pose, TRAPEZOIDS, precision=1e6, present=present)
    numpyro.sample("points", likelihood, obs=points)


@pytest.mark.parametrize("method", [map_parse.run, functools.partial(cavi.run, rng_key=KEY)])
def test_no_joint_state_of_identical_objects_is_counted_twice(method):
    """A trapezoid has no turn of its own: all there is are two matches, in each of four states.

    Coordinate ascent loses the van der Waerden bound of eight rows beside that.
    """
    scenes = sample_scenes(4, seed=37, objects=("trapezoid", "trapezoid"), presence=1.0)
    scenes = scenes.take(slice(0, 2))
    evidence, found = exact.run(two_kinds, scenes).log_evidence, method(two_kinds, scenes)
    lost = 0.0 if found.method == "map" else -oracle.log_van_der_waerden(8)
    np.testing.assert_allclose(evidence - found.elbo, np.log(2) + lost, atol=0.01)


def points_of_objects(result) -> np.ndarray:
    """How many points each object is expected to have, (scenes, K)."""
    of_points = (result.match_probs * result.scene.present[..., None]).sum(axis=1)
    return np.stack([of_points[:, result.owner == k].sum(axis=1) for k in range(3)], axis=1)


@pytest.mark.slow
def test_identical_objects_have_points_with_the_same_probability():
    scenes = sample_scenes(24, seed=36)
    found = cavi.run(presence_constellation, scenes, KEY)
    certain = exact.run(presence_constellation, scenes)
    np.testing.assert_allclose(points_of_objects(found), points_of_objects(certain), atol=1e-2)


@pytest.mark.parametrize(
    ("state", "twin", "number"),
    [([1, 0, 0], [0, 1, 0], 2), ([1, 1, 1], [0, 0, 0], 1), ([2, 1, 0, 1], [0, 0, 0, 3], 6)],
)
def test_exchanges_are_all_states_of_twins_once(state, twin, number):
    state, twin = np.array(state), np.array(twin)
    found = list(states._exchanges(state, twin))
    assert found[0] == list(range(len(state)))
    wanted = {
        tuple(state[list(order)])
        for order in itertools.permutations(range(len(state)))
        if (twin[list(order)] == twin).all()
    }
    assert len(wanted) == len(found) == number
    assert {tuple(state[order]) for order in found} == wanted


def test_states_that_no_parse_explains_are_looked_for_nearby():
    """Points that are no shape: at visibility 1 only a set with as many parts is possible."""
    points = np.random.default_rng(1).uniform(-1, 1, (1, 11, 2))
    present = np.arange(11) < 7
    scene = Scene(np.where(present[:, None], points, 0.0), present[None])
    found = cavi.run(presence_constellation, scene, KEY)
    sizes = np.array([4, 3, 4])
    assert sizes @ found.conditions["presence"][0] == 7
    assert found.elbo[0] <= exact.run(presence_constellation, scene).log_evidence[0] + 1e-6
