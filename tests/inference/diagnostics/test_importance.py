"""Importance weights against exact evidence, and calibration that passes and fails as it should."""

import functools
import itertools

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from scipy.special import logsumexp

from inference import cavi, exact
from inference.diagnostics.calibration import Calibration, calibrate
from inference.diagnostics.importance import GOOD_K, importance, local_optima, symmetry, weigh
from inference.plots.calibration import plot_calibration, rank_excess, uniform_band
from inference.result import Result
from models.constellation import constellation
from models.errors import InputError
from models.scenes import Scene
from models.templates import shapes, stack
from tests import oracle
from tests.inference.two_triangles import PARTS, PROGRAM, SCENE, result_of, scene_at
from tests.oracle_inference import posterior
from tests.problems import DESIGNS, make_problem, stack_problems

pytestmark = pytest.mark.long

# --- evidence -----------------------------------------------------------------------------------

COUNT = 6
in_make_test_half_of_them = pytest.mark.parametrize(
    "count", [COUNT // 2, pytest.param(COUNT, marks=pytest.mark.slow)]
)


@functools.cache
def scenes():
    """Two whole triangles at random poses."""
    rng = np.random.default_rng(5)
    made = [scene_at(0.5 * rng.normal(size=(2, 4)), seed) for seed in range(COUNT)]
    return Scene(np.stack([s.points for s in made]), np.stack([s.present for s in made]))


@functools.cache
def exact_evidence():
    return exact.run(PROGRAM, scenes()).log_evidence


@in_make_test_half_of_them
def test_the_evidence_of_all_optima_is_the_exact_one_where_k_is_small(count):
    agreed = 0
    for i in range(count):
        optima = local_optima(PROGRAM, scenes().take(i), jax.random.key(0), num_restarts=128)
        found = importance(PROGRAM, optima, jax.random.key(0))
        if found.pareto_k < GOOD_K:
            error = abs(found.log_evidence - exact_evidence()[i])
            assert error < 5 * found.standard_error + 0.02, (i, found.status)
            agreed += 1
    assert agreed >= count - 1


@in_make_test_half_of_them
def test_q_alone_never_finds_more_than_there_is(count):
    """An unbiased estimate of a part of the evidence, above the ELBO."""
    for i in range(count):
        result = cavi.run(PROGRAM, scenes().take(i), jax.random.key(0), num_restarts=16)
        found = importance(PROGRAM, result, jax.random.key(0))
        assert found.log_evidence < exact_evidence()[i] + 5 * found.standard_error + 1e-6
        assert found.log_evidence > result.elbo - 5 * found.standard_error


@pytest.mark.slow
def test_the_evidence_of_one_q_is_the_exact_one_where_parts_are_missing():
    """Where q alone may miss most of it, and its weights look well."""
    blind = 0
    for num_points, seed in itertools.product((4, 5), (0, 3)):
        poses = 0.5 * np.random.default_rng(seed).normal(size=(2, 4))
        scene = scene_at(poses, seed, rows=range(6 - num_points, 6))
        expected = exact.run(PROGRAM, scene).log_evidence
        result = cavi.run(PROGRAM, scene, jax.random.key(0), num_restarts=16)
        found = importance(PROGRAM, result, jax.random.key(0))
        assert abs(found.log_evidence - expected) < 5 * found.standard_error, found.status
        assert found.standard_error < 0.05
        alone = importance(PROGRAM, result, jax.random.key(0), search=False)
        np.testing.assert_allclose(np.exp(alone.log_evidence - found.log_evidence), found.covered)
        missed = expected - alone.log_evidence > 5 * alone.standard_error
        blind += missed and alone.pareto_k < GOOD_K
    assert blind  # without the search some of these fail


def random_problems(design):
    """Few and many points, sharp and blurred, with and without a preference among matches."""
    rng = np.random.default_rng(0)
    choices = itertools.product((2, 3, 4, 5), (20.0, 1e3), ("uniform", "random"))
    return [
        make_problem(rng, DESIGNS[design], points, precision=precision, logits=logits)
        for points, precision, logits in choices
    ]


@pytest.mark.slow
@pytest.mark.parametrize("design", ["similarity", "six_parts", "translation"])
def test_the_evidence_of_many_random_scenes_is_that_of_brute_force(design):
    stacked = stack_problems(random_problems(design))
    scores = []
    for i, problem in enumerate(stacked.problems):
        result = cavi.run(
            stacked.program, stacked.scenes.take(i), jax.random.key(0), num_restarts=16
        )
        found = importance(stacked.program, result, jax.random.key(0))
        error = found.log_evidence - posterior(problem).log_evidence
        assert found.standard_error < 0.1, (i, found.status)
        scores.append(error / (found.standard_error + 1e-6))  # rounding, if q is exact
    assert np.abs(scores).max() < 5, scores
    assert np.std(scores) < 2, scores


def test_without_the_symmetry_the_evidence_lacks_log_two(monkeypatch):
    result = cavi.run(PROGRAM, SCENE, jax.random.key(0), num_restarts=16)
    right = importance(PROGRAM, result, jax.random.key(0), search=False)
    find = symmetry.find

    def identities(program, scene):
        group = find(program, scene)
        return group._replace(turns={(k, k): group.turns[k, k][:1] for k in range(2)})

    monkeypatch.setattr(symmetry, "find", identities)
    wrong = importance(PROGRAM, result, jax.random.key(0), search=False)
    assert wrong.pareto_k < GOOD_K  # nothing to be seen in the weights
    np.testing.assert_allclose(right.log_evidence - wrong.log_evidence, np.log(2), atol=0.02)


@pytest.mark.slow
def test_evidence_with_an_unknown_precision():
    """Against exact evidences of fixed precisions, integrated over the Gamma prior on a grid."""

    def fixed(points=None, present=None, point_type=None):
        return constellation(points, present, parts=PARTS, precision=grid[point_type[0]])

    def unknown(points=None, present=None):
        precision = numpyro.sample("precision", dist.Gamma(4.0, 4e-3))
        return constellation(points, present, parts=PARTS, precision=precision)

    log_precision = np.linspace(np.log(30), np.log(2e4), 60)
    grid = jax.numpy.exp(log_precision)
    same = SCENE.batch().take(np.zeros(60, int))
    types = np.repeat(np.arange(60)[:, None], 6, axis=1)
    evidence = exact.run(fixed, same._replace(point_type=types)).log_evidence
    prior = dist.Gamma(4.0, 4e-3).log_prob(grid) + log_precision  # per log precision
    expected = logsumexp(evidence + prior) + np.log(log_precision[1] - log_precision[0])
    found = importance(
        unknown, local_optima(unknown, SCENE, jax.random.key(0), num_restarts=64), jax.random.key(0)
    )
    assert found.pareto_k < GOOD_K
    assert abs(found.log_evidence - expected) < 5 * found.standard_error + 0.01


def test_weights_of_known_tails():
    """Of weights U^-k the tail index is k; equal weights have no tail at all."""
    uniform = np.random.default_rng(0).uniform(size=20_000)
    for k in (0.3, 0.9):
        found = weigh(-k * np.log(uniform))
        assert abs(found.pareto_k - k) < 0.1
    mild = weigh(-0.3 * np.log(uniform))
    assert abs(mild.log_evidence - np.log(1 / 0.7)) < 5 * mild.standard_error
    expected = (1 / 0.7) ** 2 / (1 / 0.4)  # E[w]^2 / E[w^2]
    np.testing.assert_allclose(mild.effective_draws / 20_000, expected, rtol=0.05)
    assert "can be relied on" in mild.status
    assert "cannot be relied on" in weigh(-0.9 * np.log(uniform)).status


def test_only_variational_results_have_weights():
    with pytest.raises(InputError, match="require a variational result, got one from 'exact'"):
        importance(PROGRAM, result_of("exact"), jax.random.key(0))


# --- calibration --------------------------------------------------------------------------------

ONE = stack(shapes("triangle"))
TRIANGLE = functools.partial(constellation, parts=ONE, precision=20.0)
PRESENT = np.ones(3, bool)


def brute_force(program, scene, rng_key, shrink=1.0, shift=0.0, count=99):
    """Draws of the exact posterior of one triangle: six matches, each with a Normal pose."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(rng_key)))
    F = np.asarray(ONE.F)
    columns = oracle.permutations(3)
    weights, means, covariances = [], [], []
    for part in columns:
        design, x = F[part].reshape(6, 4), scene.points.ravel()
        marginal = design @ design.T + np.eye(6) / 20.0
        weights.append(-0.5 * (x @ np.linalg.solve(marginal, x)))  # the determinant is the same
        covariances.append(np.linalg.inv(np.eye(4) + 20.0 * design.T @ design))
        means.append(covariances[-1] @ (20.0 * design.T @ x))
    probs = np.exp(np.array(weights) - logsumexp(weights))
    which = rng.choice(6, size=count, p=probs)
    factor = shrink * np.linalg.cholesky(covariances)[which]
    pose = np.array(means)[which] + np.einsum("npq,nq->np", factor, rng.normal(size=(count, 4)))
    pose += shift * np.sqrt(np.array(covariances)[which].diagonal(axis1=1, axis2=2))
    return Result(
        method="brute force",
        scene=scene,
        match_probs=np.eye(3),
        pose_mean=pose.mean(axis=0)[None],
        pose_covariance=np.cov(pose.T)[None],
        labels=np.zeros(3, int),
        owner=np.asarray(ONE.owner),
        converged=np.array(True),
        steps=np.array(1),
        draws={"pose": pose[None, :, None], "match": columns[which][None]},
    )


@functools.cache
def calibrated(num_scenes=300, **changes):
    method = functools.partial(brute_force, **changes)
    return calibrate(TRIANGLE, method, PRESENT, num_scenes=num_scenes, rng_key=jax.random.key(1))


@pytest.mark.slow
def test_exact_draws_are_calibrated():
    found = calibrated()
    assert found.ranks.shape == (300, 1, 4)
    assert found.ranks.min() >= 0
    assert found.ranks.max() <= 99
    assert found.p_values().min() > 0.01 / 4


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"shrink": 0.5}, {"shrink": 2.0}, {"shift": 0.5}])
def test_wrong_draws_are_not(changes):
    """Where the posterior has several matches, some dimensions show it and some do not."""
    assert calibrated(100, **changes).p_values().min() < 1e-6


def test_p_values_are_those_of_uniform_ranks():
    """Uniform ranks have uniform p-values, whether or not the bins divide the ranks."""
    rng = np.random.default_rng(4)
    for num_samples in (99, 96):
        ranks = rng.integers(0, num_samples + 1, size=(400, 50, 20))
        p = Calibration(ranks, num_samples).p_values()
        assert abs((p < 0.1).mean() - 0.1) < 0.04


def test_the_band_holds_most_uniform_curves_and_not_others():
    rng = np.random.default_rng(6)
    grid = np.linspace(0, 1, 51)
    band = uniform_band(200, grid)
    found = Calibration(rng.integers(0, 100, size=(200, 20, 20)), 99)
    outside = (np.abs(rank_excess(found, grid)) > band[:, None, None] + 1e-9).any(axis=0)
    assert 0.01 < outside.mean() < 0.10
    narrow = (
        np.abs(rank_excess(calibrated(100, shrink=0.5), grid))
        > uniform_band(100, grid)[:, None, None]
    )
    assert narrow.any(axis=0).sum() >= 2


@pytest.mark.slow
def test_the_plot_has_a_curve_for_each_method_in_each_panel():
    figure = plot_calibration(
        {"right": calibrated(), "narrow": calibrated(100, shrink=0.5)}, ["triangle"]
    )
    FigureCanvasAgg(figure).draw()
    assert len(figure.axes) == 4
    for panel in figure.axes:
        assert [line.get_label() for line in panel.lines[1:]] == ["right", "narrow"]
    assert figure.axes[0].get_ylabel().startswith("triangle")


@pytest.mark.slow
def test_a_batch_of_scenes_has_the_ranks_of_each_of_them():
    def run(program, scene, rng_key):
        return exact.run(program, scene)

    apart, together = (
        calibrate(TRIANGLE, run, PRESENT, jax.random.key(0), num_scenes=5, together=way)
        for way in (False, True)
    )
    np.testing.assert_array_equal(together.ranks, apart.ranks)
    assert len(np.unique(apart.ranks)) > 5


def test_a_scene_without_points_cannot_be_drawn():
    with pytest.raises(InputError, match="with at least one"):
        calibrate(TRIANGLE, brute_force, np.zeros(3, bool), jax.random.key(0))
