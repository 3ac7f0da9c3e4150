"""Coordinate ascent in batch against the plain numpy form of the same updates.

The reference, `tests/oracle_inference.py`, does one scene at a time as one would write it first.
Both step from the same kind of random R; the ratio is of times for one scene and one restart.
"""

import time
from collections.abc import Iterator

import jax
import numpy as np

from benchmarks.measurements.timing import best_time, row
from capsules.experiments.generator import sample_scenes
from inference import cavi
from inference.variational import pool
from inference.variational.ascent import Schedule
from models.constellation import constellation
from models.program.batches import read_scenes
from models.program.reading import read
from models.scenes import Scene
from tests import oracle_inference as reference

NUM_SCENES, RESTARTS = 512, 5
REFERENCE_SCENES = 3


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Time for a coordinate step, and time to the same ELBO."""
    scenes = sample_scenes(600, sigma=0.0, seed=11).take(slice(NUM_SCENES))
    problems = [_problem(scenes.take(i)) for i in range(REFERENCE_SCENES)]
    rng = np.random.default_rng(0)

    plain_step, plain_fit, plain_elbo = [], [], []
    for problem in problems:
        best = -np.inf
        began = time.perf_counter()
        for _ in range(RESTARTS):
            start = reference.uniform_start(rng, len(problem.points))
            fit_began = time.perf_counter()
            fit = reference.fit(problem, start)
            plain_step.append((time.perf_counter() - fit_began) / fit.steps)
            best = max(best, fit.last.elbo.total)
        plain_fit.append(time.perf_counter() - began)
        plain_elbo.append(best)

    runs = NUM_SCENES * RESTARTS
    yield row(
        f"a coordinate step, {NUM_SCENES} scenes x {RESTARTS} restarts",
        float(np.mean(plain_step)),
        _step_time(scenes) / runs,
    )
    ours = cavi.run(constellation, scenes, jax.random.key(0), num_restarts=RESTARTS)
    began = time.perf_counter()
    ours = cavi.run(constellation, scenes, jax.random.key(0), num_restarts=RESTARTS)
    seconds = (time.perf_counter() - began) / NUM_SCENES
    assert ours.elbo is not None
    gain = ours.elbo[:REFERENCE_SCENES] - np.array(plain_elbo)
    yield row(
        f"to the ELBO of {RESTARTS} random restarts (ours is {gain.mean():+.2f} nats better)",
        float(np.mean(plain_fit)),
        seconds,
    )


def _step_time(scenes: Scene) -> float:
    """Seconds for one step of all runs, from random starts, averaged over the first steps."""
    tiled = scenes.take(np.tile(np.arange(NUM_SCENES), RESTARTS))
    reading = read_scenes(constellation, tiled)
    runner = pool.engine(reading.skeleton, "sinkhorn", Schedule())
    keys = jax.random.split(jax.random.key(0), NUM_SCENES * RESTARTS)
    runs = runner.advance(runner.start(reading.model, keys))
    return best_time(lambda: runner.advance(runs))


def _problem(scene: Scene) -> reference.Problem:
    model = read(constellation, scene)
    parts = model.parts
    arrays = (
        model.points,
        model.seen,
        parts.F,
        parts.offset,
        parts.variance,
        parts.feature_mask,
        parts.owner,
        model.pose_mean,
        model.pose_covariance,
        model.match_logits,
    )
    return reference.Problem(*(np.asarray(x) for x in arrays))
