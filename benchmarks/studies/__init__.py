"""The studies behind the documentation: every table and picture that it shows.

A study is a function of a module, by default its function `pieces`.
"""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Pieces


class Study(NamedTuple):
    """A study, and when it may run."""

    module: str
    arguments: tuple[Any, ...] = ()
    alone: bool = False
    """It measures time, and nothing else may run beside it."""
    after: tuple[str, ...] = ()
    """Studies whose networks it uses."""
    function: str = "pieces"

    def run(self) -> Pieces:
        """Compute the study, piece by piece."""
        module = importlib.import_module(f"benchmarks.studies.{self.module}")
        pieces: Pieces = getattr(module, self.function)(*self.arguments)
        return pieces

    @property
    def path(self) -> Path:
        """Its source."""
        return Path(__file__).with_name(f"{self.module}.py")


AMORTISED = ("train-amortised-0", "train-amortised-0.1", "train-amortised-0.25")
CCAE = ("train-ccae-0", "train-ccae-0.1", "train-ccae-0.25")
"""Studies that train the networks of the main table, for each level of noise."""

STUDIES = {
    "train-amortised-0.25": Study("training", ("amortised-0.25",)),
    "table1": Study("constellations", function="main"),
    "train-amortised-0.1": Study("training", ("amortised-0.1",)),
    "train-amortised-0": Study("training", ("amortised-0",)),
    "learning-noise-0.25": Study("learning", ("noise", 0.25)),
    "equivariance": Study("equivariance"),
    "missing": Study("missing"),
    "learning-noise-0.1": Study("learning", ("noise", 0.1)),
    "learning-coverage": Study("learning", ("coverage",)),
    "learning-templates": Study("learning", ("templates",)),
    "learning-sized": Study("learning", ("sized",)),
    "faces": Study("faces"),
    "calibration": Study("calibration"),
    "train-ccae-0": Study("training", ("ccae-0",)),
    "train-ccae-0.1": Study("training", ("ccae-0.1",)),
    "train-ccae-0.25": Study("training", ("ccae-0.25",)),
    "train-ccae-seed-1": Study("training", ("ccae-seed-1",)),
    "train-ccae-published": Study("training", ("ccae-published",)),
    "objectives": Study("objectives"),
    "ccae-objective": Study("ccae_objective"),
    "beta": Study("constellations", function="beta"),
    "clutter": Study("clutter"),
    "starts": Study("constellations", function="starts"),
    "errors": Study("errors"),
    "importance": Study("importance"),
    "scale-endurance": Study("endurance"),
    "demo": Study("demo"),
    "bound": Study("bound"),
    "amortised": Study("amortised", after=AMORTISED),
    "ccae": Study("ccae", after=(*CCAE, "train-ccae-seed-1", "train-ccae-published")),
    "trained": Study("constellations", after=(*AMORTISED, *CCAE), function="trained"),
    "examples": Study("examples", after=CCAE),
    "growing": Study("growing", alone=True),
    "learning-time": Study("learning", ("time",), alone=True),
    "growth": Study("growth", alone=True),
    "scale-throughput": Study("throughput", alone=True),
    "faces-speed": Study("faces_speed", alone=True),
}
"""In the order in which they begin: those that take long first."""
