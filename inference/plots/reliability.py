"""The reliability diagram."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from inference.diagnostics.reliability import Reliability
from inference.plots.scenes import COLOURS, MARKERS, style


def plot_reliability(found: Mapping[str, Reliability]) -> Figure:
    """Plot observed frequencies against predicted probabilities.

    A method is overconfident about likely events below the diagonal, and underconfident above it.
    The area of a mark grows with the number of events.
    """
    with style():
        figure = Figure(figsize=(4.6, 4.4), layout="constrained")
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color="#808080", linewidth=0.8)
        for colour, marker, (name, one) in zip(COLOURS, MARKERS, found.items(), strict=False):
            label = f"{name} (error {one.error:.3f})"
            axes.plot(one.said, one.happened, color=colour, linewidth=1.2, label=label)
            size = 20 + 120 * one.events / one.events.max()
            axes.scatter(one.said, one.happened, size, color=colour, marker=marker, alpha=0.7)
        axes.set_xlabel("probability that two points are of one object")
        axes.set_ylabel("share that is")
        axes.set_aspect("equal")
        axes.legend(loc="upper left")
    return figure
