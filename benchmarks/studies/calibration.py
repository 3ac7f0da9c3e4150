"""Simulation-based calibration of four methods on the same scenes.

One triangle, all three points seen, at a precision so low that a scene has several matches to speak
of. Draws of the posterior have uniform ranks.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jaxtyping import Array

from benchmarks.report import Picture, Pieces, Table
from inference import cavi, exact, nuts, svi
from inference.diagnostics.calibration import Calibration, calibrate
from inference.plots.calibration import plot_calibration
from inference.result import Result
from models.constellation import constellation
from models.program.sites import Program
from models.scenes import Scene
from models.templates import shapes, stack

NUM_SCENES, PRECISION = 100, 20.0


def _exact(program: Program, scene: Scene, rng_key: Array) -> Result:
    return exact.run(program, scene)


METHODS: dict[str, Callable[[Program, Scene, Array], Result]] = {
    "exact": _exact,
    "nuts": functools.partial(nuts.run, num_warmup=200, num_samples=200, num_temperatures=6),
    "svi": functools.partial(svi.run, num_restarts=4, num_particles=4),
    "ds": cavi.run,
}

TOGETHER = ("svi", "ds")
"""Methods that take all scenes at once."""


def pieces() -> Pieces:
    """P-values of uniform ranks for each method and pose dimension, and the ranks themselves."""
    found: dict[str, Calibration] = {}
    headings = ["p of uniform ranks", *(f"dimension {i}" for i in range(4)), "scenes"]
    yield Table("calibration", headings, rows(found))
    yield Picture("calibration", plot_calibration(found, ["triangle"]))


def rows(found: dict[str, Calibration]) -> Iterator[list[str]]:
    """Rank the true poses of the same scenes by every method; the ranks are added to `found`."""
    program = functools.partial(constellation, parts=stack(shapes("triangle")), precision=PRECISION)
    for name, run in METHODS.items():
        found[name] = calibrate(
            program,
            run,
            np.ones(3, bool),
            jax.random.key(0),
            num_scenes=NUM_SCENES,
            together=name in TOGETHER,
        )
        values = found[name].p_values()[0]
        yield [f"`{name}`", *map(shown, values), str(NUM_SCENES)]


def shown(p: float) -> str:
    """A p-value with two digits: `.55` or `5.1e-07`."""
    return f"{p:.1e}" if p < 1e-3 else f"{p:.2g}".removeprefix("0")
