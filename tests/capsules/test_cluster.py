"""Blocks on a Dask cluster: the answers of one process, whatever is lost on the way."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from distributed import Client, LocalCluster
from typer.testing import CliRunner

from capsules import batch, cli, cluster, methods
from capsules.batch import Job, Work
from capsules.commands import scale
from capsules.experiments.generator import sample_scenes
from capsules.files.inputs import SceneFile
from capsules.files.outputs import save_scenes
from capsules.store import Store
from models.errors import InputError
from tests.capsules.stand_in import quick

pytestmark = [
    pytest.mark.long,
    # Dask and tornado leave the closing of loops to the end of a process.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ROOT = Path(__file__).parents[2]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def path(tmp_path):
    save_scenes(tmp_path / "scenes.npz", sample_scenes(200, sigma=0.1, seed=2))
    return tmp_path / "scenes.npz"


# --- within this process ------------------------------------------------------------------------


@pytest.fixture
def work(path, tmp_path, monkeypatch):
    """Blocks of eight scenes, and a stand-in for the method."""
    monkeypatch.setattr(batch, "BLOCK", 8)
    ransac = methods.METHODS["ransac"]._replace(run=quick)
    monkeypatch.setitem(methods.METHODS, "ransac", ransac)
    (tmp_path / "out").mkdir()
    with SceneFile(path) as file:
        yield Work(Job("ransac", 0, {}), file, Store(tmp_path / "out"))


@pytest.fixture(scope="module")
def client():
    options = {"processes": False, "dashboard_address": ":0", "threads_per_worker": 2}
    there = LocalCluster(n_workers=2, **options)
    with there, Client(there, set_as_default=False) as client:
        yield client


def test_every_block_is_computed_and_kept(work, client, monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "AHEAD", 3)
    assert sorted(cluster.compute(client, work, work.missing())) == list(range(len(work)))
    assert not work.missing()
    found = contents(tmp_path / "out")
    work.store.forget(work.entries)
    list(work.results())  # in this process
    assert contents(tmp_path / "out") == found


def test_what_a_method_refuses_is_the_same_sentence(work, client, monkeypatch):
    def refuse(*arguments, **options):
        raise InputError("the points are on the moon")

    ransac = methods.METHODS["ransac"]._replace(run=refuse)
    monkeypatch.setitem(methods.METHODS, "ransac", ransac)
    with pytest.raises(InputError, match="the points are on the moon"):
        list(cluster.compute(client, work, work.missing()))


def test_workers_with_another_source_are_refused(work, client, monkeypatch):
    block = work.block(0)
    with pytest.raises(InputError, match="another source of this project; install the same"):
        cluster._answer(block, work.entries[0], work.numbers_of(0), "an edited prior")


@pytest.mark.parametrize("kind", ["nothing is there", "nothing is said", "no address"])
def test_a_scheduler_that_does_not_answer_is_a_sentence(path, tmp_path, monkeypatch, kind):
    assert scale.CONNECT_SECONDS <= 3
    monkeypatch.setattr(scale, "CONNECT_SECONDS", 1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "nothing is said":
            listener.listen()
        address = "x" if kind == "no address" else f"127.0.0.1:{listener.getsockname()[1]}"
        options = ["--method", "ransac", "--cluster", address, "--out", str(tmp_path / "out")]
        began = time.monotonic()
        result = CliRunner().invoke(cli.app, ["infer", str(path), "--all", *options])
    assert time.monotonic() - began < 15
    assert result.exit_code == cli.BAD_INPUT, result.output
    assert result.stderr.startswith(f"error: no Dask scheduler answers at {address} (")
    assert result.stderr.count("\n") == 1


# --- the real thing, killed ---------------------------------------------------------------------

_SMALL_BLOCKS = """
from capsules import batch, cli
batch.BLOCK = 8
if __name__ == "__main__":
    cli.main()
"""


def start(path, out, *options, cache):
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    asked = ["infer", str(path), "--all", "--method", "ransac", "--out", str(out), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", _SMALL_BLOCKS, *asked], env=environment, **pipes)


def finished(process):
    try:
        out, err = process.communicate(timeout=280)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "Traceback" not in err, err
    return out, err


def wait_for(condition, seconds=280):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def workers_of(process):
    """Processes that compute: not the one that looks after shared resources."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_a_worker_and_then_the_run_are_killed(tmp_path):
    path, cache = tmp_path / "scenes.npz", tmp_path / "cache"
    save_scenes(path, sample_scenes(300, sigma=0.1, seed=2))
    finished(start(path, tmp_path / "one", cache=cache))
    wanted = contents(tmp_path / "one")

    out = tmp_path / "two"
    running = start(path, out, "--workers", "2", cache=cache)
    wait_for(lambda: running.poll() or (out.is_dir() and len(os.listdir(out)) >= 3))
    first, *_ = workers_of(running)
    first.send_signal(signal.SIGKILL)
    before = len(os.listdir(out))
    wait_for(lambda: len(os.listdir(out)) >= before + 6)
    assert running.poll() is None
    workers = workers_of(running)
    running.kill()
    running.communicate()
    wait_for(lambda: not any(worker.is_running() for worker in workers), 30)
    assert 9 <= len(os.listdir(out)) < len(wanted)
    assert not (out / "manifest.json").exists()
    assert all(wanted[name] == content for name, content in contents(out).items())

    _, err = finished(start(path, out, "--workers", "2", cache=cache))
    assert "Resuming: " in err
    assert contents(out) == wanted
