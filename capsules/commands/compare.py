"""The command `capsules compare`. Heavy imports wait until it runs, so that help is quick."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsules.commands.options import Index, LearnedFile, OtherShapes, Precision, Prior, Rungs, Seed
from capsules.commands.shared import progress_bar

if TYPE_CHECKING:
    from inference.result import Report


def compare(
    scenes: Annotated[
        Path, typer.Argument(metavar="SCENE.npz", help="A file of scenes, as `sample` writes it.")
    ],
    index: Index = 0,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Methods, separated by commas.",
            show_default="all that take the prior",
        ),
    ] = None,
    seed: Seed = 0,
    shapes: OtherShapes = None,
    precision: Precision = None,
    prior: Prior = "uniform",
    learned: LearnedFile = None,
    rungs: Rungs = None,
    once: Annotated[
        bool, typer.Option("--once", help="Call each method once: the time includes compilation.")
    ] = False,
) -> None:
    """Infer one scene with several methods and compare them with exact inference.

    The table has for each method the ELBO or log evidence in nats; for
    variational methods the log evidence by importance weights and its error,
    reliable if Pareto k is below 0.7; the largest error of a match probability
    and the mean total variation (TV) from the exact marginals of a point; the
    largest error of a pose mean, in exact standard deviations; for samplers
    ESS per second and R-hat; and the time.

    [bold]Examples[/bold]

      [cyan]capsules compare scenes.npz[/cyan]
      [cyan]capsules compare scenes.npz --index 3 --methods ds,exact[/cyan]
      [cyan]capsules compare scenes.npz --methods exact,gibbs,nuts --rungs 16[/cyan]
    """
    from rich.console import Console

    from capsules.experiments.compare import compare as run
    from capsules.experiments.compare import render
    from capsules.files.inputs import stored_scene
    from capsules.methods import methods_for
    from models.templates import shape_names

    scene = stored_scene(scenes, index)
    chosen = None if methods is None else [name.strip() for name in methods.split(",")]
    names = list(methods_for(prior)) if chosen is None else chosen
    objects = None if shapes is None else shape_names(shapes)
    with progress_bar() as bar:

        def progress(name: str) -> "Report":
            task: Any = bar.add_task(name, total=None)
            return lambda done, total: bar.update(task, completed=done, total=total)

        rows = run(
            scene,
            names,
            seed=seed,
            objects=objects,
            precision=precision,
            prior=prior,
            learned=None if learned is None else str(learned),
            rungs=rungs,
            twice=not once,
            progress=progress,
        )
    Console().print(render(rows))
