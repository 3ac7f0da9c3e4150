"""RANSAC: hypotheses from small tuples of points, and the cheapest cover of the scene by them."""

from inference.ransac.search import PAPER, PUBLISHED, run

__all__ = ["PAPER", "PUBLISHED", "run"]
