"""Exact inference at every precision of the noise against Normal densities with 60 digits."""

import decimal
import functools
import itertools
import math
from decimal import Decimal
from typing import NamedTuple

import jax
import numpy as np
import pytest

from inference import exact
from inference.diagnostics.readout import poses_given_match
from models.errors import InputError
from tests import oracle, oracle_inference
from tests.problems import DESIGNS, make_problem, single, stack_problems

pytestmark = pytest.mark.long

PRECISIONS = (1e-2, 1.0, 1e2, 1e4, 1e6, 1e8, 1e10)
POSE_SCALES = (1e-3, 1.0, 1e3)
TOLERANCE = 1e-6  # of the log evidence, relative where it is large

# --- the oracle ---------------------------------------------------------------------------------


class Given(NamedTuple):
    """One object, given the points that it has."""

    log_density: float
    mean: np.ndarray
    covariance: np.ndarray


def object_posterior(problem, k, pairs, digits=60):
    """N(x; F mu_0 + m, F D_0 F' + D) and the pose given x, with so many decimal digits.

    The matrix [[F D_0 F' + D, F D_0], [D_0 F', D_0]] is eliminated from the top left.
    """
    with decimal.localcontext(prec=digits):
        mean, prior = exactly(problem.prior_mean[k]), exactly(problem.prior_covariance[k])
        rows = [(m, n, j) for m, n in pairs for j in np.flatnonzero(problem.feature_mask[n])]
        F = exactly([problem.F[n, j] for _, n, j in rows]).reshape(len(rows), len(mean))
        x = exactly([problem.points[m, j] for m, _, j in rows])
        offset = exactly([problem.offset[n, j] for _, n, j in rows])
        noise = exactly([problem.variance[n, j] for _, n, j in rows])
        residual = x - F @ mean - offset
        pushed = F @ prior
        table = np.block(
            [[pushed @ F.T + noise * np.eye(len(x), dtype=int), pushed], [pushed.T, prior]]
        )
        right = np.concatenate([residual, np.zeros(len(mean), int) * Decimal(0)])
        log_density = -len(x) * (2 * Decimal(math.pi)).ln() / 2
        for i in range(len(x)):
            pivot, row, value = table[i, i], table[i].copy(), right[i]
            log_density -= (value**2 / pivot + pivot.ln()) / 2
            right[i + 1 :] -= table[i + 1 :, i] * (value / pivot)
            table[i + 1 :] -= table[i + 1 :, i : i + 1] * (row / pivot)
        shift, covariance = -right[len(x) :], table[len(x) :, len(x) :]
        return Given(float(log_density), (mean + shift).astype(float), covariance.astype(float))


def exactly(values):
    """Floats as decimal numbers, exactly."""
    array = np.asarray(values, float)
    return np.array([Decimal(x) for x in array.ravel().tolist()], object).reshape(array.shape)


class Truth(NamedTuple):
    log_evidence: float
    match_probs: np.ndarray
    pose_mean: np.ndarray
    pose_covariance: np.ndarray


def brute_force(problem, family):
    """The sum over all matches of the points."""
    rows = np.flatnonzero(problem.present)
    num_parts = len(problem.owner)
    log_prior = problem.match_logits
    if family == "mixture":
        log_prior = log_prior - np.logaddexp.reduce(log_prior, axis=1, keepdims=True)
        matches = np.array(list(itertools.product(range(num_parts), repeat=len(rows))))
        prior = oracle.scores(log_prior[rows], matches)
    else:
        full = np.array(list(itertools.permutations(range(num_parts))))
        weight = oracle.scores(log_prior, full)
        matches, first = np.unique(full[:, rows], axis=0, return_index=True)
        prior = weight[first] + math.lgamma(num_parts - len(rows) + 1) - oracle.log_sum(weight)
    matches, weight = matches[prior > -np.inf], prior[prior > -np.inf]
    known = {}
    objects = []
    for i, match in enumerate(matches):
        pairs = [(m, n) for m, n in zip(rows.tolist(), match.tolist(), strict=True)]
        of = [
            (k, tuple(pair for pair in pairs if problem.owner[pair[1]] == k))
            for k in range(problem.num_objects)
        ]
        for name in of:
            if name not in known:
                known[name] = object_posterior(problem, *name)
            weight[i] += known[name].log_density
        objects.append([known[name] for name in of])
    evidence = oracle.log_sum(weight)
    probs = np.exp(weight - evidence)
    means = np.array([[given.mean for given in of] for of in objects])
    within = np.array([[given.covariance for given in of] for of in objects])
    mean = np.einsum("c,ckp->kp", probs, means)
    apart = means - mean
    covariance = np.einsum("c,ckpq->kpq", probs, within + apart[..., None] * apart[..., None, :])
    match_probs = np.einsum("c,cmn->mn", probs, np.eye(num_parts)[matches])
    return Truth(evidence, match_probs, mean, covariance)


@pytest.mark.parametrize("precision", [10.0, 1e10])
def test_the_oracle_has_digits_to_spare(precision):
    """Twice the digits change nothing, and where floats suffice numpy has the same."""
    rng = np.random.default_rng(0)
    problem = make_problem(rng, DESIGNS["similarity"], 3, precision=precision)
    pairs = ((0, 2), (1, 0), (2, 1))
    found = object_posterior(problem, 0, pairs)
    for values, more in zip(found, object_posterior(problem, 0, pairs, 120), strict=True):
        np.testing.assert_array_equal(values, more)
    if precision == 10.0:
        plain = oracle_inference.object_posterior(problem, 0, pairs)
        for values, floats in zip(found, plain, strict=True):
            np.testing.assert_allclose(values, floats, rtol=1e-10)


# --- the sums -----------------------------------------------------------------------------------


def every_precision(name, sizes):
    """Scenes at every precision and scale of the poses: one that fits the program, one of noise."""
    rng = np.random.default_rng(0)
    kinds = itertools.cycle(("uniform", "random", "typed"))
    settings = [*itertools.product(PRECISIONS, POSE_SCALES), (1e12, 1e-3), (1e12, 1.0)]
    for size, (precision, scale), fits in itertools.product(sizes, settings, (True, False)):
        problem = make_problem(
            rng, DESIGNS[name], size, logits=next(kinds), precision=precision, pose_scale=scale
        )
        noise = np.where(problem.seen, rng.normal(size=problem.points.shape), 0.0)
        yield problem if fits else problem._replace(points=noise)


@pytest.mark.parametrize(
    ("name", "family", "sizes"),
    [
        ("one_object", "permutation", (2,)),
        pytest.param("one_object", "permutation", (1, 3), marks=pytest.mark.slow),
        pytest.param("similarity", "permutation", (4,), marks=pytest.mark.slow),
        ("interleaved", "mixture", (3,)),
    ],
)
def test_the_posterior_is_right_at_every_precision(name, family, sizes):
    problems = list(every_precision(name, sizes))
    stacked = stack_problems(problems, family)
    result = exact.run(stacked.program, stacked.scenes)
    for i, problem in enumerate(problems):
        truth, found = brute_force(problem, family), result.take(i)
        assert found.log_evidence == pytest.approx(truth.log_evidence, rel=TOLERANCE, abs=TOLERANCE)
        rows = found.match_probs[problem.present]
        np.testing.assert_allclose(rows, truth.match_probs, atol=1e-6)
        assert_moments(
            found.pose_mean, found.pose_covariance, truth.pose_mean, truth.pose_covariance
        )


def assert_moments(mean, covariance, true_mean, true_covariance):
    """Right in units of the posterior, and covariances that are ones."""
    deviation = np.sqrt(np.diagonal(true_covariance, axis1=1, axis2=2))
    np.testing.assert_allclose(mean / deviation, true_mean / deviation, rtol=1e-9, atol=1e-3)
    units = deviation[:, :, None] * deviation[:, None]
    np.testing.assert_allclose(covariance / units, true_covariance / units, atol=1e-5)
    np.testing.assert_array_equal(covariance, covariance.swapaxes(1, 2))
    np.linalg.cholesky(covariance)  # raises where one is not positive definite


# --- draws, and poses given a match -------------------------------------------------------------


def precise(pose_scale=1.0, precision=1e10):
    """One point on an object of three parts, seen with nearly no noise."""
    rng = np.random.default_rng(1)
    options = {"logits": "uniform", "precision": precision, "pose_scale": pose_scale}
    return make_problem(rng, DESIGNS["one_object"], 1, **options)


@pytest.mark.parametrize("pose_scale", POSE_SCALES)
def test_poses_given_a_match_are_right_at_high_precision(pose_scale):
    problem = precise(pose_scale)
    program, scene = single(problem)
    result = exact.run(program, scene)
    match = result.best_match
    mean, covariance = poses_given_match(program, result, match)
    truth = object_posterior(problem, 0, ((0, match[0]),))
    assert_moments(mean, covariance, truth.mean[None], truth.covariance[None])


def test_draws_put_the_point_where_it_is():
    """The pose is free in two directions, and in the other two as certain as the point."""
    problem = precise()
    program, scene = single(problem)
    draws = exact.sample(program, scene, jax.random.key(0), num_samples=4000)
    parts = draws.match[:, 0]
    predicted = np.einsum("idp,ip->id", problem.F[parts], draws.pose[:, 0]) + problem.offset[parts]
    z = (problem.points[0] - predicted) / np.sqrt(problem.variance[parts])
    assert np.mean(z**2) == pytest.approx(1.0, abs=5 * np.sqrt(2 / z.size))
    truth = brute_force(problem, "permutation")
    deviation = np.sqrt(np.diagonal(truth.pose_covariance[0]))
    np.testing.assert_allclose(draws.pose[:, 0].std(axis=0), deviation, rtol=0.15)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [exact.run, functools.partial(exact.sample, rng_key=jax.random.key(0))],
    ids=["run", "sample"],
)
def test_more_digits_than_a_float_has_are_refused(method):
    program, scene = single(precise(pose_scale=1e6, precision=1e12))
    pattern = r"got numbers of .*e\+1\d standard deviations .* within 1e\+10 .* lower the precision"
    with pytest.raises(InputError, match=pattern):
        method(program, scene)
