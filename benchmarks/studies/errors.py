"""Is the inference at fault or the model? Coordinate ascent beside exact inference.

A partition that coordinate ascent finds is an *inference error* where it is not the exact most
probable one under the same program, and the scene has a *model error* where the exact one is not
the truth. Where several partitions are equally probable, any of them counts as the exact one. The
scenes are our own.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import Picture, Pieces, Table, number
from capsules.experiments.generator import sample_scenes
from capsules.methods import infer

SIGMAS = (0.0, 0.1, 0.25)
NUM_DRAWS, SEED = 400, 17
TIE = 1e-6
"""Partitions whose probabilities differ by less than this share are equally probable."""

KINDS = {
    "right": "#B0B0B0",
    "right, exact is not": "#56B4E9",
    "inference error": "#D55E00",
    "model error": "#0072B2",
    "both": "#CC79A7",
}
"""What can become of a scene, with a colour each."""


class Level(NamedTuple):
    """What was found on the scenes of one level of template noise."""

    sigma: float
    gap: Float[np.ndarray, " scenes"]
    """Exact log evidence less ELBO, in nats."""
    agrees: Bool[np.ndarray, " scenes"]
    """Coordinate ascent has the (or an) exact most probable partition."""
    model_right: Bool[np.ndarray, " scenes"]
    """The truth is the (or an) exact most probable partition."""
    right: Bool[np.ndarray, " scenes"]
    """Coordinate ascent has the true partition."""
    tied: Bool[np.ndarray, " scenes"]
    """There is more than one most probable partition."""
    lone: Bool[np.ndarray, " scenes"]
    """In the exact most probable partition an object has a single point."""

    @property
    def rescued(self) -> Bool[np.ndarray, " scenes"]:
        """Coordinate ascent is right although the exact partition is not."""
        return self.right & ~self.model_right

    @property
    def shares(self) -> dict[str, float]:
        """Of the scenes, by kind."""
        found = {
            "right": self.right & self.model_right,
            "right, exact is not": self.rescued,
            "inference error": ~self.right & self.model_right,
            "model error": ~self.right & ~self.model_right & self.agrees,
            "both": ~self.right & ~self.model_right & ~self.agrees,
        }
        return {kind: float(scenes.mean()) for kind, scenes in found.items()}


def pieces() -> Pieces:
    """Run both methods on every level: shares of scenes, and the picture."""
    levels = [compare(sigma) for sigma in SIGMAS]
    headings = ["share of scenes", *(f"σ = {level.sigma:g}" for level in levels)]
    shares = [level.shares for level in levels]
    lines = {
        "right, and so is the exact partition": [x["right"] for x in shares],
        "right, but the exact partition is not": [x["right, exact is not"] for x in shares],
        "inference error: the exact one is right": [x["inference error"] for x in shares],
        "model error: as the exact one, which is wrong": [x["model error"] for x in shares],
        "both: differs from the exact one, which is wrong too": [x["both"] for x in shares],
        "exact most probable partition right": [x.model_right.mean() for x in levels],
        "coordinate ascent finds it": [x.agrees.mean() for x in levels],
    }
    rows = [[name, *(number(x) for x in values)] for name, values in lines.items()]
    rows.append(
        ["right where the exact partition has an object with a single point, of those above"]
        + [f"{(x.lone & x.rescued).sum()} of {x.rescued.sum()}" for x in levels]
    )
    quartiles = (np.percentile(level.gap, (25, 50, 75)) for level in levels)
    gaps = [", ".join(f"{q:.1f}" for q in three) for three in quartiles]
    rows.append(["log evidence − ELBO, quartiles in nats", *gaps])
    rows.append(["scenes", *(str(len(level.gap)) for level in levels)])
    yield Table("errors", headings, rows)
    yield Picture("inference_or_model", draw(levels))


def compare(sigma: float, num_samples: int = NUM_DRAWS, seed: int = SEED) -> Level:
    """Coordinate ascent with its defaults and exact inference, on the same scenes and program."""
    scenes = sample_scenes(num_samples, sigma=sigma, seed=seed)
    exact, ascent = infer("exact", scenes), infer("ds", scenes, num_restarts=32)
    assert exact.log_evidence is not None
    assert ascent.elbo is not None
    assert scenes.object is not None
    agrees, model_right, tied, lone = [], [], [], []
    for listed, found, truth in zip(exact.partitions, ascent.labels, scenes.object, strict=True):
        highest = listed[0][1]
        best = [labels for labels, probability in listed if probability > (1 - TIE) * highest]
        tied.append(len(best) > 1)
        lone.append(1 in np.unique(best[0][best[0] >= 0], return_counts=True)[1])
        agrees.append(any(_same(labels, found) for labels in best))
        model_right.append(any(_same(labels, truth) for labels in best))
    right = [_same(f, t) for f, t in zip(ascent.labels, scenes.object, strict=True)]
    flags = (np.array(x) for x in (agrees, model_right, right, tied, lone))
    return Level(sigma, exact.log_evidence - ascent.elbo, *flags)


def draw(levels: list[Level]) -> Figure:
    """What became of the scenes, and how far the ELBO is below the evidence."""
    figure = Figure(figsize=(10, 4.0), layout="constrained")
    bars, gaps = figure.subplots(1, 2, width_ratios=(1, 1.1))
    _draw_kinds(bars, levels)
    _draw_gaps(gaps, levels)
    return figure


def _draw_kinds(axes: Axes, levels: list[Level]) -> None:
    places = [float(i) for i in range(len(levels))]
    below = np.zeros(len(levels))
    for kind, colour in KINDS.items():
        heights = np.array([level.shares[kind] for level in levels])
        axes.bar(places, heights, 0.62, below, color=colour, label=kind)
        for place, height, bottom in zip(places, heights, below, strict=True):
            if height >= 0.05:
                axes.text(place, bottom + height / 2, f"{height:.2f}", ha="center", va="center")
        below += heights
    names = [
        f"σ = {level.sigma:g}\n{len(level.gap)} scenes\n{level.tied.sum()} tied" for level in levels
    ]
    axes.set_xticks(places, names)
    axes.set(ylabel="share of scenes", ylim=(0, 1), title="partitions of coordinate ascent")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5)
    )


def _draw_gaps(axes: Axes, levels: list[Level]) -> None:
    for i, level in enumerate(levels):
        for same, style in ((True, "-"), (False, "--")):
            values = np.sort(level.gap[level.agrees == same])
            if len(values):
                which = "as exact" if same else "another"
                label = f"σ = {level.sigma:g}, {which} ({len(values)})"
                up = np.arange(1, len(values) + 1) / len(values)
                axes.step(values, up, style, where="post", color=f"C{i}", label=label)
    axes.set(xscale="log", xlabel="log evidence − ELBO (nats)", ylabel="share of scenes below")
    axes.set(title="ELBO gap, by the partition found", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _same(first: Int[np.ndarray, " N"], second: Int[np.ndarray, " N"]) -> bool:
    """Whether two labellings group the points alike; the missing ones are missing in both."""
    return bool(((first[:, None] == first) == (second[:, None] == second)).all())
