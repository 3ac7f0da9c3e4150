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
    LearnedFile,
    Method,
    Precision,
    Preset,
    Prior,
    Restarts,
    Rungs,
    Seed,
    Shapes,
    Visibility,
    Weights,
)
from capsules.commands.shared import PAPER_SHAPES, check_picture_format, save_picture

if TYPE_CHECKING:
    from inference.result import Result
    from models.templates import Parts

MAX_WORKERS = 1024
"""Largest number of processes of a machine; each takes about a gigabyte."""


def infer(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A scene file, or a .csv or .json of points.")
    ],
    method: Method = "ds",
    prior: Prior = "uniform",
    visibility: Visibility = None,
    clutter: Clutter = 0,
    preset: Preset = "default",
    restarts: Restarts = None,
    rungs: Rungs = None,
    index: Index = 0,
    shapes: Shapes = PAPER_SHAPES,
    precision: Precision = None,
    weights: Weights = None,
    learned: LearnedFile = None,
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
    devices: scale.Devices = 1,
    workers: scale.Workers = None,
    cluster: scale.Cluster = None,
    fresh: scale.Fresh = False,
) -> None:
    """Infer one scene: the objects in it, where they are, and which point is which part.

    Poses are given the most probable match, as translation, scale and angle
    (degrees, clockwise when y points up), each with a standard deviation.
    With [bold]--clutter[/bold] points may belong to no object; in the answer their object has
    the number after the last.

    With [bold]--all[/bold] every scene of a file of any size is inferred in bounded memory;
    answers are written to DIR block by block, and the same command resumes after
    an interruption. docs/scale.md says what is in DIR and how several devices,
    processes or machines share the work.

    [bold]Examples[/bold]

      [cyan]capsules infer scenes.npz --index 3[/cyan]
      [cyan]capsules infer points.csv --method ransac --plot objects.png[/cyan]
      [cyan]capsules infer points.json --method exact --json -[/cyan]
      [cyan]capsules infer cluttered.npz --clutter 3 --prior presence[/cyan]
      [cyan]capsules infer scenes.npz --all --restarts 5 --workers 2 --out answers[/cyan]
    """
    if every and cluster is not None and workers is None:  # before the imports, which take seconds
        scale.check_scheduler(cluster)
    from capsules.files.outputs import check_output, whole_file
    from models.errors import InputError
    from models.templates import object_names, shape_names

    names = shape_names(shapes)
    objects = None if shapes == PAPER_SHAPES else tuple(names)
    options: dict[str, Any] = {"objects": objects, "precision": precision, "prior": prior}
    options |= {"preset": preset} | ({} if restarts is None else {"num_restarts": restarts})
    options |= {"clutter": clutter} if clutter else {}
    options |= {} if visibility is None else {"visibility": visibility}
    options |= {} if weights is None else {"weights": str(weights)}
    options |= {} if learned is None else {"learned": str(learned)}
    options |= {} if rungs is None else {"num_temperatures": rungs}
    if every:
        if (index, plot, json_file) != (0, None, None):
            raise InputError(
                "--index, --plot and --json are for one scene; leave them or --all out"
            )
        if out is None:
            raise InputError("--all needs a folder for the answers; give it with --out DIR")
        if workers is not None and (cluster is not None or not 1 <= workers <= MAX_WORKERS):
            raise InputError(
                f"--workers must be 1 to {MAX_WORKERS}, without --cluster, got {workers}; choose "
                "one"
            )
        _infer_all(file, out, (method, seed, options, devices), fresh, workers, cluster)
        return
    if (out, workers, cluster) != (None,) * 3 or fresh or devices != 1:
        raise InputError(
            "--out, --devices, --workers, --cluster and --fresh are for many scenes; give --all "
            "too, or leave them out"
        )

    to_file = None if json_file is None or str(json_file) == "-" else json_file
    if plot is not None:
        check_picture_format(plot)
        check_output(plot, file, weights, learned)
    if to_file is not None:
        check_output(to_file, file, weights, learned, plot)
    from capsules import methods
    from capsules.files.inputs import read_scene

    program = methods.check_options(method, seed, **options)  # cheaper than reading the file
    parts = program.keywords["parts"]  # learnt ones, if there are any
    scene = read_scene(file, index, parts.num_parts)
    result = methods.infer(method, scene, seed, **options)
    answer = describe(result, program, parts, object_names(names)) | {"prior": prior}
    if plot is not None:
        from inference.plots.scenes import plot_demo

        save_picture(plot_demo([result], parts, object_names(names)), plot)
    if to_file is not None:
        with whole_file(to_file) as written:
            written.write((json.dumps(answer, indent=2) + "\n").encode())
    if str(json_file) == "-":
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    else:
        _print(answer, result.status)


def _infer_all(
    file: Path,
    folder: Path,
    asked: tuple[str, int, dict[str, Any], int],
    fresh: bool,
    workers: int | None,
    address: str | None,
) -> None:
    from capsules.batch import MANIFEST, Job, Work
    from capsules.cluster import client_of, compute
    from capsules.files.inputs import SceneFile
    from capsules.methods import check_options

    job = Job(*asked)
    check_options(job.method, job.seed, **job.all_options)
    with SceneFile(file) as scenes, scale.open_store(folder) as store:
        work = Work(job, scenes, store)
        if fresh:
            store.forget(work.entries)
        missing = work.missing()
        scale.say_what_is_there(len(work) - len(missing), len(work))
        sizes = {block: len(work.numbers_of(block)) for block in missing}
        with scale.progress_of_scenes(sum(sizes.values())) as report:
            if missing and (address is not None or workers is not None):
                with client_of(address, workers or 1) as client:
                    for block in compute(client, work, missing):
                        report(sizes[block])(1, 1)
            else:
                for block in missing:
                    work.result(block, report(sizes[block]))
        work.write_manifest()
    print(f"Wrote {len(work.numbers):,} scenes in {len(work)} parts: {folder / MANIFEST}.")


def describe(
    result: "Result", program: Any, parts: "Parts", names: Sequence[str]
) -> dict[str, Any]:
    """The answer for a single scene, as plain lists and numbers.

    Identical objects have the same names as in the picture.
    """
    import numpy as np

    from inference.diagnostics.readout import (
        most_probable_match,
        poses_given_match,
        relabel,
        renaming,
        similarity_of,
    )

    match = most_probable_match(result)
    means, covariances = poses_given_match(program, result, match)
    first_part = [int(np.flatnonzero(result.owner == k)[0]) for k in range(len(names))]
    truth = result.scene.object
    shown = relabel(result, parts, result.labels if truth is None else np.asarray(truth)).labels
    found = np.where(match < 0, -1, result.owner[match])
    name_of = [*map(int, renaming(found, parts, shown)), len(names)]
    rows = np.flatnonzero(result.scene.present)
    points = []
    for number, row in enumerate(rows):
        part = int(match[row])
        owner = None if part < 0 else int(result.owner[part])
        is_clutter = owner == len(names)  # its slot is arbitrary
        same = result.owner == owner if is_clutter else np.arange(len(match)) == part
        points.append(
            {
                "point": number,
                "coordinates": [float(x) for x in result.scene.points[row]],
                "object": None if owner is None else name_of[owner],
                "part": None if owner is None or is_clutter else part - first_part[owner],
                "probability": 0.0 if part < 0 else float(result.match_probs[row, same].sum()),
            }
        )
    objects = []
    for k, name in enumerate(names):
        own = [point["point"] for point in points if point["object"] == k]
        if not own:
            continue
        old_name = name_of.index(k)
        pose = similarity_of(means[old_name], covariances[old_name])
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
    numbers = ("elbo", "log_evidence", "log_evidence_error")
    bounds = {name: getattr(result, name) for name in numbers}
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
