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


TRAINING: tuple[str, ...] = ()
"""Studies that train the networks of the main table."""

STUDIES = {
    "table1": Study("constellations", function="main"),
    "beta": Study("constellations", function="beta"),
    "starts": Study("constellations", function="starts"),
    "trained": Study("constellations", after=TRAINING, function="trained"),
    "errors": Study("errors"),
}
"""In the order in which they begin: those that take long first."""
