"""Scenes that grow: accuracy and time with 3 to 24 objects of VI, the best parse, RANSAC, exact.

Scenes have all of 3, 6, 12 or 24 objects without noise: square, triangle and square, or the six
shapes in turn. Where parts are missing, each is with probability 0.1, at least three of each object
being seen, of which the presence prior (visibility 0.9, precision 1e6) and RANSAC
(`cover="partial"`) are told. Scenes are of a seed that nothing was chosen on. They are
processed in small batches (RANSAC one by one, because it pads batches) until the time for a method
and a size is used up, so large scenes may be few; times exclude compilation.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import Picture, Pieces, Table, share
from benchmarks.studies.missing import MISSING, num_parts_of, occluded, shapes_of
from capsules.commands.shared import Stopwatch
from capsules.experiments.generator import sample_scenes
from capsules.methods import PRIORS
from inference import cavi, exact, map_parse, ransac
from inference.diagnostics.metrics import partition_metrics
from inference.result import Result
from models.errors import InputError
from models.program.sites import Program
from models.scenes import Scene
from models.templates import shapes, stack

OBJECTS = (3, 6, 12, 24)
NUM_SCENES, BATCH = 24, 8
SECONDS = 3.0
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
    seconds: float
    """For a scene."""


Kind = tuple[str, bool]
"""A method, and whether parts are missing."""
Cells = dict[int, Cell]
"""By the number of parts of all objects."""


def pieces() -> Pieces:
    """Accuracy and time of every method on every size, without and with parts missing."""
    cells: dict[Kind, Cells] = {
        (method, missing): {} for missing in (False, True) for method in COLOURS
    }
    sizes = [f"{count} objects, {num_parts_of(count)} parts" for count in OBJECTS]
    yield Table("growing", ["scene accuracy, of how many scenes", *sizes], accuracies(cells))
    yield Table("growing_time", ["milliseconds a scene", *sizes, "grows as"], times(cells))
    yield Picture("growing", draw(cells))


def accuracies(cells: dict[Kind, Cells]) -> Iterator[list[str]]:
    """A row for each method and kind of scenes; what is measured is kept in `cells`."""
    for (method, missing), of in cells.items():
        shown = []
        for count in OBJECTS:
            names = shapes_of(count)
            solve, batch = _method(method, names, missing)
            try:
                cell = _measured(solve, _scenes(names, missing), batch)
            except InputError:  # too large for exact inference
                shown.append("refused")
            else:
                of[num_parts_of(count)] = cell
                shown.append(f"{share(cell.right)} of {len(cell.right)}")
        yield [_name(method, missing), *shown]


def times(cells: dict[Kind, Cells]) -> Iterator[list[str]]:
    """Milliseconds, and the power of the number of parts that they grow with."""
    for (method, missing), of in cells.items():
        some = (of.get(num_parts_of(count)) for count in OBJECTS)
        shown = ("" if cell is None else f"{1e3 * cell.seconds:,.1f}" for cell in some)
        yield [_name(method, missing), *shown, f"N^{exponent(of):.1f}" if len(of) > 1 else ""]


def exponent(cells: Cells) -> float:
    """Of the power of the number of parts that the time grows with."""
    seconds = [cell.seconds for cell in cells.values()]
    return float(np.polyfit(np.log(list(cells)), np.log(seconds), 1)[0])


def draw(table: dict[Kind, Cells]) -> Figure:
    """Accuracy by the number of objects, and time by that of parts."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    accuracy, cost = figure.subplots(1, 2)
    objects = {num_parts_of(count): count for count in OBJECTS}
    for (method, missing), cells in table.items():
        if not cells:
            continue
        style: dict[str, Any] = {
            "color": COLOURS[method],
            "marker": "s" if missing else "o",
            "linestyle": "--" if missing else "-",
        }
        label = f"{method}, parts missing" if missing else method
        mean = np.array([cell.right.mean() for cell in cells.values()])
        error = np.array([cell.right.std() / np.sqrt(len(cell.right)) for cell in cells.values()])
        shift = 0.12 * (list(COLOURS).index(method) - 2)
        places = np.array([objects[size] for size in cells]) + shift
        accuracy.errorbar(places, mean, error, capsize=3, label=label, **style)
        power = f", $N^{{{exponent(cells):.1f}}}$" if len(cells) > 1 else ""
        seconds = [cell.seconds for cell in cells.values()]
        cost.loglog(list(cells), seconds, label=label + power, **style)
    accuracy.set_xticks(OBJECTS)
    accuracy.set(xlabel="objects", ylabel="scenes parsed correctly", ylim=(-0.03, 1.05))
    cost.set(xlabel="parts of all objects, N", ylabel="seconds a scene")
    cost.set_xticks(list(objects), [str(size) for size in objects])
    cost.minorticks_off()
    for axes in (accuracy, cost):
        _finish(axes)
    cost.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


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
        cover: Literal["partial", "exact"] = "partial" if missing else "exact"
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
    right = partition_metrics(scenes.object[: len(labels)], labels)["scene_accuracy"]
    return Cell(right, watch.seconds / len(labels))


def _scenes(names: tuple[str, ...], missing: bool) -> Scene:
    if missing:
        return occluded(names, NUM_SCENES, SEED)
    return sample_scenes(NUM_SCENES, seed=SEED, objects=names, presence=1.0)


def _name(method: str, missing: bool) -> str:
    return f"`{method}`, parts missing" if missing else f"`{method}`"
