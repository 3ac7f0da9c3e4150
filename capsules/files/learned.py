"""Files of `capsules learn`: learnt numbers, and unfinished rounds, as plain arrays."""

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from capsules.files.inputs import ArrayFile
from capsules.files.outputs import whole_file
from inference.learning import Learned, Rounds
from inference.learning.expectation import Expectations
from inference.learning.statistics import Statistics
from models.errors import InputError

ERROR, HISTORY = "error_", "history_"
"""Prefixes of the names of standard errors, and of values by round."""


def save_learned(path: Path, learned: Learned, given: Mapping[str, float]) -> None:
    """Write the learnt numbers with their errors, their history and the objective by round.

    Args:
        given: numbers that were fixed, with which the learnt ones belong together.
    """
    arrays = {name: np.asarray(x) for name, x in {**given, **learned.params}.items()}
    arrays |= {ERROR + name: np.asarray(x) for name, x in learned.standard_errors.items()}
    arrays |= {HISTORY + name: x for name, x in learned.history.items()}
    arrays |= {"objective": learned.objective}
    arrays |= {} if learned.holdout is None else {"holdout": learned.holdout}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    with whole_file(path) as file:
        file.write(buffer.getvalue())


def load_learned(path: Path) -> Mapping[str, np.ndarray]:
    """The numbers of a file, learnt or given, by name."""
    wanted = "a file that `capsules learn` wrote"
    with ArrayFile(path, "a file of learnt numbers", wanted) as file:
        values = {name: file.array(name) for name in file.names}
    if "objective" not in values:
        raise InputError(
            f"{path} has no `objective`, so `capsules learn` did not write it; give a file that "
            "it wrote"
        )
    beside = ("objective", "holdout")
    numbers = {
        name: x
        for name, x in values.items()
        if name not in beside and not name.startswith((ERROR, HISTORY))
    }
    for name, x in numbers.items():
        if not np.isfinite(x).all():
            raise InputError(f"{path}: {name} is not finite; learn it again")
    return numbers


def arrays_of(rounds: Rounds) -> dict[str, np.ndarray]:
    """The rounds of an unfinished run, as arrays by name."""
    arrays = {name: getattr(rounds, name) for name in _BY_ROUND}
    for b, expected in enumerate(rounds.expected):
        for name in _OF_RUNS:
            arrays[f"{b}/{name}"] = getattr(expected, name)
        for name, x in expected.given.items():
            arrays[f"{b}/given/{name}"] = x
        for name, x in expected.statistics._asdict().items():
            if x is not None:
                arrays[f"{b}/statistics/{name}"] = x
    return arrays


def rounds_of(arrays: Mapping[str, np.ndarray]) -> Rounds:
    """The inverse of `arrays_of`."""
    count = 1 + max(int(name.split("/")[0]) for name in arrays if "/" in name)

    def under(prefix: str) -> dict[str, np.ndarray]:
        return {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}

    expected = tuple(
        Expectations(
            **{name: arrays[f"{b}/{name}"] for name in _OF_RUNS},
            given=under(f"{b}/given/"),
            statistics=Statistics(**under(f"{b}/statistics/")),
        )
        for b in range(count)
    )
    return Rounds(**{name: arrays[name] for name in _BY_ROUND}, expected=expected)


_BY_ROUND = ("path", "objective", "holdout")
_OF_RUNS = ("scene", "weight", "log_volume", "value")
