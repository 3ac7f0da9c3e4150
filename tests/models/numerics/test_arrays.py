"""Lengths that compiled code is kept for."""

import numpy as np
import pytest

from models.numerics.arrays import padded


@pytest.mark.parametrize(
    ("count", "length"), [(1, 1), (2, 16), (16, 16), (17, 32), (1000, 1024), (1025, 1025)]
)
def test_the_last_row_is_repeated_up_to_a_power_of_two(count, length):
    rows = padded(count)
    np.testing.assert_array_equal(rows, np.minimum(np.arange(length), count - 1))
