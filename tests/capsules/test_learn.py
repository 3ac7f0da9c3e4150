"""`capsules learn`, and what `--learned` does with the file that it writes."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from capsules.experiments.generator import sample_scenes
from capsules.experiments.learnable import arguments, leave_open
from capsules.experiments.resumed import Checkpoint
from capsules.files.learned import load_learned
from capsules.files.outputs import save_scenes
from capsules.methods import PAPER, PRIORS, program_of
from inference import exact
from inference.diagnostics.readout import most_probable_match, poses_given_match
from models.errors import InputError
from models.program.reading import read
from models.templates import normalise, stack
from tests.capsules.test_cli import assert_sentence, run

pytestmark = pytest.mark.long

SCENES = sample_scenes(120, sigma=0.15, seed=5, objects=("triangle",))
SHAPES = ("--shapes", "triangle")
WHAT = "precision,pose,templates"
LEARN = (*SHAPES, "--e-step", "exact", "--rounds", 3)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learn")
    save_scenes(folder / "scenes.npz", SCENES)
    paths = ("--out", folder / "learned.npz", "--plot", folder / "learned.png")
    result = run("learn", folder / "scenes.npz", *LEARN, "--what", WHAT, *paths)
    assert result.exit_code == 0, result.output
    return folder, result


def test_numbers_are_learnt_and_written(files):
    folder, result = files
    numbers = load_learned(folder / "learned.npz")
    names = ["pose_covariance", "pose_mean", "precision", "template_triangle"]
    assert sorted(numbers) == names
    assert "log evidence" in result.stdout and "±" in result.stdout
    assert (folder / "learned.png").stat().st_size > 10_000
    with np.load(folder / "learned.npz") as file:
        assert (np.diff(file["objective"]) > -1e-9).all()


def test_learning_that_is_interrupted_goes_on_to_the_same_numbers(files, tmp_path, monkeypatch):
    command = ("learn", files[0] / "scenes.npz", *LEARN, "--what", "precision", "--out")
    assert run(*command, tmp_path / "whole.npz").exit_code == 0
    write, kept = Checkpoint.keep, []

    def keep(self, rounds):
        self.not_before = 0.0
        write(self, rounds)
        kept.append(self.entry.path)
        if len(kept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "keep", keep)
    out = tmp_path / "learned.npz"
    assert run(*command, out).exit_code != 0
    assert not out.exists() and kept[-1].exists()
    assert run(*command, out).exit_code == 0
    assert len(kept) == 3 and not kept[-1].exists()  # one round was left to do
    with np.load(out) as found, np.load(tmp_path / "whole.npz") as wanted:
        assert found.files == wanted.files
        for name in wanted.files:
            np.testing.assert_array_equal(found[name], wanted[name])


def test_any_prior_takes_what_it_has(files):
    folder, _ = files
    numbers = load_learned(folder / "learned.npz")
    scene = SCENES.take(0)
    options = {"objects": ("triangle",), "learned": str(folder / "learned.npz")}
    for prior in ("uniform", "presence"):
        program = program_of("exact", prior=prior, **options)
        model = read(program, scene, {} if prior == "uniform" else {"presence": np.array([1])})
        np.testing.assert_allclose(model.pose_mean[0], numbers["pose_mean"])
        np.testing.assert_allclose(model.pose_covariance[0], numbers["pose_covariance"])
        np.testing.assert_allclose(model.parts.variance, 1 / numbers["precision"])
    given = program_of("exact", precision=7.0, **options)  # an option takes precedence
    np.testing.assert_allclose(read(given, scene).parts.variance, 1 / 7.0)


def test_an_answer_has_the_learnt_program_and_shapes(files, monkeypatch):
    """Poses are those given the match under the learnt numbers, and pictures have learnt shapes."""
    folder, _ = files
    drawn = []
    monkeypatch.setattr(
        "inference.plots.scenes.plot_demo", lambda _, parts, names: drawn.append(parts) or Figure()
    )
    more = ("--learned", folder / "learned.npz", "--plot", folder / "infer.png", "--json", "-")
    result = run("infer", folder / "scenes.npz", *SHAPES, "--method", "exact", *more)
    assert result.exit_code == 0, result.output
    vertices = load_learned(folder / "learned.npz")["template_triangle"]
    np.testing.assert_allclose(drawn[0].F, stack([normalise(vertices)]).F)
    scene = SCENES.take(0)
    program = program_of("exact", ("triangle",), learned=str(folder / "learned.npz"))
    wanted = exact.run(program, scene)
    match = most_probable_match(wanted)
    mean, _ = poses_given_match(program, wanted, match)
    (found,) = json.loads(result.stdout)["objects"]
    np.testing.assert_allclose(found["translation"], mean[0, :2], rtol=1e-9)


def test_scenes_are_better_explained(files):
    folder, _ = files
    found = []
    for more in ([], ["--learned", folder / "learned.npz"]):
        arguments = (*SHAPES, "--method", "exact", "--prior", "presence", "--json", "-", *more)
        result = run("evaluate", folder / "scenes.npz", *arguments)
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout)["log_evidence"])
    assert found[1] > found[0] + 1


def test_poses_are_those_of_the_learnt_model(files):
    folder, _ = files
    path = folder / "learned.npz"
    arguments = (*SHAPES, "--method", "exact", "--learned", path, "--json", "-")
    result = run("infer", folder / "scenes.npz", *arguments)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["objects"]
    model = read(program_of("exact", ("triangle",), learned=str(path)), SCENES.take(0))
    design = np.asarray(model.parts.F).reshape(-1, 4)
    precision = np.linalg.inv(model.pose_covariance[0]) + load_learned(path)["precision"] * (
        design.T @ design
    )
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    np.testing.assert_allclose(found["translation_sd"], sd[:2], rtol=1e-9)


def test_what_cannot_be_done_is_said(files, tmp_path):
    folder, _ = files
    scenes, out = folder / "scenes.npz", tmp_path / "out.npz"
    to = ("--out", out)
    assert_sentence(run("learn", scenes, *LEARN, *to, "--what", "colour"), "'colour' cannot be le")
    assert_sentence(run("learn", scenes, *LEARN, *to, "--what", "clutter"), "without slots")
    assert_sentence(
        run("learn", scenes, *LEARN, *to, "--what", "presence", "--prior", "uniform"),
        "constellation has no presence_prob",
    )
    assert_sentence(run("learn", scenes, *LEARN, "--out", scenes), "named twice")
    assert_sentence(run("learn", scenes, *SHAPES, *to, "--e-step", "em"), "no E-step 'em'")
    assert_sentence(run("learn", scenes, *LEARN, *to, "--limit", 10), "too few to learn 15 numbers")
    many = tmp_path / "many.npz"
    save_scenes(many, sample_scenes(30, seed=5, objects=["square"] * 6, presence=1.0))
    six = ("--shapes", ",".join(["square"] * 6), "--e-step", "exact", *to)
    assert_sentence(run("learn", many, *six), "24 points")
    assert [path.name for path in tmp_path.iterdir()] == ["many.npz"]  # no checkpoint either
    damaged = tmp_path / "damaged.npz"
    content = bytearray((folder / "learned.npz").read_bytes())
    content[len(content) // 3] ^= 1
    damaged.write_bytes(content)
    assert_sentence(
        run("evaluate", scenes, *SHAPES, "--learned", damaged), "a file that `capsules learn` wrote"
    )
    assert_sentence(run("evaluate", scenes, *SHAPES, "--learned", scenes), "objective")
    assert_sentence(
        run(
            "evaluate",
            scenes,
            *SHAPES,
            "--preset",
            "published",
            "--method",
            "gmm",
            "--learned",
            folder / "learned.npz",
        ),
        "preset 'published'",
    )


def test_numbers_that_were_given_belong_to_the_learnt_ones(files, tmp_path):
    """`evaluate` has the log evidence that learning ended with."""
    scenes, out = files[0] / "scenes.npz", tmp_path / "learned.npz"
    more = ("--what", "presence", "--precision", 200, "--visibility", 0.8, "--holdout", 0)
    assert run("learn", scenes, *LEARN, *more, "--out", out).exit_code == 0
    method = (*SHAPES, "--method", "exact", "--prior", "presence")
    found = json.loads(run("evaluate", scenes, *method, "--learned", out, "--json", "-").stdout)
    with np.load(out) as file:
        assert found["log_evidence"] == pytest.approx(file["objective"][-1], rel=1e-9)


def test_a_precision_is_not_that_of_noise_in_proportion_to_size():
    """Under the prior `sized` a precision of 3000 would be noise of 1/365 of an object."""
    numbers = {"precision": 3e3, "presence_prob": 0.4}
    assert arguments(PRIORS["presence"], numbers, PAPER).keys() == {*numbers, "parts"}
    assert arguments(PRIORS["sized"], numbers, PAPER).keys() == {"presence_prob", "parts"}
    with pytest.raises(InputError, match=r"'sized' has noise in proportion .* got 3000"):
        program_of("exact", precision=3e3, prior="sized")
    with pytest.raises(InputError, match="sized_constellation has no precision"):
        leave_open(PRIORS["sized"], ["precision"], PAPER)


def test_an_option_that_the_program_does_not_have_is_refused_in_learning():
    with pytest.raises(InputError, match="constellation has no visibility to set"):
        leave_open(PRIORS["uniform"], ["precision"], PAPER, given={"visibility": 0.9})
