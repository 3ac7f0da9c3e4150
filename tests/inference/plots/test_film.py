"""The film: a frame for each step, that shows the state after it, and errors in a sentence."""

import io
import itertools
import os
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

from capsules import cli
from capsules.files.inputs import load_scenes
from capsules.files.outputs import save_scenes
from capsules.methods import program_of
from inference import cavi
from inference.plots import film
from inference.plots.outlines import outline_at
from inference.result import Result
from models.errors import InputError
from models.scenes import make_scene
from models.templates import shapes, stack

PARTS = stack(shapes("square", "triangle"))
OWNER = np.asarray(PARTS.owner)
POSES = np.array([[-0.4, 0.1, 0.3, 0.1], [0.5, -0.2, 0.2, 0.2]])
STEPS = 5


def make_result():
    """A run that goes from the uniform match and no size to the truth in even steps."""
    share = np.linspace(0, 1, STEPS)[:, None, None]
    return Result(
        method="ds",
        scene=make_scene(np.asarray(PARTS.predict(POSES)), 7),
        match_probs=np.eye(7),
        pose_mean=POSES,
        pose_covariance=np.tile(np.eye(4), (2, 1, 1)),
        labels=OWNER,
        owner=OWNER,
        converged=np.array(True),
        steps=np.array(STEPS),
        elbo=np.array(-1.0),
        history={
            "match_probs": share * np.eye(7) + (1 - share) / 7,
            "pose_mean": share * POSES,
            "elbo": np.linspace(-9, -1, STEPS),
            "beta": np.geomspace(0.05, 1, STEPS),
        },
    )


RESULT = make_result()


def frames_of(file):
    with Image.open(file) as image:
        for number in range(image.n_frames):
            image.seek(number)
            yield np.asarray(image.convert("RGB"), float)


def drawn(figure):
    """Outlines by object, the match matrix, and the ELBO and beta so far."""
    scene, match, history, _, other = figure.axes
    outlines = {line.get_gid(): line.get_xydata() for line in scene.lines}
    return outlines, match.images[0].get_array(), history.lines[0], other.lines[0]


def test_a_gif_has_a_frame_for_each_step_and_they_differ():
    file = io.BytesIO()
    assert film.write_film(RESULT, PARTS, file, names=["square", "triangle"]) == STEPS
    frames = list(frames_of(file))
    assert len(frames) == STEPS
    for before, after in itertools.pairwise(frames):
        assert np.abs(before - after).max() > 50
    assert frames[0].shape == (round(3.9 * film.DPI), round(10.4 * film.DPI), 3)


def test_frames_show_the_state_after_each_step():
    figure = Figure()
    for number, state in enumerate(film.draw_frames(figure, RESULT, PARTS), start=1):
        outlines, match, elbo, beta = drawn(figure)
        np.testing.assert_array_equal(match, RESULT.history["match_probs"][number - 1])
        np.testing.assert_array_equal(elbo.get_ydata(), RESULT.history["elbo"][:number])
        np.testing.assert_array_equal(beta.get_ydata(), RESULT.history["beta"][:number])
        for k in np.unique(state.labels):
            expected = outline_at(PARTS, k, RESULT.history["pose_mean"][number - 1, k])
            np.testing.assert_allclose(outlines[f"outline {k}"][:-1], expected)
        assert figure.axes[0].get_title() == f"step {number} of {STEPS}"
    assert number == STEPS
    np.testing.assert_array_equal(state.labels, RESULT.labels)


def test_the_window_is_the_same_in_all_frames_and_has_the_points():
    figure, windows = Figure(), set()
    for _ in film.draw_frames(figure, RESULT, PARTS):
        scene, history = figure.axes[0], figure.axes[2]
        windows.add((scene.get_xlim(), scene.get_ylim(), history.get_xlim(), history.get_ylim()))
    ((x, y, _, _),) = windows
    points = RESULT.scene.points
    assert x[0] < points[:, 0].min() and points[:, 0].max() < x[1]
    assert y[0] < points[:, 1].min() and points[:, 1].max() < y[1]


def test_a_film_wants_a_history():
    with pytest.raises(InputError, match="result has none; infer a single scene with history"):
        film.write_film(replace(RESULT, history=None), PARTS, io.BytesIO())


# --- capsules film ------------------------------------------------------------------------------


@pytest.fixture
def scene_file(tmp_path):
    file = tmp_path / "scene.npz"
    save_scenes(file, RESULT.scene.batch())
    return file


def run(*arguments):
    return CliRunner().invoke(cli.app, ["film", *map(str, arguments)])


@pytest.mark.slow
@pytest.mark.long
def test_the_command_films_the_run_of_coordinate_ascent(scene_file):
    out = scene_file.with_name("fit.gif")
    result = run(scene_file, "--out", out, "--shapes", "square,triangle", "--restarts", 8)
    assert result.exit_code == 0, result.output
    program = program_of("ds", ("square", "triangle"))
    scene = load_scenes(scene_file).take(0)
    found = cavi.run(
        program, scene, jax.random.key(0), num_restarts=8, init_strategy="uniform", history=True
    )
    count = len(found.history["elbo"])
    assert count > 3
    assert len(list(frames_of(out))) == count
    assert f"of {count} frames" in result.stdout and found.status in result.stdout
    assert found.history["elbo"][-1] == pytest.approx(float(found.elbo))
    assert sorted(os.listdir(out.parent)) == ["fit.gif", "scene.npz"]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("fit.avi", r"should end in \.gif or \.mp4, .* but ends in '\.avi'; try fit\.gif"),
        ("fit", r"ends in ''; try fit\.gif"),
        ("no/such/folder/fit.gif", "cannot write .*; choose a folder that exists"),
    ],
)
def test_a_film_that_cannot_be_written_is_explained(scene_file, name, pattern):
    result = run(scene_file, "--out", scene_file.parent / name, "--shapes", "square,triangle")
    assert result.exit_code == cli.BAD_INPUT
    assert result.stderr.count("\n") == 1 and result.stdout == ""
    assert re.search(pattern, result.stderr), result.stderr
    assert os.listdir(scene_file.parent) == ["scene.npz"]


def test_without_ffmpeg_an_mp4_is_refused(scene_file, monkeypatch):
    monkeypatch.setattr(film.FFMpegWriter, "isAvailable", classmethod(lambda cls: False))
    result = run(scene_file, "--out", scene_file.with_name("fit.mp4"))
    assert result.exit_code == cli.BAD_INPUT
    assert "requires the program ffmpeg, which is not installed; install it" in result.stderr


@pytest.mark.skipif(not film.FFMpegWriter.isAvailable(), reason="ffmpeg is not installed")
def test_with_ffmpeg_an_mp4_is_written():
    file = io.BytesIO()
    assert film.write_film(RESULT, PARTS, file, ".mp4") == STEPS
    assert file.getvalue()[4:8] == b"ftyp"
