"""Work on whole files: blocks, memory, resuming, devices, processes; all of them change nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from capsules import batch, cli, methods
from capsules.batch import Job, Work
from capsules.experiments.generator import sample_scenes
from capsules.files.inputs import SceneFile, load_scenes
from capsules.files.outputs import save_scenes
from capsules.methods import infer
from capsules.store import Store
from inference.diagnostics.metrics import METRICS, PROTOCOLS, score
from models.errors import InputError
from models.scenes import Scene
from tests.capsules.stand_in import quick

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SCENES = sample_scenes(40, sigma=0.1, seed=2)
RANSAC = Job("ransac", 0, {})
FIELDS = ("match_probs", "pose_mean", "pose_covariance", "labels", "converged", "steps")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(batch, "BLOCK", 8)


@pytest.fixture
def path(tmp_path):
    """Scenes with some empty ones between them."""
    path = tmp_path / "scenes.npz"
    gaps = np.insert(np.arange(len(SCENES.points)), [0, 3, 3, 20], -1)
    points, present, truth = (x[gaps] for x in SCENES[:3])
    present = present & (gaps >= 0)[:, None]
    save_scenes(path, Scene(points, present, np.where(present, truth, -1)))
    return path


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def all_of(results, name):
    return np.concatenate([getattr(result, name) for result in results])


def results_in(folder, path, job=RANSAC):
    """The answers that are kept; none is computed."""
    with SceneFile(path) as file:
        work = Work(job, file, Store(folder))
        assert not work.missing()
        return list(work.results())


COMMAND = {"objects": None, "precision": None, "prior": "uniform", "preset": "default"}
"""Settings of the command line."""


# --- what is computed ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
    """What the method itself says, in one batch."""
    return infer("ransac", SCENES)


def test_blocks_change_no_answer(path, tmp_path, plain):
    with SceneFile(path) as file:
        work = Work(RANSAC, file, Store(tmp_path))
        numbers = np.concatenate([work.numbers_of(block) for block in range(len(work))])
        computed = list(work.results())
    np.testing.assert_array_equal(numbers, np.flatnonzero(np.load(path)["present"].any(axis=1)))
    stored = results_in(tmp_path, path)
    for name in (*FIELDS, "explained"):
        np.testing.assert_array_equal(all_of(computed, name), getattr(plain, name))
        np.testing.assert_array_equal(all_of(stored, name), getattr(plain, name))
    np.testing.assert_array_equal(
        np.concatenate([result.scene.points for result in stored]), SCENES.points
    )


@pytest.mark.slow
def test_blocks_have_random_keys_of_their_own_and_the_first_that_of_the_method(monkeypatch, path):
    seeds = []

    def fake(method, scenes, seed, **options):
        seeds.append(seed)
        return infer("ransac", scenes)

    monkeypatch.setattr(batch, "infer", fake)
    with SceneFile(path) as file:
        list(Work(RANSAC._replace(seed=5), file).results())
    assert len(set(seeds)) == len(seeds) == -(-len(SCENES.points) // 8)
    assert seeds[0] == 5


# --- what is kept -------------------------------------------------------------------------------


def test_work_goes_on_where_it_stopped(path, tmp_path, monkeypatch):
    out = tmp_path / "out"
    calls = []

    def counted(method, scenes, *arguments, **options):
        calls.append(len(scenes.points))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return infer(method, scenes, *arguments, **options)

    monkeypatch.setattr(batch, "infer", counted)
    arguments = ("infer", path, "--all", "--method", "ransac", "--out", out)
    stopped = run(*arguments)
    assert stopped.exit_code == cli.INTERRUPTED
    assert "the same command resumes there" in stopped.stderr
    before = {part: part.stat().st_mtime_ns for part in out.iterdir()}
    assert len(before) == 2
    resumed = run(*arguments)
    assert resumed.exit_code == 0, resumed.output
    assert "Resuming: 2 of" in resumed.stderr
    assert sum(calls[3:]) == len(SCENES.points) - 16
    assert {part: part.stat().st_mtime_ns for part in before} == before
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["scenes"] == len(SCENES.points)
    parts = [part["file"] for part in manifest["parts"]]
    assert sorted(os.listdir(out)) == sorted(["manifest.json", *parts])
    with np.load(out / parts[1]) as stored:  # for anyone to read
        assert [stored["scene"][0], stored["scene"][-1]] == [
            manifest["parts"][1]["first"],
            manifest["parts"][1]["last"],
        ]


def test_other_settings_and_scenes_are_kept_apart(path, tmp_path, monkeypatch):
    ransac = methods.METHODS["ransac"]._replace(run=quick)
    monkeypatch.setitem(methods.METHODS, "ransac", ransac)
    out = tmp_path / "out"
    arguments = ("infer", path, "--all", "--method", "ransac", "--out", out)
    assert run(*arguments).exit_code == 0
    for other in (["--seed", 1], ["--precision", 100]):
        result = run(*arguments, *other)
        assert result.exit_code == 0 and "Resuming" not in result.stderr
    assert "Resuming: 4 of 4" in run(*arguments).stderr
    fresh = run(*arguments, "--fresh")
    assert fresh.exit_code == 0 and "Resuming" not in fresh.stderr
    save_scenes(path, SCENES._replace(points=SCENES.points + 1e-3))
    assert "Resuming" not in run(*arguments).stderr


@pytest.mark.parametrize("kept", [False, True])
def test_evaluate_by_blocks_says_what_the_metrics_say(path, tmp_path, plain, kept):
    options = ["--method", "ransac"]
    if kept:
        options += ["--out", tmp_path / "out"]
        assert run("infer", path, "--all", *options).exit_code == 0
    result = run("evaluate", path, *options, "--json", "-")
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.stdout)
    assert numbers["scenes"] == len(SCENES.points)
    assert (numbers["seconds_per_scene"] is None) == kept
    for protocol in PROTOCOLS:
        for name in METRICS:
            values = score(plain)[protocol][name]
            assert numbers[protocol][name] == pytest.approx(values.mean())
            error = values.std(ddof=1) / np.sqrt(len(values))
            assert numbers["standard_error"][protocol][name] == pytest.approx(error)


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--all"], "--all needs a folder for the answers; give it with --out DIR"),
        (["--out", "here"], "are for many scenes; give --all too"),
        (["--devices", 2], "are for many scenes; give --all too"),
        (["--workers", 2], "are for many scenes; give --all too"),
        (["--all", "--out", "here", "--index", 2], "--index, --plot and --json are for one scene"),
        (["--all", "--out", "here", "--devices", 99], "devices must be 1 to"),
        (["--all", "--out", "here", "--devices", 0], "devices must be 1 to"),
        (["--all", "--out", "here", "--workers", 0], "--workers must be 1 to 1024"),
        (["--all", "--out", "h", "--workers", 1, "--cluster", "h:1"], "without --cluster"),
    ],
)
def test_bad_arguments_are_explained(path, monkeypatch, tmp_path, arguments, pattern):
    monkeypatch.chdir(tmp_path)
    result = run("infer", path, "--method", "ransac", *arguments)
    assert result.exit_code == cli.BAD_INPUT, result.output
    assert re.search(pattern, result.stderr), result.stderr
    assert not list(tmp_path.rglob("part-*"))


def test_methods_of_one_device_say_so(path, tmp_path):
    result = run(
        "infer", path, "--method", "exact", "--all", "--out", tmp_path / "o", "--devices", 2
    )
    assert "the method exact has no option 'devices'" in result.stderr


# --- reading in slices --------------------------------------------------------------------------


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_slices_are_those_of_the_whole(tmp_path, write):
    path = tmp_path / "scenes.npz"
    whole = {"points": SCENES.points, "present": SCENES.present, "object": SCENES.object}
    write(path, **whole)
    with SceneFile(path) as file:
        assert len(file) == len(SCENES.points)
        for start, stop in ((0, 3), (20, 25), (4, 5), (0, len(file))):  # forwards and back
            some = file.read(start, stop)
            for name, array in whole.items():
                np.testing.assert_array_equal(getattr(some, name), array[start:stop])


def test_arrays_stored_by_columns_are_read(tmp_path):
    path = tmp_path / "scenes.npz"
    np.savez(path, points=np.asfortranarray(SCENES.points), present=SCENES.present)
    np.testing.assert_array_equal(load_scenes(path).points, SCENES.points)


# --- several devices and processes, in processes of their own -----------------------------------


_SMALL_BLOCKS = """
from capsules import batch, cli
batch.BLOCK = 8
cli.main()
"""


def start(*arguments, cache, devices=1, **options):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment["XLA_FLAGS"] = flags.strip()
    command = [sys.executable, "-c", _SMALL_BLOCKS, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes, **options)


def finished(process):
    out, err = process.communicate(timeout=280)
    assert "Traceback" not in err, err
    return process.returncode, out, err


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
def test_two_devices_say_what_one_says(path, tmp_path, cache):
    arguments = ["--method", "ransac", "--devices", 2, "--out", tmp_path / "out"]
    code, _, err = finished(start("infer", path, "--all", *arguments, cache=cache, devices=2))
    assert code == 0, err
    plain = infer("ransac", SCENES)
    stored = results_in(tmp_path / "out", path, RANSAC._replace(settings=COMMAND))
    for name in FIELDS:
        np.testing.assert_allclose(all_of(stored, name), getattr(plain, name), rtol=0, atol=1e-9)


_TWO_DEVICES = """
import json, sys
import jax, numpy as np
from inference import cavi
from inference.variational import pool
from inference.variational.ascent import Schedule
from models.program.batches import read_scenes
from models.constellation import constellation
from capsules.experiments.generator import sample_scenes
from models.templates import shapes, stack
from functools import partial

program = partial(constellation, parts=stack(shapes("triangle", "triangle")))
scenes = sample_scenes(40, sigma=0.1, seed=2, objects=("triangle", "triangle"))
one, two = (cavi.run(program, scenes, jax.random.key(0), num_restarts=3, devices=n) for n in (1, 2))
names = ("match_probs", "pose_mean", "pose_covariance", "elbo", "steps")
apart = {n: float(np.abs(getattr(one, n) - getattr(two, n)).max()) for n in names}
reading = read_scenes(program, scenes.take(slice(8)))
engine = pool.engine(reading.skeleton, "sinkhorn", Schedule(), 2)
runs = engine.start(reading.model, jax.random.split(jax.random.key(0), 8))
text = engine.finish.lower(runs).compile().as_text()
words = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
found = {"collectives": [word for word in words if word in text], "loops": "while" in text}
spread = len(runs.state.done.sharding.device_set)
print(json.dumps({"apart": apart, "spread": spread} | found))
"""


@pytest.mark.slow
def test_coordinate_ascent_on_two_devices_without_a_collective():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", _TWO_DEVICES], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert max(found["apart"].values()) <= 1e-9, found
    assert found["loops"] and not found["collectives"]
    assert found["spread"] == 2


# --- memory -------------------------------------------------------------------------------------

_PEAK = """
import sys
from pathlib import Path
from capsules import batch
from capsules.batch import Job, Work
from inference.result import Result
from capsules.files.inputs import SceneFile
from capsules.store import Store
import numpy as np

def quick(method, scenes, seed, **options):
    "Stands in for a method: answers of the right size at no cost."
    n, rows = scenes.present.shape
    probs = np.random.default_rng(seed).dirichlet(np.ones(rows), (n, rows))
    return Result(method, scenes, probs, np.zeros((n, 3, 4)),
        np.zeros((n, 3, 4, 4)), np.zeros((n, rows), int), np.zeros(rows, int), np.ones(n, bool),
        np.ones(n, int), elbo=np.zeros(n))

batch.infer = quick
with SceneFile(sys.argv[1]) as file:
    store = Store(Path(sys.argv[2]))
    with store.alone():
        for result in Work(Job("quick", 0, {}), file, store).results():
            pass
status = Path("/proc/self/status").read_text()
print(int(status.split("VmHWM:")[1].split()[0]) / 2**20)
"""
"""(`getrusage` would do, but its peak is handed on to a child: it would be that of the tests.)"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path):
    """Answers of 40,000 scenes are 60 MB, and of 4,000 six."""
    peaks = []
    for count in (4_000, 40_000):
        path = tmp_path / f"{count}.npz"
        save_scenes(path, sample_scenes(count, sigma=0.1, seed=2))
        command = [sys.executable, "-c", _PEAK, str(path), str(tmp_path / f"{count}")]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        assert done.returncode == 0, done.stderr
        peaks.append(float(done.stdout))
    assert peaks[1] < peaks[0] + 0.02  # GiB
    assert peaks[1] < 2.0


def test_a_file_too_large_for_memory_is_refused_with_its_size(path, monkeypatch):
    monkeypatch.setattr("capsules.files.inputs.MAX_BYTES", 1000)
    with pytest.raises(InputError, match=r"take 0\.0 GiB, more than .* `capsules infer --all`"):
        load_scenes(path)
