"""The figure of simulation-based calibration."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from inference.diagnostics.calibration import Calibration
from inference.plots.scenes import COLOURS, style
from models.templates import object_names


def plot_calibration(
    calibrations: Mapping[str, Calibration], names: Sequence[str] | None = None
) -> Figure:
    """Plot how far the ranks of true poses are from uniform, for each method.

    There is a panel for each object and pose dimension. It shows the share of ranks below a value
    minus that value, with a curve for each method. Curves of uniform ranks leave the grey band
    anywhere in 5 % of panels. An S (down, up, down) means that draws are too narrow, its mirror
    image that they are too wide, and a bow to one side is a bias.
    """
    first = next(iter(calibrations.values()))
    num_scenes, num_objects, pose_dim = first.ranks.shape
    names = object_names(["object"] * num_objects) if names is None else names
    with style():
        size = (2.3 * pose_dim + 0.6, 1.9 * num_objects + 0.9)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(num_objects, pose_dim, sharex=True, sharey=True, squeeze=False)
        grid = np.linspace(0, 1, 101)
        band = uniform_band(num_scenes, grid)
        for k, row in enumerate(axes):
            row[0].set_ylabel(f"{names[k]}\nexcess of ranks below")
            for i, panel in enumerate(row):
                panel.fill_between(grid, -band, band, color="#E0E0E0", linewidth=0, gid="band")
                panel.axhline(0, color="#808080", linewidth=0.8)
                for colour, (method, found) in zip(COLOURS, calibrations.items(), strict=False):
                    excess = rank_excess(found, grid)[:, k, i]
                    panel.plot(grid, excess, color=colour, linewidth=1.4, label=method)
                panel.set_title(f"pose dimension {i}" if k == 0 else "")
        for panel in axes[-1]:
            panel.set_xlabel("rank / draws")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def rank_excess(found: Calibration, grid: Float[np.ndarray, " g"]) -> Float[np.ndarray, "g K p"]:
    """The share of normalised ranks up to each value, minus the value."""
    middle = (found.ranks + 0.5) / (found.num_samples + 1)
    below = (middle <= grid[:, None, None, None]).mean(axis=1)
    return below - grid[:, None, None]


def uniform_band(
    num_scenes: int, grid: Float[np.ndarray, " g"], level: float = 0.95, simulations: int = 2000
) -> Float[np.ndarray, " g"]:
    """Half-width of the band that contains whole curves of uniform ranks with probability `level`.

    It is a multiple of the pointwise standard deviation; the multiple is found by simulation.
    """
    uniform = np.random.default_rng(0).uniform(size=(simulations, num_scenes))
    counts = np.stack([(uniform <= value).mean(axis=1) for value in grid], axis=1)
    deviation = np.sqrt(grid * (1 - grid) / num_scenes)
    inside = deviation > 0
    widest = (np.abs(counts - grid)[:, inside] / deviation[inside]).max(axis=1)
    return np.quantile(widest, level) * deviation
