"""A film of coordinate ascent: scene, match, ELBO and beta, one frame per step of a run."""

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
"""File endings of films."""
DPI = 80


def check_film_format(path: Path) -> None:
    """Raise an error if a film cannot be written in the format of the path's ending."""
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise InputError(
            f"the film {path} should end in {' or '.join(FORMATS)}, which says its format, but "
            f"ends in {path.suffix!r}; try fit.gif"
        )
    if ending == ".mp4" and not FFMpegWriter.isAvailable():
        raise InputError(
            f"a film that ends in {ending} requires the program ffmpeg, which is not installed; "
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
        result: the result of `cavi.run(..., history=True)` for a single scene.
        parts: the templates of the program.
        ending: .gif or .mp4.
        names: names of the objects.
    """
    states_of(result)  # raises for a result without a history, before anything is opened
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
    """Write a film of a figure that changes, and return the number of frames.

    Args:
        frames: an iterator that draws the next frame into the figure at each step.
    """
    with style():
        write = _write_gif if ending == ".gif" else _write_mp4
        return write(file, figure, frames, frames_per_second)


def _write_gif(
    file: BinaryIO, figure: Figure, frames: Iterator[Result], frames_per_second: int
) -> int:
    """Write a GIF from memory, so that a killed command leaves no temporary file."""
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
    """Draw each step of a run into the figure, one after another, and yield its state.

    The window and the order of the rows are those of the final result in all frames.
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
    """The result as it was after each step of its history."""
    if result.history is None or result.is_batch:
        raise InputError(
            "a film requires the history of a single run, but the result has none; infer a single "
            "scene with history=True"
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
