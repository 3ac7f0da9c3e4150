"""Exact inference against brute force over all permutations, and an independent estimate."""

import functools
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.handlers import substitute, trace

from capsules.experiments.generator import sample_scenes
from capsules.files.inputs import load_scenes
from inference import exact
from inference.diagnostics.metrics import partition_metrics
from models.constellation import constellation
from models.distributions.likelihood import MatchedParts
from models.distributions.match import DoublyStochasticMatch, PermutationMatch
from models.distributions.match_priors import typed_probs
from models.errors import ConjugacyError, InputError
from models.program.marginal import marginal
from models.scenes import Scene, make_scene
from models.templates import shapes, stack
from tests import oracle_inference
from tests.problems import DESIGNS, make_problem, single, stack_problems

pytestmark = pytest.mark.long

KINDS = ("uniform", "random", "typed")


# --- brute force --------------------------------------------------------------------------------


def assert_is(found, wanted, problem):
    """One scene's result is the brute-force posterior."""
    np.testing.assert_allclose(found.log_evidence, wanted.log_evidence, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.match_probs, wanted.match_probs, atol=1e-9)
    np.testing.assert_allclose(found.pose_mean, wanted.pose_mean, atol=1e-9, rtol=1e-9)
    np.testing.assert_allclose(found.pose_covariance, wanted.pose_covariance, atol=1e-9, rtol=1e-9)
    match = found.best_match
    assert ((match >= 0) == problem.present).all()
    assert log_weight(problem, match) == pytest.approx(wanted.best_log_weight, rel=1e-9, abs=1e-9)


def log_weight(problem, match):
    """Log weight of a match of the points, dummies filling up the rest."""
    columns = np.array(match)
    columns[~problem.present] = np.setdiff1d(np.arange(len(match)), match[problem.present])
    total = problem.match_logits[np.arange(len(match)), columns].sum()
    for k in range(problem.num_objects):
        pairs = tuple(
            (m, n) for m, n in enumerate(columns) if problem.present[m] and problem.owner[n] == k
        )
        total += oracle_inference.object_posterior(problem, k, pairs)[0]
    return total


def random_problems(name, count, sizes, seed=0, **options):
    rng = np.random.default_rng(seed)
    return [
        make_problem(
            rng,
            DESIGNS[name],
            sizes[i % len(sizes)],
            logits=KINDS[i % 3],
            precision=float(10 ** rng.uniform(-1, 2)),
            **options,
        )
        for i in range(count)
    ]


# Structures of programs, their match prior, and numbers of points: compiled once each.
STRUCTURES = {
    "one_object": ("doubly_stochastic", (2,)),
    "similarity": ("permutation", (3, 5)),
    "interleaved": ("permutation", (4,)),
    "seven_parts": ("permutation", (7,)),
}
TOGETHER = 12


@pytest.mark.parametrize("name", ["one_object", "similarity", "interleaved"])
def test_equal_to_brute_force(name):
    """Random programs, a dozen together; typed and missing parts among them."""
    check_structure(name, max_examples=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCTURES)
def test_hundreds_of_programs_are_equal_to_brute_force(name):
    check_structure(name, max_examples=2 if name == "seven_parts" else 5)


def check_structure(name, max_examples):
    family, sizes = STRUCTURES[name]
    precisions = st.lists(st.floats(-1, 2), min_size=TOGETHER, max_size=TOGETHER)

    @settings(max_examples=max_examples)
    @given(st.integers(0, 2**32 - 1), precisions)
    def check(seed, exponents):
        rng = np.random.default_rng(seed)
        problems = [
            make_problem(rng, DESIGNS[name], size, logits=kind, precision=10**exponent)
            for size, kind, exponent in zip(cycle(sizes), cycle(KINDS), exponents, strict=False)
        ]
        stacked = stack_problems(problems, family)
        result = exact.run(stacked.program, stacked.scenes)
        for i, problem in enumerate(problems):
            wanted = oracle_inference.posterior(problem)
            assert_is(result.take(i), wanted, problem)
            assert_partitions(result.take(i), wanted)

    check()


@pytest.mark.parametrize("logits", ["uniform", "random"])
def test_a_program_with_its_numbers_written_into_it(logits):
    """Two identical objects, alike or, where the match prior tells them apart, not."""
    check_written_into(0, logits)


@pytest.mark.slow
@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1), st.sampled_from(KINDS))
def test_any_program_with_its_numbers_written_into_it(seed, logits):
    check_written_into(seed, logits)


def check_written_into(seed, logits):
    rng = np.random.default_rng(seed)
    problem = make_problem(rng, DESIGNS["six_parts"], 5, logits=logits, identical=True)
    program, scene = single(problem)
    result = exact.run(program, scene)
    wanted = oracle_inference.posterior(problem)
    assert_is(result, wanted, problem)
    assert_partitions(result, wanted)


def test_two_objects_without_points_have_one_order():
    design = DESIGNS["similarity"]._replace(owner=(0, 0, 1, 1, 2, 2))
    problem = make_problem(np.random.default_rng(0), design, 2, logits="uniform", identical=True)
    assert_partitions(exact.run(*single(problem)), oracle_inference.posterior(problem))


def assert_partitions(result, wanted):
    """The listed partitions are the most probable ones, in order."""
    listed = result.partitions[:3]
    ranks = sorted(wanted.partitions.values(), reverse=True)[: len(listed)]
    np.testing.assert_allclose([prob for _, prob in listed], ranks, atol=1e-9)
    assert listed[0][0].tolist() == result.labels.tolist()
    for labels, prob in listed:
        truth = wanted.partitions[oracle_inference.canonical(labels)]
        assert prob == pytest.approx(truth, abs=1e-9)


@pytest.mark.slow
def test_relabelling_the_points_permutes_the_answer():
    rng = np.random.default_rng(3)
    problems = [make_problem(rng, DESIGNS["similarity"], 3, logits="uniform") for _ in range(10)]
    stacked = stack_problems(problems)
    first = exact.run(stacked.program, stacked.scenes)
    order = np.array([rng.permutation(5) for _ in problems])
    orders = (order[..., None], order, None, order, None)
    moved = Scene(
        *(
            None if x is None else np.take_along_axis(x, o, axis=1)
            for x, o in zip(stacked.scenes, orders, strict=True)
        )
    )
    second = exact.run(stacked.program, moved)
    np.testing.assert_allclose(first.log_evidence, second.log_evidence, rtol=1e-12)
    rows = np.arange(10)[:, None]
    np.testing.assert_allclose(first.match_probs[rows, order], second.match_probs, atol=1e-12)
    np.testing.assert_array_equal(first.labels[rows, order], second.labels)
    np.testing.assert_allclose(first.pose_mean, second.pose_mean, atol=1e-10)


TYPES = np.array([0, 1, 0, 1, 0])
TYPED_PARTS = stack([shapes("triangle")[0], np.array([[0.0, 1.0], [1.0, -1.0]])])


def typed_program(points=None, present=None, point_type=None):
    with numpyro.plate("object", 2):
        pose = numpyro.sample("pose", dist.MultivariateNormal(np.zeros(4), np.eye(4)))
    prior = DoublyStochasticMatch(typed_probs(point_type, present, TYPES))
    match = numpyro.sample("match", prior)
    likelihood = MatchedParts(match, pose, TYPED_PARTS, precision=20.0, present=present)
    return numpyro.sample("points", likelihood, obs=points)


def fixed_problem(points, present, parts, precision, probs):
    """The oracle's view of a program with standard Normal poses."""
    K, P = parts.num_objects, parts.pose_dim
    with np.errstate(divide="ignore"):
        return oracle_inference.Problem(
            points,
            np.repeat(present[:, None], parts.num_features, axis=1),
            np.asarray(parts.F),
            np.asarray(parts.offset),
            np.asarray(parts.variance) / precision,
            np.asarray(parts.feature_mask),
            np.asarray(parts.owner),
            np.zeros((K, P)),
            np.tile(np.eye(P), (K, 1, 1)),
            np.log(np.maximum(probs, 0)),
        )


def test_typed_points_with_dummies_in_between():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(6, 5, 2))
    present = np.ones((6, 5), bool)
    present[:3, [1, 4]] = present[3:, [0, 2]] = False
    points[~present] = 0.0
    kinds = np.broadcast_to(TYPES, (6, 5))
    result = exact.run(typed_program, Scene(points, present, point_type=kinds))
    for i in range(6):
        probs = np.asarray(typed_probs(kinds[i], present[i], TYPES))
        problem = fixed_problem(points[i], present[i], TYPED_PARTS, 20.0, probs)
        assert_is(result.take(i), oracle_inference.posterior(problem), problem)


@pytest.mark.slow
@pytest.mark.parametrize("objects", [("triangle", "triangle"), ("triangle", "square")])
def test_templates_that_are_alike_share_their_tables(objects):
    """A fixed program, where identical objects are found and done once."""
    parts = stack(shapes(*objects))
    this = functools.partial(constellation, parts=parts, precision=30.0)
    N = parts.num_parts
    rng = np.random.default_rng(0)
    points = rng.normal(size=(5, N, 2)) * 0.7
    present = np.ones((5, N), bool)
    present[:, 2] = False
    present[3:, 0] = False
    points[~present] = 0.0
    result = exact.run(this, Scene(points, present))
    for i in range(5):
        problem = fixed_problem(points[i], present[i], parts, 30.0, np.full((N, N), 1 / N))
        wanted = oracle_inference.posterior(problem)
        assert_is(result.take(i), wanted, problem)
        _labels, prob = result.partitions[i][0]
        assert prob == pytest.approx(max(wanted.partitions.values()), abs=1e-9)


# --- an independent route -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_evidence_is_the_mean_likelihood_under_the_prior(seed):
    """Importance sampling from the prior of the poses, with the match summed out by `marginal`."""
    parts = TYPED_PARTS
    this = functools.partial(constellation, parts=parts, precision=1.5)
    rng = np.random.default_rng(seed)
    scene = make_scene(rng.normal(size=(3 + seed, 2)) * 0.7, parts.num_parts)
    wanted = exact.run(this, scene).log_evidence

    @jax.jit
    @jax.vmap
    def log_likelihood(pose):
        sites = trace(substitute(marginal(this), {"pose": pose})).get_trace(**scene.observed)
        return sites["points"]["fn"].log_prob(jnp.asarray(scene.points))

    poses = jax.random.normal(jax.random.key(seed), (40_000, 2, 4))
    logs = np.asarray(log_likelihood(poses))
    weights = np.exp(logs - logs.max())
    estimate = logs.max() + np.log(weights.mean())
    error = weights.std() / weights.mean() / np.sqrt(len(weights))
    assert error < 0.03
    assert abs(estimate - wanted) < 5 * error


# --- what is refused ----------------------------------------------------------------------------


def test_a_scene_that_is_too_large_is_refused_with_its_cost():
    parts = stack(shapes(*["plane"] * 4))
    this = functools.partial(constellation, parts=parts)
    scene = make_scene(np.random.default_rng(0).normal(size=(24, 2)), parts.num_parts)
    with pytest.raises(InputError, match=r"24 points .* placements .* GiB.* use the variational"):
        exact.run(this, scene)


@pytest.mark.slow
def test_an_unknown_precision_is_integrated_over():
    """Against adaptive quadrature over the brute-force evidence at fixed precisions."""
    rng = np.random.default_rng(4)
    points, present = rng.normal(size=(5, 2)), np.arange(5) < 4
    points = np.where(present[:, None], points, 0.0)
    prior = scipy.stats.gamma(3.0, scale=1 / 0.5)

    def program(points=None, present=None):
        with numpyro.plate("object", 2):
            pose = numpyro.sample("pose", dist.MultivariateNormal(np.zeros(4), np.eye(4)))
        precision = numpyro.sample("precision", dist.Gamma(3.0, 0.5))
        match = numpyro.sample("match", PermutationMatch(np.zeros((5, 5))))
        likelihood = MatchedParts(match, pose, TYPED_PARTS, precision=precision, present=present)
        return numpyro.sample("points", likelihood, obs=points)

    def at(precision):
        problem = fixed_problem(points, present, TYPED_PARTS, precision, np.ones((5, 5)))
        return oracle_inference.posterior(problem)

    found = exact.run(program, Scene(points, present))
    evidence, _ = scipy.integrate.quad_vec(
        lambda t: prior.pdf(t) * np.exp(at(t).log_evidence) * np.array([1.0, t]), 1e-6, 60.0
    )
    np.testing.assert_allclose(found.log_evidence, np.log(evidence[0]), atol=1e-6)
    np.testing.assert_allclose(found.details["precision"], evidence[1] / evidence[0], rtol=1e-5)
    assert found.partitions[0][1] <= 1.0


def test_points_that_are_seen_in_part_are_refused():
    problem = make_problem(
        np.random.default_rng(0), DESIGNS["interleaved"], 4, missing_features=True
    )
    stacked = stack_problems([problem])
    with pytest.raises(InputError, match=r"seen whole or not at all, .* use the method ds"):
        exact.run(stacked.program, stacked.scenes)


def test_a_prior_that_is_not_normal_is_refused_by_name():
    def program(points=None, present=None):
        with numpyro.plate("object", 2):
            pose = numpyro.sample("pose", dist.StudentT(4.0).expand([4]).to_event(1))
        match = numpyro.sample("match", PermutationMatch(np.zeros((5, 5))))
        likelihood = MatchedParts(match, pose, TYPED_PARTS, present=present)
        return numpyro.sample("points", likelihood, obs=points)

    with pytest.raises(ConjugacyError, match=r"'pose': found a StudentT prior"):
        exact.run(program, make_scene([[0.0, 0.0]], 5))


# --- the scenes of the paper --------------------------------------------------------------------


@pytest.mark.slow
def test_scenes_without_noise_are_parsed_right():
    scenes = sample_scenes(40, seed=4)
    scenes = scenes.take(scenes.present.sum(axis=1) == 7)  # one size, one compilation
    result = exact.run(constellation, scenes)
    assert partition_metrics(scenes.object, result.labels)["scene_accuracy"].all()
    np.testing.assert_allclose(result.match_probs.sum(axis=1), 1, atol=1e-9)
    np.testing.assert_allclose(result.match_probs.sum(axis=2), 1, atol=1e-9)


@pytest.mark.slow
def test_the_published_scenes_without_noise_are_all_right(shared_data):
    scenes = load_scenes(shared_data / "constellations_0.00.npz", limit=512)
    result = exact.run(constellation, scenes)
    found = partition_metrics(scenes.object, result.labels)
    assert (found["sa"] == 1).all()
    assert (found["ari"] == 1).all()
    np.testing.assert_allclose(found["vi"], 0, atol=1e-12)
    assert (found["scene_accuracy"] == 1).all()


def test_a_prior_of_the_rows_stays_with_its_rows():
    """A match prior that is not uniform and a scene whose first row is a dummy."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(5, 5))
    logits[0] = 0.0

    def program(points=None, present=None):
        with numpyro.plate("object", 2):
            pose = numpyro.sample("pose", dist.MultivariateNormal(np.zeros(4), np.eye(4)))
        match = numpyro.sample("match", PermutationMatch(logits))
        likelihood = MatchedParts(match, pose, TYPED_PARTS, precision=20.0, present=present)
        return numpyro.sample("points", likelihood, obs=points)

    present = np.arange(5) > 0
    points = np.where(present[:, None], rng.normal(size=(5, 2)), 0.0)
    problem = fixed_problem(points, present, TYPED_PARTS, 20.0, np.exp(logits))
    result = exact.run(program, Scene(points, present))
    assert_is(result, oracle_inference.posterior(problem), problem)
