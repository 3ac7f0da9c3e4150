"""Report of the equivariance study: a table, templates, digits drawn by parts, residuals."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from capsules.experiments.digits import Network, poses_of_objects, poses_of_parts
from capsules.experiments.equivariance import (
    ANGLES,
    NEAR,
    Residuals,
    residuals,
    summary,
)
from capsules.files.outputs import whole_file
from inference.plots.scenes import COLOURS, png, style

LINES = {
    "rmse": "picture, RMSE",
    "place": "place, pixels",
    "best_place": "place, relabelled",
    "still_place": "place, if parts stayed",
    "angle": "angle, degrees",
    "symmetric_angle": "angle, up to symmetry",
    "best_angle": "angle, relabelled",
    "ink": "ink, pixels",
    "best_ink": "ink, relabelled",
    "presence": "change of presence",
    "right": "right, %",
    "swapped": "swapped, %",
    "lost": "lost, %",
}
"""Numbers of a network: how well it draws digits, and `equivariance.summary`."""

SHARES = ("right", "swapped", "lost")
DIGITS = {"rmse": 2, "presence": 2} | dict.fromkeys(SHARES, 0)
OURS = "ours"
NUM_SCENES = 100

Arrays = Mapping[str, np.ndarray]
"""The result of `capsules.experiments.digits.infer_parts`."""


class Measurement(NamedTuple):
    """Residuals of one network, or of our model, which draws no pictures and has no RMSE."""

    residuals: Residuals
    rmse: float

    @property
    def numbers(self) -> dict[str, float]:
        """All numbers, by the names of `LINES`."""
        return {"rmse": self.rmse} | summary(self.residuals)


Measurements = Mapping[str, Sequence[Measurement]]
"""Measurements of each seed, for each part set and for our model."""


def name_of(network: Network) -> str:
    """The name in the table of a network's part set."""
    return f"set {network.part_set + 1}: {network.num_parts} parts"


def measured(found: Mapping[Network, Arrays], seed: int) -> Measurements:
    """How far parts are from where they should be; last, the objects of our model."""
    sets: dict[str, list[Measurement]] = {}
    for network in sorted(found):
        arrays = found[network]
        error = float(np.sqrt(arrays["error"].mean()))
        one = Measurement(residuals(*poses_of_parts(arrays)), error)
        sets.setdefault(name_of(network), []).append(one)
    return sets | {OURS: [Measurement(residuals(*poses_of_objects(NUM_SCENES, seed)), np.nan)]}


def table_lines(sets: Measurements) -> list[list[str]]:
    """Means over seeds, with the standard deviation if there are several seeds."""
    lines = [["seeds", *(str(len(seeds)) for seeds in sets.values())]]
    for name, title in LINES.items():
        factor, digits = 100 if name in SHARES else 1, DIGITS.get(name, 1)
        cells = []
        for seeds in sets.values():
            x = factor * np.array([one.numbers[name] for one in seeds])
            spread = f" ± {x.std(ddof=1):.{digits}f}" if len(x) > 1 else ""
            cells.append("" if np.isnan(x).all() else f"{x.mean():.{digits}f}{spread}")
        lines.append([title, *cells])
    return lines


def write_equivariance(found: Mapping[Network, Arrays], seed: int, folder: Path) -> Iterator[Path]:
    """Print the table, and write it and the pictures; yields the files."""
    sets = measured(found, seed)
    heading, lines = ["", *sets], table_lines(sets)
    table = Table(
        title="Parts of turned digits by PCAE; ours: objects by map",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in heading:
        table.add_column(column)
    for line in lines:
        table.add_row(*line)
    console = Console()
    console.print(table)
    console.print(NOTE, highlight=False)
    contents = {
        "equivariance.md": markdown(heading, lines).encode(),
        "equivariance.csv": comma_separated(sets).encode(),
        "equivariance_parts.png": png(plot_parts(found)),
        "equivariance_residuals.png": png(plot_residuals(sets)),
    }
    for name, content in contents.items():
        with whole_file(folder / name) as file:
            file.write(content)
        yield folder / name


NOTE = (
    "Mean over held-out scenes, seven angles and parts, weighted by presence; ± is the standard "
    "deviation over seeds. Relabelled: with the best relabelling of parts that look the same, and "
    "up to turns at which they do. Ink: root mean square distance of the part's ink from where it "
    f"should be. Right: within {NEAR:g} pixels of ink. Swapped: right when relabelled or up to "
    "symmetry only. Lost: neither."
)


def markdown(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """The table as Markdown."""
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join(["# Equivariance", "", NOTE, "", *(f"| {' | '.join(r)} |" for r in rows), ""])


def comma_separated(sets: Measurements) -> str:
    """A line for each seed of each part set, with every number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["set", "seed", *LINES])
    for name, seeds in sets.items():
        for number, one in enumerate(seeds):
            writer.writerow([name, number, *(f"{one.numbers[line]:.6g}" for line in LINES)])
    return text.getvalue()


def plot_parts(found: Mapping[Network, Arrays]) -> Figure:
    """A digit at each angle; below it, for each part set, the templates of the seed that draws
    digits best, and the digit in the colours of the parts that draw it."""
    best: dict[int, Network] = {}
    for network in sorted(found, key=lambda network: found[network]["error"].mean()):
        best.setdefault(network.part_set, network)
    shown = [best[part_set] for part_set in sorted(best)]
    with style():
        figure = Figure(figsize=(9.6, 1.0 + 1.1 * len(shown)), layout="constrained")
        grid = figure.add_gridspec(1 + len(shown), len(ANGLES) + 2)
        for column, angle in enumerate(np.degrees(ANGLES)):
            axes = figure.add_subplot(grid[0, column + 2])
            _picture(axes, 1.0 - next(iter(found.values()))["image"][column])
            axes.set_title(f"{angle:.0f}°")
        for row, network in enumerate(shown, start=1):
            arrays = found[network]
            axes = figure.add_subplot(grid[row, :2])
            _picture(axes, _side_by_side(arrays["templates"]))
            error = np.sqrt(arrays["error"].mean())
            axes.set_title(f"{network.num_parts} templates, RMSE {error:.2f}", fontsize=8)
            for column, shares in enumerate(arrays["first"]):
                _picture(figure.add_subplot(grid[row, column + 2]), _coloured(shares))
    return figure


def _side_by_side(templates: Float[np.ndarray, "K height width"]) -> np.ndarray:
    """Templates in rows of three, each in its colour, with a margin."""
    pictures = [_coloured(t[None], first=k) for k, t in enumerate(templates)]
    framed = [np.pad(x, ((1, 1), (1, 1), (0, 0)), constant_values=0.8) for x in pictures]
    blank = np.ones_like(framed[0])
    rows = [framed[i : i + 3] for i in range(0, len(framed), 3)]
    return np.vstack([np.hstack(row + [blank] * (3 - len(row))) for row in rows])


def _coloured(ink: Float[np.ndarray, "K height width"], first: int = 0) -> np.ndarray:
    """Each part's ink in its colour, on white."""
    colours = np.array([to_rgb(COLOURS[(first + k) % len(COLOURS)]) for k in range(len(ink))])
    return np.clip(1.0 - np.einsum("khw,kc->hwc", ink, 1.0 - colours), 0.0, 1.0)


def _picture(axes: Axes, picture: np.ndarray) -> None:
    axes.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set(xticks=[], yticks=[])


def plot_residuals(sets: Measurements) -> Figure:
    """Residuals of place and angle against the angle of the scene, a line for each seed."""
    panels = (
        ("place", "best_place", "residual of place, pixels"),
        ("angle", "best_angle", "residual of angle, degrees"),
        ("ink", "best_ink", "residual of ink, pixels"),
    )
    degrees = np.degrees(ANGLES[1:])
    with style():
        figure = Figure(figsize=(9.6, 3.8), layout="constrained")
        for axes, (raw, best, label) in zip(figure.subplots(1, 3), panels, strict=True):
            for (name, seeds), colour in zip(sets.items(), COLOURS, strict=False):
                for number, one in enumerate(seeds):
                    for field, line in ((raw, "-"), (best, ":")):
                        values = getattr(one.residuals, field)
                        values = np.average(values, (0, 2), one.residuals.weight)
                        shown = name if number == 0 and line == "-" else None
                        marker = "." if line == "-" else ""
                        axes.plot(
                            degrees, values, line, color=colour, lw=0.9, marker=marker, label=shown
                        )
            axes.set(xlabel="angle of the scene, degrees", ylabel=label, ylim=(-0.5, None))
            axes.set_xticks(degrees)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
        figure.suptitle("Solid: as inferred. Dotted: relabelled, up to symmetry.", fontsize=9)
    return figure
