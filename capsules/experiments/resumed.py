"""Checkpoints of `capsules learn`: its rounds, in a store beside the file that it writes."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capsules.files.learned import arrays_of, rounds_of
from capsules.store import Store, digest, sealed
from inference.learning import Rounds
from models.scenes import Scene

SHARE = 0.1
"""Largest share of the time that is spent on writing checkpoints."""


class Checkpoint:
    """One entry of the store, from which the next run of the same command resumes."""

    def __init__(self, out: Path, scenes: Scene, asked: Mapping[str, Any]) -> None:
        """The checkpoint for the file `out`, learnt from `scenes` with the settings `asked`."""
        self.store = Store(out.parent)
        data = digest(scenes.points, scenes.present)
        self.entry = self.store.entry(f"{out.stem}-rounds", scenes=data, **asked)
        self.not_before = 0.0

    def read(self) -> Rounds | None:
        """The rounds that are done already, if there are any."""
        arrays = self.store.read(self.entry)
        return None if arrays is None else rounds_of(arrays)

    def keep(self, rounds: Rounds) -> None:
        """Write the rounds, unless that would take too large a share of the time."""
        began = time.monotonic()
        if began < self.not_before:
            return
        self.store.write(self.entry, sealed(self.entry, arrays_of(rounds)))
        ended = time.monotonic()
        self.not_before = ended + (ended - began) / SHARE

    def forget(self) -> None:
        """Remove the checkpoint, after learning has ended."""
        self.store.forget([self.entry])
