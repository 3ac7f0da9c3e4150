"""Arrays: their type in annotations, and lengths that compiled code is kept for."""

from typing import Any

import numpy as np
from jaxtyping import Int

AnyArray = Any
"""A numpy or JAX array, in type annotations of what users hand in."""

_FEW, _MANY = 16, 1024


def padded(count: int) -> Int[np.ndarray, " rows"]:
    """Numbers of rows, the last one repeated up to a length that other calls have too.

    JAX compiles each operation of a program once for each length of its batch. One stays one,
    further lengths become powers of two from 16 on, and those above 1,024 stay as they are.
    """
    length = max(_FEW, 1 << (count - 1).bit_length())
    return np.minimum(np.arange(length if 1 < count <= _MANY else count), count - 1)
