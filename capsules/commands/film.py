"""`capsules film`: an inference, frame by frame."""

from pathlib import Path
from typing import Annotated, Any

import typer

from capsules.commands.options import Index, Precision, Seed, Shapes
from capsules.commands.shared import PAPER_SHAPES


def film(
    file: Annotated[
        Path, typer.Argument(metavar="SCENE", help="A scene file, or a .csv or .json of points.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The film to write: .gif, or .mp4 with ffmpeg.")
    ] = Path("fit.gif"),
    index: Index = 0,
    shapes: Shapes = PAPER_SHAPES,
    precision: Precision = None,
    restarts: Annotated[int, typer.Option(help="Number of runs; the best is shown.")] = 16,
    seed: Seed = 0,
    speed: Annotated[int, typer.Option(help="Frames per second.", min=1, max=50)] = 4,
) -> None:
    """Film coordinate ascent (ds) on one scene, from a random match to the solution.

    Each frame is a step: the current objects and match probabilities, and the
    ELBO and the annealing parameter beta so far. The ELBO falls where beta
    grows, because the model changes there.

    [bold]Examples[/bold]

      [cyan]capsules film scenes.npz --index 3[/cyan]
      [cyan]capsules film points.csv --out fit.mp4 --speed 8[/cyan]
    """
    from capsules.files.outputs import check_output, whole_file
    from inference.plots.film import check_film_format, write_film

    check_film_format(out)
    check_output(out, file)
    from capsules import methods
    from capsules.files.inputs import read_scene
    from inference import cavi
    from models.templates import object_names, shape_names

    names = shape_names(shapes)
    objects = None if shapes == PAPER_SHAPES else tuple(names)
    parts = methods.templates(objects)
    given: dict[str, Any] = {"objects": objects, "precision": precision}
    program = methods.check_options("ds", seed, num_restarts=restarts, **given)
    scene = read_scene(file, index, parts.num_parts)
    with whole_file(out) as film_file:
        result = cavi.run(
            program,
            scene,
            methods.key_of(seed),
            num_restarts=restarts,
            init_strategy="uniform",
            history=True,
        )
        frames = write_film(
            result,
            parts,
            film_file,
            out.suffix.lower(),
            object_names(names),
            frames_per_second=speed,
        )
    print(result.status)
    print(f"The film, of {frames} frames, is in {out}.")
