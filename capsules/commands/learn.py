"""`capsules learn` and `train`: numbers of the model, and weights of networks, from scenes."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from capsules.commands.options import Clutter, Precision, Prior, Seed, Shapes, Visibility
from capsules.commands.shared import PAPER_SHAPES, check_picture_format, progress_bar, save_picture


def learn(
    file: Annotated[Path, typer.Argument(metavar="FILE.npz", help="Scenes; labels are not used.")],
    what: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="What to learn, separated by commas: precision, pose, presence, visibility, "
            "clutter, templates.",
        ),
    ] = "precision,pose",
    out: Annotated[
        Path, typer.Option(metavar="FILE.npz", help="The file of learnt numbers to write.")
    ] = Path("learned.npz"),
    prior: Prior = "presence",
    e_step: Annotated[str, typer.Option(help="Inference of the scenes: exact, ds, or map.")] = "ds",
    rounds: Annotated[int, typer.Option(help="Rounds of expectation maximisation.", min=1)] = 100,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Scenes between updates of the numbers.", show_default="all"),
    ] = None,
    holdout: Annotated[
        float, typer.Option(help="Share of the scenes, the last ones, that is held out.")
    ] = 0.2,
    limit: Annotated[
        int | None, typer.Option(help="The number of scenes to read, counting empty ones.")
    ] = None,
    shapes: Shapes = PAPER_SHAPES,
    precision: Precision = None,
    visibility: Visibility = None,
    clutter: Clutter = 0,
    seed: Seed = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture to write: .png, .pdf or .svg.")
    ] = None,
) -> None:
    """Learn numbers of the model from scenes, by expectation maximisation.

    Each round infers every scene with the current numbers and then chooses the
    numbers that best explain what was inferred. With [bold]--e-step exact[/bold]
    the log evidence of the scenes never falls. `infer`, `evaluate` and `compare`
    take the file with [bold]--learned[/bold], under any prior that has such
    numbers. A checkpoint is kept beside the file during learning: after an
    interruption the same command resumes there and ends in the same numbers.

    [bold]Examples[/bold]

      [cyan]capsules learn scenes.npz --out learned.npz[/cyan]
      [cyan]capsules learn scenes.npz --what precision,pose,presence --e-step exact[/cyan]
      [cyan]capsules learn scenes.npz --what templates --plot templates.png[/cyan]
      [cyan]capsules evaluate others.npz --learned learned.npz[/cyan]
    """
    from capsules.files.inputs import load_scenes
    from capsules.files.learned import save_learned
    from capsules.files.outputs import check_output
    from models.errors import InputError
    from models.templates import shape_names

    names = shape_names(shapes)
    check_output(out, file)
    if plot is not None:
        check_picture_format(plot)
        check_output(plot, file, out)
    from capsules.experiments.learnable import leave_open
    from capsules.experiments.resumed import Checkpoint
    from capsules.methods import PRIORS, key_of, templates
    from inference.learning import learn as run

    if prior not in PRIORS:
        raise InputError(f"there is no prior {prior!r}; choose from {', '.join(PRIORS)}")
    templates(tuple(names), clutter)  # not too many
    options: dict[str, Any] = {"precision": precision, "visibility": visibility}
    given = {name: x for name, x in options.items() if x is not None}
    program = leave_open(
        PRIORS[prior],
        [name.strip() for name in what.split(",")],
        names,
        clutter,
        given,
    )
    scenes = load_scenes(file, limit=limit)
    asked = {"what": what, "prior": prior, "e_step": e_step, "holdout": holdout, "seed": seed}
    asked |= {"shapes": names, "clutter": clutter, "batch_size": batch_size, "rounds": rounds}
    checkpoint = Checkpoint(out, scenes, asked | options)
    with progress_bar() as bar:
        task = bar.add_task("learning", total=rounds)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        learned = run(
            program,
            scenes,
            key_of(seed),
            e_step=e_step,  # type: ignore[arg-type]
            num_steps=rounds,
            batch_size=batch_size,
            holdout=holdout,
            begin=checkpoint.read(),
            keep=checkpoint.keep,
            progress_bar=report,
        )
    save_learned(out, learned, given)
    checkpoint.forget()
    print(learned.status)
    for name, value in learned.params.items():
        print(_line(name, value, learned.standard_errors[name]))
    print(f"Wrote {out}.")
    if plot is not None:
        from inference.plots.learning import plot_learned

        save_picture(plot_learned(learned), plot)
        print(f"Wrote {plot}.")


def _line(name: str, value: Any, error: Any) -> str:
    """The numbers of one name with their standard errors."""
    import numpy as np

    numbers = [f"{x:.4g} ± {e:.2g}" for x, e in zip(np.ravel(value), np.ravel(error), strict=True)]
    width = np.shape(value)[-1] if np.ndim(value) else 1
    rows = [", ".join(numbers[i : i + width]) for i in range(0, len(numbers), width)]
    return "\n".join(f"  {name if i == 0 else '':16} {row}" for i, row in enumerate(rows))


class Network(StrEnum):
    """What can be trained."""

    ccae = "ccae"
    amortised = "amortised"


class Variant(StrEnum):
    """Sizes of CCAE."""

    small = "small"
    published = "published"


def train(
    network: Annotated[Network, typer.Argument(help="The network.")],
    sigma: Annotated[float, typer.Option(help="Template noise of the scenes to train on.")] = 0.0,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of the optimiser.", show_default="ccae 6000, amortised 30000"),
    ] = None,
    variant: Annotated[
        Variant, typer.Option(help="The size of ccae: as published, or small.")
    ] = Variant.small,
    seed: Annotated[int, typer.Option(help="Seed of the scenes and of the weights.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The file of weights.", show_default="weights/ccae-0.00.eqx, ..."
        ),
    ] = None,
) -> None:
    """Train a network on the generator's scenes and write its weights.

    [bold]ccae[/bold] is the autoencoder that the paper compares with. [bold]amortised[/bold] is a
    guide: the match of a scene in one pass. A checkpoint is kept beside the file
    of weights during training: after an interruption the same command resumes
    there and ends in the same weights.

    [bold]Examples[/bold]

      [cyan]capsules train ccae --sigma 0 --steps 6000[/cyan]
      [cyan]capsules train amortised --sigma 0.25 --out weights/amortised-0.25.eqx[/cyan]
      [cyan]capsules evaluate scenes.npz --method ccae --weights weights/ccae-0.00.eqx[/cyan]
      [cyan]capsules reproduce table1 --weights weights[/cyan]
    """
    from models.errors import InputError

    if network is Network.amortised and variant is not Variant.small:
        raise InputError(
            "--variant is an option of ccae, but the network is amortised; leave it out"
        )
    from capsules.methods import key_of, networks

    key_of(seed)  # before the work
    trained = networks(network)
    path = out or Path("weights") / f"{network}-{sigma:.2f}.eqx"
    num_steps = steps if steps is not None else {"ccae": 6000, "amortised": 30_000}[network]
    with progress_bar() as bar:
        task = bar.add_task(f"training {network}", total=num_steps)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        trained.train(network, path, sigma, num_steps, seed, variant, report)
    print(f"The weights are in {path}.")
