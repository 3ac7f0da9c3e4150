"""Report of the faces experiment: pictures of scenes, and tables with their files."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from capsules.faces.experiment import METHODS, Cell, Explained, FaceStudy, true_scene
from capsules.faces.images import PART_TYPES, FaceImages
from capsules.faces.rendering import render_poses, scene_rmse
from capsules.faces.scenes import FaceScenes
from capsules.files.outputs import whole_file
from inference.diagnostics.metrics import summarise
from inference.plots.film import states_of
from inference.plots.fits import draw_history
from inference.plots.scenes import COLOURS, draw_objects, png, style
from inference.result import Result

DRAWN = (
    "Our faces are drawn by this project; they are not the photographs of the paper, which are not "
    "ours to ship. So accuracies and the order of the methods can be compared with the paper's, "
    "the sizes of errors cannot."
)
YOURS = (
    "Our numbers are of the part images that were given, not of the photographs of the paper. So "
    "the sizes of errors cannot be compared with the paper's."
)

PAPER_ACCURACY = {
    Cell(2): (1.0, 1.0),
    Cell(3): (1.0, 1.0),
    Cell(4): (0.992, 1.0),
    Cell(5): (0.937, 1.0),
    Cell(3, occluded=True): (1.0, 1.0),
}
"""Accuracies of VI and of RANSAC, on 250 scenes each."""

PAPER_RMSE = {"vi": (0.036, 0.004), "draw": (0.052, 0.006)}
"""RMSE of the whole canvas, mean and spread over 250 scenes of 2 to 5 faces together. The code
published for the paper's RANSAC draws the appearance from the posterior of the part."""

QUANTITIES = {
    "scene": "RMSE of the scene, whole canvas",
    "mask": "RMSE of the scene, where faces are",
    "appearance": "RMSE of the scores of the observed parts",
}

Numbers = Mapping[Cell, Mapping[str, np.ndarray]]
"""The numbers of every scene, for each cell (`capsules.faces.experiment.measure`)."""


class Report(NamedTuple):
    """A table: its title, its heading, and its rows."""

    title: str
    heading: list[str]
    rows: list[list[str]]


def plot_faces(study: FaceStudy, scenes: FaceScenes, explained: Explained) -> Figure:
    """The first scene of a batch and the results of each method on it.

    Above, the scene and the inferred faces; below, the parts in the colours of the faces that VI
    assigns them to, and the error of each method's picture.
    """
    scene, wanted = scenes.scene.take(0), true_scene(study, scenes, 0)[0]
    found = explained.results["vi"].labels[0]
    names = ("vi", "ransac", "refit")
    with style():
        figure = Figure(figsize=(9.6, 5.3), layout="compressed")
        axes = figure.subplots(2, 1 + len(names))
        draw_picture(axes[0, 0], wanted, f"scene\n{int(scene.present.sum())} parts seen")
        draw_objects(axes[1, 0], scene, found, {})
        axes[1, 0].set(title="parts, by VI's faces", xlim=(-1, 1), ylim=(1, -1))
        axes[1, 0].set(xlabel="", ylabel="", xticks=[], yticks=[])
        for (above, below), name in zip(axes[:, 1:].T, names, strict=True):
            image = render_poses(study.images, study.appearance, explained.poses[name][0])
            draw_picture(above, image, f"{METHODS[name]}\nRMSE {scene_rmse(wanted, image):.4f}")
            error = below.imshow(np.abs(image - wanted), cmap="magma", vmin=0, vmax=0.4)
            below.set(title="error", xticks=[], yticks=[])
        figure.colorbar(error, ax=axes[1, 1:], shrink=0.9, pad=0.02, extend="max")
    return figure


def draw_face_frames(
    figure: Figure, study: FaceStudy, scenes: FaceScenes, result: Result
) -> Iterator[Result]:
    """Draw each step of coordinate ascent on a scene of faces into the figure, one after another.

    From left to right: the scene, its parts in the colours of their faces, the faces inferred so
    far, and the ELBO and beta.

    Args:
        result: the result of `cavi.run(..., history=True)` for the first of the scenes.
    """
    states, steps = states_of(result), result.history or {}
    wanted = true_scene(study, scenes, 0)[0]
    for number, state in enumerate(states, start=1):
        figure.clear()
        truth, parts, faces, history = figure.subplots(1, 4, width_ratios=[1.0, 1.0, 1.0, 1.2])
        draw_picture(truth, wanted, "scene")
        draw_objects(parts, state.scene, state.labels, {})
        parts.set(title=f"parts, step {number} of {len(states)}", xlim=(-1, 1), ylim=(1, -1))
        parts.set(xlabel="", ylabel="", xticks=[], yticks=[])
        shown = state.pose_mean[np.unique(state.labels[state.labels >= 0])]
        draw_picture(faces, render_poses(study.images, study.appearance, shown), "inferred faces")
        draw_history(history, steps, upto=number)
        history.set_title(f"ELBO {float(steps['elbo'][number - 1]):.2f}")
        yield state


def plot_pictures(pictures: Mapping[str, Float[np.ndarray, "224 224"]]) -> Figure:
    """Grey pictures side by side, each under its name."""
    with style():
        figure = Figure(figsize=(1.5 * len(pictures), 1.85), layout="compressed")
        axes = figure.subplots(1, len(pictures), squeeze=False)[0]
        for ax, (name, picture) in zip(axes, pictures.items(), strict=True):
            draw_picture(ax, picture, name)
    return figure


def plot_images(images: FaceImages, faces_of_group: int = 3, seed: int = 0) -> Figure:
    """Some faces composed of the part images, a column for each group."""
    rng = np.random.default_rng(seed)
    with style():
        figure = Figure(
            figsize=(1.5 * images.num_groups, 1.5 * faces_of_group + 0.25), layout="constrained"
        )
        axes = figure.subplots(faces_of_group, images.num_groups, squeeze=False)
        for row in range(faces_of_group):
            for group in range(images.num_groups):
                variants = rng.integers(images.num_variants, size=len(PART_TYPES))
                title = f"group {group}" if row == 0 else ""
                draw_picture(axes[row, group], images.compose(group, variants), title)
    return figure


def draw_picture(axes: Axes, picture: Float[np.ndarray, "224 224"], title: str = "") -> None:
    """Put a picture of a face into axes."""
    axes.imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set(title=title, xticks=[], yticks=[])


def reports(numbers: Numbers) -> list[Report]:
    """Tables of the assignments and of each kind of error, and how often VI has the lower one."""
    accuracy = []
    for cell, of in numbers.items():
        paper = PAPER_ACCURACY.get(cell, (np.nan, np.nan))
        ours = [summarise(of[f"right_{name}"].astype(float)) for name in ("vi", "ransac")]
        percent: list[str] = []
        for published, found in zip(paper, ours, strict=True):
            percent.append("-" if np.isnan(published) else f"{100 * published:.1f}")
            percent.append(found.text(100, 1))
        accuracy.append([cell.name, str(len(of["right_vi"])), *percent])
    heading = ["faces", "scenes", "paper's VI", "VI", "paper's RANSAC", "RANSAC"]
    title = "Scenes whose parts are all assigned rightly, % ± one standard error"
    tables = [Report(title, heading, accuracy)]
    for quantity, title in QUANTITIES.items():
        heading = ["faces", *METHODS.values(), "VI below one part", "VI below a draw"]
        rows = []
        if quantity == "scene":
            paper_rmse = (_spread(*PAPER_RMSE.get(name, (np.nan, np.nan))) for name in METHODS)
            rows.append(["the paper's photographs, 2 to 5", *paper_rmse, "all scenes", ""])
        for cell, of in numbers.items():
            errors = {name: of[f"{quantity}_{name}"] for name in METHODS}
            below = (
                f"{np.sum(errors['vi'] < errors[other])} of {len(errors['vi'])}"
                for other in ("ransac", "draw")
            )
            means = (_spread(x.mean(), x.std()) for x in errors.values())
            rows.append([cell.name, *means, *below])
        tables.append(Report(f"{title}, mean ± spread over scenes", heading, rows))
    return tables


def _spread(mean: float, spread: float) -> str:
    return "-" if np.isnan(mean) else f"{mean:.4f} ± {spread:.4f}"


def write_report(
    numbers: Numbers, study: FaceStudy, folder: Path, drawn: bool = True
) -> Iterator[Path]:
    """Print the tables and write them in three formats, with every number; yields the files.

    Args:
        drawn: whether the images were drawn by the project's artist.
    """
    tables, note = reports(numbers), notes(numbers, study, drawn)
    console = Console()
    for report in tables:
        table = Table(title=report.title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in report.heading:
            table.add_column(heading)
        for row in report.rows:
            table.add_row(*row)
        console.print(table)
    console.print("\n".join(note), highlight=False)
    contents = {
        "faces.md": markdown(tables, note).encode(),
        "faces.csv": comma_separated(numbers).encode(),
        "faces_scenes.csv": scenes_csv(numbers).encode(),
        "faces.png": png(plot_errors(numbers, drawn)),
        "faces_factors.png": png(plot_factors(study)),
        "faces_images.png": png(plot_images(study.images)),
    }
    for name, content in contents.items():
        with whole_file(folder / name) as file:
            file.write(content)
        yield folder / name


def notes(numbers: Numbers, study: FaceStudy, drawn: bool) -> list[str]:
    """Notes for readers of the tables."""
    factors = study.appearance.factors
    dims = ", ".join(f"{n} {d}" for n, d in zip(PART_TYPES, factors.part_dims, strict=True))
    gap = max(np.abs(of["scene_vi"] / of["scene_refit"] - 1).max() for of in numbers.values())
    return [
        DRAWN if drawn else YOURS,
        f"Scores of a part: {dims}; factors: {factors.num_factors}.",
        "RANSAC, one part: the appearance of a face is the posterior of the first of its parts "
        f"that is seen ({', '.join(PART_TYPES)}); its mean, or a draw as in the code published "
        "for the paper. Refitted: from all parts that RANSAC has matched.",
        f"VI and refitted RANSAC differ by at most {100 * gap:.2g} % of the scene RMSE on any "
        "scene.",
    ]


def markdown(tables: list[Report], note: list[str]) -> str:
    """The tables as Markdown."""
    lines = ["# Faces", ""]
    for sentence in note:
        lines += [sentence, ""]
    for report in tables:
        lines += [f"## {report.title}", "", "| " + " | ".join(report.heading) + " |"]
        lines += ["| --- " * len(report.heading) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in report.rows] + [""]
    return "\n".join(lines)


def comma_separated(numbers: Numbers) -> str:
    """A line for each mean, with the paper's beside ours if it has one."""
    lines = []
    for cell, of in numbers.items():
        for name in of:
            quantity, method = name.split("_")
            published: tuple[float, ...] = ()
            if quantity == "right" and cell in PAPER_ACCURACY and method != "refit":
                published = (PAPER_ACCURACY[cell][method != "vi"],)
            found = summarise(of[name].astype(float))
            own = (found.mean, found.standard_error, of[name].std())
            lines.append(
                [
                    cell.num_faces,
                    int(cell.occluded),
                    len(of[name]),
                    quantity,
                    method,
                    *(f"{x:.6g}" for x in (*own, *published)),
                ]
            )
            lines[-1] += [""] * (len(_COLUMNS) - len(lines[-1]))
    return _csv([_COLUMNS, *lines])


_COLUMNS = ["faces", "occluded", "scenes", "quantity", "method"]
_COLUMNS += ["mean", "standard_error", "spread", "paper"]


def scenes_csv(numbers: Numbers) -> str:
    """Every number of every scene."""
    names = list(next(iter(numbers.values())))
    lines = [
        [cell.name, i, *(f"{of[name][i]:.6g}" for name in names)]
        for cell, of in numbers.items()
        for i in range(len(of[names[0]]))
    ]
    return _csv([["faces", "scene", *names], *lines])


def plot_errors(numbers: Numbers, drawn: bool = True) -> Figure:
    """The scene errors of every method, by number of faces."""
    title = "Drawn faces, not the paper's photographs" if drawn else "The faces that were given"
    with style():
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
        axes.set(
            ylabel="RMSE of the scene",
            title=title,
            ylim=(0, None),
        )
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def plot_factors(study: FaceStudy) -> Figure:
    """The error of predicting a part from the other four, by the number of factors."""
    errors = study.appearance.prediction_error
    number = np.arange(1, len(errors) + 1)
    chosen = study.appearance.factors.num_factors
    with style():
        figure = Figure(figsize=(4.6, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.errorbar(number, errors[:, 0], errors[:, 1], color=COLOURS[0], marker="o", capsize=2)
        axes.axvline(chosen, color="#808080", linestyle=":", label=f"{chosen} factors")
        axes.set(xlabel="number of factors", ylabel="mean squared error of left-out parts")
        axes.set_xticks(number)
        axes.legend()
    return figure


def _csv(lines: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
