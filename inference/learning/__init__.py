"""Learning what a program leaves open: `numpyro.param` from many scenes."""

from inference.learning.learn import Learned, Rounds, learn

__all__ = ["Learned", "Rounds", "learn"]
