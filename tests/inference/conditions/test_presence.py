"""Programs with a presence site against brute force over presence vectors and injections.

The oracle follows the generative story: each object is there or not, a binomial number of the parts
of those that are there is seen, and the points are these parts in any order, all equally likely.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import numpy as np
import pytest

from inference import cavi, exact
from inference.conditions import listing
from models.constellation import presence_constellation, sized_constellation
from models.errors import InputError
from models.geometry import affine
from models.scenes import Scene, make_scene
from models.templates import shapes, stack
from tests import oracle
from tests.oracle_inference import Problem, canonical, object_posterior

pytestmark = pytest.mark.long

PRECISION = 20.0
EQUAL, UNLIKE = np.array([0.3, 0.3]), np.array([0.8, 0.3])
TRIANGLES = stack(shapes("triangle", "triangle"))
UNEQUAL = stack([shapes("triangle")[0], np.array([[0.0, 1.0], [1.0, -1.0]])])


def program_of(parts, visibility, presence_prob=EQUAL):
    return functools.partial(
        presence_constellation,
        parts=parts,
        visibility=visibility,
        precision=PRECISION,
        presence_prob=presence_prob,
    )


def scenes_of(parts, num_points, count, seed=0):
    """Random points in random rows."""
    rng = np.random.default_rng(seed)
    rows = parts.num_parts
    present = np.array([rng.permutation(rows) < num_points for _ in range(count)])
    points = 0.7 * rng.normal(size=(count, rows, 2))
    return Scene(np.where(present[..., None], points, 0.0), present)


class State(NamedTuple):
    """What an object that is absent (the first) or present in some way is like."""

    prob: float
    mean: np.ndarray
    covariance: np.ndarray
    variance: float


def plain_states(prob):
    """Of `presence_constellation`: there or not."""
    return [State(x, np.zeros(4), np.eye(4), 1 / PRECISION) for x in (1 - prob, prob)]


def sized_states():
    """Of `sized_constellation` with the noise and the sizes that the case has, by quadrature."""
    kinds = []
    nodes, weights = np.polynomial.legendre.leggauss(24)
    for size, (low, high) in itertools.product((0.5, 1.5), ((-np.pi / 2, 0), (0, np.pi / 2))):
        angles = low + (high - low) * (nodes + 1) / 2
        circle = np.stack([np.cos(angles), np.sin(angles)])
        mean, covariance = np.zeros(4), np.zeros((4, 4))
        mean[:2], mean[2:] = 0.064 / size - 0.57, size * circle @ weights / 2
        covariance[:2, :2] = np.eye(2) * (0.064 / size) ** 2 / 3
        second = (size**2 + 0.037**2) * (circle * weights) @ circle.T / 2
        covariance[2:, 2:] = second - np.outer(mean[2:], mean[2:])
        kinds.append(State(0.075, mean, covariance, (0.2 * size) ** 2))
    return [kinds[0]._replace(prob=0.7), *kinds]


def brute_force(scene, parts, visibility, states):
    """Evidence, marginals, pose moments, partitions and presence of one scene, all listed."""
    K = parts.num_objects
    owner = np.asarray(parts.owner)
    rows = np.flatnonzero(scene.present)
    M = len(rows)
    terms = []  # log weight, presence, the part of each point, pose means and covariances
    for flags in itertools.product(range(len(states[0])), repeat=K):
        there = [n for n in range(len(owner)) if flags[owner[n]]]
        chosen = [states[k][flag] for k, flag in enumerate(flags)]
        problem = Problem(
            scene.points,
            np.repeat(scene.present[:, None], 2, axis=1),
            np.asarray(parts.F),
            np.asarray(parts.offset),
            np.array([[chosen[k].variance] * 2 for k in owner]),
            np.asarray(parts.feature_mask),
            owner,
            np.array([state.mean for state in chosen]),
            np.array([state.covariance for state in chosen]),
            np.zeros((len(owner), len(owner))),
        )
        chance = math.prod(state.prob for state in chosen)
        missed = len(there) - M
        if missed < 0 or (visibility == 1 and missed > 0):
            continue
        chance *= math.comb(len(there), M) * visibility**M * (1 - visibility) ** missed
        chance /= math.perm(len(there), M)
        for columns in itertools.permutations(there, M):
            matched = [
                object_posterior(
                    problem,
                    k,
                    tuple((m, n) for m, n in zip(rows, columns, strict=True) if owner[n] == k),
                )
                for k in range(K)
            ]
            log_weight = math.log(chance) + sum(density for density, _, _ in matched)
            means = np.array([mean for _, mean, _ in matched])
            covariances = np.array([covariance for _, _, covariance in matched])
            terms.append((log_weight, flags, columns, means, covariances))
    log_weight = np.array([term[0] for term in terms])
    evidence = oracle.log_sum(log_weight)
    probs = np.exp(log_weight - evidence)
    means, covariances = (np.array([term[i] for term in terms]) for i in (3, 4))
    mean = np.einsum("c,ckp->kp", probs, means)
    second = np.einsum("c,ckpq->kpq", probs, covariances + means[..., None] * means[..., None, :])
    match_probs = np.zeros((M, len(owner)))
    partitions: dict[tuple[int, ...], float] = {}
    for prob, (_, _, columns, _, _) in zip(probs, terms, strict=True):
        match_probs[np.arange(M), columns] += prob
        labels = np.full(len(owner), -1)
        labels[rows] = owner[list(columns)]
        partitions[canonical(labels)] = partitions.get(canonical(labels), 0.0) + prob
    return {
        "log_evidence": evidence,
        "match_probs": match_probs,
        "pose_mean": mean,
        "pose_covariance": second - mean[:, :, None] * mean[:, None, :],
        "partitions": partitions,
        "presence": np.einsum("c,ck->k", probs, np.array([term[1] for term in terms]) > 0),
    }


sized = functools.partial(
    sized_constellation,
    parts=TRIANGLES,
    presence_prob=0.3,
    sizes=(0.5, 1.5),
    noise=0.2,
    relative_precision=1.0,
)


def plain_case(parts, visibility, num_points, presence_prob):
    states = [plain_states(prob) for prob in presence_prob]
    return program_of(parts, visibility, presence_prob), parts, visibility, num_points, states


CASES = {
    "two triangles, all parts seen": plain_case(TRIANGLES, 1.0, 3, EQUAL),
    "two triangles, some parts seen": plain_case(TRIANGLES, 0.7, 3, EQUAL),
    "two triangles, one more often there": plain_case(TRIANGLES, 0.7, 3, UNLIKE),
    "unequal, all parts seen": plain_case(UNEQUAL, 1.0, 5, EQUAL),
    "unequal, some parts seen": plain_case(UNEQUAL, 0.7, 4, UNLIKE),
    "small or large, all parts seen": (sized, TRIANGLES, 1.0, 3, [sized_states()] * 2),
    "small or large, some parts seen": (
        functools.partial(sized, visibility=0.7),
        TRIANGLES,
        0.7,
        3,
        [sized_states()] * 2,
    ),
}


SLOW = {
    "small or large, all parts seen",
    "unequal, all parts seen",
    "unequal, some parts seen",
    "small or large, some parts seen",
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES],
)
def solved(request):
    """A program, its result on some scenes, and what brute force says of each."""
    program, parts, visibility, num_points, states = CASES[request.param]
    scenes = scenes_of(parts, num_points, 4)
    wanted = [brute_force(scenes.take(i), parts, visibility, states) for i in range(4)]
    return program, exact.run(program, scenes), wanted


def test_evidence_marginals_and_moments(solved):
    _, result, wanted = solved
    for i, truth in enumerate(wanted):
        found = result.take(i)
        np.testing.assert_allclose(found.log_evidence, truth["log_evidence"], rtol=1e-9)
        np.testing.assert_allclose(
            found.match_probs[found.scene.present], truth["match_probs"], atol=1e-9
        )
        np.testing.assert_allclose(found.match_probs.sum(axis=0), 1, atol=1e-9)
        np.testing.assert_allclose(found.details["presence"], truth["presence"], atol=1e-9)
        np.testing.assert_allclose(found.pose_mean, truth["pose_mean"], atol=1e-9)
        np.testing.assert_allclose(found.pose_covariance, truth["pose_covariance"], atol=1e-9)


def test_partitions(solved):
    _, result, wanted = solved
    for i, truth in enumerate(wanted):
        listed = result.partitions[i]
        ranks = sorted(truth["partitions"].values(), reverse=True)
        np.testing.assert_allclose([prob for _, prob in listed], ranks[: len(listed)], atol=1e-9)
        for labels, prob in listed:
            assert prob == pytest.approx(truth["partitions"][canonical(labels)], abs=1e-9)
        assert result.labels[i].tolist() == listed[0][0].tolist()
        assert ((result.labels[i] >= 0) == result.scene.present[i]).all()


@pytest.mark.parametrize(
    "case",
    [
        "two triangles, some parts seen",
        pytest.param("unequal, some parts seen", marks=pytest.mark.slow),
        pytest.param("small or large, some parts seen", marks=pytest.mark.slow),
    ],
)
def test_the_elbo_is_a_lower_bound(case):
    """The sum over sets of lower bounds is one, and close where the scene is clear."""
    program, parts, visibility, num_points, states = CASES[case]
    scenes = scenes_of(parts, num_points, 4)
    bound = cavi.run(program, scenes, jax.random.key(0), num_restarts=4)
    evidence = np.array(
        [brute_force(scenes.take(i), parts, visibility, states)["log_evidence"] for i in range(4)]
    )
    assert bound.elbo is not None
    gap = evidence - bound.elbo
    assert (gap > 0).all()
    assert (gap < 10).all()
    assert (bound.details["presence"] > 0).all()
    assert (bound.details["presence"] < 1 + 1e-9).all()


def test_a_scene_that_no_set_explains():
    """Four points, but a triangle and a pair have 2, 3 or 5 parts and all of them are seen."""
    scene = make_scene(np.zeros((4, 2)), 5)
    with pytest.raises(InputError, match=r"no match explains a scene of 4 points .* visibility"):
        exact.run(program_of(UNEQUAL, 1.0), scene)


def test_too_many_objects_are_refused():
    parts = stack([[[0.0, 0.0], [1.0, 0.0]]] * 13)
    assert listing.MAX_VALUES == 2**12
    scene = make_scene(np.zeros((2, 2)), parts.num_parts)
    with pytest.raises(InputError, match=r"sites presence have 8,192 joint values, .* method ds"):
        exact.run(program_of(parts, 0.5, presence_prob=0.5), scene)


def test_other_poses_than_similarities_have_no_size():
    parts = stack(shapes("triangle"), design=affine)
    with pytest.raises(InputError, match="similarity poses of 4 numbers, got 6"):
        exact.run(
            functools.partial(sized_constellation, parts=parts), make_scene(np.eye(3)[:, :2], 3)
        )
