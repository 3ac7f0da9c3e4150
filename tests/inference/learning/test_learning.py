"""Learning: the slope of the M-step against that of exact inference, and that EM goes uphill."""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints

from inference import exact
from inference.exact.permutations import make_plan, sum_over_matches
from inference.exact.solutions import ordered
from inference.learning import learn
from inference.learning.expectation import expect, join_expectations
from inference.learning.information import observed_information, standard_errors
from inference.learning.maximisation import Objective
from inference.learning.params import Params, at, params_of
from models import MatchedParts, PermutationMatch, make_scene, presence_constellation
from models.numerics.permanent import log_permanent
from models.program.batches import skeleton_of
from models.program.reading import read
from models.scenes import Scene, join
from models.templates import normalise, stack

pytestmark = pytest.mark.long

KEY = jax.random.key(0)
REAL_AND_POSITIVE = {"a": constraints.real, "b": constraints.positive}
TRIANGLE = np.array([[1.0, 2.0], [3.0, 1.0], [3.0, 3.0]])
SEGMENT = np.array([[0.0, -1.0], [0.3, 1.0]])
PARTS = stack([normalise(TRIANGLE), normalise(SEGMENT)])
TWINS = stack([normalise(TRIANGLE)] * 2)
CLUTTERED = stack([normalise(TRIANGLE), normalise(SEGMENT)], clutter=1)


def with_precision(points=None, present=None):
    simple(points, present, numpyro.param("precision", 20.0, constraint=constraints.positive))


def with_templates(points=None, present=None):
    triangle = numpyro.param("triangle", TRIANGLE + 0.1)
    segment = numpyro.param("segment", SEGMENT - 0.2)
    simple(points, present, parts=stack([normalise(triangle), normalise(segment)]))


def with_four(points=None, present=None):
    """Templates, the pose prior, the match prior and the noise are open."""
    triangle = numpyro.param("triangle", TRIANGLE + 0.1)
    mean = numpyro.param("mean", jnp.array([0.1, -0.2, 0.3, 0.2]))
    covariance = numpyro.param(
        "covariance", 0.5 * jnp.eye(4) + 0.1, constraint=constraints.positive_definite
    )
    logits = numpyro.param("logits", jnp.linspace(-1.0, 1.0, 25).reshape(5, 5) ** 2)
    simple(
        points,
        present,
        numpyro.param("precision", 20.0, constraint=constraints.positive),
        dist.MultivariateNormal(mean, covariance),
        jnp.where(jnp.arange(5)[:, None] < 4, logits, 0.0),
        stack([normalise(triangle), normalise(SEGMENT)]),
    )


def with_presence(points=None, present=None):
    """Which objects are there, which parts are seen, and how much is clutter are open."""
    names = ("presence_prob", "visibility", "clutter_prob")
    starts = zip(names, (0.4, 0.7, 0.3), strict=True)
    probs = {n: numpyro.param(n, x, constraint=constraints.unit_interval) for n, x in starts}
    presence_constellation(points, present, precision=20.0, parts=CLUTTERED, **probs)


def with_twins(points=None, present=None):
    """Identical objects with numbers of their own, which begin alike."""
    prob = numpyro.param("of_twins", jnp.full(2, 0.4), constraint=constraints.unit_interval)
    presence_constellation(
        points, present, presence_prob=prob, visibility=0.7, precision=20.0, parts=TWINS
    )


def simple(points, present, precision=20.0, pose_prior=None, logits=None, parts=PARTS):
    standard = dist.MultivariateNormal(jnp.zeros(4), jnp.eye(4))
    with numpyro.plate("object", 2):
        pose = numpyro.sample("pose", standard if pose_prior is None else pose_prior)
    logits = jnp.zeros((5, 5)) if logits is None else logits
    match = numpyro.sample("match", PermutationMatch(logits))
    likelihood = MatchedParts(match, pose, parts, precision=precision, present=present)
    numpyro.sample("points", likelihood, obs=points)


def scenes_for(program, count=6):
    """Under presence few points, so that several sets of objects explain them."""
    num_points, num_parts = (2, 6) if program in (with_presence, with_twins) else (4, 5)
    rng = np.random.default_rng(7)
    return join(
        [make_scene(rng.normal(size=(num_points, 2)), num_parts=num_parts) for _ in range(count)]
    )


def log_evidence(program, params, scene):
    """A function of the parameters: exact inference's sums, straight through, and their slope."""
    sets = [{}]
    if program in (with_presence, with_twins):
        sets = [{"presence": np.array(x)} for x in ((1, 0), (0, 1), (1, 1))]
    num_points = int(scene.present.sum())
    skeletons = [skeleton_of(read(at(program, params.start), scene, given)) for given in sets]
    plans = [make_plan(skeleton, num_points) for skeleton in skeletons]

    def of_params(flat, observed, sets):
        terms = []
        for given, plan in zip(sets, plans, strict=True):
            model = read(at(program, params.values(flat)), Scene(**observed), given)
            wide = jax.tree.map(lambda x: jnp.asarray(x)[..., None], model)
            wide, _, _ = ordered(wide, plan, np.arange(len(scene.points))[None])
            value = sum_over_matches(wide, plan).evidence[0]
            value += math.lgamma(len(scene.points) - num_points + 1)
            terms.append(value + model.log_constant - log_permanent(model.match_logits))
        return logsumexp(jnp.stack(terms))

    return functools.partial(
        jax.jit(jax.value_and_grad(of_params)), observed=scene.observed, sets=sets
    )


@functools.cache
def two_ways(program):
    """Functions of the parameters: value and slope by the E-step, and through exact inference."""
    scene = scenes_for(program, count=1)
    params = params_of(program, scene.take(0))
    start = params.flat(params.start) + 0.05
    first = expect(at(program, params.values(start)), scene, "exact", KEY)
    objective = Objective.of(program, params, scene.take(0), first.first_given())

    def by_e_step(flat, last=None):
        expected = expect(at(program, params.values(flat)), scene, "exact", KEY, last)
        return expected.value[0], objective.scores(scene, expected, flat)

    again = functools.partial(by_e_step, last=first)
    return params, start, by_e_step, again, log_evidence(program, params, scene.take(0))


@functools.cache
def slopes(program):
    """By the M-step and through exact inference, by parameter."""
    params, flat, by_e_step, _, straight = two_ways(program)
    found_value, (found,) = by_e_step(flat)
    value, wanted = straight(flat)
    assert found_value == pytest.approx(float(value), rel=1e-9)
    names = np.array(params.names())
    return {name: (found[names == name], wanted[names == name]) for name in params.start}


@pytest.mark.parametrize(
    "program, name",
    [(with_four, n) for n in ("precision", "mean", "covariance", "logits", "triangle")]
    + [
        pytest.param(with_presence, n, marks=pytest.mark.slow)
        for n in ("presence_prob", "visibility", "clutter_prob")
    ]
    + [(with_twins, "of_twins")],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_the_slope_of_the_m_step_is_that_of_the_evidence(program, name):
    """Fisher's identity, for each kind of parameter."""
    found, wanted = slopes(program)[name]
    assert np.isfinite(found).all() and np.abs(found).max() > 1e-4
    np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-7)


def test_the_information_is_the_curvature_of_the_evidence():
    """Differences of E-steps against differences of slopes through exact inference."""
    _, flat, _, again, straight = two_ways(with_twins)
    every, step = np.arange(len(flat)), 1e-5
    found = observed_information(flat, lambda x: again(x)[1], np.full(len(flat), 1e-3), every)
    ends = flat + step * np.stack([np.eye(len(flat)), -np.eye(len(flat))])
    up, down = (np.stack([straight(x)[1] for x in end]) for end in ends)
    np.testing.assert_allclose(found, (down - up) / (2 * step), rtol=1e-4, atol=1e-5)


def test_standard_errors_leave_out_what_nothing_informs():
    """Of a Normal mean and its size: two numbers that only their sum matters of."""
    params = Params({"a": np.zeros(()), "b": np.ones(())}, REAL_AND_POSITIVE, {"a": 1, "b": 1})
    points = np.random.default_rng(0).normal(size=50)

    def scores(flat):
        return (points - flat.sum())[:, None] * np.ones(2)

    errors = standard_errors(params, np.array([0.1, -0.1]), scores)
    # a direction of length sqrt(2) is known to 1/sqrt(50) in the sum, half of it in each
    assert errors["a"] == pytest.approx(0.5 / np.sqrt(50))
    assert errors["b"] == pytest.approx(0.5 / np.sqrt(50) * np.exp(-0.1))


def test_a_parameter_at_a_saddle_has_no_standard_error_and_others_have():
    """Of a mean, and of a number whose log evidence curves up."""
    params = Params({"a": np.zeros(()), "b": np.ones(())}, REAL_AND_POSITIVE, {"a": 1, "b": 1})
    points = np.random.default_rng(0).normal(size=50)

    def scores(flat):
        return np.stack([points - flat[0], points + flat[1]], axis=1)

    errors = standard_errors(params, np.array([0.1, -0.1]), scores)
    assert errors["a"] == pytest.approx(1 / np.sqrt(50))
    assert np.isnan(errors["b"])


def with_all(points=None, present=None):
    """Two objects, some absent, with every number of the model open."""
    precision = numpyro.param("precision", 20.0, constraint=constraints.positive)
    mean = numpyro.param("mean", jnp.zeros(4))
    covariance = numpyro.param("covariance", jnp.eye(4), constraint=constraints.positive_definite)
    prob = numpyro.param("presence_prob", 0.5, constraint=constraints.unit_interval)
    presence_constellation(
        points,
        present,
        presence_prob=prob,
        visibility=0.8,
        precision=precision,
        parts=PARTS,
        pose_prior=dist.MultivariateNormal(mean, covariance),
    )


@functools.cache
def some_scenes(count=24):
    """Of triangles and segments with parts missing, of three to five points."""
    rng = np.random.default_rng(3)
    scenes = []
    while len(scenes) < count:
        pose = rng.normal([0.2, -0.1, 0.3, 0.0], 0.2, size=(2, 4))
        where = np.asarray(PARTS.predict(jnp.asarray(pose))) + 0.05 * rng.normal(size=(5, 2))
        here = np.asarray(PARTS.owner)[:, None] == np.flatnonzero(rng.random(2) < 0.7)
        kept = here.any(axis=1) & (rng.random(5) < 0.8)
        if kept.sum() >= 3:
            scenes.append(make_scene(rng.permutation(where[kept]), num_parts=5))
    return join(scenes)


@functools.cache
def learnt(e_step, num_steps=6):
    return learn(with_all, some_scenes(), KEY, e_step=e_step, num_steps=num_steps, tolerance=0.0)


def test_with_exact_e_steps_the_evidence_never_falls():
    learned = learnt("exact")
    assert (np.diff(learned.objective) >= -1e-9).all()
    assert learned.objective[-1] > learned.objective[0] + 1


@pytest.mark.slow
def test_every_method_takes_the_learnt_program():
    learned = learnt("exact")
    result = exact.run(learned.program, some_scenes())
    assert result.log_evidence.mean() == pytest.approx(learned.objective[-1], rel=1e-12)
    assert learned.history["precision"][-1] == learned.params["precision"]


@pytest.mark.slow
def test_rounds_that_are_done_are_not_done_again():
    kept = []
    learned = learn(
        with_all, some_scenes(), KEY, e_step="ds", num_steps=3, tolerance=0.0, keep=kept.append
    )
    again = learn(
        with_all, some_scenes(), KEY, e_step="ds", num_steps=3, tolerance=0.0, begin=kept[1]
    )
    assert len(kept) == 3 and len(kept[1].objective) == 2
    for name, values in learned.history.items():
        np.testing.assert_array_equal(again.history[name], values)


@pytest.mark.slow
def test_batches_are_put_together():
    """The E-steps of two halves are that of the whole, and two M-steps a round get further."""
    halves = [some_scenes().take(x) for x in (slice(12), slice(12, 24))]
    joined = join_expectations([expect(with_all, x, "exact", KEY) for x in halves], halves)
    whole = expect(with_all, some_scenes(), "exact", KEY)
    for found, wanted in zip(jax.tree.leaves(joined), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
    settings = {"e_step": "exact", "num_steps": 2, "tolerance": 0.0}
    at_once, by_halves = (
        learn(with_precision, some_scenes(), KEY, batch_size=size, **settings)
        for size in (None, 12)
    )
    assert by_halves.objective[-1] > at_once.objective[-1]
    last = exact.run(by_halves.program, some_scenes()).log_evidence.mean()
    assert by_halves.objective[-1] == pytest.approx(last, rel=1e-12)


@pytest.mark.slow
def test_a_scene_goes_on_from_its_last_match():
    """Coordinate ascent in the same runs goes uphill, and at new numbers ends where a search does.

    Not always: some scenes have several optima.
    """
    first = expect(with_all, some_scenes(), "ds", KEY)
    again = expect(with_all, some_scenes(), "ds", KEY, first)
    assert (again.scene == first.scene).all()
    np.testing.assert_allclose(np.bincount(again.scene, again.weight), 1.0, rtol=1e-12)
    assert (again.value >= first.value - 1e-6).all()
    near = at(with_all, {"precision": 15.0})
    moved, searched = (expect(near, some_scenes(), "ds", KEY, last) for last in (first, None))
    assert np.median(np.abs(moved.value - searched.value)) < 1e-3
    assert (moved.value > searched.value - 1).all()


@pytest.mark.slow
def test_a_bound_is_below_the_evidence():
    right = exact.run(with_all, some_scenes()).log_evidence
    for e_step in ("map", "ds"):
        assert (expect(with_all, some_scenes(), e_step, KEY).value <= right + 1e-6).all()


@pytest.mark.slow
def test_held_out_scenes_are_not_learnt_from():
    whole = learn(with_all, some_scenes(), KEY, e_step="exact", num_steps=1, holdout=0.25)
    alone = learn(with_all, some_scenes().take(slice(18)), KEY, e_step="exact", num_steps=1)
    assert whole.num_scenes == 18 and whole.params["precision"] == alone.params["precision"]
    right = exact.run(whole.program, some_scenes().take(slice(18, None))).log_evidence
    assert whole.holdout[-1] == pytest.approx(right.mean(), rel=1e-12)


def test_the_witness_is_called_once_for_all_rounds(monkeypatch):
    calls = []
    monkeypatch.setattr("models.program.batches.testify", lambda *problem: calls.append(problem))
    scenes = scenes_for(with_precision)
    learned = learn(with_precision, scenes, KEY, e_step="exact", num_steps=3, tolerance=0.0)
    assert len(learned.objective) == 4 and len(calls) == 1


def far_off(points=None, present=None):
    simple(points, present, numpyro.param("precision", 2e3, constraint=constraints.positive))


def test_an_m_step_that_comes_to_nothing_is_no_convergence(monkeypatch):
    """The objective stays as it is then, far from where its slope vanishes."""

    scenes = scenes_for(far_off)
    settings = {"e_step": "exact", "tolerance": 1e-3}
    assert learn(far_off, scenes, KEY, **settings).converged
    monkeypatch.setattr(Objective, "maximise", lambda self, scenes, expected, flat: flat)
    assert not learn(far_off, scenes, KEY, **settings, num_steps=3).converged


def test_a_search_that_finds_less_does_not_keep_learning_from_its_end(monkeypatch):
    """Rounds that go on from the last one may have better parses than a search."""
    whole, searches = expect, []

    def worse_if_searched(program, scenes, e_step, rng_key, last=None, **options):
        found = whole(program, scenes, "exact", rng_key)
        if last is None:
            searches.append(found.value.mean())
        return found._replace(value=found.value - (0.01 if last is None else 0.0))

    monkeypatch.setattr(sys.modules[learn.__module__], "expect", worse_if_searched)
    learned = learn(far_off, scenes_for(far_off), KEY, e_step="ds", tolerance=1e-3)
    assert learned.converged
    assert searches[-1] == pytest.approx(searches[-2], abs=1e-2)
