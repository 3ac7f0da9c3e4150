"""A film of coordinate ascent: scene, match, ELBO and beta, a frame for each step of a run."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from matplotlib.animation import FFMpegWriter
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from inference.plots.fits import draw_history
from inference.plots.outlines import result_outlines
from inference.plots.scenes import draw_match, draw_objects, legend_handles, same_limits, style
from inference.result import Result, partition
from models.errors import InputError
from models.templates import Parts, object_names

FORMATS = (".gif", ".mp4")
"""Endings of a film's file."""
DPI = 80


def check_film_format(path: Path) -> None:
    """Say in a sentence if a film cannot be written in the format that the path asks for."""
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise InputError(
            f"the film {path} should end in {' or '.join(FORMATS)}, which says its format, but "
            f"ends in {path.suffix!r}; try fit.gif"
        )
    if ending == ".mp4" and not FFMpegWriter.isAvailable():
        raise InputError(
            f"a film that ends in {ending} wants the program ffmpeg, which is not installed; "
            "install it, or write a .gif"
        )


def write_film(
    result: Result,
    parts: Parts,
    file: BinaryIO,
    ending: str = ".gif",
    names: Sequence[str] | None = None,
    *,
    frames_per_second: int = 4,
) -> int:
    """Write the film of a run to an open file and return the number of its frames.

    Args:
        result: for a single scene, of `cavi.run(..., history=True)`.
        parts: the templates of the program.
        ending: .gif or .mp4.
        names: what to call the objects.
    """
    states_of(result)  # a result without a history is refused before anything is opened
    figure = Figure(figsize=(10.4, 3.9), dpi=DPI, layout="constrained")
    frames = draw_frames(figure, result, parts, names)
    return write_frames(figure, frames, file, ending, frames_per_second)


def write_frames(
    figure: Figure,
    frames: Iterator[Result],
    file: BinaryIO,
    ending: str = ".gif",
    frames_per_second: int = 4,
) -> int:
    """Write a film of what is drawn into a figure and return the number of its frames.

    Args:
        frames: draws the next frame each time that it is asked.
    """
    with style():
        write = _write_gif if ending == ".gif" else _write_mp4
        return write(file, figure, frames, frames_per_second)


def _write_gif(
    file: BinaryIO, figure: Figure, frames: Iterator[Result], frames_per_second: int
) -> int:
    """In memory: a command that is killed leaves no file behind."""
    canvas = FigureCanvasAgg(figure)
    images = []
    for _ in frames:
        canvas.draw()
        images.append(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]))
    timing = {"duration": 1000 // frames_per_second, "loop": 0}
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], **timing)
    return len(images)


def _write_mp4(
    file: BinaryIO, figure: Figure, frames: Iterator[Result], frames_per_second: int
) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        writer, count = FFMpegWriter(fps=frames_per_second), 0
        with writer.saving(figure, str(path), DPI):
            for _ in frames:
                writer.grab_frame()
                count += 1
        file.write(path.read_bytes())
    return count


def draw_frames(
    figure: Figure, result: Result, parts: Parts, names: Sequence[str] | None = None
) -> Iterator[Result]:
    """Draw each step of a run into the figure, one after another, and give its state.

    Windows and the order of the rows stay the same throughout; they are those of the solution.
    """
    states = states_of(result)
    names = object_names(["object"] * parts.num_objects) if names is None else names
    seen = np.asarray(result.scene.points)[np.asarray(result.scene.present)]
    window = [seen, *result_outlines(result, parts).values()]
    steps: dict[str, Any] = result.history or {}
    for number, state in enumerate(states, start=1):
        figure.clear()
        scene, match, history = figure.subplots(1, 3, width_ratios=[1.0, 1.0, 1.2])
        draw_objects(
            scene, state.scene, state.labels, result_outlines(state, parts), None, len(names)
        )
        same_limits([scene], window)
        scene.set_title(f"step {number} of {len(states)}")
        image = draw_match(match, state, names, result.labels)
        match.set_title("match probabilities")
        figure.colorbar(image, ax=match, shrink=0.75)
        draw_history(history, steps, upto=number)
        elbo, beta = (float(steps[name][number - 1]) for name in ("elbo", "beta"))
        history.set_title(f"ELBO {elbo:.2f}, β {beta:.2f}")
        figure.legend(
            handles=legend_handles(names, clutter=bool(np.any(parts.is_clutter))),
            loc="outside lower center",
            ncols=parts.num_objects + 1,
        )
        yield state


def states_of(result: Result) -> list[Result]:
    """What the result would have been after each step of its history."""
    if result.history is None or result.is_batch:
        raise InputError(
            "a film is of one run, and the result has no history of one; infer a single scene with "
            "history=True"
        )
    present = np.asarray(result.scene.present)
    return [
        replace(
            result,
            match_probs=match_probs,
            pose_mean=pose_mean,
            labels=partition(match_probs, result.owner, present),
            elbo=elbo,
            history=None,
        )
        for match_probs, pose_mean, elbo in zip(
            result.history["match_probs"],
            result.history["pose_mean"],
            result.history["elbo"],
            strict=True,
        )
    ]
