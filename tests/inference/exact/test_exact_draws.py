"""Independent draws of exact inference against the posterior that brute force lists.

Every comparison is a test of known level: z-scores under a Bonferroni bound, chi-square over
classes with enough expected draws, Kolmogorov-Smirnov for whole distributions. Seeds are fixed.
"""

import functools

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from inference import exact
from models.constellation import constellation
from models.distributions.likelihood import MatchedParts
from models.distributions.match import DoublyStochasticMatch
from models.distributions.match_priors import typed_probs
from models.errors import InputError
from models.scenes import Scene
from models.templates import shapes, stack
from tests import oracle_inference

pytestmark = pytest.mark.long

NUM_DRAWS = 4_000
LEVEL = 1e-3  # of each test, over all that it compares
PRECISION = 6.0  # low, so that many matches are probable
PARTS = stack([shapes("triangle")[0], np.array([[0.0, 1.0], [1.0, -1.0]])])
TYPES = np.array([0, 1, 0, 1, 0])

UNIFORM = functools.partial(constellation, parts=PARTS, precision=PRECISION)


def typed(points=None, present=None, point_type=None):
    """Points meet parts of their own type only."""
    with numpyro.plate("object", 2):
        pose = numpyro.sample("pose", dist.MultivariateNormal(np.zeros(4), np.eye(4)))
    prior = DoublyStochasticMatch(typed_probs(point_type, present, TYPES))
    match = numpyro.sample("match", prior)
    likelihood = MatchedParts(match, pose, PARTS, precision=PRECISION, present=present)
    return numpyro.sample("points", likelihood, obs=points)


def problem_of(scene):
    """The oracle's view of a scene."""
    if scene.point_type is None:
        probs = np.full((5, 5), 0.2)
    else:
        probs = np.asarray(typed_probs(scene.point_type, scene.present, TYPES))
    with np.errstate(divide="ignore"):
        return oracle_inference.Problem(
            scene.points,
            np.repeat(scene.present[:, None], 2, axis=1),
            np.asarray(PARTS.F),
            np.asarray(PARTS.offset),
            np.asarray(PARTS.variance) / PRECISION,
            np.asarray(PARTS.feature_mask),
            np.asarray(PARTS.owner),
            np.zeros((2, 4)),
            np.tile(np.eye(4), (2, 1, 1)),
            np.log(probs),
        )


def make(missing=(), point_type=None):
    present = np.ones(5, bool)
    present[list(missing)] = False
    points = np.random.default_rng(5).normal(size=(5, 2)) * 0.7
    return Scene(np.where(present[:, None], points, 0.0), present, point_type=point_type)


CASES = {
    "all points": (UNIFORM, make()),
    "dummies": (UNIFORM, make(missing=(0, 3))),
    "typed": (typed, make(missing=(1,), point_type=TYPES)),
}


@pytest.fixture(scope="module", params=CASES)
def drawn(request):
    """A scene as the oracle sees it, its posterior, and draws."""
    program, scene = CASES[request.param]
    problem = problem_of(scene)
    draws = exact.sample(program, scene, rng_key=jax.random.key(2), num_samples=NUM_DRAWS)
    return problem, oracle_inference.posterior(problem), draws


def assert_standard_normal(z):
    """None of these z-scores is too large, for as many as there are."""
    assert np.abs(z).max() < stats.norm.isf(LEVEL / 2 / np.size(z))


def assert_frequencies(counts, probs):
    """Chi-square of counts against probabilities, rare classes together."""
    order = np.argsort(-probs)
    counts, expected = counts[order], probs[order] * NUM_DRAWS
    common = max(1, int((expected >= 10).sum()))
    counts = np.append(counts[:common], counts[common:].sum())
    expected = np.append(expected[:common], expected[common:].sum())
    if expected[-1] < 10:  # too rare for a class of its own
        counts, expected = (np.append(x[:-2], x[-2] + x[-1]) for x in (counts, expected))
    assert len(counts) > 2
    assert stats.chisquare(counts, expected).pvalue > LEVEL


def test_draws_are_matches(drawn):
    problem, _, draws = drawn
    assert draws.match.shape == (NUM_DRAWS, 5)
    assert draws.pose.shape == (NUM_DRAWS, 2, 4)
    assert ((draws.match >= 0) == problem.present).all()
    for match in np.unique(draws.match[:, problem.present], axis=0):
        assert len(set(match)) == len(match)


def test_match_frequencies_are_the_marginals(drawn):
    problem, wanted, draws = drawn
    probs = wanted.match_probs[problem.present]
    found = (draws.match[:, problem.present, None] == np.arange(5)).mean(axis=0)
    impossible = probs < 1e-12
    assert (found[impossible] == 0).all()
    spread = np.sqrt(probs * (1 - probs) / NUM_DRAWS)
    assert_standard_normal((found - probs)[~impossible] / spread[~impossible])


def test_partitions_are_drawn_by_their_probability(drawn):
    """Whole groupings, so that points are not only right one by one."""
    problem, wanted, draws = drawn
    names = list(wanted.partitions)
    place = {name: i for i, name in enumerate(names)}
    labels = np.where(problem.present, problem.owner[draws.match], -1)
    counts = np.bincount(
        [place[oracle_inference.canonical(label)] for label in labels], minlength=len(names)
    )
    assert_frequencies(counts, np.array(list(wanted.partitions.values())))


def test_pose_moments(drawn):
    _, wanted, draws = drawn
    mean, covariance = wanted.pose_mean, wanted.pose_covariance
    spread = np.sqrt(np.diagonal(covariance, axis1=1, axis2=2) / NUM_DRAWS)
    assert_standard_normal((draws.pose.mean(axis=0) - mean) / spread)
    shift = draws.pose - mean
    products = shift[..., :, None] * shift[..., None, :]
    error = products.std(axis=0) / np.sqrt(NUM_DRAWS)
    assert_standard_normal((products.mean(axis=0) - covariance) / error)


def test_a_pose_goes_with_its_match(drawn):
    """Given its match a pose is Normal; its squared distance from the mean is chi-square."""
    problem, _, draws = drawn
    known = {}
    distances = np.zeros((NUM_DRAWS, 2))
    for i, (match, pose) in enumerate(zip(draws.match, draws.pose, strict=True)):
        for k in range(2):
            pairs = tuple((m, n) for m, n in enumerate(match) if n >= 0 and problem.owner[n] == k)
            if (k, pairs) not in known:
                _, mean, covariance = oracle_inference.object_posterior(problem, k, pairs)
                known[k, pairs] = (mean, np.linalg.inv(covariance))
            mean, precision = known[k, pairs]
            distances[i, k] = (pose[k] - mean) @ precision @ (pose[k] - mean)
    for of_object in distances.T:
        assert stats.kstest(of_object, stats.chi2(4).cdf).pvalue > LEVEL / 2


def test_draws_are_independent_of_each_other(drawn):
    """No correlation between a draw and the next: 1/sqrt(draws) is the spread of it."""
    _, _, draws = drawn
    pose = draws.pose.reshape(NUM_DRAWS, -1)
    scaled = (pose - pose.mean(axis=0)) / pose.std(axis=0)
    assert_standard_normal((scaled[1:] * scaled[:-1]).mean(axis=0) * np.sqrt(NUM_DRAWS - 1))


def test_the_key_decides():
    program, scene = CASES["dummies"]
    first, again, other = (
        exact.sample(program, scene, jax.random.key(seed), NUM_DRAWS) for seed in (2, 2, 3)
    )
    np.testing.assert_array_equal(first.pose, again.pose)
    assert (first.match != other.match).any()
    assert not np.intersect1d(first.pose, other.pose).size


def test_draws_of_a_batch_are_refused():
    with pytest.raises(InputError, match=r"require one scene, got a batch; use scene\.take\(i\)"):
        exact.sample(UNIFORM, CASES["dummies"][1].batch(), jax.random.key(0))
