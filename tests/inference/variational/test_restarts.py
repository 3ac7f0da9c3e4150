"""How many runs a scene is given, by the ELBOs that they end with."""

import numpy as np
import pytest

from inference.variational.restarts import ROUND, START_ANEW, Restarts, Rounds


def work_off(elbos, restarts, sparse=()):
    """Feed scenes with ELBOs by attempt; gives how many runs each scene was given."""
    rounds = Rounds(len(elbos), restarts)
    made = [[] for _ in elbos]
    while rounds.waiting:
        runs = rounds.take(3)
        for scene, attempt in runs:
            made[scene].append(int(attempt))
        values = np.array([elbos[s][a % len(elbos[s])] for s, a in runs], float)
        rounds.finish(runs, values, np.array([(int(s), int(a)) in sparse for s, a in runs]))
    assert all(attempts == list(range(len(attempts))) for attempts in made)
    assert rounds.finished == rounds.foreseen.sum() == sum(map(len, made))
    return [len(attempts) for attempts in made]


def test_a_scene_is_done_when_its_best_was_found_three_times():
    always = [5.0]
    late = [1.0, 2.0, 3.0, 4.0, 5.0, 5.001, 1.0, 5.0, 5.0]  # the third 5 is in the second round
    never = list(range(40))
    counts = work_off([always, late, never], Restarts(10, 3, 2.0))
    assert counts == [ROUND, 2 * ROUND, 10]


def test_without_confirmations_every_run_is_made():
    assert work_off([[5.0], [1.0, 2.0]], Restarts(7, None, 2.0)) == [7, 7]


def test_elbos_that_differ_by_more_than_a_hundredth_are_different_solutions():
    near, far = [5.0, 4.995, 4.992], [5.0, 4.98, 4.97, 4.96, 4.95, 4.94, 4.93, 4.92]
    assert work_off([near, far], Restarts(8, 3, 2.0)) == [ROUND, 8]


@pytest.mark.parametrize("confirmations", [None, 3])
def test_sparse_runs_do_not_count_and_are_made_anew_but_not_for_ever(confirmations):
    some = {(0, 0), (0, 2)}
    every = {(1, attempt) for attempt in range(100)}
    distinct = list(range(100))
    counts = work_off([distinct, distinct], Restarts(5, confirmations, 2.0), some | every)
    assert counts == [7, 5 * (1 + START_ANEW)]


def test_sparse_runs_do_not_confirm():
    """Three runs reach the best, one of them sparse: that is not enough."""
    elbo = [5.0, 5.0, 5.0, 1.0, 2.0, 3.0, 4.0, 4.5]
    assert work_off([elbo], Restarts(7, 3, 2.0), {(0, 1)}) == [8]
