"""Where objects could be: hypotheses from few points, starts, covers of a scene."""
