"""Networks by name: training by the command, weights in files, methods and tables that use them."""

import sys

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from capsules import trained
from capsules.baselines import ccae
from capsules.baselines.ccae import VARIANTS, Variant
from capsules.cli import app
from capsules.experiments.constellations import Cell, entries_of, scene_sets, study_cells
from capsules.experiments.generator import sample_scenes
from capsules.experiments.tables import markdown, reports
from capsules.methods import infer
from capsules.store import Store
from guides import amortised, training
from guides.amortised import AmortisedGuide, Settings, Size
from inference.diagnostics.metrics import METRICS
from models.constellation import PARTS
from models.errors import InputError

pytestmark = pytest.mark.long

OWNER = np.asarray(PARTS.owner)
SCENES = sample_scenes(12, seed=5)


def ccae_file(folder, name="ccae-0.00.eqx"):
    """Weights of a CCAE that was not trained, whose capsules have other names."""
    path, small = folder / name, VARIANTS["small"]
    header = {"kind": "ccae", "variant": "small", **small._asdict(), "objects": [2, 0, 1]}
    training.save(path, header, small.network(jax.random.key(0)))
    return path


def guide_file(folder, name="amortised-0.00.eqx"):
    path, settings = folder / name, Settings(size=Size(8, 1, 2))
    guide = AmortisedGuide(2, 11, settings.size, jax.random.key(0))
    amortised.save_guide(path, guide, settings, {})
    return path


@pytest.mark.slow
def test_ccae_by_name_gives_each_point_the_object_of_its_capsule(tmp_path):
    path = ccae_file(tmp_path)
    result = infer("ccae", SCENES, weights=str(path))
    network, objects = trained._ccae(path, path.stat().st_mtime)
    assert objects.tolist() == [2, 0, 1]
    mass, _ = ccae.read_out(network, SCENES)
    expected = np.where(SCENES.present, objects[mass.argmax(axis=-1)], -1)
    np.testing.assert_array_equal(result.labels, expected)
    by_object = result.match_probs @ np.eye(3)[OWNER]
    np.testing.assert_allclose(by_object[SCENES.present].max(axis=-1), 1)
    assert result.elbo is None and result.log_evidence is None


def test_the_amortised_guide_by_name_is_the_one_in_the_file(tmp_path):
    path = guide_file(tmp_path)
    result = infer("amortised", SCENES, weights=str(path))
    expected = amortised.load_guide(path).match_probs(SCENES)
    np.testing.assert_allclose(result.match_probs, expected, atol=1e-6)
    assert result.elbo is not None


def test_weights_that_cannot_be_used_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(InputError, match="ccae requires trained weights, got none"):
        infer("ccae", SCENES)
    with pytest.raises(InputError, match="not a readable file of weights"):
        infer("amortised", SCENES, weights=str(tmp_path / "missing.eqx"))
    with pytest.raises(InputError, match="the weights of 'ccae', but those of 'amortised'"):
        infer("amortised", SCENES, weights=str(ccae_file(tmp_path)))
    path = ccae_file(tmp_path)
    training.save(path, training.read_header(path) | {"narrowest": 0.01}, np.zeros(3))
    with pytest.raises(InputError, match="the weights of another CCAE than the variant small"):
        infer("ccae", SCENES, weights=str(path))
    squares = sample_scenes(4, objects=("square", "square"), seed=1)
    with pytest.raises(InputError, match="scenes of 11 rows"):
        infer("ccae", squares, objects=("square", "square"), weights=str(ccae_file(tmp_path)))
    with pytest.raises(InputError, match="ds has no option 'weights'"):
        infer("ds", SCENES, weights="x")


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "capsules.trained")
    monkeypatch.delattr(sys.modules["capsules"], "trained")
    monkeypatch.setitem(sys.modules, "equinox", None)
    for name in ("capsules.baselines.ccae", "guides.amortised", "guides.training"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InputError, match=r"equinox, which is not installed.*\[networks\]"):
        infer("ccae", SCENES, weights="x")


def command(*arguments):
    return CliRunner().invoke(app, [str(x) for x in arguments])


def test_the_command_trains_and_does_not_train_again(tmp_path, monkeypatch):
    monkeypatch.setitem(VARIANTS, "small", Variant(8, 1, 4, 0.1, False))
    monkeypatch.setattr(trained, "SCENES_TO_NAME", 64)
    path = tmp_path / "weights" / "ccae.eqx"
    done = command("train", "ccae", "--steps", 2, "--sigma", 0.1, "--out", path)
    assert done.exit_code == 0, done.output
    assert training.read_header(path, "ccae")["sigma"] == 0.1
    assert sorted(training.read_header(path)["objects"]) == [0, 1, 2]
    np.testing.assert_array_equal(
        infer("ccae", SCENES, weights=str(path)).labels >= 0, SCENES.present
    )
    again = command("train", "ccae", "--steps", 2, "--sigma", 0.1, "--out", path)
    assert again.exit_code == 2


def test_a_checkpoint_of_other_noise_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setitem(VARIANTS, "small", Variant(8, 1, 4, 0.1, False))
    monkeypatch.setattr(trained, "SCENES_TO_NAME", 64)
    monkeypatch.setattr(training, "SAVED_EVERY", 1)
    monkeypatch.setattr(training, "REPORTED_EVERY", 1)

    def train(name, sigma, report=training.silent):
        trained.train("ccae", tmp_path / name, sigma, 3, 0, "small", report)
        return (tmp_path / name).read_bytes()

    def die(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("ccae.eqx", 0.0, die)
    assert list(tmp_path.glob("*.checkpoint"))
    assert train("ccae.eqx", 0.25) == train("other.eqx", 0.25)


@pytest.mark.parametrize(
    "arguments",
    [
        ("ccae", "--steps", 0),
        ("amortised", "--variant", "published"),
        ("ccae", "--seed", -1),
        ("ccae", "--seed", 2**64),
        ("ccae", "--steps", 10**14),
        ("ccae", "--sigma", 1e300),
    ],
)
def test_bad_arguments_end_in_two(tmp_path, arguments):
    assert command("train", *arguments, "--out", tmp_path / "weights.eqx").exit_code == 2
    assert not list(tmp_path.iterdir())


def test_cells_of_networks_have_the_weights_of_their_noise_level(tmp_path):
    for sigma in ("0.00", "0.10", "0.25"):
        ccae_file(tmp_path, f"ccae-{sigma}.eqx")
    cells = study_cells("table1", ["ccae"], tmp_path)
    assert [cell.weights for cell in cells] == [
        str(tmp_path / f"ccae-{sigma}.eqx") for sigma in ("0.00", "0.10", "0.25")
    ]
    with pytest.raises(InputError, match="capsules train amortised --sigma 0 --out"):
        study_cells("table1", ["amortised"], tmp_path)


def test_numbers_of_other_weights_are_not_taken_for_these(tmp_path):
    store, tests = Store(tmp_path / "blocks"), scene_sets(None, 4, 0)
    path = ccae_file(tmp_path)
    cell = Cell("ccae", "default", None, 0.0, str(path))
    (before,) = entries_of([cell], tests, 0, store)[cell]
    training.save(path, {"kind": "ccae"}, np.zeros(3))
    (after,) = entries_of([cell], tests, 0, store)[cell]
    assert after.path != before.path


def test_the_table_shows_ccae_as_printed_and_as_trained():
    tests = scene_sets(None, 4, 0)
    count = len(tests[0.0].scenes.points)
    numbers = {p: {m: np.full(count, 0.5) for m in METRICS} for p in ("partition", "slots")}
    cell = Cell("ccae", "default", None, 0.0, "file")
    page = markdown(reports("table1", {cell: numbers}, tests)[1])
    assert "| CCAE | paper | 0.950 | 0.897 | 0.157 | 0.736 |" in page
    assert "| CCAE | trained by us | 0.500 ± 0.000" in page
    assert "its predictions" not in page
