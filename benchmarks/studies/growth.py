"""How the time of exact inference grows with the number of points and of objects.

Templates are square, triangle, square, ... as in the paper. Times are for a scene of a batch, after
compilation. The picture goes to `docs/images/exact_growth.png`.
"""

import functools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.measurements.timing import best_time
from inference import exact
from models.constellation import constellation
from models.scenes import Scene
from models.templates import SHAPES, shapes, stack

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "exact_growth.png"

POINTS = {3: (4, 8, 11), 4: (8, 11, 14), 5: (8, 12)}
"""Numbers of points that are timed, for each number of objects."""
OBJECTS = (3, 4, 5, 7)
"""Numbers of objects that are timed with `FEW` points."""
FEW = 8
LARGEST = ("square",) * 4
"""The largest scene: sixteen points on as many parts."""

Times = dict[tuple[int, int], float]
"""Seconds a scene, by the numbers of objects and points."""


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Time each scene size, and draw the picture."""
    wanted = [(k, m) for k, sizes in POINTS.items() for m in sizes]
    wanted += [(k, FEW) for k in OBJECTS if k not in POINTS]
    times: Times = {}
    for num_objects, num_points in wanted:
        names = tuple(("square", "triangle")[k % 2] for k in range(num_objects))
        times[num_objects, num_points] = _seconds(names, num_points)
        yield _row(names, num_points, times[num_objects, num_points])
    largest = _seconds(LARGEST, 16)
    yield _row(LARGEST, 16, largest)
    draw(times, largest)


def draw(times: Times, largest: float) -> None:
    """Two panels: against the points for some numbers of objects, and against the objects."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    by_points, by_objects = figure.subplots(1, 2, sharey=True)
    for num_objects, sizes in POINTS.items():
        milliseconds = [1e3 * times[num_objects, m] for m in sizes]
        label = f"K = {num_objects}, N = {_num_parts(num_objects)}"
        by_points.plot(sizes, milliseconds, marker="o", label=label)
    by_points.plot(16, 1e3 * largest, "k*", markersize=11, label="four squares, N = 16")
    _finish(by_points, "points M", "milliseconds a scene")
    by_points.set_xticks(range(4, 17, 2))
    by_points.legend(frameon=False, loc="upper left")
    by_objects.plot(OBJECTS, [1e3 * times[k, FEW] for k in OBJECTS], "C3o-", label=f"M = {FEW}")
    _finish(by_objects, "objects K", "")
    by_objects.set_xticks(OBJECTS)
    by_objects.legend(frameon=False, loc="upper left")
    figure.savefig(PICTURE, dpi=130)


def _finish(axes: Axes, across: str, up: str) -> None:
    axes.set(xlabel=across, ylabel=up, yscale="log")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _num_parts(num_objects: int) -> int:
    return sum(len(SHAPES[("square", "triangle")[k % 2]]) for k in range(num_objects))


def _seconds(names: tuple[str, ...], num_points: int) -> float:
    """Of one scene, in a batch; the time does not depend on where the points are."""
    parts = stack(shapes(*names))
    program = functools.partial(constellation, parts=parts)
    num_scenes, repeats = (256, 2) if num_points < 12 else (64, 1)
    points = np.random.default_rng(0).uniform(-1, 1, (num_scenes, parts.num_parts, 2))
    present = np.tile(np.arange(parts.num_parts) < num_points, (num_scenes, 1))
    scenes = Scene(np.where(present[..., None], points, 0.0), present)
    return best_time(lambda: exact.run(program, scenes).match_probs, repeats) / num_scenes


def _row(names: tuple[str, ...], num_points: int, seconds: float) -> tuple[str, str, str, str]:
    num_parts = sum(len(SHAPES[name]) for name in names)
    matches = math.perm(num_parts, num_points)
    what = f"exact, K = {len(names)}, N = {num_parts}, M = {num_points}"
    return (what, f"{matches:.1e} matches", f"{1e3 * seconds:,.3f} ms", "")
