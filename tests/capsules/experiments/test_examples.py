"""Pictures of example scenes: who is drawn, under which names, and which points get a ring."""

import numpy as np
import pytest
from typer.testing import CliRunner

from capsules import cli
from capsules.experiments import examples
from capsules.experiments.constellations import Scenes
from capsules.experiments.examples import best_names, full_scenes, plot_examples, write_examples
from capsules.experiments.generator import sample_scenes
from capsules.methods import templates
from inference.result import Result

SCENES = sample_scenes(40, 0.1, 5)
OWNER = np.asarray(templates().owner)


def at_truth(method, scenes, seed, weights=None):
    """A method that knows the truth."""
    count, K = len(scenes.points), templates().num_objects
    return Result(
        method=method,
        scene=scenes,
        match_probs=np.broadcast_to(np.eye(len(OWNER)), (count, len(OWNER), len(OWNER))),
        pose_mean=np.tile([0.0, 0.0, 1.0, 0.0], (count, K, 1)),
        pose_covariance=np.zeros((count, K, 4, 4)),
        labels=np.asarray(scenes.object),
        owner=OWNER,
        converged=np.ones(count, bool),
        steps=np.ones(count, int),
    )


def test_names_are_those_that_agree_most():
    truth = np.array([0, 0, 0, 1, 1, -1])
    np.testing.assert_array_equal(
        best_names(np.array([2, 2, 1, 0, 0, 1]), truth)[:5], [0, 0, 2, 1, 1]
    )
    assert best_names(np.array([2, 2, 1, 0, 0, 1]), truth)[5] == -1


def test_scenes_with_all_their_parts_come_first():
    chosen = full_scenes(SCENES)
    assert len(chosen) == examples.NUM_SCENES
    assert SCENES.present[chosen].all() and (np.diff(chosen) > 0).all()


@pytest.mark.parametrize(("stored", "titles"), [(True, 4), (False, 3)])
def test_a_picture_for_each_noise_level(tmp_path, monkeypatch, stored, titles):
    monkeypatch.setattr(examples, "infer", at_truth)
    labels = np.where(SCENES.object == 0, 1, 0) if stored else None
    figures = []

    def plot(*arguments):
        figures.append(plot_examples(*arguments))
        return figures[-1]

    monkeypatch.setattr(examples, "plot_examples", plot)
    [path] = write_examples({0.1: Scenes(SCENES, None, labels)}, None, 0, tmp_path)
    assert path.name == "examples_0.10.png" and path.stat().st_size > 1000
    panels = figures[0].axes
    assert [ax.get_title() for ax in panels[:titles]] == [
        "truth",
        *(["CCAE"] if stored else []),
        "GCM-DS",
        "RANSAC",
    ]
    rings = [[c for c in ax.collections if c.get_gid() == "wrong"] for ax in panels[:titles]]
    assert [bool(r) for r in rings] == [False, *([True] if stored else []), False, False]


def test_the_command_makes_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "infer", at_truth)
    out = tmp_path / "new"
    done = CliRunner().invoke(cli.app, ["reproduce", "examples", "--draws", "9", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert len(list(out.glob("examples_*.png"))) == 3
    refused = CliRunner().invoke(cli.app, ["reproduce", "examples", "--methods", "ds"])
    assert refused.exit_code == cli.BAD_INPUT
