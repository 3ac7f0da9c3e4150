"""All matches of a few rows and columns, listed."""

import itertools
import math

import numpy as np
from jaxtyping import Float

from models.errors import InputError

MAX_ENUMERATED = 50_000
"""The largest number of matches in a list."""


def all_injection_matrices(rows: int, columns: int) -> Float[np.ndarray, "count rows columns"]:
    """Every way to give each row a column of its own, in lexicographic order of those columns."""
    what = f"{columns}!" + (f"/{columns - rows}!" if rows < columns else "")
    _refuse_long_list(math.perm(columns, rows), f"{what} permutation matrices")
    listed = list(itertools.permutations(range(columns), rows))
    return np.eye(columns)[np.array(listed, int).reshape(-1, rows)]


def all_assignment_matrices(rows: int, columns: int) -> Float[np.ndarray, "count rows columns"]:
    """Every way to give each row a column, in lexicographic order of those columns."""
    _refuse_long_list(columns**rows, f"{columns}^{rows} assignments of points to parts")
    grid = np.indices((columns,) * rows).reshape(rows, -1).T
    return np.eye(columns)[grid]


def _refuse_long_list(count: int, what: str) -> None:
    if count > MAX_ENUMERATED:
        raise InputError(
            f"enumerating the support would list {what}, {count:,} matrices, more than the limit "
            f"of {MAX_ENUMERATED:,}; use mean, mode, entropy, log_normalizer or sample, which do "
            "not list it"
        )
