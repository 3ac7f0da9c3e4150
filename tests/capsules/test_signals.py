"""Commands that are killed at any moment: nothing is left over, and the same command ends the same.

Stand-ins take the place of the methods, a little slower than they are, so that most of the time is
spent between reading and writing. Two moments in `make test`, 36 in `make test-all`. Processes are
forks of one that has the libraries already, and has computed nothing.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from capsules.experiments.generator import sample_scenes
from capsules.files.outputs import save_scenes

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]

DRIVER = """
import json, os, sys, time
import matplotlib.figure, numpyro, PIL.GifImagePlugin, rich.progress, scipy.optimize
import sklearn.metrics, typer.testing

for line in sys.stdin:
    folder, *arguments = json.loads(line)
    if not (child := os.fork()):
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

os.chdir(folder)
os.environ["TMPDIR"] = folder
for number, end in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{folder}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
sys.argv[1:] = arguments

from dataclasses import replace
from pathlib import Path
import numpy as np
from capsules import batch, cli, methods
from capsules.experiments import constellations
from inference import cavi, learning
from tests.capsules.stand_in import quick

def slow(*arguments, **options):
    Path("begun").touch()
    time.sleep(0.05)
    result = quick(*arguments, **options)
    if options.get("history"):
        one = {name: getattr(result, name) for name in ("match_probs", "pose_mean")}
        one |= {"elbo": 0.0, "beta": 1.0}
        history = {name: np.stack([x] * 3) for name, x in one.items()}
        result = replace(result, elbo=np.array(0.0), history=history)
    return result

def learn(program, scenes, rng_key, **options):
    Path("begun").touch()
    for done in range(8):
        time.sleep(0.05)
        options["progress_bar"](done, 8)
    path = np.linspace(1.0, 2.0, 9)
    one = {"precision": path[-1]}
    return learning.Learned(
        program, one, {"precision": path}, path, path, True, "ds", 100, lambda: one
    )

batch.BLOCK = constellations.BLOCK = 8
cavi.run = slow
learning.learn = learn
for name, method in methods.METHODS.items():
    methods.METHODS[name] = method._replace(run=slow)
cli.main()
"""

COMMANDS = {
    "infer": ["infer", "in/scenes.npz", "--all", "--method", "ransac", "--out", "out"],
    "reproduce": ["reproduce", "table1", "--methods", "ransac", "--draws", "40", "--out", "out"],
    "learn": ["learn", "in/scenes.npz", "--out", "learned.npz", "--plot", "learned.png"],
    "film": ["film", "in/scenes.npz", "--out", "fit.gif"],
    "demo": ["demo", "--scenes", "in/scenes.npz", "--out", "demo.png"],
}


class Running:
    """A command at work in a folder."""

    def __init__(self, driver, folder, command):
        self.driver, self.folder = driver, folder
        driver.stdin.write(json.dumps([str(folder), *COMMANDS[command]]) + "\n")
        driver.stdin.flush()
        self.process = int(driver.stdout.readline())

    def wait_until_it_begins(self):
        deadline = time.monotonic() + 200
        while not (self.folder / "begun").exists():
            assert time.monotonic() < deadline, self.err
            time.sleep(0.01)

    def ended(self):
        """Its exit code."""
        return int(self.driver.stdout.readline())

    @property
    def err(self):
        return Path(f"{self.folder}.err").read_text()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-W", "ignore:os.fork:RuntimeWarning", "-c", DRIVER]
    with subprocess.Popen(command, env=environment, **pipes) as process:
        yield process
        process.stdin.close()


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "begun"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def new_folder(folder):
    (folder / "in").mkdir(parents=True)
    save_scenes(folder / "in" / "scenes.npz", sample_scenes(100, sigma=0.1, seed=2))
    return folder


def check(driver, tmp_path, command, moments):
    """Run a command once undisturbed, then killed at some moments and resumed after each."""
    running = Running(driver, new_folder(tmp_path / "whole"), command)
    running.wait_until_it_begins()
    began = time.monotonic()
    assert running.ended() == 0, running.err
    seconds, wanted = time.monotonic() - began, contents(running.folder)

    rng = np.random.default_rng(len(command))
    for number in range(moments):
        sent = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[number % 3]
        running = Running(driver, new_folder(tmp_path / str(number)), command)
        running.wait_until_it_begins()
        time.sleep(seconds * rng.uniform())
        with contextlib.suppress(ProcessLookupError):  # it may be done
            os.kill(running.process, sent)
        assert running.ended() in (0, 130, -sent), running.err  # the last as Python itself ends
        assert "Traceback" not in running.err, running.err
        for name, content in contents(running.folder).items():  # whole, and expected
            assert wanted[name] == content, (number, name)
        again = Running(driver, running.folder, command)
        assert again.ended() == 0, again.err
        assert contents(running.folder) == wanted


def test_two_moments(driver, tmp_path):
    check(driver, tmp_path, "infer", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "moments"),
    [("infer", 9), ("reproduce", 9), ("learn", 6), ("film", 6), ("demo", 6)],
)
def test_thirty_moments(driver, tmp_path, command, moments):
    check(driver, tmp_path, command, moments)
