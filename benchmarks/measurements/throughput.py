"""Scenes a second of coordinate ascent: by batch, restarts, objects and devices; a step by size.

Every figure is held against one of the same run, and against the run before: `throughput.json` has
its figures, in units of a fixed piece of numpy, so that another machine, or a busy one, does not
look like another program.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from benchmarks.measurements.timing import best_time
from capsules.experiments.generator import sample_scenes
from capsules.files.outputs import save_scenes
from inference import cavi
from inference.variational import pool
from inference.variational.ascent import Schedule
from models.constellation import constellation
from models.program.batches import read_scenes
from models.program.sites import Program
from models.scenes import Scene
from models.templates import shapes, stack

FIGURES = Path(__file__).with_suffix(".json")

WANTED = 2_000
"""Scenes a second on two cores, with `RESTARTS`."""
RESTARTS = 5
BATCHES = (1, 16, 128, 1024)
NUMBERS_OF_RESTARTS = (1, 5, 16)
OBJECTS = {
    1: ("square",),
    3: ("square", "triangle", "square"),
    5: ("square", "triangle") * 2 + ("L",),
}
SIZES = (8, 16, 32, 64, 128, 256)
"""Numbers of parts, all of squares."""
SOME = 256
"""Scenes where their number is not what is varied."""

_DEVICES = """
import time
import jax
from inference import cavi
from models.constellation import constellation
from capsules.experiments.generator import sample_scenes
scenes = sample_scenes(1400, seed=11).take(slice({scenes}))
for devices in (1, 2):
    options = dict(num_restarts={restarts}, devices=devices)
    run = lambda: cavi.run(constellation, scenes, jax.random.key(0), **options)
    run()
    began = time.perf_counter()
    run()
    print({scenes} / (time.perf_counter() - began), flush=True)
"""

Figures = dict[str, float]


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Measure, compare with the run before, and write the figures."""
    before = json.loads(FIGURES.read_text()) if FIGURES.exists() else None
    figures: Figures = {"unit": unit_of_time()}
    for measure in (by_batch, by_restarts, by_objects, by_devices, by_size, first_answer):
        figures |= measure()
    figures["exponent"] = exponent(figures)
    for name, value in figures.items():
        yield name, _against(name, figures, before), f"{value:,.4g}", _ratio(name, figures)
    best = max(v for n, v in figures.items() if n.startswith("scenes/s, batch") or "devices" in n)
    yield "scenes/s wanted on two cores", f"{WANTED:,}", f"{best:,.0f}", f"{best / WANTED:.2f}"
    FIGURES.write_text(json.dumps(figures, indent=2) + "\n")


def unit_of_time() -> float:
    """Seconds of a fixed piece of numpy on one core, much like a step: exponentials and sums."""
    x = np.random.default_rng(0).random((121, 512))
    return best_time(lambda: [np.exp(-x * k).sum(axis=0) for k in range(200)], 5)


def by_batch() -> Figures:
    scenes = _scenes(max(BATCHES))
    return {f"scenes/s, batch {n}": _rate(scenes.take(slice(n)), RESTARTS) for n in BATCHES}


def by_restarts() -> Figures:
    scenes = _scenes(SOME)
    return {f"scenes/s, {n} restarts": _rate(scenes, n) for n in NUMBERS_OF_RESTARTS}


def by_objects() -> Figures:
    return {
        f"scenes/s, {k} objects": _rate(_scenes(SOME // 2, names), RESTARTS, names)
        for k, names in OBJECTS.items()
    }


def by_devices() -> Figures:
    """In a process that has its processor as two devices."""
    script = _DEVICES.format(scenes=max(BATCHES), restarts=RESTARTS)
    found = _elsewhere(script, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    return {f"scenes/s, {n} devices": rate for n, rate in enumerate(found, 1)}


def by_size() -> Figures:
    """Microseconds of a step of one run, from random starts; enough at once to be worth it."""
    times = {}
    for size in SIZES:
        program = functools.partial(constellation, parts=stack(shapes(*["square"] * (size // 4))))
        width = int(np.clip(2**16 // size**2, 2, 256))
        points = np.random.default_rng(0).uniform(-1, 1, (width, size, 2))
        scenes = Scene(points, np.ones((width, size), bool))
        reading = read_scenes(program, scenes)
        engine = pool.engine(reading.skeleton, "sinkhorn", Schedule())
        runs = engine.start(reading.model, jax.random.split(jax.random.key(0), width))
        seconds = best_time(functools.partial(engine.advance, runs), 2)
        times[f"us a step, {size} parts"] = 1e6 * seconds / width
    return times


def first_answer() -> Figures:
    """Seconds of `capsules infer` for one scene, with and without compiled code on disk."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scenes.npz"
        save_scenes(path, _scenes(1))
        command = [sys.executable, "-m", "capsules.cli", "infer", str(path)]
        environment = os.environ | {"XDG_CACHE_HOME": folder}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        for state in ("cold", "cached"):
            began = time.perf_counter()
            subprocess.run(command, env=environment, capture_output=True, check=True)
            figures[f"s to the first answer, {state}"] = time.perf_counter() - began
    return figures


def exponent(figures: Figures) -> float:
    """Of the number of parts, in the time of a step: a line through the logarithms."""
    times = [figures[f"us a step, {size} parts"] for size in SIZES]
    return float(np.polyfit(np.log(SIZES), np.log(times), 1)[0])


def _scenes(count: int, names: tuple[str, ...] = OBJECTS[3]) -> Scene:
    return sample_scenes(3 * count, seed=11, objects=names).take(slice(count))


def _rate(scenes: Scene, restarts: int, names: tuple[str, ...] = OBJECTS[3]) -> float:
    """Scenes a second, to convergence, with everything compiled."""
    program = _program(names)
    cavi.run(program, scenes, jax.random.key(0), num_restarts=restarts)
    began = time.perf_counter()
    cavi.run(program, scenes, jax.random.key(0), num_restarts=restarts)
    return len(scenes.points) / (time.perf_counter() - began)


@functools.cache
def _program(names: tuple[str, ...]) -> Program:
    return functools.partial(constellation, parts=stack(shapes(*names)))


def _elsewhere(script: str, **environment: str) -> list[float]:
    """The numbers that a script prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(line) for line in done.stdout.split()]


def _against(name: str, figures: Figures, before: Figures | None) -> str:
    """The run before, in this run's unit of time."""
    if before is None or name not in before or name == "unit":
        return ""
    speed = 1.0 if name == "exponent" else figures["unit"] / before["unit"]
    return f"{before[name] / speed if name.startswith('scenes') else before[name] * speed:,.4g}"


def _ratio(name: str, figures: Figures) -> str:
    """A figure against the first of its kind in this run."""
    if not name.startswith(("scenes/s, ", "us a step", "s to")):
        return ""
    kind = next(n for n in figures if _kind(n) == _kind(name))
    return f"{figures[name] / figures[kind]:.3g}"


def _kind(name: str) -> str:
    """A name without its number."""
    what = name.removesuffix("cold").removesuffix("cached")
    return "".join(letter for letter in what if not letter.isdigit())
