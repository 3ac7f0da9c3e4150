"""NUTS with tempering against brute force, on scenes with several modes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import log_density
from scipy.stats import gamma

from inference import nuts, tempering
from models.errors import InputError
from models.likelihood import MatchedParts
from models.marginal import marginal, tempered
from models.match import PermutationMatch
from models.scenes import Scene
from models.templates import Parts
from tests import oracle
from tests.agreement import assert_means, assert_posterior
from tests.oracle_inference import posterior
from tests.problems import DESIGNS, make_problem, stack_problems

pytestmark = pytest.mark.long

TWO = 0.1
"""Weight that two partitions have at least in a scene of several modes."""


def several_modes(design, num_points, precision, count):
    """Random scenes by the first seeds, from 0, with two partitions of weight above 0.1.

    No template of a random problem is like another one or like itself turned, so no partition is
    the image of another one.
    """
    problems = (
        make_problem(np.random.default_rng(seed), DESIGNS[design], num_points, precision=precision)
        for seed in itertools.count()
    )
    return list(itertools.islice(filter(_is_mixed, problems), count))


def _is_mixed(problem):
    return sorted(posterior(problem).partitions.values())[-2:][0] > TWO


def assert_exact(result, exact):
    assert result.converged, result.details
    assert_posterior(result.draws, exact, result.scene.present)
    error = result.details["log_evidence_error"]
    assert 0 < error < 0.2
    assert abs(result.log_evidence - exact.log_evidence) < 5 * error
