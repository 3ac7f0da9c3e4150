"""Mixed work in a loop: memory stays flat, and nothing is compiled again.

`CAPSULES_ENDURANCE_MINUTES=60 python -m benchmarks endurance` for an hour of it; two minutes
otherwise, after a warm-up: what is compiled for few scenes only is asked for on purpose (searches
and exact sums for each number of points, and exact inference with a longer list of partitions), and
rounds of the work take a tenth of the time, at least two of them.
"""

import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from capsules.batch import Job, Work
from capsules.experiments.generator import sample_scenes
from capsules.files.inputs import SceneFile
from capsules.files.outputs import save_scenes
from capsules.methods import infer
from capsules.store import Store
from models.scenes import Scene

MINUTES = 2.0
ROUND = 16
"""Scenes of a piece of work: always as many, of other seeds."""
SINGLE = 60
"""Scenes that exact inference is asked for one by one: some need a longer list of partitions."""


class Watched(NamedTuple):
    """What was seen after the warm-up."""

    rounds: int
    compiled: list[str]
    """The functions that were compiled."""
    early: float
    late: float
    """Median resident memory in the first and in the second half, in MiB."""
    peak: float
    """Largest resident memory of the process, in MiB."""


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Compilations and memory."""
    minutes = float(os.environ.get("CAPSULES_ENDURANCE_MINUTES", MINUTES))
    found = watch(minutes)
    rounds = f"compilations in {found.rounds} rounds after the warm-up"
    yield rounds, "0", str(len(found.compiled)), ", ".join(found.compiled)
    yield (
        f"resident memory, {minutes:g} minutes (MiB)",
        f"{found.early:,.0f} in the first half",
        f"{found.late:,.0f} in the second; peak {found.peak:,.0f}",
        f"{found.late / found.early:.3f}",
    )


def watch(minutes: float) -> Watched:
    """Warm up, then go on with the same and watch."""
    compiled: list[str] = []

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(str(kwargs.get("fun_name", "?")))

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        _compile_all()
        first = _rounds(0, 6 * minutes, at_least=2)
        warm = len(compiled)
        resident = _rounds(len(first), 60 * minutes, at_least=2)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    half = len(resident) // 2
    early, late = (float(np.median(some)) for some in (resident[:half], resident[half:]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return Watched(len(resident), compiled[warm:], early, late, peak)


def _rounds(first: int, seconds: float, at_least: int) -> list[float]:
    """Resident memory after each of the rounds that fit into the time."""
    until = time.monotonic() + seconds
    resident: list[float] = []
    while len(resident) < at_least or time.monotonic() < until:
        _round(first + len(resident))
        resident.append(_resident())
    return resident


def _compile_all() -> None:
    """Every number of points, alone and in a batch."""
    for scenes in (_vague_scenes(), sample_scenes(500, sigma=0.1, seed=0)):
        _, one_of_each = np.unique(scenes.present.sum(axis=1), return_index=True)
        some = scenes.take(np.resize(one_of_each, ROUND))
        infer("exact", scenes)
        for number in range(SINGLE):
            infer("exact", scenes.take(number))
        infer("gmm", some, num_restarts=5)
        infer("ds", some, num_restarts=5)
        for number in one_of_each:
            infer("ds", scenes.take(int(number)))


def _vague_scenes() -> Scene:
    """Close points without objects, in every number: many partitions are about as probable."""
    drawn = sample_scenes(500, seed=0)
    points = np.random.default_rng(0).normal(scale=0.03, size=drawn.points.shape)
    return Scene(np.where(drawn.present[..., None], points, 0.0), drawn.present)


def _round(seed: int) -> None:
    """A little of everything that a long-running process may be asked for."""
    drawn = sample_scenes(100, sigma=0.1, seed=seed)
    scenes = drawn.take(slice(ROUND))
    _, one_of_each = np.unique(drawn.present.sum(axis=1), return_index=True)
    work: list[Callable[[], object]] = [
        lambda: infer("ds", scenes, seed, num_restarts=5),
        lambda: infer("ds", scenes.take(0), seed),
        lambda: infer("gmm", scenes, seed, num_restarts=5),
        lambda: infer("ransac", scenes, seed),
        lambda: infer("exact", drawn.take(one_of_each), seed),  # compiled by number of points
    ]
    for piece in work:
        piece()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scenes.npz"
        save_scenes(path, scenes)
        with SceneFile(path) as file:
            store = Store(Path(folder) / "out")
            with store.alone():
                whole = Work(Job("ransac", seed, {}), file, store)
                assert sum(len(result) for result in whole.results()) == len(scenes.points)


def _resident() -> float:
    """Memory of this process now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20
