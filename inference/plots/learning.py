"""The figure of learning: the objective and each parameter by round."""

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from inference.learning import Learned
from inference.plots.scenes import COLOURS, style


def plot_learned(learned: Learned) -> Figure:
    """Plot the objective by round and, beside it, each parameter.

    Vertices (arrays of two columns) are drawn at their initial and learnt values; other parameters
    are lines over the rounds.
    """
    count = 1 + len(learned.params)
    columns = min(count, 3)
    rows = -(-count // columns)
    with style():
        figure = Figure(figsize=(3.2 * columns, 2.7 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        _objective(axes[0], learned)
        for panel, (name, values) in zip(axes[1:], learned.history.items(), strict=False):
            is_template = values.ndim == 3 and values.shape[-1] == 2 and values.shape[-2] > 2
            (_vertices if is_template else _lines)(panel, values)
            panel.set_title(name.replace("_", " "))
        for panel in axes[count:]:
            panel.set_visible(False)
    return figure


def _objective(axes: Axes, learned: Learned) -> None:
    name = "log evidence" if learned.e_step == "exact" else "ELBO"
    rounds = np.arange(len(learned.objective))
    axes.plot(rounds, learned.objective, color=COLOURS[0], label="learnt from")
    if learned.holdout is not None:
        axes.plot(rounds, learned.holdout, color=COLOURS[1], ls="--", label="held out")
        axes.legend(frameon=False)
    # The first rounds gain the most and would flatten the rest of the curve.
    gained = learned.objective[-1] - learned.objective
    if len(rounds) > 4 and gained[0] > 20 * max(gained[2], 1e-12):
        low, high = learned.objective[2], learned.objective[-1]
        if learned.holdout is not None:
            low, high = min(low, learned.holdout[2]), max(high, learned.holdout[2:].max())
        axes.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
    axes.set(title=f"{name} of a scene, nats", xlabel="round")


def _lines(axes: Axes, values: Float[np.ndarray, "rounds ..."]) -> None:
    flat = values.reshape(len(values), -1)
    axes.plot(flat, lw=1.2)
    if (flat > 0).all() and flat.max() > 30 * flat.min():
        axes.set_yscale("log")
    axes.set_xlabel("round")


def _vertices(axes: Axes, values: Float[np.ndarray, "rounds n 2"]) -> None:
    for vertices, marks, label in ((values[0], "o:", "begun at"), (values[-1], "o-", "learnt")):
        centred = vertices - vertices.mean(axis=0)
        centred = centred / np.sqrt((centred**2).sum(axis=1).mean())
        order = np.argsort(np.arctan2(*centred.T))
        closed = centred[np.append(order, order[0])]
        colour = COLOURS[1] if label == "begun at" else COLOURS[0]
        axes.plot(*closed.T, marks, color=colour, label=label, ms=4)
    axes.set_aspect("equal")
    axes.legend(frameon=False, loc="center")
