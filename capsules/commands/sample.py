"""`capsules sample`: draw scenes and write them to a file."""

from pathlib import Path
from typing import Annotated

import typer

from capsules.commands.shared import PAPER_SHAPES


def sample(
    out: Annotated[Path, typer.Argument(metavar="OUT.npz", help="The file to write.")],
    draws: Annotated[
        int,
        typer.Option(help="Draws, before empty scenes are dropped."),
    ] = 512,
    sigma: Annotated[
        float, typer.Option(help="Standard deviation of the noise on a template's vertices.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    shapes: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="The objects that a scene may contain, each with probability 1/2, of square, "
            "triangle, trapezoid, pentagon, L, plane.",
        ),
    ] = PAPER_SHAPES,
    centred: Annotated[
        bool | None,
        typer.Option(
            "--centred/--no-centred",
            help="Centre the shapes before they are turned.",
            show_default="as in the published sets: centred if sigma > 0",
        ),
    ] = None,
    clutter: Annotated[
        int,
        typer.Option(
            help="Points that belong to no object, each with probability 1/2, uniform in the frame."
        ),
    ] = 0,
) -> None:
    """Draw scenes of the constellations experiment and write them to a file.

    The npz file has plain arrays: [bold]points[/bold] (scenes, rows, 2),
    [bold]present[/bold] (scenes, rows), false where a row has no point, and
    [bold]object[/bold] (scenes, rows), the true object of each row, -1 if it has
    no point and the number of objects if it is clutter. The same seed gives the
    same scenes, and the first ones are the same for any number of draws.

    [bold]Examples[/bold]

      [cyan]capsules sample test.npz[/cyan]
      [cyan]capsules sample clean.npz --draws 10000 --sigma 0 --seed 1[/cyan]
      [cyan]capsules sample pentagons.npz --shapes pentagon,pentagon,L[/cyan]
      [cyan]capsules sample cluttered.npz --sigma 0 --clutter 3[/cyan]
    """
    from capsules.experiments.generator import sample_scenes
    from capsules.files.outputs import check_output, save_scenes
    from models.errors import InputError
    from models.templates import shape_names

    names = shape_names(shapes)
    check_output(out)
    scenes = sample_scenes(draws, sigma, seed, names, centred, clutter=clutter)
    kept = len(scenes.points)
    if not kept:
        raise InputError(
            f"{draws} draws with seed {seed} gave no object at all, so there is no scene to write; "
            "draw more, or choose another seed"
        )
    save_scenes(out, scenes)
    print(f"Wrote {kept} scenes to {out} ({draws} draws, {draws - kept} of them empty).")
