"""The queue of runs, and retries of sparse ones."""

import numpy as np

from inference.variational.pool import Waiting


def run_all(number, retries, sparse=()):
    """Process all runs, three at a time; returns how many each scene had."""
    waiting = Waiting(np.array(number), retries)
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
    assert run_all([1, 4, 2], 0) == [1, 4, 2]


def test_sparse_runs_are_retried_up_to_a_limit():
    some = {(0, 0), (0, 2)}
    every = {(1, attempt) for attempt in range(100)}
    assert run_all([5, 5], 20, some | every) == [7, 25]
