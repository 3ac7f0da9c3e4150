"""What a benchmark hands over: tables and pictures, printed as they come and kept as files."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure
from PIL import Image

from capsules.files.outputs import whole_file
from inference.plots.scenes import png

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
RESULTS = ROOT / "docs" / "results"
WEIGHTS = BUILD / "weights"
"""Networks that one study trains and others use."""

SPEED = ("what", "reference", "this project", "ratio")
"""Headings of a table of times or of memory."""

SpeedRow = tuple[str, str, str, str]


class Table(NamedTuple):
    """A table, whose rows may still have to be computed."""

    name: str
    headings: Sequence[str]
    rows: Iterable[Sequence[str]]


class Picture(NamedTuple):
    """A picture, drawn or already in a file."""

    name: str
    figure: Figure | Path


Pieces = Iterator[Table | Picture]
Benchmark = Callable[[], Pieces]


def speed(name: str, rows: Callable[[], Iterator[SpeedRow]]) -> Benchmark:
    """A benchmark of one table, in which each figure stands beside its reference."""

    def pieces() -> Pieces:
        yield Table(name, SPEED, rows())

    return pieces


def show(pieces: Pieces, folder: Path | None = None) -> list[str]:
    """Print tables, each row as soon as it is there, and write all pieces to a folder.

    Returns:
        The names of the files.
    """
    written = []
    for piece in pieces:
        if isinstance(piece, Table):
            lines = []
            for line in _lines(piece):
                print(line, flush=True)
                lines.append(line)
            print()
            name, content = f"{piece.name}.md", ("\n".join(lines) + "\n").encode()
        else:
            name, content = f"{piece.name}.png", small_png(piece.figure)
        if folder is not None:
            with whole_file(folder / name) as file:
                file.write(content)
            written.append(name)
    return written


def _lines(table: Table) -> Iterator[str]:
    yield _line(table.headings)
    yield "| " + "--- | " * (len(table.headings) - 1) + "--- |"
    yield from map(_line, table.rows)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def small_png(figure: Figure | Path) -> bytes:
    """A picture in 256 colours, a third of the bytes."""
    content = figure.read_bytes() if isinstance(figure, Path) else png(figure)
    file = io.BytesIO()
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    picture = picture.quantize(256, kmeans=3)  # which keeps greys grey and apart
    picture.save(file, "png", optimize=True)
    return file.getvalue()


Values = Float[np.ndarray, " n"] | Int[np.ndarray, " n"] | Bool[np.ndarray, " n"]


def share(values: Values) -> str:
    """A mean with its standard error, or without one where all are the same."""
    values = np.asarray(values, float)
    return number(values[0]) if values.std() == 0 else mean(values)


def mean(values: Values, digits: int = 3) -> str:
    """A mean with its standard error."""
    values = np.asarray(values, float)
    error = values.std() / np.sqrt(len(values))
    return f"{number(values.mean(), digits)} ± {number(error, digits)}"


def difference(these: Values, those: Values) -> str:
    """The mean of paired differences, with its sign and its standard error."""
    apart = mean(np.asarray(these, float) - np.asarray(those, float))
    return apart if apart.startswith(("−", "0 ", ".000")) else f"+{apart}"


def number(value: float, digits: int = 3) -> str:
    """Without a zero before the point: `.882`, `−.005`; a whole number as such."""
    if value == int(value):
        return f"{int(value)}".replace("-", "−")
    text = f"{abs(value):.{digits}f}"
    sign = "−" if value < 0 and float(text) else ""
    return sign + (text[1:] if text.startswith("0.") else text)
