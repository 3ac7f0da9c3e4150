"""Shared by several commands. Heavy imports wait until a command runs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.progress import Progress

    from inference.result import Result

PICTURE_FORMATS = (".png", ".pdf", ".svg")
PAPER_SHAPES = "square,triangle,square"

COMPILATION = "/jax/core/compile/"
"""Prefix of JAX's events for the durations of tracing, lowering and compiling."""


def show_seconds(seconds: float) -> str:
    """A duration for a table, in ms or s."""
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.1 else f"{seconds:.2g} s"


def check_picture_format(path: Path) -> None:
    """Raise an InputError unless the name of a picture ends in a known format."""
    from models.errors import InputError

    if path.suffix.lower() not in PICTURE_FORMATS:
        raise InputError(
            f"the picture {path} should end in {', '.join(PICTURE_FORMATS)}, which says its "
            f"format, but ends in {path.suffix!r}; try demo.png"
        )


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a picture in the format that its name says, whole or not at all."""
    from capsules.files.outputs import whole_file

    with whole_file(path) as file:
        figure.savefig(file, dpi=110, format=path.suffix[1:].lower())


@contextmanager
def progress_bar() -> Iterator["Progress"]:
    """A bar with the count and the remaining time on a terminal; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    quiet = not console.is_terminal
    with Progress(*columns, *times, console=console, transient=True, disable=quiet) as bar:
        yield bar


@contextmanager
def progress_of_blocks() -> Iterator[Callable[[Any, int, int], None]]:
    """A bar on the terminal; call it with the cell (its `name`), blocks done, and blocks in all."""
    with progress_bar() as bar:
        task = bar.add_task("blocks of scenes", total=None)

        def report(cell: Any, done: int, total: int) -> None:
            bar.update(task, description=cell.name, completed=done, total=total)

        yield report


class Stopwatch:
    """Measures computing time, without the time that JAX spends compiling."""

    def __init__(self) -> None:
        self.seconds, self.scenes = 0.0, 0
        self._compiling: list[tuple[float, float]] = []

    def __enter__(self) -> "Stopwatch":
        import jax

        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        return self

    def __exit__(self, *reason: Any) -> None:
        import jax

        jax.monitoring.unregister_event_duration_listener(self._compiled)

    def time(self, compute: Callable[[], "Result"]) -> "Result":
        """Call a function and count its time."""
        self._compiling.clear()
        began = time.perf_counter()
        result = compute()
        self.seconds += time.perf_counter() - began - _covered(self._compiling)
        self.scenes += len(result)
        return result

    def _compiled(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith(COMPILATION):
            now = time.perf_counter()
            self._compiling.append((now - duration_secs, now))


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans; that of tracing includes those of the functions called."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
