"""Learn the `numpyro.param` values of a program from many scenes."""

from inference.learning.learn import Learned, Rounds, learn

__all__ = ["Learned", "Rounds", "learn"]
