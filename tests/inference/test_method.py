"""What every method's `run` has: the scene is checked once, the time is told, and the progress."""

import numpy as np
import pytest

from inference.result import Result, method, reporter
from models.errors import InputError
from models.scenes import Scene, make_scene

SCENE = make_scene([[0.0, 1.0], [2.0, 3.0]], 3)


@method
def nothing(program, scene, rng_key=None, wish=0):
    scenes = scene.batch()
    count, rows = scenes.present.shape
    return Result(
        method="nothing",
        scene=scenes,
        match_probs=np.tile(np.eye(rows), (count, 1, 1)),
        pose_mean=np.full((count, 1, 2), float(wish)),
        pose_covariance=np.tile(np.eye(2), (count, 1, 1, 1)),
        labels=np.zeros((count, rows), int),
        owner=np.zeros(rows, int),
        converged=np.ones(count, bool),
        steps=np.ones(count, int),
    )


def test_a_scene_alone_comes_out_alone_and_a_batch_as_one():
    assert not nothing(None, SCENE).is_batch
    assert nothing(None, SCENE.batch()).is_batch
    assert nothing(None, SCENE, wish=3).pose_mean.tolist() == [[3, 3]]
    assert nothing(None, SCENE).seconds > 0
    assert nothing.__name__ == "nothing"


def test_the_scene_is_checked_first():
    with pytest.raises(InputError, match="some points are NaN"):
        nothing(None, Scene(np.full((3, 2), np.nan), np.ones(3, bool)))


def test_a_seed_is_no_key():
    with pytest.raises(InputError, match=r"got 3; give jax.random.key\(3\)"):
        nothing(None, SCENE, 3)


def test_progress_goes_to_a_function_a_bar_or_nowhere(capsys):
    told = []
    reporter(lambda done, total: told.append((done, total)))(2, 5)
    assert told == [(2, 5)]
    reporter(False)(2, 5)
    assert capsys.readouterr() == ("", "")
    report = reporter(True)
    report(2, 5)
    report(5, 5)
    assert "5/5" in capsys.readouterr().err
