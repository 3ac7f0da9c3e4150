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
    "errors": Study("errors"),
    "missing": Study("missing"),
    "faces": Study("faces"),
    "calibration": Study("calibration"),
    "objectives": Study("objectives"),
    "clutter": Study("clutter"),
    "importance": Study("importance"),
    "scale-endurance": Study("endurance"),
    "demo": Study("demo"),
    "bound": Study("bound"),
    "growing": Study("growing", alone=True),
    "growth": Study("growth", alone=True),
    "scale-throughput": Study("throughput", alone=True),
    "faces-speed": Study("faces_speed", alone=True),
}
"""In the order in which they begin: those that take long first."""
