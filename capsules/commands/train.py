"""`capsules train`: the weights of a network, on scenes of the generator."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from capsules.commands.shared import keep_compiled_code, progress_bar


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
        typer.Option(help="Steps of the optimiser.", show_default="ccae 4000, amortised 30000"),
    ] = None,
    variant: Annotated[
        Variant, typer.Option(help="The size of ccae: as published, or small.")
    ] = Variant.small,
    seed: Annotated[int, typer.Option(help="Decides the weights, with all other options.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The file of weights.", show_default="weights/ccae-0.00.eqx, ..."
        ),
    ] = None,
) -> None:
    """Train a network on the generator's scenes and write its weights.

    [bold]ccae[/bold] is the autoencoder that the paper compares with. [bold]amortised[/bold] is a
    guide: the match of a scene in one pass. Beside the file of weights is a
    checkpoint while training lasts: the same command goes on from there after an
    interruption, to the same weights.

    [bold]Examples[/bold]

      [cyan]capsules train ccae --sigma 0 --steps 4000[/cyan]
      [cyan]capsules train amortised --sigma 0.25 --out weights/amortised-0.25.eqx[/cyan]
      [cyan]capsules evaluate scenes.npz --method ccae --weights weights/ccae-0.00.eqx[/cyan]
      [cyan]capsules reproduce table1 --weights weights[/cyan]
    """
    from models.errors import InputError

    if network is Network.amortised and variant is not Variant.small:
        raise InputError(
            "--variant is an option of ccae, but the network is amortised; leave it out"
        )
    if seed < 0:
        raise InputError(f"the seed must be 0 or more, got {seed}; try 0")
    keep_compiled_code()
    from capsules.methods import networks

    trained = networks(network)
    path = out or Path("weights") / f"{network}-{sigma:.2f}.eqx"
    num_steps = steps if steps is not None else {"ccae": 4000, "amortised": 30_000}[network]
    with progress_bar() as bar:
        task = bar.add_task(f"training {network}", total=num_steps)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        trained.train(network, path, sigma, num_steps, seed, variant, report)
    print(f"The weights are in {path}.")
