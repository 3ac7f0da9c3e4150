"""InferenceData: one contract for every method, and the numbers in it against brute force."""

import functools

import arviz as az
import jax
import matplotlib as mpl
import numpy as np
import pytest

from inference import exact
from inference.diagnostics.to_arviz import coordinates, to_arviz
from inference.posterior.arviz_api import summary
from inference.posterior.densities import log_likelihood_by_point
from inference.result import Result
from models.constellation import constellation
from models.errors import InputError
from models.scenes import Scene
from models.templates import shapes, stack
from tests import oracle
from tests.inference.two_triangles import (
    FIVE,
    METHODS,
    PARTS,
    PRECISION,
    PROGRAM,
    program_of,
    result_of,
)

pytestmark = pytest.mark.long

mpl.use("Agg")
OBJECTS = ["triangle 1", "triangle 2"]
ARVIZ_ON_NEW_LIBRARIES = pytest.mark.filterwarnings(
    "ignore:Passing a dict or None as alias_mapping", "ignore:The inplace keyword in DataFrame"
)
LARGE_K = pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto")
"""Leaving out one of five points changes a posterior a lot, and ArviZ says so."""
GROUPS = {
    "posterior",
    "log_likelihood",
    "observed_data",
    "constant_data",
    "prior",
    "prior_predictive",
    "posterior_predictive",
    "sample_stats",
}


@functools.cache
def converted(method):
    return to_arviz(
        result_of(method), program_of(method), jax.random.key(0), num_samples=100, match=True
    )


SLOW = set(METHODS) - {"exact"}  # each compiles for a while


def maybe_slow(*methods):
    return [pytest.param(m, marks=[pytest.mark.slow] if m in SLOW else []) for m in methods]


@pytest.fixture(params=maybe_slow(*METHODS))
def data(request):
    return converted(request.param)


def test_groups_dimensions_and_coordinates(data):
    assert set(data.groups()) == GROUPS
    assert data.posterior.pose.dims == ("chain", "draw", "object", "pose_dim")
    assert data.posterior.match.dims == ("chain", "draw", "point", "part")
    assert data.posterior.sizes["chain"] == 4
    assert data.log_likelihood.points.dims == ("chain", "draw", "point")
    assert data.observed_data.points.dims == ("point", "feature")
    for group in ("prior_predictive", "posterior_predictive"):
        assert data[group].points.dims == ("chain", "draw", "point", "feature")
    assert data.prior.pose.dims == data.posterior.pose.dims
    assert data.sample_stats.lp.dims == ("chain", "draw")
    assert data.posterior.object.values.tolist() == OBJECTS
    assert data.posterior.part.values.tolist() == [
        f"triangle {k}, part {i}" for k in (1, 2) for i in range(3)
    ]
    assert data.posterior.point.values.tolist() == list(range(5))  # the points that are there
    assert data.constant_data.owner.values.tolist() == np.repeat(OBJECTS, 3).tolist()


def test_values_are_those_of_the_scene_and_of_matches(data):
    np.testing.assert_array_equal(data.observed_data.points, FIVE.points[:5])
    match = data.posterior.match.values
    assert set(np.unique(match)) <= {0, 1}
    assert (match.sum(axis=-1) == 1).all()
    if data.posterior.attrs["method"] != "gmm":
        assert match.sum(axis=-2).max() == 1
    for group in data.groups():
        for name, variable in data[group].data_vars.items():
            if variable.dtype.kind == "f":
                assert np.isfinite(variable).all(), (group, name)


def test_points_drawn_anew_are_near_the_points_and_those_of_the_prior_are_not(data):
    if data.posterior.attrs["method"] == "gmm":
        return  # free to give two points one part, it need not explain them
    spread = (data.posterior_predictive.points - data.observed_data.points).std()
    assert 0.5 < spread * np.sqrt(PRECISION) < 3
    assert data.prior_predictive.points.std() > 0.8  # var = 1 + mean square of a part = 2


def test_netcdf_round_trip(data, tmp_path):
    path = tmp_path / "result.nc"
    data.to_netcdf(str(path))
    again = az.from_netcdf(str(path))
    assert set(again.groups()) == GROUPS
    for group in GROUPS:
        assert again[group].equals(data[group]), group
    assert again.posterior.attrs["method"] == data.posterior.attrs["method"]


@ARVIZ_ON_NEW_LIBRARIES
@LARGE_K
def test_arviz_takes_it(data):
    summary = az.summary(data, var_names=["pose"])
    assert len(summary) == 8
    assert summary.index[0] == "pose[triangle 1, t_x]"
    loo = az.loo(data, pointwise=True)
    assert loo.n_data_points == 5
    assert np.isfinite(loo.elpd_loo)
    for plot in (az.plot_trace, az.plot_forest, az.plot_rank):
        axes = plot(data, var_names=["pose"])
        assert np.size(axes) >= 1
        mpl.pyplot.close("all")


@ARVIZ_ON_NEW_LIBRARIES
def test_a_summary_of_everything_raises_no_warning():
    """Warnings are errors here; ArviZ alone divides zero by zero for a match that is certain."""
    data = converted("exact")
    with pytest.warns(RuntimeWarning, match="invalid value"):
        az.summary(data)
    table = summary(data)
    constant = table.index.str.startswith("match") & (table["sd"] == 0)
    assert constant.any()
    assert table.loc[constant, "r_hat"].isna().all()
    assert table.loc[~constant, "r_hat"].notna().all()
    assert set(table.index.str.split("[").str[0]) == {"pose", "match"}
    pose = summary(data, var_names=["pose"])
    assert pose.equals(az.summary(data, var_names=["pose"]))


@pytest.mark.parametrize("method", maybe_slow("ds", "exact"))
def test_independent_draws_are_shown_as_such(method):
    summary = az.summary(converted(method), var_names=["pose"])
    assert (summary.r_hat < 1.06).all()
    assert (summary.ess_bulk > 200).all()


# --- numbers ------------------------------------------------------------------------------------


def log_likelihoods(pose):
    """Of each point as each part, zero in dummy rows, in plain numpy."""
    F, owner = np.asarray(PARTS.F), np.asarray(PARTS.owner)
    predicted = np.einsum("ndp,np->nd", F, pose[owner])
    squares = ((FIVE.points[:, None] - predicted) ** 2).sum(axis=-1)
    table = -0.5 * PRECISION * squares - np.log(2 * np.pi / PRECISION)
    return np.where(FIVE.present[:, None], table, 0.0)


@pytest.mark.parametrize("method", maybe_slow("ds", "exact", "nuts", "gmm"))
def test_density_of_a_point_given_the_others(method):
    """By a sum over all 720 permutations, with and without the likelihood of that point."""
    data = converted(method)
    listed = oracle.assignments(6, 6) if method == "gmm" else oracle.permutations(6)
    for draw in range(0, 100, 33):
        pose = data.posterior.pose.values[1, draw]
        table = log_likelihoods(pose)
        whole = oracle.log_normaliser(table, listed)
        for m in range(5):
            without = table.copy()
            without[m] = 0.0
            expected = whole - oracle.log_normaliser(without, listed)
            found = data.log_likelihood.points.values[1, draw, m]
            np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)
        if method == "gmm":
            continue
        prior = -0.5 * (pose**2).sum() - 4 * np.log(2 * np.pi)
        lp = prior + whole - np.log(len(listed))
        np.testing.assert_allclose(data.sample_stats.lp.values[1, draw], lp, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [0, 3])
def test_the_mean_density_of_a_point_left_out_is_the_ratio_of_exact_evidences(left_out):
    """E[p(x_m | others, pose)] over the posterior without point m is p(all) / p(others)."""
    without = Scene(FIVE.points, FIVE.present & (np.arange(6) != left_out))
    draws = exact.sample(PROGRAM, without, jax.random.key(0), 40_000)
    by_point = log_likelihood_by_point(PROGRAM, FIVE, {"pose": draws.pose})
    density = np.exp(by_point[:, left_out])
    expected = np.exp(result_of("exact").log_evidence - exact.run(PROGRAM, without).log_evidence)
    error = density.std() / np.sqrt(len(density))
    assert error < 0.2 * expected
    assert abs(density.mean() - expected) < 5 * error


OVERCONFIDENT = functools.partial(constellation, parts=PARTS, precision=1e6)
"""Noise that is far too small for the scene."""


@pytest.mark.slow
@ARVIZ_ON_NEW_LIBRARIES
@LARGE_K
@pytest.mark.parametrize("method", ["exact", "ds"])
def test_compare_ranks_priors_as_the_exact_evidence_does(method):
    evidence = {
        "narrow": exact.run(OVERCONFIDENT, FIVE).log_evidence,
        "true": result_of("exact").log_evidence,
    }
    assert evidence["true"] > evidence["narrow"] + 10
    result = METHODS[method](OVERCONFIDENT)
    narrow = to_arviz(result, OVERCONFIDENT, jax.random.key(0), num_samples=100, predictive=False)
    ranked = az.compare({"narrow": narrow, "true": converted(method)})
    assert ranked.index.tolist() == ["true", "narrow"]
    assert ranked.elpd_diff["narrow"] > 10
    assert ranked.elpd_diff["narrow"] > 2 * ranked.dse["narrow"]


# --- what is refused ----------------------------------------------------------------------------


def test_names_have_to_fit():
    present = np.ones(6, bool)
    assert coordinates(PARTS, present, ["left", "right"])["object"] == ["left", "right"]
    assert coordinates(stack([[[0, 0], [1, 2]]]), present)["object"] == ["object"]
    assert coordinates(stack(shapes("square", "L")), present)["object"] == ["square", "L"]
    with pytest.raises(InputError, match="2 different names, one for each object"):
        coordinates(PARTS, present, ["one", "one"])


def test_a_result_without_a_distribution_is_refused():
    base = result_of("exact")
    fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
    bare = Result(**{**fields, "method": "ransac", "log_evidence": None, "details": {}})
    with pytest.raises(InputError, match="'ransac' has neither draws nor a distribution"):
        to_arviz(bare, PROGRAM, jax.random.key(0))


def test_without_predictions_the_rest_is_the_same():
    whole = converted("exact")
    less = to_arviz(
        result_of("exact"),
        program_of("exact"),
        jax.random.key(0),
        num_samples=100,
        predictive=False,
        match=True,
    )
    left_out = {"prior", "prior_predictive", "posterior_predictive"}
    assert set(less.groups()) == GROUPS - left_out
    for group in less.groups():
        assert less[group].equals(whole[group])
