"""`capsules faces`: scenes of faces. `capsules reproduce faces` ends here too."""

from pathlib import Path
from typing import Annotated

import typer

from inference.commands.shared import check_picture_format, keep_compiled_code

app = typer.Typer(
    no_args_is_help=True,
    help="Scenes of faces: parts with a place, a size, a direction and an appearance.",
)

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
    from models.scenes import whole_file

    check_picture_format(out)
    with whole_file(out) as file:  # opened before the work: a bad path is found out at once
        keep_compiled_code()
        from inference.faces_experiment import METHODS, explain, measure, open_study
        from inference.faces_report import plot_faces

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
        figure = plot_faces(study, scenes, explained)
        figure.savefig(file, dpi=110, format=out.suffix[1:].lower())
    print(f"The picture is in {out}.")


@app.command()
def reproduce(
    scenes: Annotated[int, typer.Option(help="Scenes of each number of faces.")] = 250,
    more: Annotated[bool, typer.Option("--more", help="Up to 10 faces; the paper has 5.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the scenes and of random starts.")] = 0,
    images: Images = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write to.")] = Path(
        "results"
    ),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Do not use what an earlier run has left.")
    ] = False,
) -> None:
    """Make the table of the faces experiment: the paper's numbers, and ours on drawn faces.

    What was computed is kept in DIR: the same command goes on after an
    interruption and ends in the same numbers.

    [bold]Examples[/bold]

      [cyan]capsules faces reproduce[/cyan]
      [cyan]capsules faces reproduce --scenes 20 --more[/cyan]
    """
    from models.errors import InputError

    if scenes < 1:
        raise InputError(f"wanted at least one scene of each kind, got {scenes}; try 250")
    keep_compiled_code()
    from rich.console import Console
    from rich.progress import Progress

    from inference.faces_experiment import CELLS, MORE_CELLS, Cell, open_study, run_cells
    from inference.faces_report import write_report

    blocks = out / "faces_blocks"
    try:
        blocks.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write to {out} ({error.strerror}); choose another --out"
        ) from error
    if fresh:
        for path in blocks.glob("*.npz"):
            path.unlink()
    study = open_study(images)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("scenes", total=None)

        def report(cell: Cell, done: int, total: int) -> None:
            bar.update(task, description=cell.name, completed=done, total=total)

        cells = CELLS + MORE_CELLS if more else CELLS
        numbers = run_cells(study, cells, scenes, seed, blocks, report)
    for path in write_report(numbers, study, out):
        print(f"Wrote {path}.")
    print((out / "faces.md").read_text())
