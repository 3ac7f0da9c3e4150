"""`capsules infer`: the objects of one scene, or of every scene of a file."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsules.commands import scale
from capsules.commands.options import (
    Clutter,
    Index,
    Precision,
    Preset,
    Prior,
    Restarts,
    Rungs,
    Seed,
    Shapes,
    Weights,
)
from capsules.commands.shared import PAPER_SHAPES, check_picture_format, keep_compiled_code
from capsules.commands.shared import shape_names as names_of
from capsules.files.points import read_scene

if TYPE_CHECKING:
    from inference.result import Result


def infer(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A scene file, or a .csv or .json of points.")
    ],
    method: Annotated[str, typer.Option(help="How to infer: ds, gmm, ransac, exact, ....")] = "ds",
    prior: Prior = "uniform",
    clutter: Clutter = 0,
    preset: Preset = "default",
    restarts: Restarts = None,
    rungs: Rungs = None,
    index: Index = 0,
    shapes: Shapes = PAPER_SHAPES,
    precision: Precision = None,
    weights: Weights = None,
    seed: Seed = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture to write: .png, .pdf or .svg.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="The answer as JSON; - for standard output."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Infer every scene of a scene file, into --out.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder for the answers of --all.")
    ] = None,
    chunk: scale.Chunk = None,
    devices: scale.Devices = 1,
    fresh: scale.Fresh = False,
    coordinator: scale.Coordinator = None,
    process: scale.Process = None,
    processes: scale.Processes = None,
) -> None:
    """Infer one scene: the objects in it, where they are, and which point is which part.

    Poses are those given the most probable match, as translation, scale and
    angle (degrees, clockwise when y points up) with a standard deviation each.
    With [bold]--clutter[/bold] points may belong to no object; in the answer their object is one
    more than the last.

    With [bold]--all[/bold] every scene of a file of any size is worked off in bounded memory;
    the answers go to DIR as they come, and the same command goes on after an
    interruption. docs/scale.md says what is in DIR and how several devices or
    machines share the work.

    [bold]Examples[/bold]

      [cyan]capsules infer scenes.npz --index 3[/cyan]
      [cyan]capsules infer points.csv --method ransac --plot objects.png[/cyan]
      [cyan]capsules infer points.json --method exact --json -[/cyan]
      [cyan]capsules infer cluttered.npz --clutter 3 --prior presence[/cyan]
      [cyan]capsules infer scenes.npz --all --restarts 5 --out answers[/cyan]
    """
    meets = every and out is not None and (index, plot, json_file) == (0, None, None)
    # Before `models` is imported, which makes arrays: JAX must not before the processes have met.
    number = scale.check_processes(coordinator, process, processes) if meets else (0, 1)

    from capsules.files.scenes import whole_file
    from models.errors import InputError

    names = names_of(shapes)
    objects = None if shapes == PAPER_SHAPES else tuple(names)
    options: dict[str, Any] = {"objects": objects, "precision": precision, "prior": prior}
    options |= {"preset": preset} | ({} if restarts is None else {"num_restarts": restarts})
    options |= {"clutter": clutter} if clutter else {}
    options |= {} if weights is None else {"weights": str(weights)}
    options |= {} if rungs is None else {"num_temperatures": rungs}
    if every:
        if (index, plot, json_file) != (0, None, None):
            raise InputError(
                "--index, --plot and --json are for one scene; leave them or --all out"
            )
        place = scale.folder_of(out)
        keep_compiled_code()
        _infer_all(file, place, (method, seed, options, devices), chunk, fresh, number)
        return
    if (out, chunk, coordinator, process, processes) != (None,) * 5 or fresh or devices != 1:
        raise InputError(
            "--out, --chunk, --devices, --fresh, --coordinator, --process and --processes are for "
            "many scenes; give --all too, or leave them out"
        )

    if plot is not None:
        check_picture_format(plot)
    keep_compiled_code()
    from capsules import methods
    from inference.plots.scenes import plot_demo
    from models.templates import object_names

    parts = methods.templates(objects, clutter)
    # Before the file is read: a bad name is cheap.
    program = methods.program_of(method, objects, precision, prior, preset, clutter)
    scene = read_scene(file, index, parts.num_parts)
    result = methods.infer(method, scene, seed, **options)
    answer = describe(result, program, object_names(names)) | {"prior": prior}
    if plot is not None:
        with whole_file(plot) as picture:
            figure = plot_demo([result], parts, object_names(names))
            figure.savefig(picture, dpi=110, format=plot.suffix[1:].lower())
    if json_file is not None and str(json_file) != "-":
        with whole_file(json_file) as written:
            written.write((json.dumps(answer, indent=2) + "\n").encode())
    if str(json_file) == "-":
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    else:
        _print(answer, result.status)


def _infer_all(
    file: Path,
    folder: Path,
    asked: tuple[str, int, dict[str, Any], int],
    chunk: int | None,
    fresh: bool,
    number: tuple[int, int],
) -> None:
    from capsules.batch import MANIFEST, Job, Work
    from capsules.files.scenes import SceneFile
    from capsules.methods import check_options

    job = Job(*asked)
    check_options(job.method, job.seed, **job.all_options)
    with SceneFile(file) as scenes:
        work = Work(job, scenes, folder, chunk=chunk, fresh=fresh)
        share = work.share(*number)
        scale.say_what_is_kept(work, share)
        if not scale.work_off(work, share):
            print(f"Wrote {len(work.numbers):,} scenes in {len(work)} parts: {folder / MANIFEST}.")


def describe(result: "Result", program: Any, names: Sequence[str]) -> dict[str, Any]:
    """The answer for a single scene, as plain lists and numbers."""
    import numpy as np

    from inference.diagnostics.readout import most_probable_match, poses_given_match, similarity_of

    match = most_probable_match(result)
    means, covariances = poses_given_match(program, result, match)
    first_part = [int(np.flatnonzero(result.owner == k)[0]) for k in range(len(names))]
    rows = np.flatnonzero(result.scene.present)
    points = []
    for number, row in enumerate(rows):
        part = int(match[row])
        owner = None if part < 0 else int(result.owner[part])
        is_clutter = owner == len(names)  # which slot it has means nothing
        same = result.owner == owner if is_clutter else np.arange(len(match)) == part
        points.append(
            {
                "point": number,
                "coordinates": [float(x) for x in result.scene.points[row]],
                "object": owner,
                "part": None if owner is None or is_clutter else part - first_part[owner],
                "probability": 0.0 if part < 0 else float(result.match_probs[row, same].sum()),
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
    clutter = [point["point"] for point in points if point["object"] == len(names)]
    bounds = {"elbo": result.elbo, "log_evidence": result.log_evidence}
    return {
        "method": result.method,
        "converged": bool(result.converged),
        "objects": objects,
        "points": points,
        **({"clutter": clutter} if result.owner.max() == len(names) else {}),
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
        is_clutter = point["point"] in answer.get("clutter", [])
        points.add_row(
            str(point["point"]),
            ", ".join(f"{x:.3f}" for x in point["coordinates"]),
            "clutter" if is_clutter else names[point["object"]] if found else "none",
            str(point["part"]) if found and not is_clutter else "-",
            f"{point['probability']:.3f}" if found else "-",
        )
    console = Console()
    console.print(objects)
    console.print(points)
    console.print(status, highlight=False, style="dim")
