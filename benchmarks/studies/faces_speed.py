"""Scenes of five faces that coordinate ascent infers in a second, in one batch."""

from collections.abc import Iterator

import jax
import numpy as np

from benchmarks.measurements.timing import best_time
from benchmarks.report import Pieces, Table, share
from capsules.faces.experiment import RESTARTS, open_study
from inference import cavi
from inference.diagnostics.metrics import same_partition

NUM_SCENES, NUM_FACES = 250, 5


def pieces() -> Pieces:
    """The scenes and settings of `capsules reproduce faces`, with everything compiled."""
    headings = ("faces", "scenes", "restarts", "scenes a second", "scene accuracy")
    yield Table("faces_speed", headings, rows())


def rows() -> Iterator[list[str]]:
    """A single row."""
    study = open_study()
    scenes, program = study.scenes(NUM_SCENES, NUM_FACES).scene, study.program(NUM_FACES)
    labels = np.empty(0)

    def run() -> None:
        nonlocal labels
        result = cavi.run(
            program, scenes, jax.random.key(0), num_restarts=RESTARTS, fewest_points=1
        )
        labels = result.labels

    rate = NUM_SCENES / best_time(run)
    right = same_partition(np.asarray(scenes.object), labels)
    yield [str(NUM_FACES), str(NUM_SCENES), str(RESTARTS), f"{rate:,.0f}", share(right)]
