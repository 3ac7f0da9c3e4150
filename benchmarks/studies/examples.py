"""Scenes with their truth and the objects that CCAE, GCM-DS and RANSAC find, with noise."""

from benchmarks.report import WEIGHTS, Picture, Pieces
from benchmarks.studies.training import weights
from capsules.experiments.constellations import scene_sets
from capsules.experiments.examples import columns_of, full_scenes, plot_examples

SIGMA, DRAWS, SEED = 0.25, 512, 0
"""The scenes of `capsules reproduce examples`."""


def pieces() -> Pieces:
    """One picture."""
    weights(f"ccae-{SIGMA:g}")
    test = scene_sets(None, DRAWS, SEED)[SIGMA]
    chosen = full_scenes(test.scenes)
    columns = columns_of(test, chosen, SIGMA, WEIGHTS, SEED)
    yield Picture("examples", plot_examples(test.scenes.take(chosen), columns, f"σ = {SIGMA:g}"))
