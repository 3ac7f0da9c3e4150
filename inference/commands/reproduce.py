"""`capsules reproduce`: the tables of the paper."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inference.commands.shared import keep_compiled_code

if TYPE_CHECKING:
    from inference.experiments import Cell, Numbers


class Study(StrEnum):
    """What can be reproduced."""

    table1 = "table1"
    beta = "beta"
    mask = "mask"
    all = "all"


def reproduce(
    study: Annotated[
        Study,
        typer.Argument(
            help="The main table, the study of the initial beta, its tables with the ground-truth "
            "mask, or all of them."
        ),
    ],
    scenes: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Take the scenes from constellations_0.00.npz, _0.10.npz and _0.25.npz in this "
            "folder.",
            show_default="drawn by seed",
        ),
    ] = None,
    draws: Annotated[int, typer.Option(help="Draws of each noise level.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the scenes and of random starts.")] = 0,
    methods: Annotated[
        str, typer.Option(metavar="NAMES", help="The methods to run.")
    ] = "gmm,ds,ransac,exact",
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write to.")] = Path(
        "results"
    ),
    chunk: Annotated[
        int, typer.Option(help="Scenes between two files; does not change the numbers.")
    ] = 64,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Do not use what an earlier run has left.")
    ] = False,
) -> None:
    """Make the tables of the paper: its numbers, and ours beside them.

    Each cell has the paper's number, ours under the settings of the paper's
    text, and ours under our defaults. The tables are printed and written to
    DIR as Markdown, CSV and a figure. What was computed is kept there: the same
    command goes on after an interruption and ends in the same numbers.

    [bold]Examples[/bold]

      [cyan]capsules reproduce table1[/cyan]
      [cyan]capsules reproduce all --scenes published/ --out results[/cyan]
      [cyan]capsules reproduce beta --methods ds --draws 100[/cyan]
    """
    from models.errors import InputError

    if chunk < 1:
        raise InputError(f"a chunk wants at least one scene, got {chunk}; try 64")
    keep_compiled_code()
    from inference import experiments
    from inference.methods import METHODS
    from inference.tables import write_tables

    names = [name.strip() for name in methods.split(",")]
    if unknown := [name for name in names if name not in METHODS]:
        raise InputError(f"there is no method {unknown[0]!r}; give some of {', '.join(METHODS)}")
    cells = experiments.study_cells(study, names)
    if not cells:
        raise InputError(f"{study} is a study of ds and gmm, but got {methods}; name one of them")
    tests = experiments.test_sets(scenes, draws, seed)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write to {out} ({error.strerror}); choose another --out"
        ) from error
    store = experiments.Store(out / "blocks", tests, seed)
    if fresh:
        store.forget(cells)
    try:
        numbers = _work(cells, store, chunk)
    except KeyboardInterrupt:
        print(f"What was computed is kept in {store.folder}; the same command goes on from there.")
        raise
    for path in write_tables(study, numbers, tests, out):
        print(f"Wrote {path}.")


def _work(cells: list["Cell"], store: Any, chunk: int) -> dict["Cell", "Numbers"]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from inference.experiments import run_cells

    there = sum(len(store.load(cell)) for cell in cells)
    if there:
        print(f"Resuming: {there} blocks of scenes are there from an earlier run.", flush=True)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("blocks of scenes", total=None)

        def report(cell: "Cell", done: int, total: int) -> None:
            bar.update(task, description=cell.name, completed=done, total=total)

        return dict(run_cells(cells, store, chunk, report))
