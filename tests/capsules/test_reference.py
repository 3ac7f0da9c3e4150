"""The registry of reference posteriors: its form, its numbers by brute force, its command."""

import itertools
import json
import math
import subprocess
import sys

import jsonschema
import numpy as np
import pytest

from capsules.reference import load, names
from capsules.reference.problems import DEFINITIONS, make_scene
from capsules.reference.registry import FILE, SCHEMA, make_entry
from inference import exact
from models.errors import InputError
from tests import oracle
from tests.oracle_inference import Posterior, Problem, canonical, posterior_over

each_problem = pytest.mark.parametrize("name", list(DEFINITIONS))


# --- form ---------------------------------------------------------------------------------------


def test_the_file_is_as_the_schema_says():
    schema = json.loads(SCHEMA.read_text())
    data = json.loads(FILE.read_text())
    jsonschema.validate(data, schema)
    assert names() == list(DEFINITIONS)
    assert len(names()) >= 30
    assert FILE.stat().st_size < 300_000
    broken = json.loads(FILE.read_text())
    del broken["posteriors"]["triangle"]["posterior"]["log_evidence"]
    with pytest.raises(jsonschema.ValidationError, match="log_evidence"):
        jsonschema.validate(broken, schema)


@each_problem
def test_a_problem_is_as_defined_and_its_posterior_is_one(name):
    entry = json.loads(FILE.read_text())["posteriors"][name]
    definition = DEFINITIONS[name]
    assert entry["scene"] == make_scene(definition)
    assert (entry["program"], entry["arguments"]) == (definition.program, definition.arguments)
    found = load(name)
    parts, count = found.program.keywords["parts"], int(found.scene.present.sum())
    objects, p = parts.num_objects, parts.pose_dim
    assert found.match_probs.shape == (count, parts.num_parts)
    np.testing.assert_allclose(found.match_probs.sum(axis=1), 1, atol=1e-9)
    if definition.program != "mixture":
        assert (found.match_probs.sum(axis=0) < 1 + 1e-9).all()
    assert found.pose_mean.shape == (objects, p)
    assert found.pose_covariance.shape == (objects, p, p)
    assert (np.linalg.eigvalsh(found.pose_covariance) > 0).all()
    probability = [prob for _, prob in found.partitions]
    assert probability == sorted(probability, reverse=True)
    assert 0 < sum(probability) < 1 + 1e-9
    assert all(len(labels) == count for labels, _ in found.partitions)
    assert found.command.endswith(name)


def test_an_unknown_name_is_explained():
    with pytest.raises(InputError, match="no reference posterior 'cube'; choose from triangle, "):
        load("cube")


# --- numbers, by brute force --------------------------------------------------------------------


def problem_of(found, precision=None):
    """What the program assumes, for the oracle; clutter is an object that does not move."""
    parts = found.program.keywords["parts"]
    precision = precision or found.program.keywords["precision"]
    F, offset, variance = (np.array(x) for x in (parts.F, parts.offset, parts.variance))
    owner = np.asarray(parts.owner)
    points = np.asarray(found.scene.points)[found.scene.present]
    count, p = owner.max() + 1, F.shape[-1]
    return Problem(
        points,
        np.ones_like(points, bool),
        F,
        offset,
        np.where(owner[:, None] < parts.num_objects, variance / precision, variance),
        np.ones_like(offset, bool),
        owner,
        np.zeros((count, p)),
        np.tile(np.eye(p), (count, 1, 1)),
        np.zeros((len(points), len(owner))),
    )


def uniform(found, precision=None):
    """Every injection of the points into the parts stands for as many permutations."""
    problem = problem_of(found, precision)
    columns = oracle.injections(*problem.match_logits.shape)
    return posterior_over(problem, columns, np.zeros(len(columns)))


def mixture(found):
    problem = problem_of(found)
    columns = oracle.assignments(*problem.match_logits.shape)
    return posterior_over(problem, columns, np.zeros(len(columns)))


def typed(found):
    problem = problem_of(found)
    part_type = np.arange(6) % 3
    columns = oracle.injections(*problem.match_logits.shape)
    point_type = np.asarray(found.scene.point_type)[found.scene.present]
    possible = (part_type[columns] == point_type).all(axis=1)
    return posterior_over(problem, columns, np.where(possible, 0.0, -np.inf))


def presence(found):
    """Every part of a present object is seen or not, and every slot in use or not, by itself."""
    problem, arguments = problem_of(found), found.program.keywords
    K = arguments["parts"].num_objects
    count = len(problem.points)
    columns = oracle.injections(*problem.match_logits.shape)
    given, log_prior = [], []
    for there in itertools.product([0, 1], repeat=K):
        seen = np.array([arguments["visibility"] * t for t in there])
        seen = np.append(seen, arguments.get("clutter_prob", 0.5))[problem.owner]
        with np.errstate(divide="ignore"):
            used, unused = np.log(seen), np.log1p(-seen)
        taken = np.zeros((len(columns), len(seen)), bool)
        np.put_along_axis(taken, columns, True, axis=1)
        log_match = np.where(taken, used, unused).sum(axis=1) - math.lgamma(count + 1)
        if (log_match > -np.inf).any():
            given.append(posterior_over(problem, columns, log_match))
            log_prior.append(K * math.log(0.5) + oracle.log_sum(log_match))
    return averaged(given, np.array(log_prior))


def unknown_precision(found):
    """By a sum over a fine grid of the log precision."""
    arguments = found.program.keywords
    a, b = arguments["concentration"], arguments["rate"]
    return over_grid(
        found,
        lambda x: a * math.log(b) - math.lgamma(a) + a * x - b * np.exp(x),
        np.linspace(math.log(1e-3), math.log(1e5), 400),
    )


def unknown_noise(found):
    scale = found.program.keywords["scale"]

    def log_density(x):  # of x = log precision, sigma = exp(-x/2), |d sigma / dx| = sigma / 2
        sigma = np.exp(-0.5 * x)
        half_normal = 0.5 * math.log(2 / math.pi) - math.log(scale) - 0.5 * (sigma / scale) ** 2
        return half_normal + np.log(sigma / 2)

    return over_grid(found, log_density, np.linspace(math.log(1.0), math.log(1e9), 600))


def over_grid(found, log_density, grid):
    given = [uniform(found, math.exp(x)) for x in grid]
    return averaged(given, log_density(grid) + math.log(grid[1] - grid[0]))


def averaged(given: list[Posterior], log_prior: np.ndarray) -> Posterior:
    """Posteriors under conditions put together by their evidence."""
    log_weight = log_prior + [one.log_evidence for one in given]
    total = oracle.log_sum(log_weight)
    weight = np.exp(log_weight - total)
    mean = sum(w * one.pose_mean for w, one in zip(weight, given, strict=True))
    second = sum(
        w * (one.pose_covariance + one.pose_mean[:, :, None] * one.pose_mean[:, None])
        for w, one in zip(weight, given, strict=True)
    )
    partitions: dict[tuple[int, ...], float] = {}
    for w, one in zip(weight, given, strict=True):
        for labels, prob in one.partitions.items():
            partitions[labels] = partitions.get(labels, 0.0) + w * prob
    return given[0]._replace(
        log_evidence=total,
        match_probs=sum(w * one.match_probs for w, one in zip(weight, given, strict=True)),
        pose_mean=mean,
        pose_covariance=second - mean[:, :, None] * mean[:, None],
        partitions=partitions,
    )


BRUTE_FORCE = {
    function.__name__: function
    for function in (uniform, mixture, typed, presence, unknown_precision, unknown_noise)
}
TOO_LARGE = {"paper", "paper-noisy", "paper-presence", "two-triangles-unknown-precision"}
QUICK = {
    "triangle-blurred",
    "square-missing",
    "two-triangles-four",
    "affine",
    "triangle-mixture",
    "two-triangles-presence-one",
    "triangle-clutter",
    "triangle-clutter-presence",
    "two-triangles-typed",
    "triangle-unknown-precision",
    "triangle-unknown-noise",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in DEFINITIONS
        if name not in TOO_LARGE
    ],
)
def test_numbers_are_those_of_brute_force(name):
    """Written in plain numpy, from the definitions: nothing of the project computes it."""
    found = load(name)
    wanted = BRUTE_FORCE[DEFINITIONS[name].program](found)
    objects = len(found.pose_mean)
    close = {"rtol": 1e-7, "atol": 1e-7}
    assert found.log_evidence == pytest.approx(wanted.log_evidence, abs=1e-7)
    np.testing.assert_allclose(found.match_probs, wanted.match_probs, **close)
    np.testing.assert_allclose(found.pose_mean, wanted.pose_mean[:objects], **close)
    np.testing.assert_allclose(found.pose_covariance, wanted.pose_covariance[:objects], **close)
    for labels, probability in found.partitions:
        if objects not in labels:  # with clutter, a lone point is not the same as a lone object
            assert wanted.partitions[canonical(labels)] == pytest.approx(probability, abs=1e-7)


# --- numbers, by exact inference ----------------------------------------------------------------

ONE_SHAPE = ("two-triangles", "two-triangles-blurred")
"""Problems that share compiled code with other tests."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ONE_SHAPE else [pytest.mark.slow])
        for name in DEFINITIONS
    ],
)
def test_exact_inference_comes_to_the_same(name):
    found = load(name)
    result = exact.run(found.program, found.scene)
    present = found.scene.present
    assert float(result.log_evidence) == pytest.approx(found.log_evidence, abs=1e-8)
    np.testing.assert_allclose(result.match_probs[present], found.match_probs, atol=1e-8)
    np.testing.assert_allclose(result.pose_mean, found.pose_mean, atol=1e-8)
    np.testing.assert_allclose(result.pose_covariance, found.pose_covariance, atol=1e-8)


def test_an_entry_is_made_again():
    stored = json.loads(FILE.read_text())["posteriors"]["two-triangles"]
    made = make_entry("two-triangles")
    np.testing.assert_allclose(
        made["posterior"].pop("log_evidence"), stored["posterior"].pop("log_evidence"), atol=1e-9
    )
    del made["posterior"], stored["posterior"]
    assert made == stored


@pytest.mark.slow
def test_the_command_writes_the_file(tmp_path):
    out = tmp_path / "again.json"
    command = [sys.executable, "-m", "capsules.reference", "two-triangles", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert "two-triangles: log evidence" in done.stdout
    assert list(json.loads(out.read_text())["posteriors"]) == names()
    wrong = subprocess.run([*command[:3], "cube"], capture_output=True, text=True, timeout=600)
    assert wrong.returncode == 2 and "there is no problem 'cube'" in wrong.stderr
