"""The store: nothing stale, nothing damaged, one run at a time; and every command that resumes."""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from capsules import cli, methods, store
from capsules.experiments import tables
from capsules.experiments.generator import sample_scenes
from capsules.faces import experiment as faces
from capsules.faces import report
from capsules.faces.appearance import fit_appearance, split_faces
from capsules.faces.artist import draw_images
from capsules.files.outputs import save_scenes
from capsules.store import Store, digest, sealed
from models.errors import InputError
from tests.capsules.stand_in import quick

ROOT = Path(__file__).parents[2]
ARRAYS = {"labels": np.arange(12).reshape(3, 4), "elbo": np.linspace(-1, 1, 3)}


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def kept(tmp_path):
    """A store with one entry."""
    there = Store(tmp_path)
    entry = there.entry("part-000000", seed=0)
    there.write(entry, sealed(entry, ARRAYS))
    return there, entry


def test_an_entry_is_read_as_it_was_written_by_anyone(kept):
    there, entry = kept
    with np.load(entry.path) as plain:
        for found in (there.read(entry), dict(plain)):
            assert found.keys() == ARRAYS.keys()
            for name, array in ARRAYS.items():
                np.testing.assert_array_equal(found[name], array)
    assert sealed(entry, ARRAYS) == entry.path.read_bytes()  # the same bytes at another time


def test_a_flip_of_any_bit_is_noticed_and_named(kept, capsys):
    there, entry = kept
    content = entry.path.read_bytes()
    for place in range(0, len(content), 10):
        spoilt = bytearray(content)
        spoilt[place] ^= 1 << place // 10 % 8
        entry.path.write_bytes(spoilt)
        assert there.read(entry) is None
        said = capsys.readouterr().err
        assert said == f"{entry.path} is damaged or foreign; it is computed again.\n"
        assert not entry.path.exists()


@pytest.mark.parametrize("content", [b"", b"0" * 64, b"\0" * 1000])
def test_what_is_no_entry_is_none(kept, content):
    there, entry = kept
    entry.path.write_bytes(content)
    assert not there.has(entry)


def test_a_file_of_any_size_is_not_read_into_memory(kept, monkeypatch):
    there, entry = kept
    with entry.path.open("wb") as file:
        file.truncate(1 << 40)  # without a byte on the disk
    assert there.read(entry) is None and not entry.path.exists()


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_file_is_a_sentence(kept, kind):
    there, entry = kept
    entry.path.unlink()
    if kind == "folder":
        entry.path.mkdir()
    elif kind == "pipe":
        os.mkfifo(entry.path)
    else:
        entry.path.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="it is not an ordinary file"):
        there.read(entry)


def test_an_entry_under_another_name_is_foreign(kept):
    there, entry = kept
    other = there.entry("part-000000", seed=1)
    assert other.path != entry.path
    shutil.copy(entry.path, other.path)
    assert there.read(other) is None and there.has(entry)


def test_whatever_an_answer_depends_on_changes_its_address():
    there = Store(Path("here"))
    asked = [{}, {"seed": 0}, {"seed": 0.0}, {"seed": None}, {"beta": 0}, {"seed": [0, 1]}]
    addresses = {there.entry("a", **depends).address for depends in asked}
    addresses.add(there.entry("b").address)
    assert len(addresses) == len(asked) + 1
    zeros = np.zeros((2, 3))
    data = [zeros, zeros.T, zeros.astype(int), zeros + 1e-300, zeros[:1]]
    assert len({digest(array) for array in data}) == len(data)


def test_a_second_run_says_that_the_first_is_there(tmp_path):
    first, second = Store(tmp_path / "out"), Store(tmp_path / "out")
    with first.alone():
        with pytest.raises(InputError, match=r"another run is at work in .*out; wait for it"):
            second.alone().__enter__()
        assert not os.listdir(tmp_path / "out")
    with second.alone():
        pass


def test_what_a_killed_run_was_writing_is_removed(tmp_path):
    (tmp_path / ".1234.part").write_bytes(b"half")
    (tmp_path / ".mine.part").write_bytes(b"of somebody else")
    (tmp_path / ".5.part").mkdir()
    with Store(tmp_path).alone():
        assert sorted(os.listdir(tmp_path)) == [".5.part", ".mine.part"]


# --- every command that resumes -----------------------------------------------------------------


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A copy of the source that may be edited."""
    folders = [tmp_path / "source" / folder.name for folder in store.FOLDERS]
    for folder, copy in zip(store.FOLDERS, folders, strict=True):
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(store, "FOLDERS", folders)
    store.source.cache_clear()
    yield tmp_path / "source"
    store.source.cache_clear()


EDITS = {
    "a prior": ("models/constellation.py", "np.eye(parts.pose_dim)", "2 * np.eye(4)"),
    "the prior of faces": ("models/faces.py", "numpyro.sample", "numpyro. sample"),
    "a template": ("models/templates.py", "[[1, 2], [3, 1], [3, 3]]", "[[1, 2], [3, 0], [3, 3]]"),
    "a setting": ("capsules/methods.py", '"num_restarts": 5', '"num_restarts": 6'),
    "a method": ("inference/ransac/search.py", "import", "import  "),
    "the version": ("capsules/__init__.py", '__version__ = "', '__version__ = "9'),
}


@functools.cache
def small_study(folder=None):
    images = draw_images(5, num_groups=3, num_variants=3)
    return faces.FaceStudy(images, fit_appearance(images), split_faces(images).test)


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The commands that resume, with stand-ins for what takes long, and what was computed."""
    computed = []

    def counted(program, scene, *arguments, **options):
        computed.append(len(scene.points))
        return quick(program, scene, *arguments, **options)

    def made_up(study, scenes, explained):
        computed.append(len(scenes.poses))
        return {"right_vi": np.ones(len(scenes.poses))}

    ransac = methods.METHODS["ransac"]._replace(run=counted)
    monkeypatch.setitem(methods.METHODS, "ransac", ransac)
    monkeypatch.setattr(faces, "open_study", small_study)
    monkeypatch.setattr(faces, "explain", lambda *_: None)
    monkeypatch.setattr(faces, "measure", made_up)
    monkeypatch.setattr(faces, "CELLS", faces.CELLS[:1])
    monkeypatch.setattr(report, "write_report", lambda *_: [])
    monkeypatch.setattr(tables, "write_tables", lambda *_: [])
    scenes, out = tmp_path / "scenes.npz", tmp_path / "out"
    save_scenes(scenes, sample_scenes(12, seed=0))
    return computed, {
        "infer": ["infer", scenes, "--all", "--method", "ransac", "--out", out],
        "evaluate": ["evaluate", scenes, "--method", "ransac", "--out", out],
        "reproduce": ["reproduce", "table1", "--methods", "ransac", "--draws", 6, "--out", out],
        "faces": ["reproduce", "faces", "--draws", 2, "--out", out],
    }


@pytest.mark.parametrize("name", ["infer", "evaluate", "reproduce", "faces"])
def test_an_edit_makes_nothing_stale(source, commands, name):
    computed, arguments = commands[0], commands[1][name]

    def again():
        computed.clear()
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert ("Resuming" in result.stderr) == (not computed)
        return list(computed)

    first = again()
    assert first and not again()
    for what, (path, old, new) in EDITS.items():
        text = (source / path).read_text()
        assert old in text, what
        (source / path).write_text(text.replace(old, new))
        store.source.cache_clear()
        assert again() == first, what
        (source / path).write_text(text)  # taken back: so are the answers
        store.source.cache_clear()
        assert not again(), what
    (source / "capsules" / "commands" / "demo.py").write_text("# answers are only shown there")
    store.source.cache_clear()
    assert not again()


@pytest.mark.parametrize("name", ["infer", "evaluate", "reproduce", "faces"])
def test_a_damaged_part_is_named_and_computed_again(tmp_path, commands, name):
    computed, arguments = commands[0], commands[1][name]
    assert run(*arguments).exit_code == 0
    computed.clear()
    part = next((tmp_path / "out").rglob("*.npz"))
    content = part.read_bytes()
    part.write_bytes(content[:50] + bytes([content[50] ^ 4]) + content[51:])
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert f"{part} is damaged or foreign; it is computed again." in result.stderr
    assert len(computed) == 1 and part.read_bytes() == content


@pytest.mark.parametrize("name", ["infer", "evaluate", "reproduce", "faces"])
def test_a_second_command_says_that_the_first_is_there(tmp_path, commands, name):
    arguments = commands[1][name]
    out = tmp_path / "out" / ("blocks" if arguments[0] == "reproduce" else "")
    with Store(out).alone():
        result = run(*arguments)
    assert result.exit_code == cli.BAD_INPUT
    assert re.fullmatch(r"error: another run is at work in .*; wait for it.*\n", result.stderr)


@pytest.mark.slow
def test_the_edit_of_the_readme_reaches_the_tables(tmp_path):
    """In processes: the numbers after the edit are those of a run that knew nothing before."""
    for folder in ("models", "guides", "inference", "capsules"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    real = {"env": os.environ | {"PYTHONPATH": str(tmp_path)}, "cwd": tmp_path}
    options = ["table1", "--methods", "exact", "--draws", "9", "--out"]

    def table(out):
        command = [sys.executable, "-m", "capsules.cli", "reproduce", *options, str(tmp_path / out)]
        done = subprocess.run(command, capture_output=True, text=True, **real)
        assert done.returncode == 0, done.stderr
        return "Resuming" in done.stderr, (tmp_path / out / "table1.csv").read_text()

    before = table("out")
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(x[1:] for x in lines if x[0] in f" {sign}") for sign in "-+")
    model = tmp_path / "models" / "constellation.py"
    model.write_text(model.read_text().replace(old, new))
    assert table("out") == table("new") != before
