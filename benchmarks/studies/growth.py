"""How the time of exact inference grows with the number of points and of objects.

Templates are square, triangle, square, ... as in the paper. Times are for a scene of a batch, after
compilation.
"""

import functools
import math
from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from benchmarks.measurements.timing import best_time
from benchmarks.report import Picture, Pieces, Table
from inference import exact
from models.constellation import constellation
from models.scenes import Scene
from models.templates import SHAPES, shapes, stack

POINTS = {3: (4, 8, 11), 4: (8, 11, 14), 5: (8, 12)}
"""Numbers of points that are timed, for each number of objects."""
SQUARES, LARGEST = ("square",) * 4, (4, 16)
"""The largest scene, and its numbers of objects and points: no part is missing."""

Times = dict[tuple[int, int], float]
"""Seconds a scene, by the numbers of objects and points."""


def pieces() -> Pieces:
    """Milliseconds a scene by its size, and the picture."""
    times: Times = {}
    headings = ("objects", "parts", "points", "matches", "milliseconds a scene")
    yield Table("exact_growth", headings, rows(times))
    yield Picture("exact_growth", draw(times))


def rows(times: Times) -> Iterator[list[str]]:
    """Time each scene size; seconds are added to `times`."""
    for num_objects, num_points in [(k, m) for k, sizes in POINTS.items() for m in sizes]:
        names = names_of(num_objects)
        times[num_objects, num_points] = seconds = _seconds(names, num_points)
        yield _row(names, num_points, seconds)
    times[LARGEST] = seconds = _seconds(SQUARES, LARGEST[1])
    yield _row(SQUARES, LARGEST[1], seconds)


def draw(times: Times) -> Figure:
    """Times by the number of points, a line for each number of objects."""
    figure = Figure(figsize=(6.6, 3.6), layout="constrained")
    axes = figure.subplots()
    for num_objects, sizes in POINTS.items():
        milliseconds = [1e3 * times[num_objects, m] for m in sizes]
        label = f"K = {num_objects}, N = {_num_parts(names_of(num_objects))}"
        axes.plot(sizes, milliseconds, marker="o", label=label)
    axes.plot(LARGEST[1], 1e3 * times[LARGEST], "k*", markersize=11, label="four squares, N = 16")
    axes.set(xlabel="points M", ylabel="milliseconds a scene", yscale="log")
    axes.set_xticks(range(4, 17, 2))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def names_of(num_objects: int) -> tuple[str, ...]:
    """Square, triangle, square, and so on."""
    return tuple(("square", "triangle")[k % 2] for k in range(num_objects))


def _num_parts(names: tuple[str, ...]) -> int:
    return sum(len(SHAPES[name]) for name in names)


def _seconds(names: tuple[str, ...], num_points: int) -> float:
    """Of one scene, in a batch; the time does not depend on where the points are."""
    parts = stack(shapes(*names))
    program = functools.partial(constellation, parts=parts)
    num_scenes, repeats = (64, 2) if num_points < 12 else (32, 1)
    points = np.random.default_rng(0).uniform(-1, 1, (num_scenes, parts.num_parts, 2))
    present = np.tile(np.arange(parts.num_parts) < num_points, (num_scenes, 1))
    scenes = Scene(np.where(present[..., None], points, 0.0), present)
    return best_time(lambda: exact.run(program, scenes).match_probs, repeats) / num_scenes


def _row(names: tuple[str, ...], num_points: int, seconds: float) -> list[str]:
    num_parts = _num_parts(names)
    mantissa, exponent = f"{math.perm(num_parts, num_points):.0e}".split("e")
    counts = map(str, (len(names), num_parts, num_points))
    return [*counts, f"{mantissa}e{int(exponent)}", f"{1e3 * seconds:,.2f}"]
