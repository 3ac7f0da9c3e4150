"""The README does what it says: its commands, its Python, its edit of a prior, its files.

`make` commands are only looked up in the Makefile: they install things and run this very suite.
"""

import itertools
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from capsules import cli
from capsules.experiments.generator import sample_scenes
from inference import cavi, exact
from models.constellation import constellation
from models.program.reading import read

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SCENE = sample_scenes(num_samples=64, sigma=0.1, seed=51).take(0)
"""The scene of the README and of the demo."""

COMMANDS = [
    shlex.split(line, comments=True) for line in re.findall(r"^    (\S.*)", README, re.MULTILINE)
]
SMALLER = {
    "reproduce table1": ["--draws", "8", "--methods", "ransac"],
    "reproduce faces": ["--help"],  # tests/capsules/faces/test_cli.py runs it
    "faces demo": ["--help"],
}
"""What is added to commands that take many minutes as they stand."""
SLOW = {"film", "compare", "learn"}
"""Commands that compile for a while."""


OURS = [
    pytest.param(words, id=" ".join(words[:2]), marks=[pytest.mark.slow] * (words[0] in SLOW))
    for program, *words in COMMANDS
    if program == "capsules"
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all commands, as a reader would have it; the first of them fills it."""
    folder = tmp_path_factory.mktemp("readme")
    first = next(words for words in COMMANDS if words[:2] == ["capsules", "sample"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert CliRunner().invoke(cli.app, first[1:]).exit_code == 0
    return folder


def test_every_command_is_one_of_ours():
    assert len(COMMANDS) >= 8
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for program, name, *_ in COMMANDS:
        assert program in ("make", "capsules")
        assert program != "make" or name in targets
    named = re.findall(r"`make ([a-z-]+)`", README)
    assert named and set(named) <= set(targets)


@pytest.mark.parametrize("words", OURS)
def test_a_command_runs(folder, monkeypatch, words):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")
    result = CliRunner().invoke(cli.app, words + SMALLER.get(" ".join(words[:2]), []))
    assert result.exit_code == 0, result.output
    for option, name in itertools.pairwise(words):
        if option in ("--plot", "--out"):
            assert (folder / name).stat().st_size > 1000
    if words[:2] == ["reproduce", "table1"]:
        assert list((folder / "results").rglob("*.md"))


def test_the_python_example_prints_what_is_said(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in block.splitlines() if line]) <= 10
    exec(compile(block, "README.md", "exec"), {})
    status, found, truth = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"ds: converged after \d+ steps, ELBO -22\.902", status)
    labels = [re.findall(r"-?\d+", line) for line in (found, truth)]
    alike = [[a == b for a in row for b in row] for row in labels]
    assert alike[0] == alike[1]


def edited_program():
    """The program of the model file, edited as the diff says."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    lines = diff.splitlines(keepends=True)
    assert len(lines) == 5
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    source = (ROOT / "models" / "constellation.py").read_text()
    assert source.count(old) == 1
    edited = {}
    exec(compile(source.replace(old, new), "edited constellation.py", "exec"), edited)
    return edited["constellation"]


def test_the_diff_fits_the_program_and_changes_what_is_read():
    covariance = read(edited_program(), SCENE).pose_covariance
    np.testing.assert_allclose(covariance[1], np.diag([0.3, 0.3, 0.03, 0.03]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "program"), [("N(0, I)", constellation), ("edited", edited_program())]
)
def test_the_edit_has_the_effect_that_is_shown(row, program):
    (cells,) = re.findall(rf"^\| {re.escape(row)} \| (\S+) \| (\S+) \|$", README, re.MULTILINE)
    results = exact.run(program, SCENE), cavi.run(program, SCENE, jax.random.key(51))
    found = results[0].log_evidence, results[1].elbo
    np.testing.assert_allclose(np.asarray(found, float), [float(x) for x in cells], atol=0.005)


def test_its_picture_is_small():
    assert (ROOT / "docs" / "results" / "demo.png").stat().st_size < 150_000
