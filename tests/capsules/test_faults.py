"""Faults that were found by attacking the commands: each is a sentence or a right answer now."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from capsules import cli, methods
from capsules.commands.demo import _table
from capsules.commands.shared import Stopwatch, show_seconds
from capsules.experiments.generator import sample_scenes
from capsules.files.inputs import SceneFile, load_scenes, stored_scene
from capsules.files.outputs import save_scenes
from inference.diagnostics.metrics import same_partition
from models.errors import InputError
from models.scenes import make_scene
from tests.capsules.stand_in import quick

SCENES = sample_scenes(16, sigma=0.1, seed=0)
LONG = "x" * 300
ROOT = Path(__file__).parents[2]


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def seen(monkeypatch):
    """A stand-in for ransac, and the points that it was given."""
    given = []

    def noting(program, scene, *arguments, **options):
        given.extend(scene.points[scene.present].tolist())
        return quick(program, scene, *arguments, **options)

    ransac = methods.METHODS["ransac"]._replace(run=noting)
    monkeypatch.setitem(methods.METHODS, "ransac", ransac)
    return given


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_scenes(tmp_path / "scenes.npz", SCENES)
    return tmp_path / "scenes.npz"


def assert_refused(result, words):
    assert result.exit_code == cli.BAD_INPUT, (result.output, result.exception)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert words in result.stderr, result.stderr
    assert result.stdout == ""


# --- points as text -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "count"),
    [
        ("a.csv", "\ufeff0.1,0.2\n0.3,0.4\n", 2),
        ("a.csv", "\ufeffx,y\n0.3,0.4\n", 1),
        ("a.csv", " x , y_1 \r\n\r\n .3 ,-4e-1\r\n", 1),
        ("a.json", "\ufeff[[0.1, 2e-1], [1, 0]]", 2),
    ],
)
def test_no_point_is_lost(tmp_path, seen, name, content, count):
    (tmp_path / name).write_text(content)
    result = run("infer", tmp_path / name, "--method", "ransac", "--json", "-")
    assert result.exit_code == 0, result.output
    assert len(seen) == len(json.loads(result.stdout)["points"]) == count


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "O.1,0.2\n0.3,0.4\n", "'O.1' in line 1 is not a number"),
        ("a.csv", "O.1,O.2\n0.3,0.4\n", "'O.1' in line 1 is not a number"),
        ("a.csv", "x,0.2\n0.3,0.4\n", "'x' in line 1 is not a number"),
        ("a.csv", "x,\n0.3,0.4\n", "'x' in line 1"),
        ("a.csv", "0.3,0.4\n\n1_0,0.2\n", "'1_0' in line 3 is not a number"),
        ("a.csv", "\u0661,0.2\n", "in line 1 is not a number"),
        ("a.csv", "0x1,0.2\n", "'0x1' in line 1 is not a number"),
        ("a.csv", '0.1,"0.2\n', "does not hold points"),
        ("a.json", "[[true, 0.2]]", "true is not a number"),
        ("a.json", '[["1_0", 0.2]]', '"1_0" is not a number'),
        ("a.json", "[[0.1, [0.2]]]", "[0.2] is not a number"),
        ("a.json", "[[0.1, null]]", "null is not a number"),
        ("a.json", "[0.1, 0.2]", "it is not a list of lists"),
        ("a.json", '{"points": [[0, 0]], "points": [[1, 1]]}', "a key occurs twice"),
        ("a.json", "[[0.1, 0.2], [0.3]]", "the same number of coordinates"),
        ("a.json", "[[]]", "the same number of coordinates"),
    ],
)
def test_what_is_no_number_is_named(tmp_path, seen, name, content, words):
    (tmp_path / name).write_text(content)
    assert_refused(run("infer", tmp_path / name, "--method", "ransac", "--json", "-"), words)
    assert not seen


# --- scene files --------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_a_flip_of_any_bit_of_a_scene_file_is_noticed_or_changes_nothing(tmp_path, write):
    """Every tenth byte, of the whole file and of single scenes."""
    path = tmp_path / "a.npz"
    write(path, points=SCENES.points, present=SCENES.present, object=SCENES.object)
    content, refused = path.read_bytes(), 0
    for place in range(0, len(content), 10):
        spoilt = bytearray(content)
        spoilt[place] ^= 1 << place // 10 % 8
        path.write_bytes(spoilt)
        for read, wanted in ((load_scenes, SCENES), (third, SCENES.take(3))):
            try:
                found = read(path)
            except InputError:
                refused += 1
                continue
            np.testing.assert_array_equal(found.points, wanted.points)
            np.testing.assert_array_equal(found.present, wanted.present)
    assert refused > 0.8 * 2 * len(content) / 10


def third(path):
    return stored_scene(path, 3)


@pytest.mark.parametrize("label", [-7, -1])
def test_labels_of_points_are_objects(tmp_path, seen, label):
    truth = np.where(SCENES.object == 1, label, SCENES.object)
    save_scenes(tmp_path / "a.npz", SCENES._replace(object=truth))
    result = run("evaluate", tmp_path / "a.npz", "--method", "ransac", "--json", "-")
    assert_refused(result, f"object must be 0 or more where there is a point, got {label};")


# --- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [".", "..", "/", LONG, f"{LONG}/a", "scenes.npz/a"])
@pytest.mark.parametrize(
    "command",
    [
        ["sample"],
        ["infer", "scenes.npz", "--method", "ransac", "--json"],
        ["evaluate", "scenes.npz", "--method", "ransac", "--json"],
    ],
)
def test_an_output_that_cannot_be_is_a_sentence(stored, seen, command, place):
    assert_refused(run(*command, place), f"cannot write {place} (")
    assert os.listdir(stored.parent) == ["scenes.npz"]


@pytest.mark.parametrize(
    "command",
    [
        ["infer", LONG],
        ["infer", f"{LONG}.csv"],
        ["infer", "scenes.npz", "--all", "--out", LONG],
        ["infer", "scenes.npz", "--plot", f"{LONG}.png"],
        ["evaluate", LONG],
        ["evaluate", "scenes.npz", "--method", "ransac", "--out", LONG],
        ["compare", LONG],
        ["film", "scenes.npz", "--out", f"{LONG}.gif"],
        ["demo", "--out", f"{LONG}.png"],
        ["demo", "--scenes", LONG],
        ["reproduce", "table1", "--draws", 2, "--out", LONG],
        ["reproduce", "table1", "--scenes", LONG],
        ["reproduce", "faces", "--images", LONG],
        ["faces", "demo", "--images", LONG],
        ["faces", "demo", "--out", f"{LONG}.png"],
    ],
    ids=lambda command: " ".join(map(str, command)).replace(LONG, "LONG"),
)
def test_a_long_name_is_a_sentence(stored, command):
    assert_refused(run(*command), "File name too long")
    assert os.listdir(stored.parent) == ["scenes.npz"]


@pytest.mark.parametrize(
    "command",
    [
        ["infer", "a.csv", "--json", "a.csv"],
        ["infer", "scenes.npz", "--json", "./scenes.npz"],
        ["infer", "scenes.npz", "--json", "link.npz"],
        ["infer", "scenes.npz", "--plot", "a.png", "--json", "a.png"],
        ["infer", "scenes.png", "--plot", "scenes.png"],
        ["evaluate", "scenes.npz", "--json", "scenes.npz"],
        ["demo", "--scenes", "scenes.png", "--out", "scenes.png"],
        ["film", "scenes.gif", "--out", "scenes.gif"],
        ["infer", "scenes.npz", "--learned", "a.csv", "--json", "a.csv"],
        ["infer", "scenes.npz", "--weights", "scenes.png", "--plot", "scenes.png"],
        ["evaluate", "scenes.npz", "--learned", "a.csv", "--json", "a.csv"],
        ["infer", "manifest.json", "--all", "--out", ".", "--method", "ransac"],
    ],
    ids=" ".join,
)
def test_an_input_is_never_overwritten(stored, seen, command):
    folder = stored.parent
    (folder / "a.csv").write_text("0.1,0.2\n")
    (folder / "link.npz").symlink_to("scenes.npz")
    for name in ("scenes.png", "scenes.gif", "manifest.json"):
        (folder / name).write_bytes(stored.read_bytes())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert_refused(run(*command), "is named twice, to be read or written")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_there_may_be_no_home(stored, seen, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert run("infer", stored, "--method", "ransac").exit_code == 0
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_compiled_code_is_kept_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path)})
    cli._keep_compiled_code()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "generative-capsules" / "jax")
    monkeypatch.setattr(os, "environ", {"JAX_COMPILATION_CACHE_DIR": "elsewhere"})
    cli._keep_compiled_code()
    assert os.environ == {"JAX_COMPILATION_CACHE_DIR": "elsewhere"}


def test_a_file_that_is_written_to_while_it_is_read_is_refused(stored):
    """In place: checksums were verified when it was opened, long before its last rows are read."""
    with SceneFile(stored) as file:
        file.read(0, 2)
        content = stored.read_bytes()
        with stored.open("r+b") as writing:
            writing.write(content)
        os.utime(stored, ns=(1, 1))
        with pytest.raises(InputError, match="it was changed while it was read"):
            file.read(2, 4)


def test_answers_belong_to_the_file_that_was_opened(stored):
    """Another file under its name, put there meanwhile, is not what the scenes are read from."""
    with SceneFile(stored) as file:
        save_scenes(stored, SCENES._replace(points=SCENES.points + 1))
        opened = file.digest
        np.testing.assert_array_equal(file.read(0, 2).points, SCENES.points[:2])
    with SceneFile(stored) as file:
        assert file.digest != opened


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"precision": np.ones(5)}, "precision has shape (5,)"),
        ({"precision": np.array(True)}, "type bool"),
        ({"precision": np.array(-1.0)}, "positive"),
        ({"pose_mean": np.zeros(4)}, "must both be given"),
        ({"pose_mean": np.zeros(3), "pose_covariance": np.eye(3)}, "pose_mean has shape (3,)"),
        ({"pose_mean": np.zeros(4), "pose_covariance": -np.eye(4)}, "positivedefinite"),
        ({"template_square": np.zeros((9, 2))}, "it must have shape (4, 2)"),
        ({"presence_prob": np.array(7.0)}, "unitinterval"),
    ],
)
def test_learnt_numbers_that_cannot_be_are_sentences(stored, numbers, words):
    np.savez("learned.npz", objective=np.ones(2), **numbers)
    assert_refused(run("infer", stored, "--learned", "learned.npz", "--json", "-"), words)


def test_any_name_can_be_printed(tmp_path, monkeypatch):
    """Also one that is no text, and with standard output closed."""
    name = os.fsdecode(b"\xff.npz")
    code = "import sys; from capsules import cli; sys.argv[0] = 'capsules'; cli.main()"
    command = [sys.executable, "-c", code, "sample", name, "--draws", "2"]
    options = {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "cwd": tmp_path}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Wrote ") and "\\udcff.npz" in done.stdout
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, **options)
    assert (done.returncode, done.stderr) == (0, "")


# --- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["infer", "scenes.npz", "--restarts", 2**63], "num_restarts must be 1 to 69,327, got"),
        (["infer", "scenes.npz", "--restarts", 0], "num_restarts must be 1 to 69,327, got 0"),
        (["evaluate", "scenes.npz", "--restarts", 10**6], "num_restarts must be 1 to"),
        (["film", "scenes.npz", "--restarts", 10**9], "num_restarts must be 1 to"),
        (
            ["infer", "scenes.npz", "--method", "gibbs", "--rungs", 10**9],
            "num_temperatures must be 1 to 17,331, got 1,000,000,000",
        ),
        (["compare", "scenes.npz", "--methods", "gibbs", "--rungs", 10**9], "num_temperatures"),
        (["compare", "scenes.npz", "--seed", 2**64], "less than 2^63, got 18446744073709551616"),
        (["film", "scenes.npz", "--seed", 2**64], "less than 2^63, got"),
        (["faces", "demo", "--faces", 13, "--seed", 2**64], "less than 2^63, got"),
        (["demo", "--seed", 2**64], "less than 2^63, got"),
        (["reproduce", "table1", "--draws", 10**12], "--draws must be 1 to 1,000,000, got 1,000,"),
        (["reproduce", "faces", "--draws", 10**12], "--draws must be 1 to 1,000,000, got 1,000,"),
        (["sample", "many.npz", "--draws", 10**12], "draws of 11 points take more than 2 GiB"),
        (["learn", "scenes.npz", "--limit", -5], "the limit must be 1 or more, got -5"),
        (["learn", "scenes.npz", "--clutter", 10**9], "1,000,000,011 parts in all, more than"),
        (["compare", "scenes.npz", "--shapes", "cube"], "there is no shape 'cube'"),
        (["infer", "scenes.npz", "--clutter", 2**31], "2,147,483,659 parts in all, more than"),
        (["infer", "scenes.npz", "--index", 10**30], "there is no scene"),
        (["evaluate", "scenes.npz", "--limit", -(10**30)], "the limit must be 1 or more"),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else "",
)
def test_counts_that_cannot_be_are_sentences(stored, command, words):
    assert_refused(run(*command), words)


# --- every number with its error ----------------------------------------------------------------


def test_nested_spans_of_compilation_count_once():
    watch = Stopwatch()

    def compute():
        for seconds in (0.01, 0.03, 0.03):  # the first two are within the last
            watch._compiled("/jax/core/compile/x", seconds)
        return [0]

    with watch:
        watch.time(compute)
    assert watch.seconds > -0.031  # and not -0.07


@pytest.mark.parametrize(
    ("seconds", "text"), [(4e-4, "0.4 ms"), (0.0123, "12 ms"), (0.5, "0.5 s"), (12.3, "12 s")]
)
def test_no_time_is_zero(seconds, text):
    assert show_seconds(seconds) == text


def test_the_table_of_the_demo_has_the_error_of_an_estimate():
    scene = make_scene(SCENES.points[0][SCENES.present[0]], 11)
    result = quick(None, scene, None)
    changes = {"log_evidence": np.array(-3.0), "log_evidence_error": np.array(0.254)}
    out = io.StringIO()
    Console(file=out, width=100).print(_table([(_with(result, **changes), 2.0)], scene))
    assert "-3.00 ± 0.25" in out.getvalue()


def _with(result, **changes):
    return replace(result, seconds=0.01, **changes)


def test_the_status_has_the_error():
    result = quick(None, SCENES.take(0), None)
    changes = {"log_evidence": np.array(-3.0), "log_evidence_error": np.array(0.254)}
    assert _with(result, **changes).status.endswith("log evidence -3.000 ± 0.25")
    many = quick(None, SCENES.take(slice(4)), None)
    status = _with(many, elbo=np.array([1.0, 2.0, 3.0, 4.0])).status
    assert status.endswith("ELBO 2.500 ± 0.65 on average")


def test_json_has_the_error(stored, monkeypatch):
    def estimate(program, scene, *arguments, **options):
        value = np.full(scene.points.shape[:-2], -3.0)
        error = np.full_like(value, 0.1)
        return _with(quick(program, scene, None), log_evidence=value, log_evidence_error=error)

    ransac = methods.METHODS["ransac"]._replace(run=estimate)
    monkeypatch.setitem(methods.METHODS, "ransac", ransac)
    one = json.loads(run("infer", stored, "--method", "ransac", "--json", "-").stdout)
    assert (one["log_evidence"], one["log_evidence_error"]) == (-3.0, 0.1)
    many = json.loads(run("evaluate", stored, "--method", "ransac", "--json", "-").stdout)
    for key in ("standard_error", "interval"):
        assert set(many[key]) == {"slots", "partition", "converged", "log_evidence"}


@pytest.mark.long
@pytest.mark.parametrize("method", ["ransac", pytest.param("exact", marks=pytest.mark.slow)])
def test_the_table_names_squares_as_the_picture_does(stored, method):
    """The picture has the names of the truth where identical objects could be swapped."""
    both = np.flatnonzero([{0, 2} <= set(truth) for truth in SCENES.object])
    alike = 0
    for index in both[:4]:
        result = run("infer", stored, "--index", index, "--method", method, "--json", "-")
        answer = json.loads(result.stdout)
        found = np.array([point["object"] for point in answer["points"]])
        truth = SCENES.object[index][SCENES.present[index]]
        if not same_partition(found, truth):
            continue
        np.testing.assert_array_equal(found, truth)
        alike += 1
        for entry in answer["objects"]:
            centre = SCENES.points[index][SCENES.present[index]][entry["points"]].mean(axis=0)
            np.testing.assert_allclose(entry["translation"], centre, atol=0.05)
            assert entry["name"] == ["square 1", "triangle", "square 2"][entry["object"]]
    assert alike
