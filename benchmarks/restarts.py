"""How many runs coordinate ascent needs to find the most probable partition, from which starts.

The share of scenes on which the best of the first runs, by its ELBO, has the exact most probable
partition of the program with the presence prior (where several are equally probable, any of them);
a run is one for each set of present objects that can explain the scene. Runs are of two kinds: from
a random R, and from pose hypotheses. Scenes are of a seed that nothing was tuned on; times are of
batches, without compilation. The picture goes to `docs/images/restarts.png`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

from capsules.commands.shared import Stopwatch
from capsules.experiments.generator import sample_scenes
from capsules.methods import infer, program_of
from inference import cavi
from inference.diagnostics.metrics import same_partition
from models.scenes import Scene

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "restarts.png"

SIGMAS = (0.0, 0.25)
NUM_DRAWS, SEED = 160, 51_717
NUMBERS = (1, 2, 4, 8, 16, 32, 64)
ENOUGH = 0.99
TIE = 1e-6
"""Partitions whose probabilities differ by less than this share are equally probable."""

KINDS: dict[str, dict[str, Any]] = {
    "uniform R": {"init_strategy": "uniform", "confirmations": None},
    "pose hypotheses": {"init_strategy": "poses", "confirmations": None},
}
COLOURS = ("#0072B2", "#D55E00")


class Curve(NamedTuple):
    """What so many runs come to, for the first of `NUMBERS`, up to where it is enough twice."""

    share: list[float]
    """Of scenes with the exact partition."""
    milliseconds: list[float]
    """A scene."""

    @property
    def needed(self) -> str:
        """Runs, and time, to have it on nearly all scenes."""
        for number, share, time in zip(NUMBERS, self.share, self.milliseconds, strict=False):
            if share >= ENOUGH:
                return f"{number} runs, {time:.1f} ms"
        return f"not within {NUMBERS[-1]} runs, {self.milliseconds[-1]:.0f} ms"


def rows() -> Iterator[tuple[str, str, str, str]]:
    """A row for each kind of start at each level of noise, and one for the default rule."""
    curves: dict[float, dict[str, Curve]] = {}
    for sigma in SIGMAS:
        scenes = sample_scenes(NUM_DRAWS, sigma=sigma, seed=SEED)
        exact = infer("exact", scenes, prior="presence").partitions
        _time(scenes, exact, num_restarts=1)  # compiles what all starts share
        curves[sigma] = {}
        for kind, options in KINDS.items():
            _time(scenes, exact, num_restarts=1, **options)
            curve = curves[sigma][kind] = Curve([], [])
            for number in NUMBERS:
                share, time = _time(scenes, exact, num_restarts=number, **options)
                curve.share.append(share)
                curve.milliseconds.append(time)
                if min(curve.share[-2:]) >= ENOUGH and number > 1:
                    break  # it has arrived, and stays
            shares = ", ".join(f"{n}: {x:.3f}" for n, x in zip(NUMBERS, curve.share, strict=False))
            times = ", ".join(f"{x:.3g}" for x in curve.milliseconds)
            yield f"{kind}, sigma {sigma}", shares, f"{times} ms", f"99 %: {curve.needed}"
        share, time = _time(scenes, exact)
        count = len(scenes.points)
        yield f"default, sigma {sigma}", f"{share:.3f} of {count}", f"{time:.3g} ms", ""
    draw(curves)


def draw(curves: dict[float, dict[str, Curve]]) -> None:
    """The share of scenes by the number of runs, a panel for each level of noise."""
    figure = Figure(figsize=(8.6, 3.6), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True)
    for axes, (sigma, kinds) in zip(panels, curves.items(), strict=True):
        for colour, (kind, curve) in zip(COLOURS, kinds.items(), strict=True):
            numbers = NUMBERS[: len(curve.share)]
            axes.semilogx(numbers, curve.share, "o-", color=colour, label=kind, base=2)
        axes.axhline(ENOUGH, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(NUMBERS, [str(n) for n in NUMBERS])
        axes.set(xlabel="runs", title=f"σ = {sigma}")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="scenes with the exact partition", ylim=(None, 1.005))
    panels[-1].legend(frameon=False, loc="lower right")
    figure.savefig(PICTURE, dpi=120)


def _time(
    scenes: Scene, exact: list[list[tuple[np.ndarray, float]]], **options: Any
) -> tuple[float, float]:
    """Share of scenes with the exact partition, and milliseconds a scene."""
    program = program_of("ds", prior="presence")
    with Stopwatch() as watch:
        result = watch.time(lambda: cavi.run(program, scenes, jax.random.key(0), **options))
    best = [[x for x, prob in listed if prob > (1 - TIE) * listed[0][1]] for listed in exact]
    has = [
        any(same_partition(labels[None], found[None])[0] for labels in ties)
        for ties, found in zip(best, result.labels, strict=True)
    ]
    return float(np.mean(has)), 1e3 * watch.seconds / len(scenes.points)
