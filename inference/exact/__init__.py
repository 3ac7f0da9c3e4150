"""Exact inference: every match is summed over. `run` and `sample` are the front door."""

from inference.exact.solve import run, sample

__all__ = ["run", "sample"]
