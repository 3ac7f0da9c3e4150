"""A problem: scenes with a program read at each of them, ready for a closed-form method."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from inference.conditions.evidence import log_prior_normalizer
from models.program.batches import Open, Reading, Skeleton, read_scenes
from models.program.reading import FACTORS
from models.program.sites import Program, Values
from models.scenes import Scene


class Problem(NamedTuple):
    """Scenes, a program read at each of them, and the constant of each scene's evidence."""

    scenes: Scene
    reading: Reading
    log_constant: Float[np.ndarray, " scenes"]
    """Log density of all sites but poses, match and points, less the match prior's normaliser;
    -inf where no match is possible, NaN where the normaliser is out of reach."""
    is_conditional: bool = False
    """Whether it is one of several, at values of conditions, that are put together."""

    @property
    def skeleton(self) -> Skeleton:
        return self.reading.skeleton

    @property
    def owner(self) -> Int[np.ndarray, " N"]:
        return np.array(self.skeleton.owner)

    @property
    def num_scenes(self) -> int:
        return len(self.scenes.points)

    def take(self, which: Any) -> "Problem":
        """The problem of some of the scenes."""
        return self._replace(
            scenes=self.scenes.take(which),
            reading=self.reading.some(which),
            log_constant=self.log_constant[which],
        )


def read_problem(
    program: Program,
    scenes: Scene,
    given: Values | None = None,
    *,
    factors: frozenset[str] = FACTORS,
    or_bound: bool = False,
) -> Problem | Open:
    """Read a program at each scene of a batch, or say which conditions it leaves open.

    Args:
        given: values of conditions, one for each scene.
        factors: sites that the method has a factor for (see `models.program.reading`).
        or_bound: put an upper bound in the place of a normaliser that is out of reach.
    """
    reading = read_scenes(program, scenes, given, factors)
    if isinstance(reading, dict):
        return reading
    normalizer = log_prior_normalizer(reading, scenes.present, or_bound=or_bound)
    others = np.broadcast_to(np.asarray(reading.model.log_constant), len(scenes.points))
    possible = np.isfinite(others) & ~np.isneginf(normalizer)
    constant = np.where(possible, others - np.where(possible, normalizer, 0.0), -np.inf)
    return Problem(scenes, reading, constant)
