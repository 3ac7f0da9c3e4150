"""The normaliser of the match prior, against brute force over all permutations."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from inference.conditions import problem
from models.distributions.likelihood import MatchedParts
from models.distributions.match import DoublyStochasticMatch, MixtureMatch, PermutationMatch
from models.distributions.match_priors import typed_probs
from models.program.batches import read_scenes
from models.scenes import Scene
from models.templates import stack
from tests import oracle

PARTS = stack([[[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], [[0.0, 1.0], [1.0, 3.0], [2.0, 0.0]]])
N = PARTS.num_parts
TYPES = np.array([0, 1, 2, 0, 1, 2])


def program_with(prior, parts=PARTS):
    """A program whose match prior is a function of the types and of which rows are points."""

    def program(points=None, present=None, point_type=None):
        with numpyro.plate("object", parts.num_objects):
            pose = numpyro.sample("pose", dist.Normal(0, 1).expand([4]).to_event(1))
        match = numpyro.sample("match", prior(point_type, present))
        likelihood = MatchedParts(match, pose, parts, present=present)
        return numpyro.sample("points", likelihood, obs=points)

    return program


def scenes_with(present, types=None):
    present = np.asarray(present, bool)
    types = None if types is None else np.broadcast_to(types, present.shape)
    return Scene(np.zeros((*present.shape, 2)), present, point_type=types)


def log_prior_normalizer(program, scenes, **options):
    return problem.log_prior_normalizer(read_scenes(program, scenes), scenes.present, **options)


SOME = np.array([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 0]], bool)


@pytest.mark.parametrize("forbidden", [0.0, 0.4])
def test_the_same_prior_for_every_scene(forbidden):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(N, N))
    logits[rng.uniform(size=(N, N)) < forbidden] = -np.inf
    np.fill_diagonal(logits, 0.5)
    program = program_with(lambda kinds, present: PermutationMatch(logits))
    found = log_prior_normalizer(program, scenes_with(SOME))
    np.testing.assert_allclose(found, oracle.log_permanent(logits), rtol=1e-12)


def test_a_typed_prior_falls_into_groups():
    program = program_with(
        lambda kinds, present: DoublyStochasticMatch(typed_probs(kinds, present, TYPES))
    )
    found = log_prior_normalizer(program, scenes_with(SOME, TYPES))
    with np.errstate(divide="ignore"):
        wanted = [
            oracle.log_permanent(np.log(np.asarray(typed_probs(TYPES, present, TYPES))))
            for present in SOME
        ]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_uniform_prior_of_any_size():
    sizes = (4, 40)
    for size in sizes:
        parts = stack([np.random.default_rng(0).normal(size=(size, 2))])
        probs = np.full((size, size), 1 / size)
        program = program_with(
            lambda kinds, present, probs=probs: DoublyStochasticMatch(probs), parts
        )
        found = log_prior_normalizer(program, scenes_with(np.ones((1, size))))
        np.testing.assert_allclose(found, oracle.log_van_der_waerden(size), rtol=1e-12)


def test_a_permanent_out_of_reach_has_a_bound():
    size = 24
    parts = stack([np.random.default_rng(0).normal(size=(size, 2))])
    blocks = np.kron(np.eye(2), np.ones((12, 12)))
    logits = np.log(blocks + 1e-3)  # all one group, and its permanent nearly that of two blocks
    program = program_with(lambda kinds, present: PermutationMatch(logits), parts)
    scenes = scenes_with(np.ones((1, size)))
    assert np.isnan(log_prior_normalizer(program, scenes)).all()
    known = 2 * sum(np.log(np.arange(1, 13)))
    assert log_prior_normalizer(program, scenes, or_bound=True)[0] >= known
    with np.errstate(divide="ignore"):
        apart = program_with(lambda kinds, present: PermutationMatch(np.log(blocks)), parts)
        np.testing.assert_allclose(log_prior_normalizer(apart, scenes), known, rtol=1e-12)


def test_a_mixture_has_the_sums_of_its_rows():
    logits = np.random.default_rng(2).normal(size=(N, N))
    program = program_with(lambda kinds, present: MixtureMatch(logits))
    wanted = np.log(np.exp(logits).sum(axis=1)).sum()
    np.testing.assert_allclose(log_prior_normalizer(program, scenes_with(SOME)), wanted, rtol=1e-12)
