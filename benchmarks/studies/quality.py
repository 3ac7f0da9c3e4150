"""How well scenes are parsed: VI, exact inference and RANSAC, under both priors, by noise level.

One setting serves all noise levels, and no truth enters a choice. Scenes are drawn with a seed that
nothing was tuned on or, where the variable SCENES names a folder of the published test sets, are
the first 512 draws of those. Numbers are scene accuracy and segmentation accuracy over partitions,
with standard errors, and for VI the share of scenes on which it finds the most probable partition
of its own program, and its time with everything compiled. The picture goes to `docs/images/`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from capsules import methods
from capsules.experiments.generator import sample_scenes
from capsules.files.scenes import load_scenes
from inference.diagnostics.metrics import partition_metrics, same_partition
from models.scenes import Scene

SEED, DRAWS = 20_260, 512
LEVELS = (0.0, 0.1, 0.25)
ROWS = (
    ("exact", "sized"),
    ("exact", "presence"),
    ("exact", "uniform"),
    ("ds", "presence"),
    ("ds", "uniform"),
    ("ransac", "uniform"),
)
COLOURS = ("#003D5C", "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73")
MARKERS = {"sized": "D", "presence": "o", "uniform": "s"}
IMAGES = Path(__file__).parents[1] / "docs" / "images"


class Cell(NamedTuple):
    """What a method does on the scenes of one level of noise."""

    right: Float[np.ndarray, " scenes"]
    segmentation: Float[np.ndarray, " scenes"]
    as_exact: float
    milliseconds: float

    def __str__(self) -> str:
        accuracies = (_mean_and_error(x) for x in (self.right, self.segmentation))
        shown = ", ".join(f"{mean:.3f} ± {error:.3f}" for mean, error in accuracies)
        if np.isnan(self.as_exact):
            return shown
        return f"{shown}; as exact {self.as_exact:.3f}; {self.milliseconds:.1f} ms a scene"


def rows() -> Iterator[tuple[str, str, str, str]]:
    """A row for each method and prior: the three noise levels, least noise first."""
    folder = os.environ.get("SCENES")
    sets = {sigma: _scenes(sigma, folder) for sigma in LEVELS}
    best: dict[tuple[str, float], np.ndarray] = {}
    table: dict[str, list[Cell]] = {}
    for method, prior in ROWS:
        name = f"{method}, {prior} prior"
        table[name] = []
        for sigma, scenes in sets.items():
            result = methods.infer(method, scenes, prior=prior)
            assert scenes.object is not None
            metrics = partition_metrics(scenes.object, result.labels)
            as_exact = milliseconds = np.nan
            if method == "exact":
                best[prior, sigma] = result.labels
            elif method == "ds":
                as_exact = float(same_partition(result.labels, best[prior, sigma]).mean())
                again = methods.infer(method, scenes, prior=prior)
                milliseconds = 1e3 * float(again.seconds) / len(scenes.points)
            cell = Cell(metrics["scene_accuracy"], metrics["sa"], as_exact, milliseconds)
            table[name].append(cell)
        yield (name, *(str(cell) for cell in table[name]))
    draw(table, "quality.png" if folder is None else "quality_published.png")


def _scenes(sigma: float, folder: str | None) -> Scene:
    if folder is None:
        return sample_scenes(DRAWS, sigma=sigma, seed=SEED)
    return load_scenes(Path(folder) / f"constellations_{sigma:.2f}.npz", limit=DRAWS)


def draw(table: dict[str, list[Cell]], name: str) -> None:
    """Scene accuracy by noise, with standard errors."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(LEVELS))
    for i, (label, cells) in enumerate(table.items()):
        mean, error = np.array([_mean_and_error(cell.right) for cell in cells]).T
        offset = 0.09 * (i - (len(table) - 1) / 2)
        marker = next(m for prior, m in MARKERS.items() if prior in label)
        axes.errorbar(
            places + offset, mean, error, fmt=marker, color=COLOURS[i], label=label, capsize=3
        )
    axes.set_xticks(places, [f"σ = {sigma}" for sigma in LEVELS])
    axes.set(ylabel="scenes parsed rightly", ylim=(0, 1.03))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(IMAGES / name, dpi=110)


def _mean_and_error(values: Float[np.ndarray, " scenes"]) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / np.sqrt(len(values)))
