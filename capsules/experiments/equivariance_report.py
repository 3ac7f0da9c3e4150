"""The study of equivariance on paper: a table, templates, digits drawn by parts, residuals."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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

COLUMNS = {
    "place": "place, pixels",
    "best_place": "relabelled",
    "still_place": "if parts stayed",
    "angle": "angle, degrees",
    "symmetric_angle": "up to symmetry",
    "best_angle": "relabelled",
    "ink": "ink, pixels",
    "best_ink": "relabelled",
    "presence": "change of presence",
    "right": "right, %",
    "swapped": "swapped, %",
    "lost": "lost, %",
}
"""Numbers of `capsules.experiments.equivariance.summary`, as they stand in the table."""

SHARES = ("right", "swapped", "lost")
OURS = "ours: objects by map"
NUM_SCENES = 100

Arrays = Mapping[str, np.ndarray]
"""What `capsules.experiments.digits.infer_parts` has found."""


def row_name(network: Network) -> str:
    """The row of the table that a network belongs to."""
    return f"PCAE, set {network.part_set + 1}, {network.num_parts} parts"


def measured(found: Mapping[Network, Arrays], seed: int) -> dict[str, list[Residuals]]:
    """For each row of the table the residuals of each seed; the last row is our model's."""
    rows: dict[str, list[Residuals]] = {}
    for network in sorted(found):
        rows.setdefault(row_name(network), []).append(residuals(*poses_of_parts(found[network])))
    return rows | {OURS: [residuals(*poses_of_objects(NUM_SCENES, seed))]}


def table_rows(rows: Mapping[str, Sequence[Residuals]]) -> list[list[str]]:
    """Means over seeds, with the standard deviation over seeds where there are several."""
    lines = []
    for name, seeds in rows.items():
        numbers = [summary(one) for one in seeds]
        cells = []
        for column in COLUMNS:
            factor, digits = (100, 0) if column in SHARES else (1, 2 if column == "presence" else 1)
            x = factor * np.array([one[column] for one in numbers])
            spread = f" ± {x.std(ddof=1):.{digits}f}" if len(x) > 1 else ""
            cells.append(f"{x.mean():.{digits}f}{spread}")
        lines.append([name, str(len(numbers)), *cells])
    return lines


def write_equivariance(found: Mapping[Network, Arrays], seed: int, folder: Path) -> Iterator[Path]:
    """Print the table, and write it and the pictures; yields the files."""
    rows = measured(found, seed)
    heading, lines = ["", "seeds", *COLUMNS.values()], table_rows(rows)
    table = Table(title="Parts of turned scenes", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in heading:
        table.add_column(column)
    for line in lines:
        table.add_row(*line)
    console = Console()
    console.print(table)
    console.print(NOTE, highlight=False)
    contents = {
        "equivariance.md": markdown(heading, lines).encode(),
        "equivariance.csv": comma_separated(rows).encode(),
        "equivariance_parts.png": png(plot_parts(found)),
        "equivariance_residuals.png": png(plot_residuals(rows)),
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


def comma_separated(rows: Mapping[str, Sequence[Residuals]]) -> str:
    """A line for each seed of each row, with every number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "seed", *COLUMNS])
    for name, seeds in rows.items():
        for number, one in enumerate(seeds):
            writer.writerow([name, number, *(f"{summary(one)[c]:.6g}" for c in COLUMNS)])
    return text.getvalue()


def plot_parts(found: Mapping[Network, Arrays]) -> Figure:
    """A digit at each angle, and of the first seed of each part set its templates and the digit in
    the colours of the parts that draw it."""
    first: dict[int, Network] = {}
    for network in sorted(found):
        first.setdefault(network.part_set, network)
    with style():
        figure = Figure(figsize=(9.6, 1.0 + 1.1 * len(first)), layout="constrained")
        grid = figure.add_gridspec(1 + len(first), len(ANGLES) + 2)
        for column, angle in enumerate(np.degrees(ANGLES)):
            axes = figure.add_subplot(grid[0, column + 2])
            _picture(axes, 1.0 - next(iter(found.values()))["image"][column])
            axes.set_title(f"{angle:.0f}°")
        for row, network in enumerate(first.values(), start=1):
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


def plot_residuals(rows: Mapping[str, Sequence[Residuals]]) -> Figure:
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
            for (name, seeds), colour in zip(rows.items(), COLOURS, strict=False):
                for number, one in enumerate(seeds):
                    for field, line in ((raw, "-"), (best, ":")):
                        values = np.average(getattr(one, field), (0, 2), one.weight)
                        shown = name if number == 0 and line == "-" else None
                        axes.plot(degrees, values, line, color=colour, marker=".", label=shown)
            axes.set(xlabel="angle of the scene, degrees", ylabel=label, ylim=(-0.5, None))
            axes.set_xticks(degrees)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        figure.suptitle("Solid: as inferred. Dotted: relabelled, up to symmetry.", fontsize=9)
    return figure
