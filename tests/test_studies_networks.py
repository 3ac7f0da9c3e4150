"""Studies of networks and of learning: what they train once, and how they compare templates."""

import numpy as np
import pytest

from benchmarks.studies import STUDIES, learning, training
from benchmarks.studies.training import TRAININGS, weights
from capsules.experiments.constellations import weights_of
from capsules.experiments.paper import SIGMAS
from models.templates import SHAPES


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The settings of networks that were trained, by a stand-in that writes its settings."""
    found = []

    def train(network, path, *settings):
        found.append((network, *settings[:-1]))
        path.write_text(str(found[-1]))

    monkeypatch.setattr(training, "WEIGHTS", tmp_path)
    monkeypatch.setattr(training.trained, "train", train)
    return found


def test_networks_are_trained_once(trained):
    first = weights("ccae-seed-1")
    assert weights("ccae-seed-1") == first
    assert trained == [("ccae", 0.0, 6000, 1, "small")]
    assert first.read_text() == str(trained[0])


def test_other_settings_are_trained_again(trained, monkeypatch):
    weights("ccae-0")
    monkeypatch.setitem(TRAININGS, "ccae-0", TRAININGS["ccae-0"]._replace(num_steps=7))
    path = weights("ccae-0")
    assert [num_steps for _, _, num_steps, _, _ in trained] == [6000, 7]
    assert path.read_text() == str(trained[1])


def test_tables_of_the_paper_find_the_networks(trained, tmp_path):
    files = {name: weights(name) for name in TRAININGS}
    assert len(set(files.values())) == len(TRAININGS)
    for sigma in SIGMAS:
        for network in ("ccae", "amortised"):
            path = weights_of(network, sigma, tmp_path)
            assert str(files[f"{network}-{sigma:g}"]) == path


def test_every_network_has_its_study():
    found = {name for name, study in STUDIES.items() if study.module == "training"}
    assert found == {f"train-{name}" for name in TRAININGS}
    assert all(STUDIES[name].arguments == (name.removeprefix("train-"),) for name in found)


def test_templates_are_compared_up_to_similarity_and_order():
    square = SHAPES["square"]
    cosine, sine = np.cos(0.7), np.sin(0.7)
    moved = 3 * square[[2, 0, 3, 1]] @ np.array([[cosine, sine], [-sine, cosine]]) + 5
    assert learning._apart(moved, square) == pytest.approx(0, abs=1e-12)
    spoilt = moved.copy()
    spoilt[0] += 1
    assert learning._apart(spoilt, square) > 0.1
