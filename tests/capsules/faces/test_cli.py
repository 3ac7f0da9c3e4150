"""The commands about faces: real processes on a small set of images, bad folders, a kill."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.image import imread, imsave
from typer.testing import CliRunner

from capsules import cli
from capsules.faces import report
from capsules.faces.appearance import fit_appearance, split_faces
from capsules.faces.artist import draw_images
from capsules.faces.experiment import CELLS, METHODS, Cell, Explained, FaceStudy, open_study
from capsules.faces.images import save_images

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path):
    """A small set of part images, as a user would give it."""
    save_images(tmp_path / "images", draw_images(5, num_groups=3, num_variants=3))
    return tmp_path / "images"


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


FEW_BLOCKS = """
from capsules import cli
from capsules.faces import experiment as faces_experiment
faces_experiment.CELLS, faces_experiment.BLOCK = (faces_experiment.Cell(2),), 2
cli.main()
"""
"""The command line with one number of faces, to compile once, and blocks of two scenes."""


def start(*arguments, cache, code=None):
    """The real thing, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT), "COLUMNS": "150"}
    called = ["-m", "capsules.cli"] if code is None else ["-c", code]
    command = [sys.executable, *called, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def missing_image(folder):
    (folder / "2" / "mouth_1.png").unlink()
    return r"there is no image .*mouth_1\.png"


def ill_sized_image(folder):
    imsave(folder / "0" / "hair_2.png", np.zeros((64, 32)), cmap="gray")
    return r"hair_2\.png has 32 x 64 pixels, but must have 224 x 224"


def ill_sized_mask(folder):
    imsave(folder / "masks" / "jaw.png", np.ones((224, 200)), cmap="gray")
    return r"jaw\.png has 200 x 224 pixels"


def no_groups(folder):
    for group in "12":
        (folder / group).rename(folder / f"old_{group}")
    return "has 1 groups"


@pytest.mark.parametrize("command", [["faces", "demo"], ["reproduce", "faces"]])
@pytest.mark.parametrize("spoil", [missing_image, ill_sized_image, ill_sized_mask, no_groups])
def test_a_bad_folder_of_images_is_explained(tmp_path, folder, spoil, command):
    pattern = spoil(folder)
    out = tmp_path / ("new.png" if "demo" in command else "new")
    result = run(*command, "--images", folder, "--out", out)
    assert result.exit_code == cli.BAD_INPUT
    assert re.search(pattern, result.stderr), result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--faces", 0], "require 1 to 12 faces"),
        (["--faces", 13], "require 1 to 12 faces"),
        (["--seed", -1], "the seed must be 0 or more"),
        (["--out", "scene.jpg"], r"should end in \.png"),
    ],
)
def test_demo_explains_bad_arguments(tmp_path, monkeypatch, arguments, pattern):
    monkeypatch.chdir(tmp_path)
    result = run("faces", "demo", *arguments)
    assert result.exit_code == cli.BAD_INPUT, result.output
    assert re.search(pattern, result.stderr), result.stderr
    assert not list(tmp_path.glob("*.*"))


def test_help_has_examples():
    for arguments in (["faces", "-h"], ["faces", "demo", "-h"], ["reproduce", "-h"]):
        result = run(*arguments)
        assert result.exit_code == 0 and "faces" in result.stdout
    assert "capsules faces demo" in run("faces", "demo", "-h").stdout
    assert run("faces", "reproduce").exit_code == 2  # it is `reproduce faces`


# --- the tables -----------------------------------------------------------------------------------


@pytest.fixture
def made_up():
    """Numbers of two scenes of each cell; of one scene the assignment by VI is wrong."""
    numbers = {}
    for i, cell in enumerate((*CELLS, Cell(6))):
        of = {f"right_{name}": np.array([1.0, 1.0]) for name in ("vi", "ransac", "refit")}
        of["right_vi"] = np.array([1.0, float(i != 1)])
        for quantity in report.QUANTITIES:
            for j, name in enumerate(METHODS):
                of[f"{quantity}_{name}"] = np.array([0.02, 0.04]) + 0.01 * (j % 3)
        numbers[cell] = of
    numbers[Cell(4)]["scene_ransac"] = np.array([0.01, 0.05])
    return numbers


def test_the_tables_say_that_faces_are_drawn_and_have_the_papers_numbers(tmp_path, made_up, capsys):
    study = open_study()
    paths = list(report.write_report(made_up, study, tmp_path))
    printed = capsys.readouterr().out
    text = (tmp_path / "faces.md").read_text()
    assert "drawn by this project; they are not the photographs of the paper" in text
    assert "Our faces are drawn by this project" in printed
    assert "| 3 faces | 2 | 100.0 | 50.0 ± 50.0 | 100.0 | 100.0 ± 0.0 |" in text
    assert "| 5 faces | 2 | 93.7 | 100.0 ± 0.0 | 100.0 | 100.0 ± 0.0 |" in text
    assert "| 6 faces | 2 | - | 100.0 ± 0.0 | - | 100.0 ± 0.0 |" in text
    assert "2 to 5 | 0.0360 ± 0.0040 | - | 0.0520 ± 0.0060 | - |" in text
    row = "| 2 faces | 0.0300 ± 0.0100 | 0.0400 ± 0.0100 | 0.0500 ± 0.0100 | 0.0300 ± 0.0100 |"
    assert f"{row} 2 of 2 | 2 of 2 |" in text
    assert re.search(r"\| 4 faces \|.*\| 1 of 2 \| 2 of 2 \|", text)
    with (tmp_path / "faces.csv").open() as file:
        lines = list(csv.DictReader(file))
    (found,) = (
        line
        for line in lines
        if (line["faces"], line["quantity"], line["method"]) == ("4", "right", "vi")
    )
    assert (found["mean"], found["paper"], found["scenes"]) == ("1", "0.992", "2")
    assert found["standard_error"] == "0"
    assert len((tmp_path / "faces_scenes.csv").read_text().splitlines()) == 1 + 2 * 6
    for path in paths:
        if path.suffix == ".png":
            assert imread(path)[..., :3].std() > 0.01  # something is drawn


def test_given_images_are_not_called_drawn(tmp_path, made_up):
    list(report.write_report(made_up, open_study(), tmp_path, drawn=False))
    text = (tmp_path / "faces.md").read_text()
    assert "drawn" not in text and "part images that were given" in text


def test_the_picture_of_a_scene_has_its_parts_and_the_errors():
    images = draw_images(5, num_groups=3, num_variants=3)
    study = FaceStudy(images, fit_appearance(images), split_faces(images).test)
    scenes = study.scenes(1, 2, occluded=True)
    found = 1 - np.asarray(scenes.scene.object)  # the right faces under other names
    found[~scenes.scene.present] = -1
    average = np.zeros((1, 2, study.appearance.factors.num_factors))
    poses = np.concatenate([scenes.poses, average], axis=-1)
    moved = poses + 0.1 * np.eye(poses.shape[-1])[0]
    explained = Explained(
        {"vi": SimpleNamespace(labels=found)}, {"vi": poses, "ransac": moved, "refit": poses}
    )
    figure = report.plot_faces(study, scenes, explained)

    scene, parts = figure.axes[0], figure.axes[4]
    (wanted,) = (np.asarray(image.get_array()) for image in scene.get_images())
    assert f"{scenes.scene.present.sum()} parts seen" in scene.get_title()
    for k in range(2):
        (dots,) = (d for d in parts.collections if d.get_gid() == f"object {k}")
        places = scenes.scene.points[0, found[0] == k, :2]
        np.testing.assert_array_equal(np.asarray(dots.get_offsets()), places)
    for column in (1, 2, 3):
        above, below = (figure.axes[column + row].get_images()[0].get_array() for row in (0, 4))
        np.testing.assert_allclose(below, np.abs(above - wanted))
        error = np.sqrt(np.mean((np.asarray(above) - wanted) ** 2))
        assert f"RMSE {error:.4f}" in figure.axes[column].get_title()
    titles = [figure.axes[column].get_title() for column in (1, 2, 3)]
    assert titles[0].split()[-1] == titles[2].split()[-1] < titles[1].split()[-1]


# --- real runs ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_demo_writes_a_picture(tmp_path, folder):
    picture = tmp_path / "scene.png"
    options = ("--faces", 2, "--images", folder, "--out", picture)
    process = start("faces", "demo", *options, cache=tmp_path / "cache")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert re.search(r"^VI +assignment right, RMSE of the scene 0\.\d{4}", out, re.MULTILINE)
    assert out.count("assignment right") == len(METHODS)
    image = imread(picture)[..., :3]
    quarters = np.array_split(image, 4, axis=1)  # the scene and three reconstructions
    assert all(quarter.std() > 0.1 for quarter in quarters)
    assert not np.array_equal(quarters[1][:, :200], quarters[2][:, :200])


@pytest.mark.slow
def test_a_killed_reproduction_resumes_to_the_identical_tables(tmp_path, folder):
    options = ("reproduce", "faces", "--draws", 9, "--images", folder, "--out")
    real = {"cache": tmp_path / "cache", "code": FEW_BLOCKS}
    whole = start(*options, tmp_path / "whole", **real)
    _, err = whole.communicate(timeout=900)
    assert whole.returncode == 0, err
    assert "Resuming" not in err

    killed = start(*options, tmp_path / "killed", **real)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and killed.poll() is None:
        if len(list((tmp_path / "killed").rglob("*.npz"))) >= 2:
            break
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "faces.md").exists()

    resumed = start(*options, tmp_path / "killed", **real)
    _, err = resumed.communicate(timeout=900)
    assert resumed.returncode == 0, err
    assert re.search(r"Resuming: [2-4] of 5 parts", err)
    for name in ("faces.md", "faces.csv", "faces_scenes.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    table = (tmp_path / "whole" / "faces.md").read_text()
    assert "| 2 faces | 9 | 100.0 | 100.0 ± 0.0 | 100.0 | 100.0 ± 0.0 |" in table
