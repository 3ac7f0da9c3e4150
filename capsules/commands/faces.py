"""`capsules faces demo` and `film`, and the part of `capsules reproduce` that is about faces."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsules.commands.scale import open_store, say_what_is_there
from capsules.commands.shared import check_picture_format, progress_of_blocks, save_picture

if TYPE_CHECKING:
    from capsules.faces.experiment import FaceStudy

app = typer.Typer(no_args_is_help=True)

Images = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Part images: masks/PART.png and GROUP/PART_VARIANT.png, 224 x 224 pixels.",
        show_default="drawn by seed",
    ),
]


@app.command()
def demo(
    num_faces: Annotated[int, typer.Option("--faces", help="How many faces.")] = 4,
    occluded: Annotated[
        bool, typer.Option("--occluded", help="Let faces hide each other and leave the canvas.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the scene and of random starts.")] = 0,
    images: Images = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture to write: .png, .pdf or .svg.")
    ] = Path("faces.png"),
) -> None:
    """Infer the faces of one scene and draw them: the scene, VI and RANSAC side by side.

    [bold]Examples[/bold]

      [cyan]capsules faces demo[/cyan]
      [cyan]capsules faces demo --faces 3 --occluded --seed 4 --out occluded.png[/cyan]
    """
    from capsules.files.outputs import check_output

    check_picture_format(out)
    check_output(out)  # before the work
    from capsules.faces.experiment import METHODS, explain, measure, open_study
    from capsules.faces.report import plot_faces
    from capsules.methods import key_of

    key_of(seed)  # before the work
    study = open_study(images)
    scenes = study.scenes(1, num_faces, seed, occluded)
    explained = explain(study, scenes, seed)
    numbers = measure(study, scenes, explained)
    for name, label in METHODS.items():
        right = numbers.get(f"right_{name}", numbers["right_ransac"])[0]
        print(
            f"{label:26} assignment {'right' if right else 'wrong'}, RMSE of the scene "
            f"{numbers[f'scene_{name}'][0]:.4f}, of the appearance "
            f"{numbers[f'appearance_{name}'][0]:.3f}"
        )
    save_picture(plot_faces(study, scenes, explained), out)
    print(f"The picture is in {out}.")


@app.command()
def film(
    num_faces: Annotated[int, typer.Option("--faces", help="How many faces.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the scene and of random starts.")] = 0,
    images: Images = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The film to write: .gif, or .mp4 with ffmpeg.")
    ] = Path("faces.gif"),
    speed: Annotated[int, typer.Option(help="Frames per second.", min=1, max=50)] = 4,
) -> None:
    """Film coordinate ascent on a scene of faces, from a random match to the solution.

    Each frame is a step: the scene, its parts in the colours of their faces, the
    faces inferred so far, and the ELBO and the annealing parameter beta.

    [bold]Examples[/bold]

      [cyan]capsules faces film --faces 4 --out faces.gif[/cyan]
    """
    from capsules.files.outputs import check_output, whole_file
    from inference.plots.film import DPI, check_film_format, write_frames

    check_film_format(out)
    check_output(out)  # before the work
    from matplotlib.figure import Figure

    from capsules.faces.experiment import RESTARTS, open_study
    from capsules.faces.report import draw_face_frames
    from capsules.methods import key_of
    from inference import cavi

    key = key_of(seed)  # before the work
    study = open_study(images)
    scenes = study.scenes(1, num_faces, seed)
    options: dict[str, Any] = {
        "init_strategy": "uniform",
        "fewest_points": 1,
        "history": True,
    }
    with whole_file(out) as file:
        scene, program = scenes.scene.take(0), study.program(num_faces)
        result = cavi.run(program, scene, key, num_restarts=RESTARTS, **options)
        figure = Figure(figsize=(13.0, 3.4), dpi=DPI, layout="constrained")
        frames = draw_face_frames(figure, study, scenes, result)
        count = write_frames(figure, frames, file, out.suffix.lower(), speed)
    print(result.status)
    print(f"The film, of {count} frames, is in {out}.")


@app.callback()
def faces() -> None:
    """Scenes of faces: parts with a place, a size, a direction and an appearance."""


def reproduce_faces(
    study: "FaceStudy", drawn: bool, num_scenes: int, more: bool, seed: int, out: Path, fresh: bool
) -> None:
    """Make the tables of the faces experiment.

    Args:
        drawn: whether the images were drawn by the project's artist.
        more: whether to add scenes of up to 10 faces.
    """
    from capsules.faces.experiment import CELLS, MORE_CELLS, blocks_of, run_blocks
    from capsules.faces.report import write_report

    cells = CELLS + MORE_CELLS if more else CELLS
    with open_store(out / "blocks") as store:
        blocks = blocks_of(study, cells, num_scenes, seed, store)
        entries = [block.entry for block in blocks]
        if fresh:
            store.forget(entries)
        say_what_is_there(sum(map(store.has, entries)), len(entries))
        with progress_of_blocks() as report:
            numbers = run_blocks(study, blocks, seed, store, report)
        for path in write_report(numbers, study, out, drawn):
            print(f"Wrote {path}.")
