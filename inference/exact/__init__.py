"""Exact inference: a sum over all matches, by `run` and `sample`."""

from inference.exact.solve import run, sample

__all__ = ["run", "sample"]
