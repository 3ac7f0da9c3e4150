"""Queue of coordinate-ascent runs, with retries of sparse ones.

Retries of a scene depend only on its own runs, not on the rest of the batch.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

RETRIES = 4
"""Retries of sparse random runs, per restart."""


class Restarts(NamedTuple):
    """Number of runs per scene."""

    most: int
    """Non-sparse runs, at most."""
    fewest_points: float
    """A run is sparse if an object surely has a point but fewer than this many in total."""


class Waiting:
    """Runs that are waiting, and the retries left per scene."""

    def __init__(self, number: Int[np.ndarray, " scenes"], retries: int) -> None:
        """`number` runs per scene, and at most `retries` retries per scene."""
        self.runs = deque(
            (s, i) for i in range(number.max()) for s in np.flatnonzero(i < number).tolist()
        )
        self.begun = number.copy()
        self.retries = np.full(len(number), retries)
        self.finished = 0

    def take(self, count: int) -> Int[np.ndarray, "runs 2"]:
        """The scene and the attempt of the next runs."""
        runs = [self.runs.popleft() for _ in range(min(count, len(self.runs)))]
        return np.array(runs, int).reshape(-1, 2)

    def finish(self, scene: Int[np.ndarray, " runs"], sparse: Bool[np.ndarray, " runs"]) -> None:
        """Record finished runs, and queue retries of sparse ones."""
        self.finished += len(scene)
        for s in scene[sparse & (self.retries[scene] > 0)].tolist():
            if self.retries[s] > 0:
                self.runs.append((s, int(self.begun[s])))
                self.begun[s] += 1
                self.retries[s] -= 1
