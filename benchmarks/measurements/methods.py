"""Seconds a scene of the methods on the paper's scenes, and their accuracy, in one run."""

import time
from collections.abc import Iterator

from benchmarks.measurements.timing import row
from capsules.experiments.generator import sample_scenes
from capsules.methods import infer
from inference.diagnostics.metrics import score

METHODS = ("ds", "gmm", "ransac")
"""Each is held against exact inference."""


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Time of each method for a scene with everything compiled, beside that of exact inference."""
    scenes = sample_scenes(150, sigma=0.1, seed=3).take(slice(128))
    seconds = {}
    accuracy = {}
    for method in ("exact", *METHODS):
        infer(method, scenes)
        began = time.perf_counter()
        result = infer(method, scenes)
        seconds[method] = (time.perf_counter() - began) / len(scenes.points)
        accuracy[method] = score(result)["partition"]["scene_accuracy"].mean()
    for method in METHODS:
        what = (
            f"{method} against exact, seconds a scene (right on {accuracy[method]:.0%}, exact on "
            f"{accuracy['exact']:.0%})"
        )
        yield row(what, seconds["exact"], seconds[method])
