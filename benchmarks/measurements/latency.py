"""Milliseconds from a call to its answer for one scene, and how often the program is traced.

What a notebook user feels: the same program again, and a program whose numbers were edited, for
which nothing must be compiled. The reference is a call of the same program, so that the ratio says
what an edit costs.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks.measurements.timing import best_time
from capsules.experiments.generator import sample_scenes
from inference import cavi, exact
from models import constellation
from models.scenes import Scene

REPEATS = 7


METHODS: dict[str, Callable[..., Any]] = {
    "exact": exact.run,
    "ds": functools.partial(cavi.run, rng_key=jax.random.key(0)),
}


def rows() -> Iterator[tuple[str, str, str, str]]:
    """A row for each method."""
    scene = largest_scene()
    for name, same, edited in seconds():
        first, again = traces(METHODS[name], scene)
        yield (
            f"{name}, a scene of {int(scene.present.sum())} points: same program, edited numbers "
            f"(traces: {again}, {first})",
            f"{1e3 * same:.1f} ms",
            f"{1e3 * edited:.1f} ms",
            f"{edited / same:.1f}",
        )


def seconds() -> Iterator[tuple[str, float, float]]:
    """Of each method, seconds of a call with the same program and with one of other numbers."""
    scene = largest_scene()
    for name, run in METHODS.items():
        run(constellation, scene)
        run(functools.partial(constellation, precision=9e3), scene)
        numbers = itertools.count(1)

        def edited(run: Any = run, numbers: Any = numbers) -> None:
            run(functools.partial(constellation, precision=1e4 + next(numbers)), scene)

        same = best_time(functools.partial(run, constellation, scene), REPEATS)
        yield name, same, best_time(edited, REPEATS)


def largest_scene() -> Scene:
    """The scene with the most points of a few."""
    scenes = sample_scenes(64, sigma=0.1, seed=51)
    return scenes.take(int(scenes.present.sum(axis=1).argmax()))


def traces(run: Callable[..., Any], scene: Scene) -> tuple[int, int]:
    """How often a program is traced in its first call and in the next one."""
    count = 0

    def counted(points: Any, present: Any) -> Any:
        nonlocal count
        count += 1
        return constellation(points, present)

    run(counted, scene)
    first, count = count, 0
    run(counted, scene)
    return first, count
