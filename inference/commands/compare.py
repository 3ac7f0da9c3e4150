"""The command `capsules compare`. Heavy imports wait until it runs, so that help is quick."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from inference.methods import Progress as Report


def compare(
    scenes: Annotated[
        Path, typer.Argument(metavar="SCENE.npz", help="A file of scenes, as `sample` writes it.")
    ],
    index: Annotated[
        int, typer.Option(help="Which scene of the file, from 0; empty ones do not count.")
    ] = 0,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Methods, with commas between them.",
            show_default="all that take the prior",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the methods' random numbers.")] = 0,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="The objects of the model.",
            show_default="the model's own: square,triangle,square",
        ),
    ] = None,
    precision: Annotated[
        float | None,
        typer.Option(
            help="Precision of the noise that the model assumes.",
            show_default="the model's own: 1e4",
        ),
    ] = None,
    prior: Annotated[
        str, typer.Option(help="The prior: uniform (the paper's), presence, or sized.")
    ] = "uniform",
    rungs: Annotated[
        int | None,
        typer.Option(
            help="Replicas of each chain of gibbs and nuts, for tempering; 1 for none.",
            show_default="gibbs 12, nuts 1",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Call each method once: the time includes compilation.")
    ] = False,
) -> None:
    """Infer one scene with several methods and compare them with exact inference.

    The table has for each method the ELBO or log evidence in nats (± where it
    is an estimate by importance weights); the largest error of a match
    probability and the mean total variation (TV) from the exact marginals of a
    point; the largest error of a pose mean, in exact standard deviations; for
    samplers ESS per second and R-hat; for variational methods Pareto k, to be
    trusted below 0.7; and the time.

    [bold]Examples[/bold]

      [cyan]capsules compare scenes.npz[/cyan]
      [cyan]capsules compare scenes.npz --index 3 --methods ds,exact[/cyan]
      [cyan]capsules compare scenes.npz --methods exact,gibbs,nuts --rungs 16[/cyan]
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from inference.compare import compare as run
    from inference.compare import render
    from inference.methods import methods_for
    from models.errors import InputError
    from models.scenes import load_scenes

    stored = load_scenes(scenes)
    count = len(stored.points)
    if not 0 <= index < count:
        raise InputError(
            f"{scenes} has {count} scenes with points, so there is no scene {index}; give an index "
            f"from 0 to {count - 1}"
        )
    names = list(methods_for(prior)) if methods is None else _split(methods)
    objects = None if shapes is None else _split(shapes)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:

        def progress(name: str) -> "Report":
            task: Any = bar.add_task(name, total=None)
            return lambda done, total: bar.update(task, completed=done, total=total)

        rows = run(
            stored.take(index),
            names,
            seed=seed,
            objects=objects,
            precision=precision,
            prior=prior,
            rungs=rungs,
            twice=not once,
            progress=progress,
        )
    Console().print(render(rows))


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]
