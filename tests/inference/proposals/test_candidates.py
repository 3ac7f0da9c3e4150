"""Candidates and parses against lists of all injections, in plain numpy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import multivariate_normal

from capsules.experiments.generator import sample_scenes
from inference import exact
from inference.proposals import candidates, parses, propose
from inference.proposals import plan as plans
from models.constellation import constellation, presence_constellation
from models.program.batches import read_scenes
from models.program.reading import LinearGaussianModel
from models.scenes import Scene, make_scene
from models.templates import shapes, stack

pytestmark = pytest.mark.long

NAMES = ("square", "triangle")
PARTS = stack(shapes(*NAMES))
PRECISION = 1e6
uniform = functools.partial(constellation, parts=PARTS, precision=PRECISION)
NO_PRIOR = np.zeros((1, len(NAMES)))


def scene_of(seed: int, *, missing: int = 0, sigma: float = 0.0) -> Scene:
    """Both objects, with some points left out."""
    scene = sample_scenes(1, sigma=sigma, seed=seed, objects=NAMES, presence=1.0).take(0)
    rows = np.random.default_rng(seed).permutation(len(scene.points))[missing:]
    return make_scene(scene.points[np.sort(rows)], len(scene.points))


def model_of(program, scene: Scene) -> LinearGaussianModel:
    model = read_scenes(program, scene.batch()).at(0)
    return jax.tree.map(jnp.asarray, model)


def log_density(model: LinearGaussianModel, k: int, pairs: list[tuple[int, int]]) -> float:
    """log p(points on parts of object k): one Normal, pose integrated out."""
    points, part = (list(x) for x in zip(*pairs, strict=True))
    F = np.asarray(model.parts.F)[part].reshape(-1, model.pose_mean.shape[-1])
    mean = np.asarray(model.parts.offset)[part].ravel() + F @ np.asarray(model.pose_mean[k])
    noise = np.asarray(model.parts.variance)[part].ravel()
    covariance = F @ np.asarray(model.pose_covariance[k]) @ F.T + np.diag(noise)
    observed = np.asarray(model.points)[points].ravel()
    return float(multivariate_normal(mean, covariance).logpdf(observed))


def all_injections(model: LinearGaussianModel, k: int):
    """Every way in which two or more points can be parts of object k."""
    parts = np.flatnonzero(np.asarray(model.parts.owner) == k)
    rows = np.flatnonzero(np.asarray(model.seen).any(axis=1))
    for count in range(2, min(len(parts), len(rows)) + 1):
        for some in itertools.combinations(parts, count):
            for points in itertools.permutations(rows, count):
                yield list(zip(points, some, strict=True))


def found_by(model: LinearGaussianModel, reading, count: int = 32, judged: int = 4096):
    plan = plans.make_plan([reading], NO_PRIOR)
    gate = jnp.minimum(model.parts.variance, candidates.TIGHT)
    known = parses.odds([model], NO_PRIOR, plan.owner, parses.EDGE, 0.0)
    worth = known.pair[0] - known.alone[:, None]
    return plan, known, candidates.find(model, plan, gate, worth, count, judged)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_no_injection_within_ten_nats_of_the_best_is_missed_and_scores_are_exact(missing):
    scene = scene_of(seed=3 + missing, missing=missing)
    reading = read_scenes(uniform, scene.batch())
    model = model_of(uniform, scene)
    plan, known, found = found_by(model, reading)
    alone = np.asarray(known.alone)
    for k in range(len(NAMES)):
        members = plan.members[k][plan.valid[k]]
        match = np.asarray(found.match[plan.kind[k]])[: len(members)]
        score = np.asarray(found.score[plan.kind[k]])
        ours = {}
        for c in np.flatnonzero(np.isfinite(score)):
            pairs = [(int(m), int(n)) for m, n in zip(match[:, c], members, strict=True) if m >= 0]
            assert score[c] == pytest.approx(log_density(model, k, pairs), abs=1e-6)
            ours[frozenset(m for m, _ in pairs)] = score[c]
        values = {}
        for pairs in all_injections(model, k):
            points = frozenset(m for m, _ in pairs)
            value = log_density(model, k, pairs) - sum(alone[m] for m in points)
            values[points] = max(values.get(points, -np.inf), value)
        best = max(values.values())
        close = [points for points, value in values.items() if value > best - 10]
        assert set(close) <= set(ours)


def test_bases_that_a_symmetry_makes_alike_are_one():
    reading = read_scenes(uniform, scene_of(0).batch())
    plan = plans.make_plan([reading], NO_PRIOR)
    # Of a square its side and its diagonal; the triangle's sides differ by more than names.
    assert plan.basis_valid.sum(axis=1).tolist() == [2, 3]


@pytest.mark.parametrize("seed", range(4))
def test_the_table_of_the_plane_keeps_the_hypotheses_of_the_objects(seed):
    """Screened, the best candidates are those of the full search."""
    scene = scene_of(seed)
    reading = read_scenes(uniform, scene.batch())
    model = model_of(uniform, scene)
    _, _, whole = found_by(model, reading, count=4)
    _, _, screened = found_by(model, reading, count=4, judged=24)
    assert np.asarray(screened.score[:, 0]) == pytest.approx(np.asarray(whole.score[:, 0]))


@pytest.mark.parametrize("seed", range(4))
def test_the_best_parse_has_the_density_of_the_best_match_of_exact_inference(seed):
    """Its value is relative to points alone; two parses differ as their joint densities do."""
    program = functools.partial(presence_constellation, parts=PARTS, precision=PRECISION)
    scene = scene_of(seed)
    readings = [
        read_scenes(program, scene.batch(), {"presence": np.full((1, 2), state)})
        for state in (0, 1)
    ]
    found = propose.propose(readings, np.log(np.full((2, 2), 0.5)), whole=False)
    result = exact.run(program, scene)
    assert found.state[0, 0].tolist() == [1, 1]
    assert found.is_clear[0, 0]
    assert found.left_over[0, 0] == 0
    labels = np.full(len(scene.points), -1)
    labels[found.match[0, 0]] = np.asarray(PARTS.owner)
    assert labels.tolist() == result.labels.tolist()
    model = jax.tree.map(jnp.asarray, readings[1].at(0))
    joint = []
    for w in np.flatnonzero(np.isfinite(found.value[0]))[:2]:
        pairs = list(enumerate(found.match[0, w].tolist()))
        own = [[(m, n) for n, m in pairs if PARTS.owner[n] == k] for k in range(2)]
        joint.append(sum(log_density(model, k, p) for k, p in enumerate(own)))
    values = found.value[0, : len(joint)]
    assert np.diff(values) == pytest.approx(np.diff(joint), rel=1e-8)


@pytest.mark.slow
def test_the_best_parses_share_no_point_and_come_best_first():
    scenes = sample_scenes(24, seed=8)
    readings = [read_scenes(constellation, scenes)]
    found = propose.propose(readings, np.zeros((1, 3)), whole=True)
    values = np.where(np.isfinite(found.value), found.value, -1e9)
    assert (np.diff(values, axis=1) <= 1e-9).all()
    for match in found.match.reshape(-1, found.match.shape[-1]):
        met = match[match >= 0]
        assert len(set(met)) == len(met)


def test_parts_that_are_missing_are_paid_at_the_odds_of_the_program():
    """At visibility .9, log .1 for a part that is missing and log .9 for one that is seen."""
    program = functools.partial(
        presence_constellation, parts=PARTS, precision=PRECISION, visibility=0.9
    )
    scene = sample_scenes(1, seed=5, objects=NAMES, presence=1.0).take(0)
    scene = make_scene(scene.points[[0, 1, 2]], 7)
    readings = [
        read_scenes(program, scene.batch(), {"presence": np.full((1, 2), state)})
        for state in (0, 1)
    ]
    prior = np.log(np.array([[0.3, 0.6], [0.7, 0.4]]))
    models = [jax.tree.map(jnp.asarray, reading.at(0)) for reading in readings]
    plan = plans.make_plan(readings, prior)
    known = parses.odds(models, prior, plan.owner, parses.EDGE, 0.0)
    wanted = np.log(0.7 / 0.3) + 4 * np.log(0.1)
    assert float(known.state[1, 0] - known.state[0, 0]) == pytest.approx(wanted)
    assert float(known.pair[1, 0, 0]) == pytest.approx(np.log(0.9 / 0.1))
