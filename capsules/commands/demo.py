"""`capsules demo`: one scene, every method, a table and a picture."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsules.commands.options import Clutter, Index, OtherShapes, Precision
from capsules.commands.shared import (
    PAPER_SHAPES,
    Stopwatch,
    check_picture_format,
    save_picture,
    show_seconds,
)

if TYPE_CHECKING:
    from rich.table import Table

    from inference.result import Result
    from models.scenes import Scene

COMPILE_QUICKLY = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=1"
"""XLA flags for quick compilation: the demo runs each method only a few times on one scene."""

DRAWS = 64
"""Number of draws, of which the demo takes the first non-empty one."""


def demo(
    seed: Annotated[
        int, typer.Option(help="Seed of the scene and of the methods' random starts.")
    ] = 51,
    sigma: Annotated[
        float, typer.Option(help="Standard deviation of the noise on a template's vertices.")
    ] = 0.1,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture to write: .png, .pdf or .svg.")
    ] = Path("demo.png"),
    scenes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz", help="Take the scene from this file instead of drawing one."
        ),
    ] = None,
    index: Index = 0,
    shapes: OtherShapes = None,
    precision: Precision = None,
    clutter: Clutter = 0,
) -> None:
    """Infer one scene with every method, print a table and write a picture.

    The table has for each method the ELBO or, where the method gives it, the
    log evidence, in nats; whether its objects are those of the truth
    (scene accuracy 1 or 0); and the time of a call with everything compiled,
    beside that of the first call, which compiles. Compiled code is kept in the
    user's cache folder (XDG_CACHE_HOME or ~/.cache), so that a second demo
    starts faster.

    The picture shows the points, the truth, and for each method the objects
    that it found and its match probabilities.

    [bold]Examples[/bold]

      [cyan]capsules demo[/cyan]
      [cyan]capsules demo --seed 14 --sigma 0.25 --precision 660 --out noisy.png[/cyan]
      [cyan]capsules demo --shapes square,pentagon --seed 2[/cyan]
      [cyan]capsules demo --scenes scenes.npz --index 3[/cyan]
    """
    from capsules.files.outputs import check_output

    check_picture_format(out)
    check_output(out, scenes)  # before the work
    os.environ.setdefault("XLA_FLAGS", COMPILE_QUICKLY)
    from capsules.files.inputs import stored_scene
    from capsules.methods import METHODS, templates
    from inference.plots.scenes import plot_demo
    from models.templates import object_names, shape_names

    names = shape_names(shapes or PAPER_SHAPES)
    objects = None if shapes is None else names
    scene = (
        _drawn_scene(names, sigma, seed, clutter) if scenes is None else stored_scene(scenes, index)
    )
    given = {"objects": objects, "precision": precision, "clutter": clutter}
    timed = _infer_all(tuple(METHODS), scene, seed, given)
    _print_table(timed, scene)
    results = [result for result, _ in timed]
    parts = templates(None if objects is None else tuple(objects), clutter)
    labels = object_names(names) if len(names) == parts.num_objects else None
    save_picture(plot_demo(results, parts, labels), out)
    print(f"The picture is in {out}.")


def _drawn_scene(names: Sequence[str], sigma: float, seed: int, clutter: int) -> "Scene":
    from capsules.experiments.generator import sample_scenes

    return sample_scenes(DRAWS, sigma, seed, names, clutter=clutter).take(0)


def _infer_all(
    methods: Sequence[str],
    scene: "Scene",
    seed: int,
    given: dict[str, Any],
) -> list[tuple["Result", float]]:
    """The result of each method, timed without compilation, and the seconds with it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from capsules.methods import infer

    timed = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        for name in methods:
            task = bar.add_task(f"{name}: compiling, then inferring", total=None)

            def report(done: int, total: int, task: Any = task) -> None:
                bar.update(task, completed=done, total=total)

            with Stopwatch() as watch:
                call = partial(infer, name, scene, seed, progress_bar=report, **given)
                result = watch.time(call)
            timed.append((replace(result, seconds=watch.seconds), result.seconds))
            bar.update(task, description=f"{name}: done", total=1, completed=1)
    return timed


def _print_table(timed: Sequence[tuple["Result", float]], scene: "Scene") -> None:
    from rich.console import Console

    console = Console()
    console.print(_table(timed, scene))
    console.print(
        "All but gmm share a program, so their ELBO is a lower bound on its log evidence, which "
        "exact computes and gibbs estimates; gmm has another prior over matches and is not "
        "comparable.\n"
        "'first call' includes compilation, or loading it from the cache; 'time' does not.",
        highlight=False,
        style="dim",
    )


def _table(timed: Sequence[tuple["Result", float]], scene: "Scene") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=f"A scene of {int(scene.present.sum())} points", box=box.SIMPLE_HEAD)
    table.add_column("method", style="bold")
    table.add_column("quantity")
    table.add_column("nats", justify="right")
    table.add_column("scene accuracy", justify="right")
    table.add_column("time", justify="right")
    table.add_column("first call", justify="right")
    for result, first in timed:
        exact = result.log_evidence is not None
        value = result.log_evidence if exact else result.elbo
        table.add_row(
            result.method if result.converged else f"{result.method} (not converged)",
            "log evidence" if exact else "-" if value is None else "ELBO",
            "-" if value is None else f"{float(value):.2f}" + _error(result),
            _accuracy(result, scene),
            show_seconds(result.seconds),
            show_seconds(first),
        )
    return table


def _error(result: "Result") -> str:
    error = result.log_evidence_error
    return "" if error is None else f" ± {float(error):.2f}"


def _accuracy(result: "Result", scene: "Scene") -> str:
    import numpy as np

    from inference.diagnostics.metrics import partition_metrics

    if scene.object is None:
        return "truth unknown"
    labels = np.asarray(scene.object)[None], result.labels[None]
    metrics = partition_metrics(*labels, result.pose_mean.shape[-2])
    return f"{metrics['scene_accuracy'][0]:.0f}"
