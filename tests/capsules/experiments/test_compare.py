"""The comparison of methods on one scene: its numbers, its table, its command."""

import functools
import io

import jax
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from capsules.cli import app
from capsules.experiments import compare
from capsules.files.outputs import save_scenes
from capsules.methods import METHODS, Method, methods_for
from inference.posterior.relabel import frame_of
from models.errors import InputError
from tests.inference.two_triangles import POSES, PRECISION, PROGRAM, scene_at

pytestmark = pytest.mark.long

SCENE = scene_at(POSES * [1, 1, 3, 3], seed=0)
"""Triangles so large that no turned one fits their points: one clear match."""
OPTIONS = {"objects": ("triangle", "triangle"), "precision": PRECISION}


@functools.cache
def rows():
    found = compare.compare(SCENE, ["ds", "exact"], **OPTIONS)
    return {row.method: row for row in found}


def test_each_method_has_the_numbers_that_it_gives():
    ds, exact = rows()["ds"], rows()["exact"]
    assert ds.elbo < exact.log_evidence
    assert ds.log_evidence is None
    assert exact.elbo is None
    assert abs(ds.weighted_evidence - exact.log_evidence) < 0.1
    assert ds.pareto_k < 0.7
    assert exact.pareto_k is None
    assert ds.ess_per_second is None
    assert ds.r_hat is None
    assert 0 < ds.seconds < ds.first_seconds


def test_a_clear_scene_is_matched_alike():
    ds = rows()["ds"]
    assert ds.match_error < 0.05
    assert ds.match_distance <= ds.match_error
    assert ds.pose_error < 0.2  # 4000 draws: a standard error of 0.016
    assert rows()["exact"].match_error == 0.0


def sampled(program, scene, rng_key, progress_bar=False, swapped=(), moved=0.0):
    """A sampler made of exact draws, some chains with the names swapped, the poses moved."""
    from inference import exact
    from inference.result import Result

    drawn = exact.sample(program, scene, jax.random.key(7), 2000)
    pose, match = drawn.pose.reshape(4, 500, 2, 4).copy(), drawn.match.reshape(4, 500, 6).copy()
    frame = frame_of(program, exact.run(program, scene))
    pose += moved * np.sqrt(frame.covariance.diagonal(axis1=1, axis2=2))
    for chain in swapped:
        pose[chain] = pose[chain, :, ::-1]
        match[chain] = (match[chain] + 3) % 6
    return Result(
        method="sampled",
        scene=scene,
        match_probs=np.eye(6),
        pose_mean=pose.mean(axis=(0, 1)),
        pose_covariance=np.tile(np.eye(4), (2, 1, 1)),
        labels=np.zeros(6, int),
        owner=np.repeat([0, 1], 3),
        converged=np.array(True),
        steps=np.array(2000),
        seconds=2.0,
        draws={"pose": pose, "match": match},
    )


def test_draws_are_judged_in_the_exact_frame(monkeypatch):
    swapped = functools.partial(sampled, swapped=(1, 3))
    moved = functools.partial(sampled, moved=2.0)
    monkeypatch.setitem(METHODS, "good", Method(swapped, "doubly_stochastic"))
    monkeypatch.setitem(METHODS, "bad", Method(moved, "doubly_stochastic"))
    good, bad = compare.compare(SCENE, ["good", "bad"], twice=False, **OPTIONS)
    assert good.r_hat < 1.02
    assert good.match_error < 0.05
    assert good.pose_error < 0.15
    assert 2000 / 2 * 0.7 < good.ess_per_second < 2000 / 2 * 1.3
    assert 1.3 < bad.pose_error < 2.7
    assert good.elbo is good.log_evidence is good.pareto_k is None


def test_rungs_go_to_the_methods_that_temper(monkeypatch):
    given = {}

    def noted(name, program, scene, rng_key, progress_bar=False, **options):
        given[name] = options
        return sampled(program, scene, rng_key)

    for name in ("nuts", "gibbs", "svi"):
        run = functools.partial(noted, name)
        monkeypatch.setitem(METHODS, name, METHODS[name]._replace(run=run))
    compare.compare(SCENE, ["nuts", "gibbs", "svi"], rungs=7, twice=False, **OPTIONS)
    assert given == {"nuts": {"num_temperatures": 7}, "gibbs": {"num_temperatures": 7}, "svi": {}}
    compare.compare(SCENE, ["nuts"], twice=False, **OPTIONS)
    assert given["nuts"] == {}


def shown(table, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_the_table_has_a_column_for_each_method():
    lines = [line.split() for line in shown(compare.render(list(rows().values())), 80).splitlines()]
    ds, exact = rows()["ds"], rows()["exact"]
    assert ["ds", "exact"] in lines
    assert ["ELBO", f"{ds.elbo:.2f}", "-"] in lines
    assert ["log", "evidence", "-", f"{exact.log_evidence:.2f}"] in lines
    assert ["by", "weights", f"{ds.weighted_evidence:.2f}", "-"] in lines
    assert ["their", "error", f"{ds.weighted_error:.1g}", "-"] in lines
    assert ["q", "covers", f"{ds.covered:.0%}", "-"] in lines
    said = " ".join(word for line in lines for word in line)
    assert "does not cover modes that no search found" in said


COMPARED = methods_for("uniform")


def test_all_methods_fit_into_eighty_characters():
    """With numbers as long as they get."""
    long = rows()["ds"]._replace(
        elbo=-1234.56, match_error=0.123, ess_per_second=12345.0, r_hat=12.34, first_seconds=123.4
    )
    text = shown(compare.render([long._replace(method=name) for name in COMPARED]), 80)
    assert "…" not in text
    assert "log evidence" in text
    assert text.count("-1234.56") == text.count("123.4 s") == len(COMPARED) == 7


def test_weights_that_are_not_to_be_relied_on_are_named():
    good, bad = rows()["ds"]._replace(pareto_k=0.7), rows()["ds"]._replace(pareto_k=0.8)
    assert "rely" not in shown(compare.render([good]), 80)
    both = [good._replace(method="one"), bad._replace(method="other")]
    words = shown(compare.render(both), 80).split()
    assert "Do not rely on the weights of other: Pareto k is above 0.7." in " ".join(words)


@pytest.mark.parametrize(
    ("scene", "methods", "sentence"),
    [
        (SCENE, ["ds", "magic"], "no method 'magic'; choose from ds"),
        (SCENE, [], "no method ''"),
        (SCENE.batch(), ["ds"], "on one scene, got a batch"),
    ],
)
def test_what_cannot_be_compared(scene, methods, sentence):
    with pytest.raises(InputError, match=sentence):
        compare.compare(scene, methods, **OPTIONS)


def test_the_command_prints_the_table(tmp_path):
    path = tmp_path / "scenes.npz"
    save_scenes(path, SCENE.batch())
    arguments = ["compare", str(path), "--methods", "ds,exact", "--shapes", "triangle,triangle"]
    arguments += ["--precision", str(PRECISION), "--once"]
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"{rows()['exact'].log_evidence:.2f}" in result.stdout
    assert f"{rows()['ds'].elbo:.2f}" in result.stdout


def test_an_index_that_is_not_there(tmp_path):
    path = tmp_path / "scenes.npz"
    save_scenes(path, SCENE.batch())
    result = CliRunner().invoke(app, ["compare", str(path), "--index", "3"])
    assert result.exit_code == 2
    assert "has 1 scenes with points, so there is no scene 3" in result.stderr


def test_exact_evidence_is_that_of_the_program_itself():
    """`compare` builds the program by name; the same numbers come from the program by hand."""
    from inference import exact

    found = exact.run(PROGRAM, SCENE).log_evidence
    np.testing.assert_allclose(rows()["exact"].log_evidence, found, rtol=1e-12)
