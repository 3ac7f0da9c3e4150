"""The command line: help, files, the demo, and that bad input ends in one sentence."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from capsules import cli
from capsules.experiments.generator import sample_scenes
from capsules.files.inputs import load_scenes
from capsules.files.outputs import save_scenes, whole_file
from capsules.methods import METHODS, PRESETS, infer, program_of
from inference.diagnostics.metrics import METRICS, PROTOCOLS, same_partition, score
from models.constellation import published_mixture
from models.errors import InputError
from models.program.reading import read

ROOT = Path(__file__).parents[2]
COMMANDS = ("demo", "sample", "infer", "film", "evaluate", "learn", "reproduce", "train")
SCENES = sample_scenes(16, sigma=0.1, seed=0)


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def start(*arguments, cache, **options):
    """The real thing, in a process of its own and without the settings of the tests."""
    settings = ("JAX_", "XLA_FLAGS")
    environment = {k: value for k, value in os.environ.items() if not k.startswith(settings)}
    environment |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = [sys.executable, "-m", "capsules.cli", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes, **options)


def assert_sentence(result, pattern):
    """Exit code 2 and one line on stderr that matches, no traceback, nothing on stdout."""
    assert result.exit_code == cli.BAD_INPUT, result.output
    assert re.search(pattern, result.stderr), result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    assert result.stdout == ""


# --- help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], *([name, "-h"] for name in COMMANDS)])
def test_help_has_examples(arguments):
    result = run(*arguments)
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert re.search(rf"capsules ({'|'.join(COMMANDS)})", result.stdout)
    assert "[bold]" not in result.stdout


def test_help_lists_the_commands_and_their_options():
    assert all(name in run("--help").stdout for name in (*COMMANDS, "Exit codes"))
    assert all(name in run("sample", "-h").stdout for name in ("--draws", "--no-centred", "512"))
    assert all(name in run("demo", "-h").stdout for name in ("--seed", "--scenes", "demo.png"))


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom capsules.cli import app\n"
        "assert CliRunner().invoke(app, ['demo', '--help']).exit_code == 0\n"
        "print({'jax', 'numpyro', 'numpy', 'scipy', 'matplotlib', 'arviz'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.long
def test_arviz_is_not_imported_by_the_commands():
    code = "import sys, capsules.methods, inference.plots\nassert 'arviz' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_entry_point_calls_itself_capsules(tmp_path):
    process = start("--help", cache=tmp_path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Usage: capsules" in out
    assert err == ""


# --- capsules sample ----------------------------------------------------------------------------


def test_sample_writes_what_the_generator_draws(tmp_path):
    file = tmp_path / "scenes.npz"
    result = run("sample", file, "--draws", 40, "--sigma", 0.25, "--seed", 3)
    assert result.exit_code == 0, result.output
    expected, found = sample_scenes(40, 0.25, 3), load_scenes(file)
    for name in ("points", "present", "object"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert f"Wrote {len(found.points)} scenes" in result.stdout
    assert os.listdir(tmp_path) == ["scenes.npz"]


def test_sample_takes_shapes_and_centring(tmp_path):
    file = tmp_path / "scenes.npz"
    run("sample", file, "--draws", 20, "--shapes", "L, pentagon", "--no-centred")
    expected = sample_scenes(20, 0.1, 0, ["L", "pentagon"], centred=False)
    np.testing.assert_array_equal(load_scenes(file).points, expected.points)
    run("sample", file, "--draws", 20, "--shapes", "L,pentagon", "--centred")
    assert not np.array_equal(load_scenes(file).points, expected.points)


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--draws", 0], "draws must be at least 1, got 0"),
        (["--draws", 10**9], r"1,000,000,000 draws .* at most 1,952,257, and"),
        (["--clutter", 10**9], r"512 draws of 1,000,000,011 points take more than 2 GiB"),
        (["--sigma", -1], r"sigma must be 0 to 1,000, got -1\.0"),
        (["--sigma", "nan"], "sigma must be 0 to 1,000, got nan"),
        (["--sigma", "1e300"], "sigma must be 0 to 1,000, got 1e"),
        (["--seed", -1], "seed must be 0 or more, got -1"),
        (["--shapes", "square,circle"], "no shape 'circle'; give some of square"),
        (["--shapes", ""], "no shape ''"),
        (["--draws", 1, "--shapes", "square", "--seed", 0], "gave no object at all"),
    ],
)
def test_sample_explains_bad_arguments(tmp_path, arguments, pattern):
    assert_sentence(run("sample", tmp_path / "out.npz", *arguments), pattern)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("arguments", [["--sigma", "much"], ["--colour", 3], ["a.npz", "b.npz"]])
def test_usage_errors_exit_2(tmp_path, arguments):
    result = run("sample", tmp_path / "out.npz", *arguments)
    assert result.exit_code == cli.BAD_INPUT
    assert "Usage" in result.stderr
    assert "Traceback" not in result.output


# --- paths that cannot be written ---------------------------------------------------------------


@pytest.mark.parametrize("place", ["no/such/folder/out", "a_file/out", "a_folder"])
@pytest.mark.parametrize("command", ["sample", "demo"])
def test_a_path_that_cannot_be_written_is_explained(tmp_path, command, place):
    (tmp_path / "a_file").touch()
    suffix = {"sample": ".npz", "demo": ".png"}[command]
    (tmp_path / f"a_folder{suffix}").mkdir()
    path = f"{tmp_path / place}{suffix}"
    before = sorted(tmp_path.rglob("*"))
    result = run("sample", path) if command == "sample" else run("demo", "--out", path)
    assert_sentence(result, "cannot write .*; choose a folder that exists")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["demo", "demo.gif", "demo.npz"])
def test_a_picture_of_unknown_format_is_explained(tmp_path, name):
    assert_sentence(run("demo", "--out", tmp_path / name), r"should end in \.png, \.pdf, \.svg")
    assert not os.listdir(tmp_path)


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.png"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), whole_file(path) as file:
        file.write(b"half of the new")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    with whole_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["out.png"]


# --- scene files that cannot be used ------------------------------------------------------------


def write_arrays(**changes):
    def write(path):
        arrays = {"points": SCENES.points, "present": SCENES.present, "object": SCENES.object}
        arrays |= changes
        np.savez(path, **{name: x for name, x in arrays.items() if x is not None})

    return write


def truncated(path):
    save_scenes(path, SCENES)
    path.write_bytes(path.read_bytes()[:300])


def with_nan(value):
    return np.where(SCENES.present[..., None], value, SCENES.points)


BAD_FILES = {
    "absent": (lambda path: None, "there is no file"),
    "truncated": (truncated, "cannot read .* as a scene file"),
    "not npz": (lambda path: path.write_text("hello"), "cannot read .* as a scene file"),
    "empty file": (lambda path: path.touch(), "cannot read .* as a scene file"),
    "folder": (lambda path: path.mkdir(), "cannot read .* as a scene file"),
    "pickle": (write_arrays(object=np.array([{}])), "cannot read .* as a scene file"),
    "no points": (write_arrays(points=None), "has no array 'points'"),
    "NaN": (write_arrays(points=with_nan(np.nan)), "NaN or infinite"),
    "infinite": (write_arrays(points=with_nan(np.inf)), "NaN or infinite"),
    "one axis less": (write_arrays(points=SCENES.points[0]), r"has shape \(11, 2\)"),
    "three features": (write_arrays(points=np.ones((*SCENES.present.shape, 3))), "3 features"),
    "too many points": (
        write_arrays(points=np.ones((2, 15, 2)), present=np.ones((2, 15), bool), object=None),
        "15 rows but the program has 11 parts",
    ),
    "no scene": (write_arrays(present=SCENES.present & False), "no scene with points"),
    "numbers for present": (write_arrays(present=SCENES.present.astype(int)), "true or false"),
}


# numpy does not close a file that turns out to be no zip file.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO")
@pytest.mark.parametrize("case", BAD_FILES)
def test_demo_explains_a_bad_file(tmp_path, case):
    file, (write, pattern) = tmp_path / "scenes.npz", BAD_FILES[case]
    write(file)
    assert_sentence(run("demo", "--scenes", file, "--out", tmp_path / "demo.png"), pattern)
    assert set(os.listdir(tmp_path)) <= {"scenes.npz"}
    gc.collect(1)  # the warning comes within this test


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--index", 99], r"has 1\d scenes with points, so there is no scene 99; .* 0 to 1\d"),
        (["--index", -1], "there is no scene -1"),
        (["--precision", -5], r"precision must be positive, got -5\.0"),
        (["--precision", 0], r"precision must be positive, got 0\.0"),
        (["--shapes", "square,plane"], "11 rows but the program has 10 parts"),
        (["--shapes", "cube"], "no shape 'cube'"),
        (["--seed", -1], "seed must be 0 or more, and less than 2.63, got -1"),
    ],
)
def test_demo_explains_bad_arguments(tmp_path, arguments, pattern):
    file = tmp_path / "scenes.npz"
    save_scenes(file, SCENES)
    result = run("demo", "--scenes", file, "--out", tmp_path / "demo.png", *arguments)
    assert_sentence(result, pattern)
    assert os.listdir(tmp_path) == ["scenes.npz"]


@pytest.mark.parametrize("error", [InputError("the match is not square"), KeyboardInterrupt()])
def test_whatever_a_method_raises_leaves_no_file(tmp_path, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setitem(METHODS, "ds", METHODS["ds"]._replace(run=fail))
    result = run("demo", "--out", tmp_path / "demo.png")
    interrupted = isinstance(error, KeyboardInterrupt)
    assert result.exit_code == (cli.INTERRUPTED if interrupted else cli.BAD_INPUT)
    assert ("interrupted" if interrupted else "error: the match is not square") in result.stderr
    assert not os.listdir(tmp_path)


def test_errors_of_our_own_are_not_hidden(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise ValueError("a bug")

    monkeypatch.setitem(METHODS, "ds", METHODS["ds"]._replace(run=fail))
    result = run("demo", "--out", tmp_path / "demo.png")
    assert result.exit_code == 1
    assert isinstance(result.exception, ValueError)


def test_bad_input_ends_the_program(tmp_path, monkeypatch, capsys):
    """By the entry point, which also looks after signals."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # puts it back
    monkeypatch.setattr(sys, "argv", ["capsules", "demo", "--scenes", "nowhere.npz"])
    monkeypatch.chdir(tmp_path)
    try:
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    said = "error: there is no file nowhere.npz; `capsules sample` writes one\n"
    assert (stopped.value.code, *capsys.readouterr()) == (cli.BAD_INPUT, "", said)


# --- methods ------------------------------------------------------------------------------------


def test_methods_are_found_by_name():
    assert set(METHODS) >= {"ds", "gmm", "ransac", "exact"}
    with pytest.raises(
        InputError, match="no method 'magic'; choose from ds, gmm, ransac, map, exact"
    ):
        infer("magic", SCENES.take(0))
    with pytest.raises(InputError, match=r"seed must be 0 or more, .*, got -1"):
        infer("exact", SCENES.take(0), -1)
    with pytest.raises(InputError, match="no prior 'magic'; choose from uniform"):
        infer("exact", SCENES.take(0), prior="magic")
    with pytest.raises(InputError, match="no preset 'magic'; choose from default, paper, pub"):
        infer("exact", SCENES.take(0), preset="magic")
    with pytest.raises(InputError, match="method exact has no option 'num_restarts'"):
        infer("exact", SCENES.take(0), num_restarts=3)


def test_a_preset_says_the_options_and_a_call_goes_before_it(monkeypatch):
    given = {}

    def fake(program, scene, rng_key, progress_bar, **options):
        given.update(options)

    monkeypatch.setitem(METHODS, "ds", METHODS["ds"]._replace(run=fake))
    infer("ds", SCENES, preset="paper")
    assert given == {"init_strategy": "uniform", "num_restarts": 5}
    infer("ds", SCENES, preset="paper", num_restarts=7)
    assert given == {"init_strategy": "uniform", "num_restarts": 7}
    assert program_of("gmm", preset="published").func is published_mixture


def test_the_presets_of_ransac_have_the_tolerance_of_the_text_and_of_the_code():
    """The text compares the distance with 0.1, the published code the squared distance."""
    tolerance = {
        name: PRESETS[name]["ransac"].options["tolerance"] for name in ("paper", "published")
    }
    assert tolerance["paper"] == 0.1
    assert tolerance["published"] ** 2 == pytest.approx(0.1)


@pytest.mark.parametrize("method", METHODS)
def test_a_program_is_made_once_and_takes_templates_and_precision(method):
    assert program_of(method) is program_of(method)
    assert program_of(method, ["L"], 5.0) is program_of(method, ("L",), 5.0)
    parts = read(program_of(method, ["L"], 5.0), sample_scenes(9, objects=["L"]).take(0)).parts
    assert parts.num_parts == 6
    np.testing.assert_allclose(parts.variance, 1 / 5.0)


# --- capsules demo ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One compilation cache for all demos of this module."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
def test_demo_prints_a_table_and_writes_a_picture(tmp_path, cache):
    process = start("demo", cache=cache, cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "Traceback" not in err and "Warning" not in err
    quantities = dict.fromkeys(METHODS, "ELBO") | {"ransac": " - ", "nuts": " - "}
    quantities |= dict.fromkeys(("exact", "gibbs"), "log evidence")
    for name, quantity in quantities.items():
        row = next(line for line in out.splitlines() if line.split()[:1] == [name] and "s" in line)
        assert quantity in row
        right = "[01]" if name == "svi" else "1"  # its few restarts may all miss this scene
        assert re.search(rf"(-?\d+\.\d\d|-) +{right} +[\d.]+ m?s +[\d.]+ m?s", row), row
    assert "first call" in out and "compil" in out
    assert os.listdir(tmp_path) == ["demo.png"]
    with Image.open(tmp_path / "demo.png") as image:
        image.verify()
        assert image.format == "PNG"
        assert 800 <= image.width <= 1800 and 500 <= image.height <= 1500
    assert (tmp_path / "demo.png").stat().st_size < 400_000
    assert any((cache / "generative-capsules" / "jax").iterdir())


@pytest.mark.slow
def test_demo_of_a_file_without_the_truth(tmp_path, cache):
    save_scenes(tmp_path / "scenes.npz", SCENES._replace(object=None))
    arguments = ["--scenes", "scenes.npz", "--index", 1, "--out", "picture.svg"]
    process = start("demo", *arguments, cache=cache, cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count("truth unknown") == len(METHODS)
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_an_interruption_within_a_destructor_is_one():
    """Python raises nothing from there: the command would go on after a traceback."""
    code = """
import signal, sys
from capsules import cli

class Fragile:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

@cli.app.command()
def stop():
    Fragile()
    print("went on")

sys.argv = ["capsules", "stop"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (cli.INTERRUPTED, "", cli.STOPPED + "\n")


# --- capsules infer and evaluate ----------------------------------------------------------------

SQUARE = np.array([[-1, -1], [1, 1], [1, -1], [-1, 1]]) * 0.1 + [0.3, -0.2]


@pytest.mark.parametrize("kind", ["csv", "csv with a heading", "json", "json object"])
def test_infer_reads_points(tmp_path, kind):
    """A square of half a side 0.1 about (0.3, -0.2), by ransac."""
    file = tmp_path / ("points.json" if "json" in kind else "points.csv")
    lines = "\n".join(f"{x},{y}" for x, y in SQUARE)
    file.write_text(
        {
            "csv": lines,
            "csv with a heading": f"x,y\n{lines}\n",
            "json": json.dumps(SQUARE.tolist()),
            "json object": json.dumps({"points": SQUARE.tolist()}),
        }[kind]
    )
    result = run("infer", file, "--method", "ransac", "--json", "-")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    (square,) = answer["objects"]
    assert square["name"] == "square 1"
    assert square["points"] == [0, 1, 2, 3]
    np.testing.assert_allclose(square["translation"], [0.3, -0.2], atol=1e-3)
    assert square["scale"] == pytest.approx(0.1 * np.sqrt(2), rel=1e-3)
    assert square["angle"] % 90 == pytest.approx(0, abs=0.1) or square["angle"] % 90 > 89.9
    # Four points of precision 1e4: each number has the variance 1 / (1 + 4e4) of the posterior.
    np.testing.assert_allclose(square["translation_sd"], 1 / np.sqrt(40001), rtol=1e-6)
    assert square["scale_sd"] == pytest.approx(1 / np.sqrt(40001), rel=1e-6)
    sd = np.degrees(1 / np.sqrt(40001) / square["scale"])
    assert square["angle_sd"] == pytest.approx(sd, rel=1e-6)
    assert sorted(point["part"] for point in answer["points"]) == [0, 1, 2, 3]
    np.testing.assert_allclose([point["coordinates"] for point in answer["points"]], SQUARE)


def test_infer_writes_a_picture_and_json(tmp_path):
    file = tmp_path / "scenes.npz"
    save_scenes(file, SCENES)
    options = ["--plot", tmp_path / "out.png", "--json", tmp_path / "out.json"]
    result = run("infer", file, "--index", 2, "--method", "ransac", *options)
    assert result.exit_code == 0, result.output
    assert "square" in result.stdout or "triangle" in result.stdout
    answer = json.loads((tmp_path / "out.json").read_text())
    assert len(answer["points"]) == SCENES.present[2].sum()
    found = [point["object"] for point in answer["points"]]
    truth = SCENES.object[2][SCENES.present[2]]
    assert same_partition(np.array(found), truth)
    with Image.open(tmp_path / "out.png") as image:
        image.verify()


@pytest.mark.parametrize(
    ("name", "content", "pattern"),
    [
        ("points.csv", "1,2\n3\n", "does not hold points"),
        ("points.csv", "", "does not hold points"),
        ("points.csv", "1,2\n3,four\n", "does not hold points"),
        ("points.json", "[[1, 2], [3, 4]", "does not hold points"),
        ("points.json", '{"dots": []}', "does not hold points"),
        ("points.csv", "1,2\n" * 12, "12 points but the program has only 11 parts"),
        ("points.csv", "1,2,3\n", "3 features but the program's parts have 2"),
        ("points.csv", "1,nan\n", "NaN or infinite"),
    ],
)
def test_infer_explains_bad_points(tmp_path, name, content, pattern):
    (tmp_path / name).write_text(content)
    assert_sentence(run("infer", tmp_path / name, "--method", "ransac"), pattern)


@pytest.mark.long
def test_evaluate_says_what_the_metrics_say(tmp_path):
    file, out = tmp_path / "scenes.npz", tmp_path / "out.json"
    save_scenes(file, SCENES)
    result = run("evaluate", file, "--method", "ransac", "--json", "-")
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.stdout)
    assert set(numbers) >= {"method", "prior", "scenes", *PROTOCOLS, "seconds_per_scene"}
    assert (numbers["method"], numbers["prior"]) == ("ransac", "uniform")
    assert numbers["scenes"] == len(SCENES.points)
    scores = score(infer("ransac", SCENES))
    for protocol in PROTOCOLS:
        for name in METRICS:
            values = scores[protocol][name]
            assert numbers[protocol][name] == pytest.approx(values.mean())
            error = values.std(ddof=1) / np.sqrt(len(values))
            assert numbers["standard_error"][protocol][name] == pytest.approx(error)
    assert 0 <= numbers["seconds_per_scene"] < 1
    shown = run("evaluate", file, "--method", "ransac", "--limit", 1, "--json", out)
    assert shown.exit_code == 0, shown.output
    assert "partition" in shown.stdout and "slots" in shown.stdout
    assert json.loads(out.read_text())["scenes"] == 1


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--method", "magic"], "no method 'magic'"),
        (["--prior", "magic"], "no prior 'magic'"),
        (["--preset", "magic"], "no preset 'magic'"),
        (["--limit", 0], "limit must be 1 or more, got 0"),
        (["--method", "ransac", "--restarts", 3], "ransac has no option 'num_restarts'"),
    ],
)
def test_evaluate_explains_bad_arguments(tmp_path, arguments, pattern):
    file = tmp_path / "scenes.npz"
    save_scenes(file, SCENES)
    assert_sentence(run("evaluate", file, *arguments), pattern)


def test_evaluate_wants_the_truth(tmp_path):
    file = tmp_path / "scenes.npz"
    save_scenes(file, SCENES._replace(object=None))
    assert_sentence(run("evaluate", file), "no `object`, so there is no truth")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["table1", "--methods", "magic"], "no method 'magic'"),
        (["beta", "--methods", "ransac"], "beta is a study of ds and gmm"),
        (["table1", "--draws", 0], "--draws must be 1 to 1,000,000, got 0"),
        (["table1", "--scenes", "nowhere"], "there is no file nowhere"),
        (["table1", "--more"], "--images and --more are options of faces"),
        (["faces", "--methods", "ds"], "are options of the constellations"),
        (["faces", "--draws", -1], "--draws must be 1 to 1,000,000, got -1"),
        (["faces", "--images", "nowhere"], "there is no folder nowhere"),
        (["all", "--images", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_reproduce_explains_bad_arguments(tmp_path, arguments, pattern):
    assert_sentence(run("reproduce", *arguments, "--out", tmp_path / "results"), pattern)
    assert not os.listdir(tmp_path)


# --- clutter ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scenes_with_clutter_are_drawn_inferred_and_evaluated(tmp_path):
    scenes, answer = tmp_path / "cluttered.npz", tmp_path / "answer.json"
    options = ("--method", "ransac", "--clutter", 3)
    assert run("sample", scenes, "--draws", 12, "--sigma", 0, "--clutter", 3).exit_code == 0
    stored = load_scenes(scenes)
    assert stored.object.max() == 3 and stored.points.shape[1] == 14
    index = int(np.flatnonzero((stored.object == 3).any(axis=1))[0])
    shown = run("infer", scenes, "--index", index, *options)
    assert shown.exit_code == 0 and "clutter" in shown.stdout
    assert run("infer", scenes, "--index", index, *options, "--json", answer).exit_code == 0
    found = json.loads(answer.read_text())
    assert all(x["part"] is None for x in found["points"] if x["object"] == 3)
    assert found["clutter"] == [x["point"] for x in found["points"] if x["object"] == 3]
    measured = run("evaluate", scenes, *options, "--json", "-")
    assert measured.exit_code == 0 and json.loads(measured.stdout)["scenes"] == len(stored.points)
    assert_sentence(run("infer", scenes, "--method", "ransac"), "14 rows")


@pytest.mark.long
def test_parts_may_be_missing_where_visibility_says_so(tmp_path):
    scene = sample_scenes(12, seed=2, presence=1.0).take(0)
    points = np.delete(scene.points, 5, axis=0)
    np.savetxt(tmp_path / "points.csv", points, delimiter=",", header="x,y", comments="")
    options = ("--method", "map", "--prior", "presence", "--json", "-")
    result = run("infer", tmp_path / "points.csv", "--visibility", 0.9, *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["points"]
    labels = np.array([point["object"] for point in found])
    assert same_partition(np.delete(scene.object, 5), labels)
    for value, prior in ((1.5, "presence"), (0, "presence"), (0.9, "uniform")):
        refused = run("infer", tmp_path / "points.csv", "--visibility", value, "--prior", prior)
        assert_sentence(refused, "visibility")


def test_clutter_is_for_our_own_settings(tmp_path):
    scenes = tmp_path / "cluttered.npz"
    save_scenes(scenes, sample_scenes(4, sigma=0.0, seed=0, clutter=3))
    assert_sentence(run("infer", scenes, "--clutter", 3, "--preset", "published"), "clutter")
