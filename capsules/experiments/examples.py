"""Pictures of the supplement: scenes with their truth, and the objects found by each method."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from matplotlib.figure import Figure
from scipy.optimize import linear_sum_assignment

from capsules.experiments.constellations import Scenes, weights_of
from capsules.experiments.tables import NAMES
from capsules.files.outputs import whole_file
from capsules.methods import PAPER, infer, templates
from inference.diagnostics.readout import relabel
from inference.plots.outlines import Outlines, result_outlines, truth_outlines
from inference.plots.scenes import draw_objects, legend_handles, png, same_limits, style
from models.scenes import Scene
from models.templates import object_names

NUM_SCENES = 4
"""Scenes in each picture."""


class Column(NamedTuple):
    """The labels and outlines of one method for each scene."""

    title: str
    labels: list[Int[np.ndarray, " N"]]
    outlines: Sequence[Outlines]


def write_examples(
    tests: Mapping[float, Scenes], weights: Path | None, seed: int, folder: Path
) -> Iterator[Path]:
    """Write a picture for each noise level; yields the files.

    Args:
        weights: the folder of trained networks; by default CCAE has the predictions stored with the
            scenes, and is left out if there are none.
    """
    for sigma, test in tests.items():
        chosen = full_scenes(test.scenes)
        columns = columns_of(test, chosen, sigma, weights, seed)
        figure = plot_examples(test.scenes.take(chosen), columns, f"σ = {sigma:g}")
        path = folder / f"examples_{sigma:.2f}.png"
        with whole_file(path) as file:
            file.write(png(figure))
        yield path


def full_scenes(scenes: Scene) -> Int[np.ndarray, " chosen"]:
    """The first scenes in which every part is present, or else the fullest ones."""
    missing = (~np.asarray(scenes.present)).sum(axis=1)
    return np.argsort(missing, kind="stable")[:NUM_SCENES]


def columns_of(
    test: Scenes, chosen: Int[np.ndarray, " chosen"], sigma: float, weights: Path | None, seed: int
) -> list[Column]:
    """The truth, and the results of each method on the chosen scenes."""
    scenes, parts = test.scenes.take(chosen), templates()
    each = [scenes.take(i) for i in range(len(chosen))]
    truth = [np.asarray(scene.object) for scene in each]

    def through_points(title: str, labels: list[np.ndarray]) -> Column:
        return Column(title, labels, [truth_outlines(*x) for x in zip(each, labels, strict=True)])

    columns, ccae = [through_points("truth", truth)], None
    if weights is not None:
        ccae = infer("ccae", scenes, seed, weights=weights_of("ccae", sigma, weights)).labels
    elif test.ccae_labels is not None:
        ccae = test.ccae_labels[chosen]
    if ccae is not None:
        named = [best_names(*both) for both in zip(ccae, truth, strict=True)]
        columns.append(through_points(NAMES["ccae"], named))
    for method in ("ds", "ransac"):
        result = infer(method, scenes, seed)
        found = [relabel(result.take(i), parts, true) for i, true in enumerate(truth)]
        outlines = [result_outlines(one, parts) for one in found]
        columns.append(Column(NAMES[method], [one.labels for one in found], outlines))
    return columns


def best_names(
    labels: Int[np.ndarray, " N"], truth: Int[np.ndarray, " N"]
) -> Int[np.ndarray, " N"]:
    """Labels of present rows, renamed to agree with the truth, as CCAE's names are arbitrary."""
    seen, count = truth >= 0, 1 + max(labels.max(), truth.max())
    agree = np.zeros((count, count))
    np.add.at(agree, (labels[seen], truth[seen]), 1)
    return np.where(seen, linear_sum_assignment(agree, maximize=True)[1][labels], -1)


def plot_examples(scenes: Scene, columns: Sequence[Column], title: str) -> Figure:
    """A row for each scene; points that a method puts into another object have a ring."""
    count, K = len(scenes.points), templates().num_objects
    with style():
        figure = Figure(figsize=(2.1 * len(columns), 2.1 * count + 0.8), layout="constrained")
        panels = figure.subplots(count, len(columns), squeeze=False)
        for row in range(count):
            scene = scenes.take(row)
            for axes, column in zip(panels[row], columns, strict=True):
                labels, outlines = column.labels[row], column.outlines[row]
                draw_objects(axes, scene, labels, outlines, columns[0].labels[row], K)
                axes.set(title=column.title if row == 0 else "", xlabel="", ylabel="")
                axes.set(xticks=[], yticks=[])
            drawn = [x for column in columns for x in column.outlines[row].values()]
            same_limits(list(panels[row]), [np.asarray(scene.points)[scene.present], *drawn])
        figure.suptitle(title)
        handles = legend_handles(object_names(PAPER), wrong=True)
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure
