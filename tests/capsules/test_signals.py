"""Commands that are killed at any moment: nothing is left over, and the same command ends the same.

Stand-ins take the place of the methods, a little slower than they are, so that most of the time is
spent between reading and writing. Two moments in `make test`, 30 in `make test-all`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from capsules.experiments.generator import sample_scenes
from capsules.files.scenes import save_scenes

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]

DRIVER = """
import time
from dataclasses import replace
from pathlib import Path
import numpy as np
from capsules import batch, cli, methods
from capsules.experiments import constellations
from inference import cavi
from tests.capsules.stand_in import quick

def slow(*arguments, **options):
    Path("begun").touch()
    time.sleep(0.05)
    result = quick(*arguments, **options)
    if options.get("history"):
        one = {name: getattr(result, name) for name in ("match_probs", "pose_mean")}
        one |= {"elbo": 0.0, "beta": 1.0}
        history = {name: np.stack([x] * 12) for name, x in one.items()}
        result = replace(result, elbo=np.array(0.0), history=history)
    return result

batch.BLOCK = constellations.BLOCK = 8
cavi.run = slow
for name, method in methods.METHODS.items():
    methods.METHODS[name] = method._replace(run=slow)
cli.main()
"""

COMMANDS = {
    "infer": ["infer", "in/scenes.npz", "--all", "--method", "ransac", "--out", "out"],
    "reproduce": ["reproduce", "table1", "--methods", "ransac", "--draws", "40", "--out", "out"],
    "film": ["film", "in/scenes.npz", "--out", "fit.gif"],
    "demo": ["demo", "--scenes", "in/scenes.npz", "--out", "demo.png"],
}


def start(folder, command):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment |= {"TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder.parent / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", DRIVER, *COMMANDS[command]]
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "begun"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def new_folder(folder):
    (folder / "in").mkdir(parents=True)
    save_scenes(folder / "in" / "scenes.npz", sample_scenes(100, sigma=0.1, seed=2))
    return folder


def check(tmp_path, command, moments):
    """Run a command once undisturbed, then killed at some moments and resumed after each."""
    whole = new_folder(tmp_path / "whole")
    process = start(whole, command)
    while process.poll() is None and not (whole / "begun").exists():
        time.sleep(0.01)
    began = time.monotonic()
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    seconds, wanted = time.monotonic() - began, contents(whole)

    rng = np.random.default_rng(len(command))
    for number in range(moments):
        sent = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[number % 3]
        folder = new_folder(tmp_path / str(number))
        process = start(folder, command)
        while process.poll() is None and not (folder / "begun").exists():
            time.sleep(0.01)
        time.sleep(seconds * rng.uniform())
        process.send_signal(sent)
        _, err = process.communicate(timeout=200)
        assert process.returncode in (0, 130, -sent), err  # the last as Python itself ends
        assert "Traceback" not in err, err
        for name, content in contents(folder).items():  # whole, and among what there should be
            assert wanted[name] == content, (number, name)
        again = start(folder, command)
        _, err = again.communicate(timeout=200)
        assert again.returncode == 0, err
        assert contents(folder) == wanted


def test_two_moments(tmp_path):
    check(tmp_path, "infer", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "moments"), [("infer", 9), ("reproduce", 9), ("film", 6), ("demo", 6)]
)
def test_thirty_moments(tmp_path, command, moments):
    check(tmp_path, command, moments)
