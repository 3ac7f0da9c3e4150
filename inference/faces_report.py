"""The faces experiment on paper: a picture of one scene, and the table with its files."""

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from inference.faces_experiment import METHODS, Cell, Explained, FaceStudy, true_scene
from inference.plots import COLOURS, STYLE
from models.face_scenes import FaceScenes
from models.rendering import render_poses, scene_rmse
from models.scenes import whole_file

NOTE = (
    "Ours: drawn faces, not the photographs of the paper, so its RMSE is not to be compared with "
    "ours; its accuracies and the order of the methods are."
)

PAPER_ACCURACY = {
    Cell(2): 1.0,
    Cell(3): 1.0,
    Cell(4): 0.992,
    Cell(5): 0.937,
    Cell(3, occluded=True): 1.0,
}
"""Of VI; RANSAC has 1 throughout."""

PAPER_RMSE = {"vi": (0.036, 0.004), "ransac": (0.052, 0.006)}
"""Of scenes, mean and spread, over scenes of 2 to 5 faces together."""


def plot_faces(study: FaceStudy, scenes: FaceScenes, explained: Explained) -> Figure:
    """The first scene of a batch and what each method makes of it, side by side."""
    wanted, _ = true_scene(study, scenes, 0)
    drawn = {
        name: render_poses(study.images, study.appearance, explained.poses[name][0])
        for name in ("vi", "ransac", "refit")
    }
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(10.4, 3.5), layout="constrained")
        axes = figure.subplots(1, 1 + len(drawn))
        _show(axes[0], wanted, f"scene: {int(scenes.scene.present[0].sum())} parts seen")
        for ax, (name, image) in zip(axes[1:], drawn.items(), strict=True):
            _show(ax, image, f"{METHODS[name]}\nRMSE {scene_rmse(wanted, image):.4f}")
    return figure


def _show(axes: mpl.axes.Axes, image: Float[np.ndarray, "224 224"], title: str) -> None:
    axes.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set(title=title, xticks=[], yticks=[])


def table_rows(numbers: Mapping[Cell, Mapping[str, np.ndarray]]) -> list[dict[str, str]]:
    """A row for each number of faces."""
    rows = []
    for cell, of in numbers.items():
        paper = PAPER_ACCURACY.get(cell)
        row = {
            "scenes": f"{len(of['right_vi'])} of {cell.name}",
            "paper's VI, %": "-" if paper is None else f"{100 * paper:.1f}",
            "VI, %": f"{100 * of['right_vi'].mean():.1f}",
            "RANSAC, %": f"{100 * of['right_ransac'].mean():.1f}",
        }
        for name, label in METHODS.items():
            row[f"RMSE {label}"] = _spread(of[f"scene_{name}"])
        row["VI below RANSAC"] = f"{100 * np.mean(of['scene_vi'] < of['scene_ransac']):.1f} %"
        rows.append(row)
    return rows


def _spread(values: Float[np.ndarray, " scenes"]) -> str:
    return f"{values.mean():.4f} ± {values.std():.4f}"


def write_report(
    numbers: Mapping[Cell, Mapping[str, np.ndarray]], study: FaceStudy, folder: Path
) -> Iterator[Path]:
    """Write the table as Markdown and CSV, every number of every scene, and the figures."""
    rows = table_rows(numbers)
    paper = "; ".join(
        f"{METHODS[name]} {mean} ± {spread}" for name, (mean, spread) in PAPER_RMSE.items()
    )
    lines = ["| " + " | ".join(rows[0]) + " |", "| --- " * len(rows[0]) + "|"]
    lines += ["| " + " | ".join(row.values()) + " |" for row in rows]
    dims = ", ".join(str(d) for d in study.appearance.factors.part_dims)
    text = "\n".join(
        [
            "# Faces",
            "",
            NOTE,
            f"Scores of a part: {dims}; factors: {study.appearance.factors.num_factors}. RMSE is "
            "over the whole canvas, mean ± spread over scenes.",
            f"The paper's RMSE over 2 to 5 faces: {paper}.",
            "",
            *lines,
            "",
        ]
    )
    yield _written(folder / "faces.md", text.encode())
    yield _written(folder / "faces.csv", _csv([row.values() for row in rows], list(rows[0])))
    names = list(next(iter(numbers.values())))
    scenes = [
        [cell.name, str(i), *(f"{of[name][i]:.6g}" for name in names)]
        for cell, of in numbers.items()
        for i in range(len(of[names[0]]))
    ]
    yield _written(folder / "faces_scenes.csv", _csv(scenes, ["faces", "scene", *names]))
    for name, figure in (
        ("faces.png", plot_errors(numbers)),
        ("faces_factors.png", plot_factors(study)),
    ):
        with whole_file(folder / name) as file:
            figure.savefig(file, dpi=110, format="png")
        yield folder / name


def plot_errors(numbers: Mapping[Cell, Mapping[str, np.ndarray]]) -> Figure:
    """The scene errors of every method, by number of faces."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(1.6 + 1.2 * len(numbers), 3.6), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(METHODS)
        for i, (name, label) in enumerate(METHODS.items()):
            places = np.arange(len(numbers)) + (i - (len(METHODS) - 1) / 2) * width
            boxes = axes.boxplot(
                [of[f"scene_{name}"] for of in numbers.values()],
                positions=places,
                widths=0.8 * width,
                patch_artist=True,
                showfliers=False,
                medianprops={"color": "black"},
                boxprops={"facecolor": COLOURS[i], "linewidth": 0.6},
                manage_ticks=False,
            )
            boxes["boxes"][0].set_label(label)
        axes.set_xticks(range(len(numbers)), [cell.name.replace(", ", ",\n") for cell in numbers])
        axes.set(ylabel="RMSE of the scene", title="Drawn faces", ylim=(0, None))
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def plot_factors(study: FaceStudy) -> Figure:
    """How well a part is predicted from the other four, by the number of factors."""
    errors = study.appearance.prediction_error
    number = np.arange(1, len(errors) + 1)
    chosen = study.appearance.factors.num_factors
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(4.6, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.errorbar(number, errors[:, 0], errors[:, 1], color=COLOURS[0], marker="o", capsize=2)
        axes.axvline(chosen, color="#808080", linestyle=":", label=f"{chosen} factors")
        axes.set(xlabel="number of factors", ylabel="mean squared error of left-out parts")
        axes.set_xticks(number)
        axes.legend()
    return figure


def _csv(rows: list, header: list[str]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().encode()


def _written(path: Path, content: bytes) -> Path:
    with whole_file(path) as file:
        file.write(content)
    return path
