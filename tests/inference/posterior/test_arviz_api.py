"""ArviZ 0.23 and 1.x give the same groups, names and numbers.

This file takes from ArviZ only what `inference.posterior.arviz_api` has, so it runs with either:
with 1.x in an environment that has arviz-base and arviz-stats in the place of arviz.
"""

import jax
import numpy as np
import pytest

from inference.diagnostics.to_arviz import to_arviz
from inference.posterior.arviz_api import Group, ess, make_data, mcse, pareto_k, rhat, summary
from tests.inference.two_triangles import PROGRAM, result_of

pytestmark = pytest.mark.long

CHAINS = np.random.default_rng(0).normal(size=(4, 250))


def test_statistics_of_independent_draws():
    """Each against its definition, in plain numpy."""
    assert mcse(CHAINS) == pytest.approx(CHAINS.std(ddof=1) / np.sqrt(1000), rel=0.1)
    assert ess(CHAINS) == pytest.approx(1000, rel=0.15)
    assert rhat(CHAINS) == pytest.approx(1, abs=0.01)
    assert rhat(CHAINS + np.arange(4)[:, None]) > 1.4


@pytest.mark.parametrize("shape", [0.2, 0.9])
def test_the_shape_of_a_tail(shape):
    """Weights with a Pareto tail of a known shape; the small ones do not matter."""
    weights = np.random.default_rng(0).uniform(size=20_000) ** -shape
    assert pareto_k(np.log(weights)) == pytest.approx(shape, abs=0.15)
    assert pareto_k(-np.log(weights)) < 0  # the large weights count, and these have a bound


def test_groups_and_coordinates():
    groups = {
        "posterior": Group(
            {"pose": CHAINS[..., None] * [1, 2]}, {"pose": ["pose_dim"]}, {"method": "none"}
        ),
        "observed_data": Group({"points": np.eye(2)}, {"points": ["point", "pose_dim"]}),
    }
    data = make_data(groups, {"pose_dim": ["t_x", "t_y"]})
    assert data["posterior"]["pose"].dims == ("chain", "draw", "pose_dim")
    assert data["posterior"].attrs["method"] == "none"
    assert data["posterior"]["pose"].sel(pose_dim="t_y").values == pytest.approx(2 * CHAINS)
    assert data["observed_data"]["points"].dims == ("point", "pose_dim")


def test_a_result():
    """The same groups and names with both, and one screen of a summary."""
    result = result_of("exact")
    options = {"num_samples": 50, "match": True}
    data = to_arviz(result, PROGRAM, jax.random.key(0), **options)
    found = to_arviz(result, PROGRAM, jax.random.key(0), num_samples=50)
    assert "match" not in found["posterior"] and "match" not in found["prior"]
    pose = found["posterior"]["pose"]
    assert pose.dims == ("chain", "draw", "object", "pose_dim")
    assert pose["pose_dim"].values.tolist() == ["t_x", "t_y", "s_cos", "s_sin"]
    assert found["log_likelihood"]["points"].dims == ("chain", "draw", "point")
    assert data["posterior"]["match"].dims == ("chain", "draw", "point", "part")
    assert (data["posterior"]["match"].sum("part") == 1).all()
    np.testing.assert_array_equal(pose, data["posterior"]["pose"])
    table = summary(found)
    assert len(table) == 8
    assert table.index[0] == "pose[triangle 1, t_x]"
    mean = table.loc["pose[triangle 1, t_x]", "mean"]
    assert float(mean) == pytest.approx(float(pose[..., 0, 0].mean()), abs=0.006)
    assert len(summary(data)) == 8 + 5 * 6
