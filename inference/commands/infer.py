"""`capsules infer`: the objects of one scene."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inference.commands.points import read_scene
from inference.commands.shared import PAPER_SHAPES, check_picture_format, keep_compiled_code
from inference.commands.shared import shape_names as names_of

if TYPE_CHECKING:
    from inference.result import Result


def infer(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A scene file, or a .csv or .json of points.")
    ],
    method: Annotated[str, typer.Option(help="How to infer: ds, gmm, ransac, exact, ....")] = "ds",
    prior: Annotated[
        str, typer.Option(help="The prior over matches: uniform (the paper's) or presence.")
    ] = "uniform",
    index: Annotated[
        int, typer.Option(help="Which scene of a scene file, from 0; empty ones do not count.")
    ] = 0,
    shapes: Annotated[
        str, typer.Option(metavar="NAMES", help="The objects of the model.")
    ] = PAPER_SHAPES,
    precision: Annotated[
        float | None,
        typer.Option(help="Precision of the noise.", show_default="the model's own: 1e4"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random starts.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture to write: .png, .pdf or .svg.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="The answer as JSON; - for standard output."),
    ] = None,
) -> None:
    """Infer one scene: the objects in it, where they are, and which point is which part.

    Poses are those given the most probable match, as translation, scale and
    angle (degrees, clockwise when y points up) with a standard deviation each.

    [bold]Examples[/bold]

      [cyan]capsules infer scenes.npz --index 3[/cyan]
      [cyan]capsules infer points.csv --method ransac --plot objects.png[/cyan]
      [cyan]capsules infer points.json --method exact --json -[/cyan]
    """
    from models.scenes import whole_file

    if plot is not None:
        check_picture_format(plot)
    keep_compiled_code()
    from inference import methods
    from inference.plots import object_names, plot_demo

    names = names_of(shapes)
    objects = None if shapes == PAPER_SHAPES else tuple(names)
    parts = methods.templates(objects)
    methods.program_of(method, objects, precision, prior)  # before the file: a bad name is cheap
    scene = read_scene(file, index, parts.num_parts)
    options: dict[str, Any] = {"objects": objects, "precision": precision, "prior": prior}
    result = methods.infer(method, scene, seed, **options)
    program = methods.program_of(method, objects, precision, prior)
    answer = describe(result, program, object_names(names)) | {"prior": prior}
    if plot is not None:
        with whole_file(plot) as picture:
            figure = plot_demo([result], parts, object_names(names))
            figure.savefig(picture, dpi=110, format=plot.suffix[1:].lower())
    if json_file is not None and str(json_file) != "-":
        with whole_file(json_file) as out:
            out.write((json.dumps(answer, indent=2) + "\n").encode())
    if str(json_file) == "-":
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    else:
        _print(answer, result.status)


def describe(result: "Result", program: Any, names: Sequence[str]) -> dict[str, Any]:
    """The answer for a single scene, as plain lists and numbers."""
    import numpy as np

    from inference.readout import most_probable_match, poses_given_match, similarity_of

    match = most_probable_match(result)
    means, covariances = poses_given_match(program, result, match)
    first_part = [int(np.flatnonzero(result.owner == k)[0]) for k in range(len(names))]
    rows = np.flatnonzero(result.scene.present)
    points = []
    for number, row in enumerate(rows):
        part = int(match[row])
        owner = None if part < 0 else int(result.owner[part])
        points.append(
            {
                "point": number,
                "coordinates": [float(x) for x in result.scene.points[row]],
                "object": owner,
                "part": None if owner is None else part - first_part[owner],
                "probability": 0.0 if part < 0 else float(result.match_probs[row, part]),
            }
        )
    objects = []
    for k, name in enumerate(names):
        own = [point["point"] for point in points if point["object"] == k]
        if not own:
            continue
        pose = similarity_of(means[k], covariances[k])
        objects.append(
            {
                "object": k,
                "name": name,
                "points": own,
                "translation": pose.translation.tolist(),
                "translation_sd": pose.translation_sd.tolist(),
                "scale": pose.scale,
                "scale_sd": pose.scale_sd,
                "angle": float(np.degrees(pose.angle)),
                "angle_sd": float(np.degrees(pose.angle_sd)),
            }
        )
    bounds = {"elbo": result.elbo, "log_evidence": result.log_evidence}
    return {
        "method": result.method,
        "converged": bool(result.converged),
        "objects": objects,
        "points": points,
        **{name: float(value) for name, value in bounds.items() if value is not None},
    }


def _print(answer: dict[str, Any], status: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    objects = Table("object", "points", "x", "y", "scale", "angle", box=box.SIMPLE_HEAD)
    for entry in answer["objects"]:
        x, y = zip(entry["translation"], entry["translation_sd"], strict=True)
        objects.add_row(
            entry["name"],
            " ".join(map(str, entry["points"])),
            *("{:.3f} ± {:.3f}".format(*pair) for pair in (x, y)),
            f"{entry['scale']:.3f} ± {entry['scale_sd']:.3f}",
            f"{entry['angle']:.1f} ± {entry['angle_sd']:.1f}°",
        )
    names = {entry["object"]: entry["name"] for entry in answer["objects"]}
    points = Table("point", "coordinates", "object", "part", "probability", box=box.SIMPLE_HEAD)
    for point in answer["points"]:
        found = point["object"] is not None
        points.add_row(
            str(point["point"]),
            ", ".join(f"{x:.3f}" for x in point["coordinates"]),
            names[point["object"]] if found else "none",
            str(point["part"]) if found else "-",
            f"{point['probability']:.3f}" if found else "-",
        )
    console = Console()
    console.print(objects)
    console.print(points)
    console.print(status, highlight=False, style="dim")
