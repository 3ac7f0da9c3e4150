"""The studies behind the documentation: every table and picture that it shows.

A study is a module with a function `pieces`.
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

    def run(self) -> Pieces:
        """Compute the study, piece by piece."""
        module = importlib.import_module(f"benchmarks.studies.{self.module}")
        pieces: Pieces = module.pieces(*self.arguments)
        return pieces

    @property
    def path(self) -> Path:
        """Its source."""
        return Path(__file__).with_name(f"{self.module}.py")


STUDIES = {
    "train-amortised-0.25": Study("training", ("amortised-0.25",)),
    "train-amortised-0.1": Study("training", ("amortised-0.1",)),
    "train-amortised-0": Study("training", ("amortised-0",)),
    "equivariance": Study("equivariance"),
    "train-ccae-0": Study("training", ("ccae-0",)),
    "train-ccae-0.1": Study("training", ("ccae-0.1",)),
    "train-ccae-0.25": Study("training", ("ccae-0.25",)),
    "train-ccae-seed-1": Study("training", ("ccae-seed-1",)),
    "train-ccae-published": Study("training", ("ccae-published",)),
    "learning-noise-0.1": Study("learning", ("noise", 0.1)),
    "learning-noise-0.25": Study("learning", ("noise", 0.25)),
    "learning-coverage": Study("learning", ("coverage",)),
    "learning-templates": Study("learning", ("templates",)),
    "learning-sized": Study("learning", ("sized",)),
    "ccae-objective": Study("ccae_objective"),
    "amortised": Study(
        "amortised",
        after=("train-amortised-0", "train-amortised-0.1", "train-amortised-0.25"),
    ),
    "ccae": Study(
        "ccae",
        after=(
            "train-ccae-0",
            "train-ccae-0.1",
            "train-ccae-0.25",
            "train-ccae-seed-1",
            "train-ccae-published",
        ),
    ),
    "examples": Study("examples", after=("train-ccae-0.25",)),
    "learning-time": Study("learning", ("time",), alone=True),
    "errors": Study("errors"),
}
"""In the order in which they begin: those that take long first."""
