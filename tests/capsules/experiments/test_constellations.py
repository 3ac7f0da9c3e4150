"""Experiments: what they run, that they resume to the same numbers, and what the tables say."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from capsules.experiments import constellations
from capsules.experiments.constellations import (
    Cell,
    Scenes,
    _options,
    entries_of,
    run_cells,
    study_cells,
)
from capsules.experiments.generator import sample_scenes
from capsules.experiments.paper import BETAS, PARTITION, SIGMAS, SLOTS
from capsules.experiments.tables import comma_separated, markdown, reports, terminal_tables
from capsules.store import Store
from inference.diagnostics.metrics import METRICS, PROTOCOLS
from inference.result import Result, partition
from models.errors import InputError

ROOT = Path(__file__).parents[3]
CELLS = [Cell("ransac", "paper", None, 0.0), Cell("ds", "paper", 0.05, 0.1)]


@pytest.fixture
def tests():
    return {sigma: Scenes(sample_scenes(30, sigma, 0), None) for sigma in SIGMAS}


@pytest.fixture
def fake(monkeypatch):
    """Blocks of four scenes, and a method that guesses by its key; counts the calls."""
    monkeypatch.setattr(constellations, "BLOCK", 4)
    calls = []

    def guess(method, scene, key, **options):
        calls.append((method, key, options))
        if len(calls) == guess.dies_at:
            raise KeyboardInterrupt
        rng = np.random.default_rng([key, len(method)])
        match_probs = np.stack([np.eye(11)[rng.permutation(11)] for _ in scene.points])
        owner = np.repeat([0, 1, 2], [4, 3, 4])
        count = len(match_probs)
        return Result(
            method=method,
            scene=scene,
            match_probs=match_probs,
            pose_mean=np.zeros((count, 3, 4)),
            pose_covariance=np.zeros((count, 3, 4, 4)),
            labels=partition(match_probs, owner, scene.present),
            owner=owner,
            converged=np.ones(count, bool),
            steps=np.ones(count, int),
        )

    guess.dies_at = None
    guess.calls = calls
    monkeypatch.setattr(constellations, "infer", guess)
    return guess


def values(numbers):
    return {
        (cell, protocol, name): found[protocol][name]
        for cell, found in numbers
        for protocol in PROTOCOLS
        for name in METRICS
    }


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


# --- resuming -----------------------------------------------------------------------------------


def test_every_scene_has_its_numbers(tmp_path, tests, fake):
    found = dict(run_cells(CELLS, tests, 0, Store(tmp_path)))
    for cell in CELLS:
        count = len(tests[cell.sigma].scenes.points)
        assert all(found[cell][p][n].shape == (count,) for p in PROTOCOLS for n in METRICS)
    schedules = [options.get("schedule") for _, _, options in fake.calls]
    assert {s.beta_start for s in schedules if s is not None} == {0.05}
    assert {options["preset"] for _, _, options in fake.calls} == {"paper"}


@pytest.mark.parametrize("dies_at", [1, 3, 9])
def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, tests, fake, dies_at):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    whole = values(run_cells(CELLS, tests, 0, Store(tmp_path / "a")))
    total = len(fake.calls)
    store = Store(tmp_path / "b")
    fake.calls.clear()
    fake.dies_at = dies_at
    with pytest.raises(KeyboardInterrupt):
        list(run_cells(CELLS, tests, 0, store))
    fake.calls.clear()
    fake.dies_at = None
    seen = []
    resumed = values(
        run_cells(CELLS, tests, 0, store, lambda cell, done, total: seen.append((done, total)))
    )
    assert_same(whole, resumed)
    assert len(fake.calls) == total - (dies_at - 1)  # nothing twice
    assert seen[0] == (0, total) and seen[-1] == (total - 1, total)
    fake.calls.clear()
    assert_same(whole, values(run_cells(CELLS, tests, 0, store)))
    assert not fake.calls


def test_other_scenes_seeds_and_settings_are_kept_apart(tmp_path, tests):
    cell, store = CELLS[1], Store(tmp_path)
    other = tests | {0.1: Scenes(sample_scenes(30, 0.1, 1), None)}
    asked = [(cell, tests, 0), (cell, tests, 1), (cell._replace(beta=0.1), tests, 0)]
    asked.append((cell, other, 0))
    found = [entries_of([cell], *rest, store)[cell] for cell, *rest in asked]
    paths = [entry.path for entries in found for entry in entries]
    assert len(set(paths)) == len(paths) == 4


# --- what is run, and the tables ----------------------------------------------------------------


def test_the_cells_of_the_studies():
    main = study_cells("table1", ["gmm", "ds", "ransac", "exact"])
    assert len(main) == 3 * (3 + 3 + 3 + 1)
    assert {c.beta for c in main} == {0.05, None}
    betas = study_cells("beta", ["gmm", "ds", "ransac"])
    assert len(betas) == 3 * 2 * 3 * len(BETAS)
    assert study_cells("mask", ["ds"]) == study_cells("beta", ["ds"])
    assert set(study_cells("all", ["ds"])) == {*study_cells("table1", ["ds"]), *betas} - {
        c for c in betas if c.method == "gmm"
    }


def test_each_preset_takes_the_initial_beta_in_its_own_way():
    """The published mixture does not anneal: its beta ends where it begins."""
    found = {
        (method, preset): _options(Cell(method, preset, 0.01, 0.0))
        for method in ("ds", "gmm")
        for preset in ("paper", "published", "default")
    }
    assert found["ds", "published"] == {"beta_start": 0.01}
    ends = {
        key: options["schedule"].beta_max for key, options in found.items() if "schedule" in options
    }
    assert ends.pop(("gmm", "published")) == 0.01
    assert set(ends.values()) == {1.0}
    assert all(o["schedule"].beta_start == 0.01 for o in found.values() if "schedule" in o)


def test_the_numbers_of_the_paper():
    """Some read off the paper by eye, and that none is missing."""
    assert SLOTS["ds", 0.05, 0.0] == (0.899, 0.740, 0.299, 0.664)
    assert SLOTS["gmm", 0.5, 0.25] == (0.717, 0.242, 1.036, 0.064)
    assert PARTITION["ds", 0.01, 0.1] == (0.972, 0.940, 0.094, 0.857)
    assert PARTITION["ransac", None, 0.25] == (0.965, 0.914, 0.135, 0.843)
    assert len(SLOTS) == 3 * (1 + 12)
    assert len(PARTITION) == 3 * (1 + 12 + 1)


def test_tables_have_the_paper_and_ours(tmp_path, tests, fake):
    cells = study_cells("table1", ["ds", "ransac"])
    numbers = dict(run_cells(cells, tests, 0, Store(tmp_path)))
    by_slots, by_partition = reports("table1", numbers, tests)
    assert (by_slots.protocol, by_partition.protocol) == ("slots", "partition")
    lines = list(csv.DictReader(comma_separated(by_slots).splitlines()))
    assert len(lines) == len(cells) * len(METRICS)
    for line in lines:
        beta = float(line["beta"]) if line["beta"] else None
        cell = Cell(line["method"], line["settings"], beta, float(line["sigma"]))
        scores = numbers[cell]["slots"][line["metric"]]
        assert float(line["mean"]) == pytest.approx(scores.mean(), abs=1e-6)
        error = scores.std(ddof=1) / np.sqrt(len(scores))
        assert float(line["standard_error"]) == pytest.approx(error, abs=1e-6)
        if line["method"] == "ds":
            place = METRICS.index(line["metric"])
            assert float(line["paper"]) == SLOTS["ds", 0.05, cell.sigma][place]
    text = markdown(by_slots)
    assert "| GCM-DS | paper | 0.899 | 0.740 | 0.299 | 0.664 |" in text
    assert text.count("| GCM-DS | our defaults |") == text.count("RANSAC | our defaults |") == 3
    assert "| 0.25 | RANSAC - GCM-DS |" in text
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*terminal_tables(by_slots))
    shown = console.export_text()
    accuracy = numbers[study_cells("table1", ["ransac"])[0]]["slots"]["sa"]
    error = accuracy.std(ddof=1) / np.sqrt(len(accuracy))
    assert f"{accuracy.mean():.3f} ± {error:.3f}".replace("0.", ".") in shown
    assert "…" not in shown


def test_ccae_comes_with_the_files_that_have_it(shared_data):
    found = constellations.scene_sets(shared_data, 512, 0)
    means = [found[0.1].ccae["slots"][name].mean() for name in METRICS]
    np.testing.assert_allclose(means, SLOTS["ccae", None, 0.1], atol=5.01e-4)
    (row, *_) = reports("table1", {CELLS[0]: found[0.0].ccae}, found)[0].rows
    assert row.method == "ccae" and row.paper == SLOTS["ccae", None, 0.0]


def test_a_folder_without_the_files_is_explained(tmp_path):
    with pytest.raises(InputError, match=r"no file .*constellations_0\.00\.npz"):
        constellations.scene_sets(tmp_path, 512, 0)
