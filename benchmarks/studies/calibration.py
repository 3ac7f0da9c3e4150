"""Simulation-based calibration of four methods on the same scenes, and its picture.

One triangle, all three points seen, at a precision so low that a scene has several matches to speak
of. Draws of the posterior have uniform ranks. The picture goes to `docs/images/calibration.png`.
"""

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array

from inference import cavi, exact, nuts, svi
from inference.diagnostics.calibration import calibrate
from inference.plots.calibration import plot_calibration
from inference.result import Result
from models.constellation import constellation
from models.program.sites import Program
from models.scenes import Scene
from models.templates import shapes, stack

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "calibration.png"
NUM_SCENES = 100


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


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Rank the true poses of the same scenes by every method, and draw the picture."""
    program = functools.partial(constellation, parts=stack(shapes("triangle")), precision=20.0)
    found = {}
    for name, run in METHODS.items():
        began = time.perf_counter()
        found[name] = calibrate(
            program,
            run,
            np.ones(3, bool),
            jax.random.key(0),
            num_scenes=NUM_SCENES,
            together=name in TOGETHER,
        )
        seconds = time.perf_counter() - began
        values = ", ".join(f"{p:.2g}" for p in found[name].p_values()[0])
        yield (
            f"calibration of {name}, {NUM_SCENES} scenes",
            "uniform",
            f"p {values}",
            f"{seconds:.0f} s",
        )
    plot_calibration(found, ["triangle"]).savefig(PICTURE, dpi=110)
