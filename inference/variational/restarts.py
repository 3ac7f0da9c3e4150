"""Which runs of coordinate ascent a scene is given, and which are made anew.

Whether a run is made anew depends on the runs of its scene alone, and so not on the other scenes of
the batch.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

START_ANEW = 4
"""Random runs that end in a sparse solution are made anew, at most as often as there are restarts,
times this."""


class Restarts(NamedTuple):
    """How many runs a scene is given."""

    most: int
    """Runs that do not end in a sparse solution."""
    fewest_points: float
    """What counts as sparse: an object that surely has a point, but not so many in all."""


class Waiting:
    """The runs that are waiting, and how many each scene is still given."""

    def __init__(self, number: Int[np.ndarray, " scenes"], anew: int) -> None:
        """So many runs of each scene, of which so many in all may be made anew."""
        self.runs = deque(
            (s, i) for i in range(number.max()) for s in np.flatnonzero(i < number).tolist()
        )
        self.begun = number.copy()
        self.anew = np.full(len(number), anew)
        self.finished = 0

    def take(self, count: int) -> Int[np.ndarray, "runs 2"]:
        """The scene and the attempt of the next runs."""
        runs = [self.runs.popleft() for _ in range(min(count, len(self.runs)))]
        return np.array(runs, int).reshape(-1, 2)

    def finish(self, scene: Int[np.ndarray, " runs"], sparse: Bool[np.ndarray, " runs"]) -> None:
        """Take note of finished runs, and have sparse ones made anew."""
        self.finished += len(scene)
        for s in scene[sparse & (self.anew[scene] > 0)].tolist():
            if self.anew[s] > 0:
                self.runs.append((s, int(self.begun[s])))
                self.begun[s] += 1
                self.anew[s] -= 1
