"""The array type of annotations, and padding of batches to few different lengths."""

from typing import Any

import numpy as np
from jaxtyping import Int

AnyArray = Any
"""A numpy or JAX array, in annotations of what users pass."""

_FEW, _MANY = 16, 1024


def padded(count: int) -> Int[np.ndarray, " rows"]:
    """Indices of `count` rows, the last repeated to pad a batch to a common length.

    JAX compiles each operation of a program once for each batch length. Lengths from 2 to 1,024 are
    padded to a power of two, at least 16; others stay as they are.
    """
    length = max(_FEW, 1 << (count - 1).bit_length())
    return np.minimum(np.arange(length if 1 < count <= _MANY else count), count - 1)
