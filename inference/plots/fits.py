"""Figures of a fit and its reliability; they are returned, not shown.

- `plot_posterior`: objects with the uncertainty of their outlines, beside the match.
- `plot_history`: ELBO and beta over the steps of a run.
- `plot_restarts`: the ELBO at the end of each of many restarts.
- `plot_gap`: log evidence minus ELBO over a batch of scenes.

The style and the `draw_` functions are those of `inference.plots`.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from inference.diagnostics.metrics import same_partition
from inference.diagnostics.posterior_draws import draws_of
from inference.plots.outlines import Outlines, outline_at
from inference.plots.scenes import (
    COLOURS,
    colour,
    draw_match,
    draw_objects,
    legend_handles,
    same_limits,
    style,
)
from inference.posterior import symmetry
from inference.posterior.densities import flat, likelihood_at
from inference.posterior.relabel import frame_of, relabel
from inference.result import Result
from models.errors import InputError
from models.program.sites import Program
from models.templates import object_names

AGREES, DIFFERS = COLOURS[0], COLOURS[1]
"""Colours of partitions that agree with the reference, and of others."""


def plot_posterior(
    result: Result,
    program: Program,
    rng_key: Array,
    names: Sequence[str] | None = None,
    *,
    num_outlines: int = 40,
) -> Figure:
    """Plot the objects of one scene at many draws of their poses, beside the match probabilities.

    Draws are first relabelled into one frame, so that a square turned onto itself does not look
    uncertain. Outlines that lie apart are then different explanations of the points.

    Args:
        result: a result of a method that samples, approximates or sums.
        program: the program that was inferred.
        names: names of the objects.
        num_outlines: number of draws to show.
    """
    parts = likelihood_at(program, result.scene, {}).parts
    names = object_names(["object"] * parts.num_objects) if names is None else names
    drawn = posterior_outlines(result, program, rng_key, num_outlines)
    with style():
        figure = Figure(figsize=(7.6, 4.0), layout="constrained")
        scene, match = figure.subplots(1, 2)
        for outlines in drawn:
            draw_outlines(scene, outlines, len(drawn))
        draw_objects(scene, result.scene, result.labels, {}, num_objects=parts.num_objects)
        scene.set_title(f"{result.method}: {len(drawn)} draws of the objects")
        seen = np.asarray(result.scene.points)[np.asarray(result.scene.present)]
        same_limits([scene], [seen, *(x for outlines in drawn for x in outlines.values())])
        image = draw_match(match, result, names)
        match.set_title("match probabilities")
        figure.colorbar(image, ax=match, label="probability", shrink=0.75)
        figure.legend(
            handles=legend_handles(names, clutter=bool(np.any(parts.is_clutter))),
            loc="outside lower center",
            ncols=parts.num_objects + 1,
        )
    return figure


def posterior_outlines(
    result: Result, program: Program, rng_key: Array, count: int = 40
) -> list[Outlines]:
    """Outlines of the objects at some draws of a result, relabelled into one frame.

    A draw shows only objects with at least two points, because the pose of an object with fewer is
    close to its prior.
    """
    drawn = draws_of(program, result, rng_key, num_samples=count, num_chains=1)
    group = symmetry.find(program, result.scene)
    named = flat(relabel(group, frame_of(program, result), drawn))
    some = np.linspace(0, len(named["pose"]) - 1, count).round().astype(int)
    parts = likelihood_at(program, result.scene, {}).parts
    present = np.asarray(result.scene.present)
    outlines: list[Outlines] = []
    for pose, match in zip(named["pose"][some], named["match"][some], strict=True):
        points = np.bincount(result.owner[match[present]], minlength=parts.num_objects)
        outlines.append(
            {
                k: outline_at(parts, k, pose[k])
                for k in np.flatnonzero(points[: len(pose)] > 1).tolist()
            }
        )
    return outlines


def draw_outlines(axes: Axes, outlines: Outlines, count: int = 1) -> None:
    """Draw thin outlines, fainter if there are many."""
    for k, vertices in outlines.items():
        x, y = np.concatenate([vertices, vertices[:1]]).T
        alpha = max(0.04, 0.7 / np.sqrt(count))
        axes.plot(x, y, color=colour(k), linewidth=1.0, alpha=alpha, gid=f"outline {k}")


def plot_history(result: Result) -> Figure:
    """Plot ELBO and beta at each step of a run with a history, of `cavi.run` or `svi.run`."""
    if result.history is None or result.is_batch:
        raise InputError(
            "this picture requires the history of a single run, but the result has none; infer a "
            "single scene with history=True"
        )
    with style():
        figure = Figure(figsize=(5.0, 2.8), layout="constrained")
        draw_history(figure.subplots(), result.history)
    return figure


def draw_history(axes: Axes, history: dict[str, np.ndarray], upto: int | None = None) -> None:
    """Draw the ELBO and, on a second y axis, beta if there is one; optionally the first steps only.

    The window is always that of the whole run.
    """
    elbo = np.asarray(history["elbo"])
    steps = np.arange(1, len(elbo) + 1)
    shown = slice(upto)
    axes.plot(steps[shown], elbo[shown], color=COLOURS[0], marker=".", gid="elbo")
    axes.set_xlabel("step")
    axes.set_ylabel("ELBO in nats", color=COLOURS[0])
    axes.set_xlim(0.5, len(elbo) + 0.5)
    margin = 0.05 * max(float(np.ptp(elbo)), 1.0)
    axes.set_ylim(elbo.min() - margin, elbo.max() + margin)
    axes.locator_params("x", integer=True)
    if "beta" in history:
        beta = np.asarray(history["beta"])
        other = axes.twinx()
        other.step(steps[shown], beta[shown], where="post", color=COLOURS[1], gid="beta")
        other.set_ylabel("β", color=COLOURS[1])
        other.set_ylim(0.0, 1.05 * beta.max())


def plot_restarts(
    optima: Result, log_evidence: Float[np.ndarray, ""] | float | None = None
) -> Figure:
    """Plot the final ELBO of each restart, best first, and whether it found the right objects.

    Objects are compared with the truth or, if it is unknown, with those of the best restart.

    Args:
        optima: a batch of repeats of one scene, one restart each (`diagnostics.local_optima`).
        log_evidence: the log evidence of the scene, if known; drawn as a line.
    """
    elbo = _elbo(optima)
    order = np.argsort(-elbo, kind="stable")
    reference, what = _reference(optima, order[0])
    num_objects = optima.pose_mean.shape[-2]
    right = same_partition(optima.labels, reference[None], num_objects)[order]
    with style():
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.subplots()
        rank = np.arange(1, len(elbo) + 1)
        _two_kinds(axes, rank, elbo[order], right, f"objects of the {what}", "other objects")
        if log_evidence is not None:
            axes.axhline(float(log_evidence), color="black", linewidth=1, label="log evidence")
        axes.set_xlabel("restart, best first")
        axes.set_ylabel("ELBO in nats")
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def plot_gap(variational: Result, exact: Result) -> Figure:
    """Plot log evidence minus ELBO against log evidence, for each scene of a batch.

    The gap is never negative. Colours say whether the partition is that of exact inference. With
    other objects, a small gap is a rival explanation and a large one a bad local optimum.
    """
    elbo = _elbo(variational)
    if exact.log_evidence is None or len(exact) != len(variational):
        raise InputError(
            f"the second result must be from exact inference on the same {len(variational)} "
            f"scenes, got {len(exact)} from {exact.method!r}; run inference.exact on the same batch"
        )
    evidence = np.asarray(exact.log_evidence)
    right = same_partition(variational.labels, exact.labels, exact.pose_mean.shape[-2])
    with style():
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axes = figure.subplots()
        gap = evidence - elbo
        _two_kinds(axes, evidence, gap, right, "objects of exact inference", "other objects")
        axes.axhline(0.0, color="#808080", linewidth=0.8)
        axes.set_xlabel("log evidence in nats")
        axes.set_ylabel("log evidence − ELBO in nats")
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def _elbo(result: Result) -> Float[np.ndarray, " scenes"]:
    if result.elbo is None or not result.is_batch:
        raise InputError(
            f"this picture requires the ELBOs of a batch, which this result of {result.method!r} "
            "does not have; run inference.cavi on a batch"
        )
    return np.asarray(result.elbo)


def _reference(result: Result, best: int) -> tuple[Int[np.ndarray, " N"], str]:
    truth = result.scene.object
    return (result.labels[best], "best") if truth is None else (np.asarray(truth)[0], "truth")


def _two_kinds(
    axes: Axes,
    x: Float[np.ndarray, " n"],
    y: Float[np.ndarray, " n"],
    right: Bool[np.ndarray, " n"],
    yes: str,
    no: str,
) -> None:
    """Draw two kinds of points in their colours and markers; an empty kind has no legend entry."""
    for kind, shade, marker, label in ((right, AGREES, "o", yes), (~right, DIFFERS, "x", no)):
        if kind.any():
            axes.scatter(x[kind], y[kind], s=22, color=shade, marker=marker, label=label)
