"""`capsules evaluate`: accuracy and speed of a method on the scenes of a file."""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsules.commands import scale
from capsules.commands.options import (
    Clutter,
    LearnedFile,
    Method,
    Precision,
    Preset,
    Prior,
    Restarts,
    Seed,
    Shapes,
    Visibility,
    Weights,
)
from capsules.commands.shared import PAPER_SHAPES, Stopwatch

if TYPE_CHECKING:
    from capsules.batch import Work
    from inference.result import Result


def evaluate(
    file: Annotated[Path, typer.Argument(metavar="FILE.npz", help="Scenes with their truth.")],
    method: Method = "ds",
    prior: Prior = "uniform",
    visibility: Visibility = None,
    clutter: Clutter = 0,
    preset: Preset = "default",
    restarts: Restarts = None,
    limit: Annotated[
        int | None, typer.Option(help="Only the first N scenes, counting empty ones.")
    ] = None,
    shapes: Shapes = PAPER_SHAPES,
    precision: Precision = None,
    weights: Weights = None,
    learned: LearnedFile = None,
    seed: Seed = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="The numbers as JSON; - for standard output."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the answers there, to resume after an interruption; or use those of "
            "`capsules infer --all`.",
        ),
    ] = None,
    devices: scale.Devices = 1,
    fresh: scale.Fresh = False,
) -> None:
    """Measure a method on the scenes of a file, under both protocols.

    [bold]partition[/bold] compares how the points are grouped, and is the one to judge
    by. [bold]slots[/bold] is that of the paper's main table, where an object must be in
    its own place among identical ones. sa is segmentation accuracy, ari the
    adjusted Rand index, vi the variation of information (nats, lower is
    better); each with its standard error over scenes. A file may have any
    number of scenes: they are read and inferred in blocks.

    [bold]Examples[/bold]

      [cyan]capsules evaluate scenes.npz --method ransac[/cyan]
      [cyan]capsules evaluate scenes.npz --preset paper --restarts 10 --limit 100[/cyan]
      [cyan]capsules evaluate scenes.npz --method exact --json -[/cyan]
      [cyan]capsules evaluate cluttered.npz --clutter 3 --prior presence[/cyan]
    """
    from capsules.files.inputs import SceneFile
    from capsules.files.outputs import check_output, whole_file
    from models.errors import InputError

    to_file = None if json_file is None or str(json_file) == "-" else json_file
    if to_file is not None:
        check_output(to_file, file, weights, learned)
    from capsules.batch import Job, Work
    from capsules.methods import check_options
    from models.templates import shape_names

    names = shape_names(shapes)
    objects = None if shapes == PAPER_SHAPES else tuple(names)
    options: dict[str, Any] = {"objects": objects, "precision": precision, "prior": prior}
    options |= {"preset": preset} | ({} if restarts is None else {"num_restarts": restarts})
    options |= {"clutter": clutter} if clutter else {}
    options |= {} if visibility is None else {"visibility": visibility}
    options |= {} if weights is None else {"weights": str(weights)}
    options |= {} if learned is None else {"learned": str(learned)}
    job = Job(method, seed, options, devices)
    check_options(method, seed, **job.all_options)  # before the file, as it is cheap
    kept = nullcontext() if out is None else scale.open_store(out)
    with SceneFile(file) as scenes, kept as store:
        if not scenes.has_truth:
            raise InputError(
                f"{file} has no `object`, so there is no truth to compare with; `capsules infer` "
                "takes scenes without it"
            )
        work = Work(job, scenes, store, limit)
        if store is not None and fresh:
            store.forget(work.entries)
        missing = work.missing()
        scale.say_what_is_there(len(work) - len(missing), len(work))
        with Stopwatch() as watch:
            numbers = measure(_results(work, set(missing), watch))
        if store is not None:
            work.write_manifest()
    numbers = {"method": method, "prior": prior, "preset": preset} | numbers
    numbers["seconds_per_scene"] = watch.seconds / watch.scenes if watch.scenes else None
    if to_file is not None:
        with whole_file(to_file) as written:
            written.write((json.dumps(numbers, indent=2) + "\n").encode())
    if str(json_file) == "-":
        sys.stdout.write(json.dumps(numbers, indent=2) + "\n")
    else:
        _print(numbers)


def measure(results: Iterable["Result"]) -> dict[str, Any]:
    """Means, standard errors and bootstrap intervals of results for scenes with a truth.

    Only the numbers of each scene are kept in memory: eight metrics and the bound.
    """
    import numpy as np

    from inference.diagnostics.metrics import METRICS, PROTOCOLS, score, summarise

    kept: dict[str, list[np.ndarray]] = defaultdict(list)
    for result in results:
        for protocol, scores in score(result).items():
            for name, values in scores.items():
                kept[f"{protocol} {name}"].append(values)
        for name in ("converged", "elbo", "log_evidence"):
            if getattr(result, name) is not None:
                kept[name].append(getattr(result, name))
    all_scenes = {name: np.concatenate(values) for name, values in kept.items()}
    count = len(all_scenes["converged"])
    found = {p: {m: summarise(all_scenes[f"{p} {m}"]) for m in METRICS} for p in PROTOCOLS}
    numbers: dict[str, Any] = {"scenes": count}
    for protocol, metrics in found.items():
        numbers[protocol] = {name: summary.mean for name, summary in metrics.items()}
    spread: dict[str, Any] = {"standard_error": 1, "interval": slice(2, 4)}
    for key, fields in spread.items():
        numbers[key] = {
            protocol: {
                name: None if count == 1 else summary[fields]  # undefined for one scene
                for name, summary in metrics.items()
            }
            for protocol, metrics in found.items()
        }
    for name in ("elbo", "log_evidence", "converged"):
        if name in all_scenes:
            mean, error, *interval = summarise(all_scenes[name].astype(float))
            numbers[name] = mean
            numbers["standard_error"][name] = None if count == 1 else error
            numbers["interval"][name] = None if count == 1 else interval
    return numbers


def _results(work: "Work", missing: set[int], watch: Stopwatch) -> Iterator["Result"]:
    """The answers of all blocks, computed or read, with a bar on the terminal."""
    with scale.progress_of_scenes(len(work.numbers)) as report:
        for block in range(len(work)):
            progress = report(len(work.numbers_of(block)))
            call = partial(work.result, block, progress)
            yield watch.time(call) if block in missing else call()
            progress(1, 1)


def _print(numbers: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from inference.diagnostics.metrics import METRICS, PROTOCOLS

    title = f"{numbers['method']} on {numbers['scenes']} scenes"
    table = Table("protocol", *METRICS, title=title, box=box.SIMPLE_HEAD)
    for protocol in PROTOCOLS:
        means, errors = numbers[protocol], numbers["standard_error"][protocol]
        table.add_row(
            protocol,
            *(
                f"{means[n]:.3f}" + ("" if errors[n] is None else f" ± {errors[n]:.3f}")
                for n in METRICS
            ),
        )
    console = Console()
    console.print(table)
    for name, what in (("elbo", "ELBO"), ("log_evidence", "log evidence")):
        if name in numbers:
            error = numbers["standard_error"][name]
            plus_minus = "" if error is None else f" ± {error:.3f}"
            console.print(f"mean {what} {numbers[name]:.3f}{plus_minus} nats", highlight=False)
    if numbers["seconds_per_scene"] is not None:
        milliseconds = 1e3 * numbers["seconds_per_scene"]
        console.print(f"{milliseconds:.3g} ms a scene, without compilation", highlight=False)
