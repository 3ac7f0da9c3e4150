"""Figures of scenes, results and diagnostics; they are returned, not shown."""

from inference.plots.calibration import plot_calibration
from inference.plots.film import write_film
from inference.plots.fits import plot_gap, plot_history, plot_posterior, plot_restarts
from inference.plots.learning import plot_learned
from inference.plots.scenes import (
    COLOURS,
    MARKERS,
    draw_match,
    draw_objects,
    draw_scene,
    plot_demo,
    plot_scenes,
    style,
)

__all__ = [
    "COLOURS",
    "MARKERS",
    "draw_match",
    "draw_objects",
    "draw_scene",
    "plot_calibration",
    "plot_demo",
    "plot_gap",
    "plot_history",
    "plot_learned",
    "plot_posterior",
    "plot_restarts",
    "plot_scenes",
    "style",
    "write_film",
]
