"""Scenes and their files: what is accepted, what is explained, and that nothing is half written."""

import os
import pickle

import numpy as np
import pytest

from capsules.files.inputs import load_scenes
from capsules.files.outputs import save_scenes
from models.errors import InputError
from models.scenes import Scene, check_layout, check_scene, make_scene

POINTS = np.random.default_rng(0).normal(size=(4, 3, 2))
PRESENT = np.array([[1, 1, 1], [1, 0, 1], [0, 0, 1], [1, 1, 0]], bool)
OBJECT = np.where(PRESENT, [0, 0, 1], -1)
BATCH = Scene(np.where(PRESENT[..., None], POINTS, 0.0), PRESENT, OBJECT)


def assert_equal(first: Scene, second: Scene) -> None:
    for name, a, b in zip(Scene._fields, first, second, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            np.testing.assert_array_equal(a, b, err_msg=name)


# --- scenes in memory ---------------------------------------------------------------------------


def test_a_scene_is_padded_to_the_number_of_parts():
    scene = make_scene([[1, 2], [3, 4]], num_parts=3)
    np.testing.assert_array_equal(scene.points, [[1, 2], [3, 4], [0, 0]])
    np.testing.assert_array_equal(scene.present, [True, True, False])
    assert not scene.is_batch
    assert scene.object is None


def test_taking_and_batching():
    assert BATCH.is_batch
    assert_equal(BATCH.batch(), BATCH)
    one = BATCH.take(2)
    assert not one.is_batch
    assert_equal(one.batch(), BATCH.take(slice(2, 3)))
    assert_equal(BATCH.take(np.array([False, True, False, False])), BATCH.take([1]))


def test_a_program_is_given_all_but_the_truth():
    assert set(BATCH.observed) == {"points", "present"}
    assert set(BATCH._replace(point_type=OBJECT).observed) == {"points", "present", "point_type"}


def test_a_checked_scene_is_made_of_arrays_and_its_dummies_are_zero():
    scene = check_scene(Scene([[1.0, 2.0], [np.nan, 4.0]], [True, False], [0, -1]))
    np.testing.assert_array_equal(scene.points, [[1, 2], [0, 0]])
    for field in (scene.points, scene.present, scene.object):
        assert isinstance(field, np.ndarray)


def test_checking_keeps_a_good_batch():
    assert_equal(check_scene(BATCH), BATCH)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: make_scene(np.zeros(3), 4), r"points, features\), got shape \(3,\)"),
        (lambda: make_scene(np.zeros((5, 2)), 4), "has 5 points but the program has only 4 parts"),
        (lambda: make_scene(np.zeros((0, 2)), 4), "1 of 1 scenes have no points"),
        (lambda: make_scene([[0, np.nan]], 4), "NaN or infinite"),
        (lambda: make_scene([[0, np.inf]], 4), "NaN or infinite"),
        (lambda: check_scene(Scene(POINTS, PRESENT[:2])), r"\(4, 3, 2\) and \(2, 3\)"),
        (lambda: check_scene(Scene(POINTS[0, 0], PRESENT[0, 0])), r"got \(2,\) and \(\)"),
        (lambda: check_scene(Scene(POINTS, PRESENT.astype(int))), "numbers of type int64"),
        (lambda: check_layout((4, 3, 2), 11, 2), "has 3 rows but the program has 11 parts"),
        (lambda: check_layout((4, 3, 2), 3, 4), "have 2 features but the program's parts have 4"),
        (
            lambda: check_scene(BATCH._replace(present=PRESENT & False)),
            "4 of 4 scenes have no points",
        ),
        (
            lambda: check_scene(BATCH._replace(object=OBJECT[0])),
            r"shape \(4, 3\), got \(3,\)",
        ),
    ],
)
def test_bad_scenes_are_explained(call, sentence):
    with pytest.raises(InputError, match=sentence):
        call()


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", [BATCH, BATCH._replace(object=None)], ids=["truth", "no_truth"])
def test_round_trip(tmp_path, scene):
    path = tmp_path / "scenes.npz"
    save_scenes(path, scene)
    assert_equal(load_scenes(path), scene)
    assert os.listdir(tmp_path) == ["scenes.npz"]


def test_round_trip_of_point_types(tmp_path):
    scene = BATCH._replace(point_type=np.tile([0, 1, 2], (4, 1)))
    save_scenes(tmp_path / "scenes.npz", scene)
    assert_equal(load_scenes(tmp_path / "scenes.npz"), scene)


def test_a_file_is_written_as_any_other(tmp_path):
    """With the permissions of any other new file, so that others can read it."""
    (tmp_path / "other").touch()
    save_scenes(tmp_path / "scenes.npz", BATCH)
    modes = [(tmp_path / name).stat().st_mode for name in ("scenes.npz", "other")]
    assert modes[0] == modes[1]


def test_empty_scenes_are_dropped_and_the_limit_counts_them(tmp_path):
    present = PRESENT.copy()
    present[1] = False
    np.savez(tmp_path / "scenes.npz", points=POINTS, present=present)
    assert len(load_scenes(tmp_path / "scenes.npz").points) == 3
    limited = load_scenes(tmp_path / "scenes.npz", limit=2)
    np.testing.assert_array_equal(limited.points, POINTS[:1])


def save_one_array(path, array):
    with path.open("wb") as file:
        np.save(file, array)


FILES = {
    "empty": (lambda path: path.touch(), "cannot read .*file"),
    "text": (lambda path: path.write_text("points: 1, 2"), "cannot read .*file"),
    "folder": (lambda path: path.mkdir(), "cannot read .*file"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"points": 1})), "cannot read .*file"),
    "pickled_arrays": (
        lambda path: np.savez(path, points=np.array([None]), present=PRESENT),
        "cannot read .*file.*only plain numbers are read",
    ),
    "one_array": (lambda path: save_one_array(path, POINTS), "cannot read .*file"),
    "no_points": (
        lambda path: np.savez(path, present=PRESENT),
        "no array 'points', only 'present'",
    ),
    "no_present": (lambda path: np.savez(path, points=POINTS), "no array 'present', only 'points'"),
    "nothing": (lambda path: np.savez(path), "no array 'points'"),
    "one_scene": (
        lambda path: np.savez(path, points=POINTS[0], present=PRESENT[0]),
        r"'points' of .* has shape \(3, 2\) and type float64",
    ),
    "words": (
        lambda path: np.savez(path, points=np.full((4, 3, 2), "x"), present=PRESENT),
        "points holds values of type <U1",
    ),
    "nan": (
        lambda path: np.savez(path, points=POINTS * np.nan, present=PRESENT),
        "NaN or infinite",
    ),
    "present_of_numbers": (
        lambda path: np.savez(path, points=POINTS, present=PRESENT.astype(float)),
        "'present' of .* type float64, but",
    ),
    "too_few_present": (
        lambda path: np.savez(path, points=POINTS, present=PRESENT[:2]),
        r"'present' of .* has shape \(2, 3\)",
    ),
    "present_is_one_number": (
        lambda path: np.savez(path, points=POINTS, present=True),
        r"'present' of .* has shape \(\)",
    ),
    "too_few_objects": (
        lambda path: np.savez(path, points=POINTS, present=PRESENT, object=OBJECT[:2]),
        r"'object' of .* has shape \(2, 3\)",
    ),
    "objects_are_words": (
        lambda path: np.savez(path, points=POINTS, present=PRESENT, object=np.full((4, 3), "a")),
        "object",
    ),
    "all_empty": (
        lambda path: np.savez(path, points=POINTS, present=PRESENT & False),
        "holds no scene with points",
    ),
}


@pytest.mark.parametrize(("write", "sentence"), FILES.values(), ids=FILES.keys())
def test_bad_files_are_explained(tmp_path, write, sentence):
    path = tmp_path / "scene_file.npz"
    write(path)
    with pytest.raises(InputError, match=sentence):
        load_scenes(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no file .*nowhere\.npz"):
        load_scenes(tmp_path / "nowhere.npz")


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.9, 0.99])
def test_a_truncated_file_is_explained(tmp_path, share):
    path = tmp_path / "scenes.npz"
    save_scenes(path, BATCH)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(InputError, match=r"cannot read .*scenes\.npz"):
        load_scenes(path)


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_a_flip_of_any_bit_is_noticed_or_changes_nothing(tmp_path, write):
    """Of all scenes, and of the first alone, whose array is not read to its end."""
    path = tmp_path / "scenes.npz"
    write(path, points=POINTS, present=PRESENT, object=OBJECT)
    whole, content = load_scenes(path), path.read_bytes()
    noticed = 0
    for place in range(0, len(content), 10):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place // 10 % 8
        path.write_bytes(damaged)
        try:
            assert_equal(load_scenes(path), whole)
            assert_equal(load_scenes(path, limit=1), whole.take([0]))
        except InputError as error:
            assert "scenes.npz" in str(error)
            noticed += 1
    assert noticed > 0.5 * len(content) / 10


@pytest.mark.parametrize("place", ["missing/scenes.npz", "a_file/scenes.npz", "a_folder"])
def test_an_unwritable_place_is_named(tmp_path, place):
    (tmp_path / "a_file").touch()
    (tmp_path / "a_folder").mkdir()
    with pytest.raises(InputError, match=f"cannot write .*{place}"):
        save_scenes(tmp_path / place, BATCH)
    assert sorted(os.listdir(tmp_path)) == ["a_file", "a_folder"]


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (MemoryError(), MemoryError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["memory", "interrupt"],
)
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failure, raised):
    path = tmp_path / "scenes.npz"
    save_scenes(path, BATCH)
    before = path.read_bytes()

    def fail(file, **arrays):
        file.write(b"half a file")
        raise failure

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(raised):
        save_scenes(path, BATCH.take([0]))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["scenes.npz"]
