"""Which values of discrete sites are summed over, against sums written out in plain numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from inference.conditions.sets import possible_values, potential
from models.program.marginal import marginal
from tests import oracle
from tests import oracle_edits as right
from tests.inference.edited_programs import POSES, SCENE, assumed, matches, observed, poses

pytestmark = pytest.mark.long

BEYOND = 3.0  # of a standard Normal coordinate: no probe reaches it


def fenced(points=None, present=None, *, allowed):
    """A site whose second value is allowed at a few poses, at any, or at none."""
    pose, match = poses(), matches("permutation")
    kind = numpyro.sample("kind", dist.Categorical(jnp.asarray([0.6, 0.3, 0.1])))
    inside = {"at a few": pose[0, 0] > BEYOND, "nowhere": False}[allowed]
    numpyro.factor("fence", jnp.where((kind == 1) & ~jnp.asarray(inside), -jnp.inf, 0.0 * kind))
    return observed(match, pose, points, present)


FEW, NONE = (partial(fenced, allowed=allowed) for allowed in ("at a few", "nowhere"))


def test_a_value_that_no_draw_of_the_prior_allows_is_summed_over():
    """The first coordinate decides whether the second value counts, before and beyond the fence."""
    table = possible_values(FEW, SCENE)
    observed_of = {name: jnp.asarray(x) for name, x in SCENE.observed.items()}
    energy = jax.jit(lambda pose: potential(marginal(FEW), observed_of, table, {"pose": pose}))
    for first, share in ((POSES[0, 0], 0.7), (BEYOND + 0.1, 1.0)):
        pose = POSES.copy()
        pose[0, 0] = first

        def wanted(pose, share=share):
            return -right.log_density_given(assumed(), pose) - np.log(share)

        np.testing.assert_allclose(energy(pose), wanted(pose), rtol=1e-10)
        step = 1e-5 * np.eye(pose.size).reshape(-1, *pose.shape)
        slope = [(wanted(pose + x) - wanted(pose - x)) / 2e-5 for x in step]
        np.testing.assert_allclose(np.ravel(jax.grad(energy)(pose)), slope, rtol=1e-4, atol=1e-3)


def test_a_value_that_nothing_makes_possible_is_left_out():
    assert sorted(possible_values(NONE, SCENE)["kind"]) == [0, 2]


def test_the_first_value_is_possible_at_the_draws():
    assert possible_values(FEW, SCENE)["kind"].tolist() == [2, 0, 1]


def test_a_prior_that_forbids_every_match_has_a_density_of_zero():
    """Not NaN, 0/0, as it is one term of a sum."""
    logits = np.zeros((7, 7))
    logits[:2, 1:] = -np.inf  # two rows for one part
    program = partial(with_logits, logits=logits)
    observed_of = {name: jnp.asarray(x) for name, x in SCENE.observed.items()}
    energy = potential(marginal(program), observed_of, {}, {"pose": jnp.asarray(POSES)})
    assert oracle.log_permanent(logits) == -np.inf
    assert energy == np.inf


def with_logits(points=None, present=None, *, logits):
    return observed(matches("permutation", jnp.asarray(logits)), poses(), points, present)
