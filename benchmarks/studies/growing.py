"""Scenes that grow: accuracy and time with 3 to 24 objects of VI, the best parse, RANSAC, exact.

Scenes have all of 3, 6, 12 or 24 objects without noise: square, triangle and square, then the six
shapes in turn. "Occluded" ones lack each part with probability 0.1, at least three of each object
being seen, of which the presence prior (visibility 0.9, precision 1e6) and RANSAC
(`cover="partial"`) are told. Scenes are of a seed that nothing was chosen on. They are
processed in small batches (RANSAC one by one, because it pads batches) until the time for a method
and a size is used up, so large scenes may be few; times exclude compilation. The picture goes to
`docs/images/growing.png`.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.studies.missing import MISSING, occluded, shapes_of
from capsules.commands.shared import Stopwatch
from capsules.experiments.generator import sample_scenes
from capsules.methods import PRIORS
from inference import cavi, exact, map_parse, ransac
from inference.diagnostics.metrics import partition_metrics
from inference.result import Result
from models.errors import InputError
from models.program.sites import Program
from models.scenes import Scene
from models.templates import SHAPES, shapes, stack

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "growing.png"

OBJECTS = (3, 6, 12, 24)
NUM_SCENES, BATCH = 24, 8
SECONDS = 10.0
"""For a method on the scenes of a size, compilation apart; what is begun is finished."""
SEED = 40_411

COLOURS = {
    "ds": "#E69F00",
    "presence-ds": "#D55E00",
    "presence-map": "#CC79A7",
    "ransac": "#009E73",
    "exact": "#0072B2",
}


class Cell(NamedTuple):
    """What a method does on the scenes of a size."""

    right: Float[np.ndarray, " scenes"]
    segmentation: Float[np.ndarray, " scenes"]
    seconds: float
    """For a scene."""

    def __str__(self) -> str:
        shown = ", ".join(
            f"{x.mean():.3f} ± {x.std() / np.sqrt(len(x)):.3f}"
            for x in (self.right, self.segmentation)
        )
        return f"{shown} of {len(self.right)}; {1e3 * self.seconds:,.0f} ms"


Table = dict[tuple[str, bool], dict[int, Cell]]
"""By method and whether parts are missing, and by the number of parts of all objects."""


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Every method on every size, without and with parts missing, and how its time grows."""
    table: Table = {(method, missing): {} for method in COLOURS for missing in (False, True)}
    for count in OBJECTS:
        names = shapes_of(count)
        num_parts = sum(len(SHAPES[name]) for name in names)
        for (method, missing), cells in table.items():
            solve, batch = _method(method, names, missing)
            what = f"{method}, {count} objects, {num_parts} parts"
            try:
                cells[num_parts] = cell = _measured(solve, _scenes(names, missing), batch)
            except InputError as refusal:
                yield what, _kind(missing), f"refused: {str(refusal).split(';')[0]}", ""
            else:
                yield what, _kind(missing), str(cell), ""
    for (method, missing), cells in table.items():
        if len(cells) > 1:
            yield f"{method}, time by parts", _kind(missing), f"N^{exponent(cells):.1f}", ""
    draw(table)


def exponent(cells: dict[int, Cell]) -> float:
    """Of the power of the number of parts that the time grows with."""
    seconds = [cell.seconds for cell in cells.values()]
    return float(np.polyfit(np.log(list(cells)), np.log(seconds), 1)[0])


def draw(table: Table) -> None:
    """Accuracy by the number of objects, and time by that of parts."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    accuracy, cost = figure.subplots(1, 2)
    sizes = list(table["ds", False])
    for (method, missing), cells in table.items():
        if not cells:
            continue
        style: dict[str, Any] = {
            "color": COLOURS[method],
            "marker": "s" if missing else "o",
            "linestyle": "--" if missing else "-",
        }
        label = f"{method}, {_kind(missing)}" if missing else method
        mean = np.array([cell.right.mean() for cell in cells.values()])
        error = np.array([cell.right.std() / np.sqrt(len(cell.right)) for cell in cells.values()])
        shift = 0.12 * (list(COLOURS).index(method) - 2)
        places = np.array([OBJECTS[sizes.index(size)] for size in cells]) + shift
        accuracy.errorbar(places, mean, error, capsize=3, label=label, **style)
        power = f", $N^{{{exponent(cells):.1f}}}$" if len(cells) > 1 else ""
        seconds = [cell.seconds for cell in cells.values()]
        cost.loglog(list(cells), seconds, label=label + power, **style)
    accuracy.set_xticks(OBJECTS)
    accuracy.set(xlabel="objects", ylabel="scenes parsed rightly", ylim=(-0.03, 1.05))
    cost.set(xlabel="parts of all objects, N", ylabel="seconds a scene")
    cost.set_xticks(sizes, [str(size) for size in sizes])
    cost.minorticks_off()
    for axes in (accuracy, cost):
        _finish(axes)
    cost.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(PICTURE, dpi=120)


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _method(
    method: str, names: tuple[str, ...], missing: bool
) -> tuple[Callable[[Scene], Result], int]:
    """How to solve scenes, and how many of them at a time."""
    if method in ("presence-ds", "presence-map"):
        told = {"visibility": 1 - MISSING, "precision": 1e6} if missing else {}
        present = _program("presence", names, **told)
        if method == "presence-map":
            return lambda scenes: map_parse.run(present, scenes), BATCH
        return lambda scenes: cavi.run(present, scenes, jax.random.key(0)), BATCH
    uniform = _program("uniform", names)
    if method == "ransac":
        cover = "partial" if missing else "exact"
        return lambda scenes: ransac.run(uniform, scenes, jax.random.key(0), cover=cover), 1
    if method == "exact":
        return lambda scenes: exact.run(uniform, scenes), BATCH
    return lambda scenes: cavi.run(uniform, scenes, jax.random.key(0)), BATCH


@functools.cache  # methods compile once for each program, told apart by identity
def _program(prior: str, names: tuple[str, ...], **given: float) -> Program:
    return functools.partial(PRIORS[prior], parts=stack(shapes(*names)), **given)


def _measured(solve: Callable[[Scene], Result], scenes: Scene, batch: int) -> Cell:
    """Batch after batch, until there is no time left."""
    assert scenes.object is not None
    found: list[np.ndarray] = []
    with Stopwatch() as watch:
        for start in range(0, NUM_SCENES, batch):
            some = scenes.take(slice(start, start + batch))
            found.append(watch.time(functools.partial(solve, some)).labels)
            if watch.seconds > SECONDS:
                break
    labels = np.concatenate(found)
    metrics = partition_metrics(scenes.object[: len(labels)], labels)
    return Cell(metrics["scene_accuracy"], metrics["sa"], watch.seconds / len(labels))


def _scenes(names: tuple[str, ...], missing: bool) -> Scene:
    if missing:
        return occluded(names, NUM_SCENES, SEED)
    return sample_scenes(NUM_SCENES, seed=SEED, objects=names, presence=1.0)


def _kind(missing: bool) -> str:
    return "parts missing" if missing else "all parts"
