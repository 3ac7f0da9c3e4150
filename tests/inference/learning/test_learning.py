"""Learning: the slope of the M-step against that of exact inference, and that EM goes uphill."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints

from inference.exact.permutations import make_plan, sum_over_matches
from inference.exact.solutions import ordered
from inference.learning.expectation import expect
from inference.learning.maximisation import Objective
from inference.learning.params import at, params_of
from models import MatchedParts, PermutationMatch, make_scene, presence_constellation
from models.numerics.permanent import log_permanent
from models.program.batches import skeleton_of
from models.program.reading import read
from models.scenes import join
from models.templates import normalise, stack

KEY = jax.random.key(0)
TRIANGLE = np.array([[1.0, 2.0], [3.0, 1.0], [3.0, 3.0]])
SEGMENT = np.array([[0.0, -1.0], [0.3, 1.0]])
PARTS = stack([normalise(TRIANGLE), normalise(SEGMENT)])
CLUTTERED = stack([normalise(TRIANGLE), normalise(SEGMENT)], clutter=1)


def with_precision(points=None, present=None):
    precision = numpyro.param("precision", 20.0, constraint=constraints.positive)
    simple(points, present, precision=precision)


def with_pose_prior(points=None, present=None):
    mean = numpyro.param("mean", jnp.array([0.1, -0.2, 0.3, 0.2]))
    covariance = numpyro.param(
        "covariance", 0.5 * jnp.eye(4) + 0.1, constraint=constraints.positive_definite
    )
    simple(points, present, pose_prior=dist.MultivariateNormal(mean, covariance))


def with_match_weights(points=None, present=None):
    logits = numpyro.param("logits", jnp.linspace(-1.0, 1.0, 25).reshape(5, 5) ** 2)
    logits = jnp.where(jnp.arange(5)[:, None] < 4, logits, 0.0)
    simple(points, present, logits=logits)


def with_templates(points=None, present=None):
    triangle = numpyro.param("triangle", TRIANGLE + 0.1)
    segment = numpyro.param("segment", SEGMENT - 0.2)
    simple(points, present, parts=stack([normalise(triangle), normalise(segment)]))


def with_presence(points=None, present=None):
    presence = numpyro.param("presence_prob", 0.4, constraint=constraints.unit_interval)
    visibility = numpyro.param("visibility", 0.7, constraint=constraints.unit_interval)
    presence_constellation(
        points,
        present,
        presence_prob=presence,
        visibility=visibility,
        precision=20.0,
        parts=PARTS,
    )


def with_clutter(points=None, present=None):
    clutter = numpyro.param("clutter_prob", 0.4, constraint=constraints.unit_interval)
    presence_constellation(
        points, present, visibility=0.7, clutter_prob=clutter, precision=20.0, parts=CLUTTERED
    )


def simple(points, present, precision=20.0, pose_prior=None, logits=None, parts=PARTS):
    standard = dist.MultivariateNormal(jnp.zeros(4), jnp.eye(4))
    with numpyro.plate("object", 2):
        pose = numpyro.sample("pose", standard if pose_prior is None else pose_prior)
    logits = jnp.zeros((5, 5)) if logits is None else logits
    match = numpyro.sample("match", PermutationMatch(logits))
    likelihood = MatchedParts(match, pose, parts, precision=precision, present=present)
    numpyro.sample("points", likelihood, obs=points)


PROGRAMS = [
    with_precision,
    with_pose_prior,
    with_match_weights,
    with_templates,
    with_presence,
    with_clutter,
]


def scenes_for(program, count=6):
    """Under presence few points, so that several sets of objects explain them."""
    num_parts = 6 if program is with_clutter else 5
    num_points = 2 if program in (with_presence, with_clutter) else 4
    rng = np.random.default_rng(7)
    return join(
        [make_scene(rng.normal(size=(num_points, 2)), num_parts=num_parts) for _ in range(count)]
    )


def log_evidence(program, params, scene, flat):
    """By exact inference's sums, straight through, in a form that JAX can differentiate."""
    sets = [{}]
    if program in (with_presence, with_clutter):
        sets = [{"presence": np.array(x)} for x in ((1, 0), (0, 1), (1, 1))]
    terms = []
    num_points = int(scene.present.sum())
    for given in sets:
        concrete = read(at(program, params.start), scene, given)
        plan = make_plan(skeleton_of(jax.tree.map(np.asarray, concrete)), num_points)
        model = read(at(program, params.values(flat)), scene, given)
        wide = jax.tree.map(lambda x: jnp.asarray(x)[..., None], model)
        wide, _, _ = ordered(wide, plan, np.arange(len(scene.points))[None])
        value = sum_over_matches(wide, plan).evidence[0]
        value += math.lgamma(len(scene.points) - num_points + 1)
        terms.append(value + model.log_constant - log_permanent(model.match_logits))
    return logsumexp(jnp.stack(terms))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_the_slope_of_the_m_step_is_that_of_the_evidence(program):
    """Fisher's identity, for each kind of parameter."""
    scenes = scenes_for(program, count=2)
    params = params_of(program, scenes.take(0))
    flat = params.flat(params.start) + 0.05
    expected = expect(at(program, params.values(flat)), scenes, "exact", KEY)
    objective = Objective.of(
        program, params, scenes.take(0), jax.tree.map(lambda x: x[0], expected.given)
    )
    found = objective.scores(scenes, expected, flat)
    for s in range(2):
        evidence = functools.partial(log_evidence, program, params, scenes.take(s))
        value, slope = jax.jit(jax.value_and_grad(evidence))(flat)
        assert expected.value[s] == pytest.approx(float(value), rel=1e-9)
        np.testing.assert_allclose(found[s], slope, rtol=1e-7, atol=1e-7)
    assert np.isfinite(found).all() and np.abs(found).max() > 0.01
