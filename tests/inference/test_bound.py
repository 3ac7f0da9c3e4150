"""The ELBO is a lower bound on the log evidence, under random priors and extreme scales."""

import jax
import numpy as np
import pytest

from inference import cavi, exact
from tests.problems import DESIGNS, make_problem, stack_problems


def problems(count, seed):
    """Random programs of one structure: pose scales and noise over many orders of magnitude."""
    rng = np.random.default_rng(seed)
    design = DESIGNS["similarity"]
    found = []
    for _ in range(count):
        problem = make_problem(
            rng,
            design,
            4,
            logits=str(rng.choice(["uniform", "random"])),
            precision=10.0 ** rng.uniform(-2, 8),
            pose_scale=10.0 ** rng.uniform(-2, 2),
        )
        found.append(problem)
    return stack_problems(found, "permutation")


@pytest.mark.parametrize(
    "count",
    [pytest.param(200, marks=pytest.mark.long), pytest.param(10_000, marks=pytest.mark.slow)],
)
def test_the_bound_lies_below_the_evidence(count):
    stacked = problems(count, seed=count)
    evidence = exact.run(stacked.program, stacked.scenes).log_evidence
    bound = cavi.run(stacked.program, stacked.scenes, jax.random.key(0), num_restarts=2).elbo
    assert (bound <= evidence + 1e-9 * np.maximum(1.0, np.abs(evidence))).all()
    assert np.median(evidence - bound) < 20  # and says something
