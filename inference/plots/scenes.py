"""Pictures of scenes and results. Every `plot_` function returns a matplotlib Figure.

The `draw_` functions draw one thing into given axes, so other figures can be composed of them.
Nothing here shows a window or changes pyplot's state. Each object has a marker and one of the
colour-blind-safe colours of Okabe and Ito; points that belong to no object are grey crosses. The y
axis points up (see `models.geometry`).
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from inference.diagnostics.readout import is_averaged, is_object, relabel
from inference.plots.outlines import Outlines, result_outlines, truth_outlines
from inference.result import Result
from models.scenes import Scene
from models.templates import Parts, object_names

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
"""Okabe and Ito's colours, one for each object; they repeat if there are more objects."""
MARKERS = ("o", "^", "s", "D", "v", "P", "X")
POINT_COLOUR = "#404040"
CLUTTER_COLOUR = "#808080"

STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.edgecolor": "#808080",
    "axes.linewidth": 0.8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.color": "#404040",
    "ytick.color": "#404040",
    "legend.frameon": False,
    "image.cmap": "Greys",
    "svg.fonttype": "none",
}

COLUMNS = 4
"""Panels in a row of a picture; further panels go below."""


def plot_demo(
    results: Sequence[Result], parts: Parts, names: Sequence[str] | None = None
) -> Figure:
    """Plot one scene and the results of several methods.

    On the left are the points and, if known, the truth; then, for each method, the objects that it
    found above its match matrix. Identical objects are exchangeable, so those of each result are
    first relabelled to agree with the truth or, if it is unknown, with the first result.

    Args:
        results: results for the same single scene, one for each method.
        parts: the templates of the program.
        names: names of the objects, e.g. `object_names(["square", "triangle", "square"])`.
    """
    scene = results[0].scene
    names = object_names(["object"] * parts.num_objects) if names is None else names
    truth = None if scene.object is None else np.asarray(scene.object)
    reference = results[0].labels if truth is None else truth
    results = [relabel(result, parts, reference) for result in results]
    found = [result_outlines(result, parts) for result in results]

    with style():
        blocks = -(-len(results) // COLUMNS)  # four results give five columns, not two blocks
        columns = -(-(1 + len(results)) // blocks)
        size = (3.0 * columns + 0.5, 6.3 * blocks + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.06, h_pad=0.1)  # type: ignore[union-attr,call-arg]
        grid = figure.add_gridspec(2 * blocks, columns)

        def panels(number: int) -> tuple[Axes, Axes]:
            block, column = divmod(number, columns)
            upper, lower = (
                figure.add_subplot(grid[row, column]) for row in (2 * block, 2 * block + 1)
            )
            return upper, lower

        scenes = []
        points, true = panels(0)
        draw_scene(points, scene)
        points.set_title("points")
        if truth is None:
            true.set_axis_off()
        else:
            outlines = truth_outlines(scene, truth, parts.num_objects)
            draw_objects(true, scene, truth, outlines, num_objects=parts.num_objects)
            true.set_title("truth")
            scenes.append(true)
        for number, (result, outlines) in enumerate(zip(results, found, strict=True), start=1):
            objects, match = panels(number)
            draw_objects(objects, scene, result.labels, outlines, truth, parts.num_objects)
            objects.set_title(f"{result.method}: objects found\n{_bound(result)}")
            image = draw_match(match, result, names, reference)
            match.set_title(_match_title(result))
            if number % columns:
                objects.set(ylabel="")
                objects.tick_params(labelleft=False)
            if number != 1 and number % columns:  # rows are the same in all panels
                match.set(ylabel="", yticks=[])
            scenes.append(objects)
        figure.colorbar(image, ax=figure.axes, label="probability", shrink=0.4, aspect=25)
        seen = np.asarray(scene.points)[np.asarray(scene.present)]
        same_limits([points, *scenes], [seen, *_vertices(found)])
        wrong = truth is not None and any((result.labels != truth).any() for result in results)
        figure.legend(
            handles=legend_handles(names, wrong=wrong, clutter=bool(np.any(parts.is_clutter))),
            loc="outside lower center",
            ncols=parts.num_objects + 2,
        )
    return figure


def plot_scenes(
    scenes: Scene, titles: Sequence[str] | None = None, num_objects: int | None = None
) -> Figure:
    """Plot several scenes with the same axis limits, and their true objects if known.

    Outlines go through the points.

    Args:
        titles: a title for each scene.
        num_objects: K, the label of clutter, if scenes may have clutter.
    """
    count = len(scenes.batch().points)
    rows = -(-count // COLUMNS)
    columns = min(COLUMNS, count)
    with style():
        size = (2.2 * columns + 0.3, 2.35 * rows + 0.1)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
        for number, axes in enumerate(panels):
            if number >= count:
                axes.set_axis_off()
                continue
            scene = scenes.batch().take(number)
            if scene.object is None:
                draw_scene(axes, scene)
            else:
                labels = np.asarray(scene.object)
                outlines = truth_outlines(scene, labels, num_objects)
                draw_objects(axes, scene, labels, outlines, num_objects=num_objects)
            axes.set_title("" if titles is None else titles[number])
            axes.label_outer()
        everything = np.asarray(scenes.points)[np.asarray(scenes.present)]
        same_limits(list(panels[:count]), [everything])
    return figure


def draw_scene(axes: Axes, scene: Scene) -> None:
    """Draw only the points, as a method sees them."""
    _scene_axes(axes)
    x, y = np.asarray(scene.points)[np.asarray(scene.present), :2].T
    axes.scatter(x, y, s=28, color=POINT_COLOUR, gid="points")


def draw_objects(
    axes: Axes,
    scene: Scene,
    labels: Int[np.ndarray, " N"],
    outlines: Outlines,
    truth: Int[np.ndarray, " N"] | None = None,
    num_objects: int | None = None,
) -> None:
    """Draw the points in the colours of their objects, and the outlines of the objects.

    Args:
        labels: the object of each row, K for clutter, -1 for a dummy.
        outlines: outlines to draw as closed lines, e.g. those of `result_outlines`.
        truth: the true object of each row; points with another label get a ring.
        num_objects: K, if scenes may have clutter.
    """
    _scene_axes(axes)
    points = np.asarray(scene.points)[:, :2]
    for k, vertices in outlines.items():
        x, y = np.concatenate([vertices, vertices[:1]]).T
        axes.plot(x, y, color=colour(k), linewidth=1.5, alpha=0.7, gid=f"outline {k}")
    objects = is_object(labels, num_objects)
    for k in np.unique(labels[objects]):
        x, y = points[labels == k].T
        axes.scatter(x, y, s=32, color=colour(k), marker=_marker(k), zorder=3, gid=f"object {k}")
    if (clutter := (labels >= 0) & ~objects).any():
        x, y = points[clutter].T
        axes.scatter(x, y, s=32, color=CLUTTER_COLOUR, marker="x", zorder=3, gid="clutter")
    if truth is not None and (wrong := labels != truth).any():
        x, y = points[wrong].T
        ring = axes.scatter(x, y, s=110, zorder=4, facecolors="none", edgecolors="black")
        ring.set_gid("wrong")


def draw_match(
    axes: Axes,
    result: Result,
    names: Sequence[str],
    labels: Int[np.ndarray, " N"] | None = None,
) -> AxesImage:
    """Draw the match probabilities, points by parts, with lines between objects.

    Args:
        labels: the object of each row. Rows are sorted by it, dummies last; by default it is the
            partition of the result.
    """
    labels = result.labels if labels is None else labels
    rows = np.argsort(np.where(labels < 0, len(names) + 1, labels), kind="stable")
    columns = np.argsort(result.owner, kind="stable")
    image = axes.imshow(
        result.match_probs[np.ix_(rows, columns)], vmin=0.0, vmax=1.0, aspect="equal"
    )
    _mark_blocks(axes, "x", result.owner[columns], names)
    _mark_blocks(axes, "y", labels[rows], names)
    axes.set_xlabel("parts")
    axes.set_ylabel("points")
    return image


def legend_handles(
    names: Sequence[str], *, wrong: bool = False, clutter: bool = False
) -> list[Line2D]:
    """Legend entries for each object and, on request, for clutter and for rings around points."""
    handles = [
        Line2D([], [], color=colour(k), marker=_marker(k), linewidth=1.5, label=name)
        for k, name in enumerate(names)
    ]
    if clutter:
        cross = Line2D([], [], marker="x", color=CLUTTER_COLOUR, linestyle="none", label="clutter")
        handles.append(cross)
    if wrong:
        ring = Line2D([], [], marker="o", markersize=10, markerfacecolor="none", color="black")
        ring.set(linestyle="none", label="not the object of the truth")
        handles.append(ring)
    return handles


def colour(k: int) -> str:
    """The colour of object k."""
    return COLOURS[k % len(COLOURS)]


def _marker(k: int) -> str:
    return MARKERS[k % len(MARKERS)]


@contextlib.contextmanager
def style() -> Iterator[None]:
    """A context in which figures have the style of this project."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        yield


def png(figure: Figure) -> bytes:
    """A figure as the content of a .png file."""
    file = io.BytesIO()
    figure.savefig(file, dpi=110, format="png")
    return file.getvalue()


def _bound(result: Result) -> str:
    if result.log_evidence is not None:
        error = result.log_evidence_error  # samplers only
        suffix = "" if error is None else f" ± {float(error):.2f}"
        return f"log evidence {float(result.log_evidence):.2f}{suffix}"
    return "" if result.elbo is None else f"ELBO {float(result.elbo):.2f}"


def _match_title(result: Result) -> str:
    over = "all matches" if result.draws is None else "its draws"
    note = f"\naveraged over {over}" if is_averaged(result) else ""
    return f"{result.method}: match probabilities{note}"


def _scene_axes(axes: Axes) -> None:
    axes.set_aspect("equal", adjustable="box")
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    axes.locator_params(nbins=5)


def _vertices(found: Sequence[Outlines]) -> list[Float[np.ndarray, "n 2"]]:
    return [vertices for outlines in found for vertices in outlines.values()]


def same_limits(axes: Sequence[Axes], contents: Sequence[Float[np.ndarray, "n 2"]]) -> None:
    """Set the same square window around all contents in all axes."""
    everything = np.concatenate([np.asarray(content)[:, :2] for content in contents])
    low, high = everything.min(axis=0), everything.max(axis=0)
    middle, half = (low + high) / 2, 0.58 * max(float(np.max(high - low)), 1e-3)
    for ax in axes:
        ax.set_xlim(middle[0] - half, middle[0] + half)
        ax.set_ylim(middle[1] - half, middle[1] + half)


def _mark_blocks(
    axes: Axes, axis: Literal["x", "y"], labels: Int[np.ndarray, " N"], names: Sequence[str]
) -> None:
    """Draw lines between blocks of equal labels along an axis, and the name of each block."""
    edges = np.flatnonzero(np.diff(labels)) + 1
    starts, ends = np.r_[0, edges], np.r_[edges, len(labels)]
    middles = (starts + ends - 1) / 2
    line = axes.axvline if axis == "x" else axes.axhline
    for edge in edges:
        line(edge - 0.5, color="#808080", linewidth=0.8)
    texts = [[*names, "clutter", "missing"][labels[s]] for s in starts]
    if axis == "x":
        axes.set_xticks(middles, texts)
    else:
        axes.set_yticks(middles, texts, rotation=90, va="center")
    axes.tick_params(axis, length=0)
    ticklabels = axes.get_xticklabels() if axis == "x" else axes.get_yticklabels()
    for text, start in zip(ticklabels, starts, strict=True):
        of_object = 0 <= labels[start] < len(names)
        text.set_color(colour(labels[start]) if of_object else POINT_COLOUR)
