"""How well scenes are parsed: VI, exact inference and RANSAC, under both priors, by noise level.

One setting serves all noise levels, and no truth enters a choice. Scenes are drawn with a seed that
nothing was tuned on; numbers are scene accuracy and segmentation accuracy over partitions, with
standard errors, and the share of scenes on which VI finds the most probable partition of its own
program.
"""

from collections.abc import Iterator

import numpy as np

from inference import methods
from inference.metrics import partition_metrics, same_partition
from inference.result import Result
from models.generator import sample_scenes

SEED, DRAWS = 20_260, 512
LEVELS = (0.0, 0.1, 0.25)
ROWS = (
    ("ransac", "uniform"),
    ("ds", "uniform"),
    ("exact", "uniform"),
    ("ds", "presence"),
    ("exact", "presence"),
)


def rows() -> Iterator[tuple[str, str, str, str]]:
    """A row for each method and prior: the three noise levels, least noise first."""
    sets = {sigma: sample_scenes(DRAWS, sigma=sigma, seed=SEED) for sigma in LEVELS}
    best: dict[tuple[str, float], np.ndarray] = {}
    for method, prior in sorted(ROWS, key=lambda row: row[0] != "exact"):
        cells = []
        for sigma, scenes in sets.items():
            result = methods.infer(method, scenes, prior=prior)
            cells.append(_cell(result))
            if method == "exact":
                best[prior, sigma] = result.object
            elif method == "ds":
                cells[-1] += f", {same_partition(result.object, best[prior, sigma]).mean():.3f}"
        yield (f"{method}, {prior}: scene accuracy, SA, VI as exact", *cells)


def _cell(result: Result) -> str:
    assert result.scene.object is not None
    metrics = partition_metrics(result.scene.object, result.object)
    return ", ".join(
        f"{values.mean():.3f} ± {values.std() / np.sqrt(len(values)):.3f}"
        for values in (metrics["scene_accuracy"], metrics["sa"])
    )
