"""`capsules evaluate`: how good and how fast a method is on the scenes of a file."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inference.commands.shared import PAPER_SHAPES, keep_compiled_code, shape_names

if TYPE_CHECKING:
    from inference.result import Result

COMPILATION = "/jax/core/compile/"
"""What JAX calls the durations of tracing, lowering and compiling."""


def evaluate(
    file: Annotated[Path, typer.Argument(metavar="FILE.npz", help="Scenes with their truth.")],
    method: Annotated[str, typer.Option(help="The method: ds, gmm, ransac, exact, ....")] = "ds",
    prior: Annotated[
        str, typer.Option(help="The prior over matches: uniform (the paper's) or presence.")
    ] = "uniform",
    preset: Annotated[
        str,
        typer.Option(
            help="Settings of the method: our default, those of the paper's text, or those of the "
            "code published with it."
        ),
    ] = "default",
    restarts: Annotated[
        int | None, typer.Option(help="Runs for each scene.", show_default="the preset's own")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Only the first so many scenes, empty ones counted.")
    ] = None,
    shapes: Annotated[
        str, typer.Option(metavar="NAMES", help="The objects of the model.")
    ] = PAPER_SHAPES,
    precision: Annotated[
        float | None,
        typer.Option(help="Precision of the noise.", show_default="the model's own: 1e4"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random starts.")] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="The numbers as JSON; - for standard output."),
    ] = None,
) -> None:
    """Measure a method on the scenes of a file, under both protocols.

    [bold]partition[/bold] compares how the points are grouped, and is the one to judge
    by. [bold]slots[/bold] is that of the paper's main table, where an object has to be in
    its own place among identical ones. sa is segmentation accuracy, ari the
    adjusted Rand index, vi the variation of information (nats, lower is
    better); each with its standard error over scenes.

    [bold]Examples[/bold]

      [cyan]capsules evaluate scenes.npz --method ransac[/cyan]
      [cyan]capsules evaluate scenes.npz --preset paper --restarts 10 --limit 100[/cyan]
      [cyan]capsules evaluate scenes.npz --method exact --json -[/cyan]
    """
    from models.errors import InputError
    from models.scenes import load_scenes, whole_file

    if limit is not None and limit < 1:
        raise InputError(f"the limit must be 1 or more, got {limit}; leave it out for all scenes")
    keep_compiled_code()
    from inference import methods

    names = shape_names(shapes)
    objects = None if shapes == PAPER_SHAPES else tuple(names)
    options: dict[str, Any] = {} if restarts is None else {"restarts": restarts}
    common: dict[str, Any] = {"objects": objects, "precision": precision, "prior": prior}
    methods.program_of(method, preset=preset, **common)  # before the file: a bad name is cheap
    scenes = load_scenes(file, limit=limit)
    if scenes.object is None:
        raise InputError(
            f"{file} has no `object`, so there is no truth to compare with; `capsules infer` takes "
            "scenes without it"
        )
    result, seconds = _timed(method, scenes, seed, preset=preset, **common, **options)
    numbers = {"method": method, "prior": prior, "preset": preset} | measure(result)
    numbers["seconds_per_scene"] = seconds / len(scenes.points)
    if json_file is not None and str(json_file) != "-":
        with whole_file(json_file) as out:
            out.write((json.dumps(numbers, indent=2) + "\n").encode())
    if str(json_file) == "-":
        sys.stdout.write(json.dumps(numbers, indent=2) + "\n")
    else:
        _print(numbers)


def measure(result: "Result") -> dict[str, Any]:
    """Means, standard errors and bootstrap intervals of a result for scenes with a truth."""
    import numpy as np

    from inference.metrics import score, summarise

    numbers: dict[str, Any] = {"scenes": len(result)}
    found = {
        protocol: {name: summarise(values) for name, values in scores.items()}
        for protocol, scores in score(result).items()
    }
    for protocol, metrics in found.items():
        numbers[protocol] = {name: summary.mean for name, summary in metrics.items()}
    spread: dict[str, Any] = {"standard_error": 1, "interval": slice(2, 4)}
    for key, fields in spread.items():
        numbers[key] = {
            protocol: {
                name: None if len(result) == 1 else summary[fields]  # of one scene there is none
                for name, summary in metrics.items()
            }
            for protocol, metrics in found.items()
        }
    for name in ("elbo", "log_evidence"):
        value = getattr(result, name)
        if value is not None:
            numbers[name] = float(np.mean(value))
    return numbers | {"converged": float(np.mean(result.converged))}


def _timed(method: str, scenes: Any, seed: int, **options: Any) -> tuple["Result", float]:
    """The result, and the seconds that it took less those that JAX spent compiling."""
    import jax
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from inference.methods import infer

    spent = [0.0]

    def compiled(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith(COMPILATION):
            spent[0] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(compiled)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    quiet = not console.is_terminal
    try:
        with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
            task = bar.add_task(f"{method} on {len(scenes.points)} scenes", total=None)
            began = time.perf_counter()
            result = infer(
                method,
                scenes,
                seed,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
                **options,
            )
            seconds = time.perf_counter() - began
    finally:
        jax.monitoring.unregister_event_duration_listener(compiled)
    return result, max(seconds - spent[0], 0.0)


def _print(numbers: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from inference.metrics import METRICS, PROTOCOLS

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
            console.print(f"mean {what} {numbers[name]:.3f} nats", highlight=False)
    milliseconds = 1e3 * numbers["seconds_per_scene"]
    console.print(f"{milliseconds:.3g} ms a scene, compilation apart", highlight=False)
