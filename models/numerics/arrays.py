"""The type of arrays in annotations."""

from typing import Any

AnyArray = Any
"""A numpy or JAX array, in type annotations of what users hand in."""
