"""Scenes a second of coordinate ascent, the time of a step, and what a first answer takes.

The measurements are those of `benchmarks.measurements.throughput`, which holds them against a
stored run.
"""

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.measurements import latency
from benchmarks.measurements.throughput import (
    BATCHES,
    NUMBERS_OF_RESTARTS,
    OBJECTS,
    RESTARTS,
    SIZES,
    SOME,
    Figures,
    by_batch,
    by_devices,
    by_objects,
    by_restarts,
    by_size,
    exponent,
    first_answer,
)
from benchmarks.report import Picture, Pieces, Table


def pieces() -> Pieces:
    """Rates, the time of a step, a picture of both, and the time until one scene is answered."""
    figures: Figures = {}
    yield Table("throughput", ("", "scenes a second"), rates(figures))
    figures |= by_size()
    figures["exponent"] = exponent(figures)
    milliseconds = (f"{1e-3 * figures[f'us a step, {size} parts']:,.3f}" for size in SIZES)
    headings = ["", *(f"{size} parts" for size in SIZES), "grows as"]
    row = ["milliseconds a step", *milliseconds, f"N^{figures['exponent']:.1f}"]
    yield Table("throughput_step", headings, [row])
    yield Picture("throughput", draw(figures))
    yield Table("latency", ("", "seconds"), latencies())


def rates(figures: Figures) -> Iterator[list[str]]:
    """By scenes at once, restarts, objects and devices; the figures are added to `figures`."""
    names = {f"scenes/s, batch {n}": f"scenes at once: {n:,}" for n in BATCHES}
    names |= {
        f"scenes/s, {n} restarts": f"restarts: {n}, with {SOME} scenes" for n in NUMBERS_OF_RESTARTS
    }
    names |= {f"scenes/s, {n} objects": f"objects: {n}, with {SOME // 2} scenes" for n in OBJECTS}
    names |= {
        f"scenes/s, {n} devices": f"devices: {n}, with {max(BATCHES):,} scenes" for n in (1, 2)
    }
    for measure in (by_batch, by_restarts, by_objects, by_devices):
        found = measure()
        figures |= found
        for name, rate in found.items():
            yield [names[name], f"{rate:,.0f}"]


def latencies() -> Iterator[list[str]]:
    """The first command, and later calls in one process."""
    for seconds, what in zip(first_answer().values(), ("nothing", "everything"), strict=True):
        yield [f"`capsules infer` of one scene, {what} compiled", f"{seconds:.1f}"]
    for method, same, edited in latency.seconds():
        yield [f"`{method}` again, the same program", f"{same:.4f}"]
        yield [f"`{method}` again, a program with other numbers", f"{edited:.4f}"]


def draw(figures: Figures) -> Figure:
    """Three panels: scenes a second by batch and by restarts, and a step by size."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    batch, restarts, size = figure.subplots(1, 3)
    _line(batch, BATCHES, [figures[f"scenes/s, batch {n}"] for n in BATCHES])
    batch.set(
        xlabel=f"scenes at once ({RESTARTS} restarts)",
        ylabel="scenes a second",
        xscale="log",
        ylim=(0, None),
    )
    rates = [figures[f"scenes/s, {n} restarts"] for n in NUMBERS_OF_RESTARTS]
    _line(restarts, NUMBERS_OF_RESTARTS, rates)
    restarts.set(
        xlabel=f"restarts ({SOME} scenes)",
        ylabel="scenes a second",
        xticks=NUMBERS_OF_RESTARTS,
        ylim=(0, None),
    )
    times = [1e-3 * figures[f"us a step, {n} parts"] for n in SIZES]
    _line(size, SIZES, times)
    size.set(xlabel="parts N", ylabel="milliseconds a step", xscale="log", yscale="log")
    size.set_xticks(SIZES, [str(n) for n in SIZES])
    size.minorticks_off()
    size.set_title(f"N to the power of {figures['exponent']:.1f}", fontsize=10)
    return figure


def _line(axes: Axes, x: tuple[int, ...], y: list[float]) -> None:
    axes.plot(x, y, "o-")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
