"""Exact inference under a mixture prior against brute force over all assignments."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from scipy import stats

from inference import cavi, exact
from models.constellation import mixture_constellation, published_mixture
from models.errors import InputError
from models.scenes import make_scene
from models.templates import shapes, stack
from tests import oracle
from tests.oracle_inference import canonical, object_posterior
from tests.problems import DESIGNS, make_problem, stack_problems

pytestmark = pytest.mark.long


class Truth(NamedTuple):
    log_evidence: float
    match_probs: np.ndarray
    pose_mean: np.ndarray
    pose_covariance: np.ndarray
    partitions: dict[tuple[int, ...], float]
    best: np.ndarray


def brute_force(problem):
    """Every point with every part, each assignment's poses as explicit Gaussian marginals."""
    rows = np.flatnonzero(problem.present)
    log_prior = problem.match_logits - np.logaddexp.reduce(
        problem.match_logits, axis=1, keepdims=True
    )
    columns = oracle.assignments(len(rows), len(problem.owner))
    log_weight = oracle.scores(log_prior[rows], columns)
    columns, log_weight = columns[log_weight > -np.inf], log_weight[log_weight > -np.inf]
    K, p = problem.prior_mean.shape
    means, covariances = np.zeros((len(columns), K, p)), np.zeros((len(columns), K, p, p))
    for i, match in enumerate(columns):
        for k in range(K):
            pairs = tuple((m, n) for m, n in zip(rows, match, strict=True) if problem.owner[n] == k)
            density, means[i, k], covariances[i, k] = object_posterior(problem, k, pairs)
            log_weight[i] += density
    evidence = oracle.log_sum(log_weight)
    probs = np.exp(log_weight - evidence)
    mean = np.einsum("c,ckp->kp", probs, means)
    second = np.einsum("c,ckpq->kpq", probs, covariances + means[..., None] * means[..., None, :])
    match_probs = np.exp(log_prior)
    match_probs[rows] = np.einsum("c,cmn->mn", probs, np.eye(len(problem.owner))[columns])
    partitions: dict[tuple[int, ...], float] = {}
    for match, prob in zip(columns, probs, strict=True):
        labels = np.full(len(problem.owner), -1)
        labels[rows] = problem.owner[match]
        partitions[canonical(labels)] = partitions.get(canonical(labels), 0.0) + prob
    covariance = second - mean[:, :, None] * mean[:, None, :]
    best = np.full(len(problem.owner), -1)
    best[rows] = columns[log_weight.argmax()]
    return Truth(evidence, match_probs, mean, covariance, partitions, best)


def random_problems(name, sizes, count=8):
    rng = np.random.default_rng(0)
    kinds = ("uniform", "random", "typed")
    return [
        make_problem(
            rng,
            DESIGNS[name],
            sizes[i % len(sizes)],
            logits=kinds[i % 3],
            precision=float(10 ** rng.uniform(-1, 2)),
        )
        for i in range(count)
    ]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("similarity", (4, 2)), marks=pytest.mark.slow),
        ("interleaved", (3,)),
    ],
    ids=str,
)
def solved(request):
    """Random programs of a design, their exact results and the brute-force ones."""
    stacked = stack_problems(random_problems(*request.param), "mixture")
    result = exact.run(stacked.program, stacked.scenes)
    return stacked, result, [brute_force(problem) for problem in stacked.problems]


def test_equal_to_brute_force(solved):
    _, result, wanted = solved
    for i, truth in enumerate(wanted):
        found = result.take(i)
        np.testing.assert_allclose(found.log_evidence, truth.log_evidence, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found.match_probs, truth.match_probs, atol=1e-9)
        np.testing.assert_allclose(found.pose_mean, truth.pose_mean, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(
            found.pose_covariance, truth.pose_covariance, rtol=1e-9, atol=1e-9
        )
        np.testing.assert_array_equal(found.best_match, truth.best)


def test_partitions(solved):
    _, result, wanted = solved
    for i, truth in enumerate(wanted):
        listed = result.partitions[i]
        ranks = sorted(truth.partitions.values(), reverse=True)[: len(listed)]
        np.testing.assert_allclose([prob for _, prob in listed], ranks, atol=1e-9)
        for labels, prob in listed:
            assert prob == pytest.approx(truth.partitions[canonical(labels)], abs=1e-9)
        assert result.labels[i].tolist() == listed[0][0].tolist()


def test_the_elbo_of_the_mixture_is_below_the_evidence(solved):
    stacked, result, _ = solved
    bound = cavi.run(stacked.program, stacked.scenes, jax.random.key(0), num_restarts=4)
    assert (result.log_evidence - bound.elbo > -1e-9).all()


def test_draws():
    """Frequencies and pose moments within a Bonferroni bound of level 1e-3."""
    problem = random_problems("similarity", (3,), count=2)[1]
    stacked = stack_problems([problem], "mixture")
    truth = brute_force(problem)
    count = 4_000
    draws = exact.sample(
        stacked.program, stacked.scenes.take(0), rng_key=jax.random.key(1), num_samples=count
    )
    rows = np.flatnonzero(problem.present)
    probs = truth.match_probs[rows]
    found = (draws.match[:, rows, None] == np.arange(5)).mean(axis=0)
    spread = np.sqrt(np.maximum(probs * (1 - probs), 1 / count) / count)
    z = np.ravel((found - probs) / spread)
    mean_spread = np.sqrt(np.diagonal(truth.pose_covariance, axis1=1, axis2=2) / count)
    z = np.append(z, (draws.pose.mean(axis=0) - truth.pose_mean) / mean_spread)
    shift = draws.pose - truth.pose_mean
    products = shift[..., :, None] * shift[..., None, :]
    error = products.std(axis=0) / np.sqrt(count)
    z = np.append(z, (products.mean(axis=0) - truth.pose_covariance) / error)
    assert np.abs(z).max() < stats.norm.isf(1e-3 / 2 / len(z))
    assert (draws.match[:, ~problem.present] == -1).all()
    shared = [len(set(match)) < len(match) for match in draws.match[:, rows]]
    assert any(shared)  # two points on one part, which no permutation has


def test_too_many_assignments_are_refused_with_their_number():
    parts = stack(shapes("square", "triangle", "square"))
    program = functools.partial(mixture_constellation, parts=parts)
    scene = make_scene(np.random.default_rng(0).normal(size=(11, 2)), 11)
    with pytest.raises(InputError, match=r"11\^11 assignments.* 48,828,125 terms.*GiB.*\(gmm\)"):
        exact.run(program, scene)


def test_unknown_part_probabilities_are_refused():
    sentence = r"site 'part_probs' is a Dirichlet .*\(gmm, gibbs, svi\)"
    with pytest.raises(InputError, match=sentence):
        exact.run(published_mixture, make_scene([[0.0, 0.0]], 11))
