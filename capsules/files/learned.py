"""Files of learnt numbers, as `capsules learn` writes them: an npz file of plain arrays."""

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from capsules.files.npz import ArrayFile
from capsules.files.paths import whole_file
from inference.learning import Learned
from models.errors import InputError

ERROR, HISTORY = "error_", "history_"
"""What the names of standard errors, and of values by round, begin with."""


def save_learned(path: Path, learned: Learned) -> None:
    """Write the learnt numbers with their errors, their history and the objective by round."""
    arrays = {name: np.asarray(x) for name, x in learned.params.items()}
    arrays |= {ERROR + name: np.asarray(x) for name, x in learned.standard_errors.items()}
    arrays |= {HISTORY + name: x for name, x in learned.history.items()}
    arrays |= {"objective": learned.objective}
    arrays |= {} if learned.holdout is None else {"holdout": learned.holdout}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    with whole_file(path) as file:
        file.write(buffer.getvalue())


def load_learned(path: Path) -> Mapping[str, np.ndarray]:
    """The learnt numbers of a file, by name."""
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
