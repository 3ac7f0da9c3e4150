"""RANSAC: make hypotheses from small tuples of points, and cover the scene at the lowest cost."""

from inference.ransac.search import PAPER, PUBLISHED, run

__all__ = ["PAPER", "PUBLISHED", "run"]
