"""Which runs a scene is given, and which are made anew."""

import numpy as np

from inference.variational.restarts import Waiting


def work_off(number, anew, sparse=()):
    """Work off the runs of some scenes, three at a time; gives the attempts of each."""
    waiting = Waiting(np.array(number), anew)
    made = [[] for _ in number]
    while waiting.runs:
        runs = waiting.take(3)
        for scene, attempt in runs:
            made[scene].append(int(attempt))
        failed = np.array([(int(s), int(a)) in sparse for s, a in runs])
        waiting.finish(runs[:, 0], failed)
    assert waiting.finished == waiting.begun.sum() == sum(map(len, made))
    assert all(attempts == list(range(len(attempts))) for attempts in made)
    return [len(attempts) for attempts in made]


def test_every_run_is_made_once():
    assert work_off([1, 4, 2], 0) == [1, 4, 2]


def test_sparse_runs_are_made_anew_but_not_for_ever():
    some = {(0, 0), (0, 2)}
    every = {(1, attempt) for attempt in range(100)}
    assert work_off([5, 5], 20, some | every) == [7, 25]
