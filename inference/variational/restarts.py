"""Which runs of coordinate ascent a scene is given: in rounds, until its best is found again.

Where the ELBO has one wide basin a few runs all end in it, and more of them tell nothing new; where
it has many, most runs end in poor ones. So a scene gets a few runs at a time, and is done once the
best ELBO has been reached several times. Whether another round follows depends on the rounds before
it alone, and so not on the other scenes of the batch.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

ROUND = 4
"""Runs of a scene in a round, where it is done by confirmations."""

START_ANEW = 4
"""Runs that end in a sparse solution are made anew, at most as often as there are restarts, times
this."""

SAME = 1e-2
"""Nats; runs whose ELBOs are as close as this have found the same solution."""


class Restarts(NamedTuple):
    """How many runs a scene is given."""

    most: int
    """Runs that do not end in a sparse solution."""
    confirmations: int | None
    """Times that the best ELBO has to be reached for a scene to be done; None for no such rule."""
    fewest_points: float
    """What counts as sparse: an object that surely has a point, but not so many in all."""


class Rounds:
    """The runs that are waiting, and what is known of the finished ones."""

    def __init__(
        self,
        num_scenes: int,
        restarts: Restarts,
        number: Int[np.ndarray, " scenes"] | None = None,
    ) -> None:
        """With `number`, so many runs of each scene and no more."""
        most = restarts.most
        self.number = number
        self.restarts = restarts
        self.size = min(ROUND, most) if restarts.confirmations else most
        self.waiting = deque(
            (s, attempt) for attempt in range(self.size) for s in range(num_scenes)
        )
        if number is not None:
            self.waiting = deque(
                (s, i) for i in range(number.max()) for s in np.flatnonzero(i < number).tolist()
            )
        self.begun = np.full(num_scenes, self.size) if number is None else number.copy()
        self.pending = self.begun.copy()
        self.elbo = np.full((num_scenes, most * (1 + START_ANEW)), -np.inf)
        """Of each run, -inf until it has ended and if it ended in a sparse solution."""
        self.finished = 0
        self.foreseen = np.full(num_scenes, most) if number is None else number
        """Runs of each scene in all, as far as can be said."""

    def take(self, count: int) -> Int[np.ndarray, "runs 2"]:
        """The scene and the attempt of the next runs."""
        runs = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        return np.array(runs, int).reshape(-1, 2)

    def finish(
        self,
        runs: Int[np.ndarray, "runs 2"],
        elbo: Float[np.ndarray, " runs"],
        sparse: Bool[np.ndarray, " runs"],
    ) -> None:
        """Take note of finished runs, and begin the next round of a scene that needs one."""
        scene, attempt = runs.T
        self.elbo[scene, attempt] = np.where(sparse, -np.inf, elbo)
        np.subtract.at(self.pending, scene, 1)
        self.finished += len(runs)
        for s in np.unique(scene):
            if self.pending[s] == 0 and self.number is None:
                self._begin(int(s))

    def _begin(self, scene: int) -> None:
        """Begin another round of a scene, if it needs one."""
        elbo = self.elbo[scene]
        begun = int(self.begun[scene])
        counted = np.isfinite(elbo)
        confirmed = int((elbo[counted] >= elbo.max() - SAME).sum())
        wanted = self.restarts.confirmations
        missing = min(self.restarts.most - int(counted.sum()), len(elbo) - begun)
        missing = missing if wanted is None or confirmed < wanted else 0
        count = min(missing, self.size)
        self.waiting.extend((scene, begun + i) for i in range(count))
        self.begun[scene], self.pending[scene] = begun + count, count
        self.foreseen[scene] = begun + missing
