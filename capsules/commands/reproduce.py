"""`capsules reproduce`: the tables of the paper."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from capsules.commands.faces import Images, reproduce_faces
from capsules.commands.scale import Fresh, open_store, say_what_is_there
from capsules.commands.shared import progress_of_blocks

ALL_METHODS = "gmm,ds,ransac,exact,em_routing"
STEPS, MAX_DRAWS = 4000, 1_000_000


class Study(StrEnum):
    """What can be reproduced."""

    table1 = "table1"
    beta = "beta"
    mask = "mask"
    examples = "examples"
    faces = "faces"
    all = "all"
    equivariance = "equivariance"


def reproduce(
    study: Annotated[
        Study,
        typer.Argument(
            help="The main table, the study of the initial beta, its tables with the ground-truth "
            "mask, pictures of example scenes, the faces experiment, all of these, or the study of "
            "PCAE's parts."
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
    draws: Annotated[
        int | None,
        typer.Option(
            help="Draws for each noise level, or scenes for each number of faces.",
            show_default="512, faces: 250",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the scenes and of random starts.")] = 0,
    methods: Annotated[
        str, typer.Option(metavar="NAMES", help="The methods to run; faces have their own.")
    ] = ALL_METHODS,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Networks that `capsules train` has made, ccae-0.00.eqx and so on: adds ccae and "
            "amortised to the methods.",
        ),
    ] = None,
    images: Images = None,
    more: Annotated[
        bool, typer.Option("--more", help="Scenes of up to 10 faces; the paper has 5.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Training steps of each network of equivariance.", show_default=f"{STEPS}"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write to.")] = Path(
        "results"
    ),
    fresh: Fresh = False,
) -> None:
    """Make the tables of the paper: its numbers, and ours beside them.

    Each cell has the paper's number and ours: under the settings of the paper's
    text, under those of the code published with it, and by default. Faces are
    drawn ones, not the paper's photographs, which are not ours to ship.
    [bold]equivariance[/bold] trains PCAE, the part autoencoder, on the digit 4 and
    measures how its parts follow a turn.

    The tables are printed and written to DIR as Markdown, CSV and a figure.
    Finished blocks are kept there: after an interruption the same command
    resumes and ends in the same numbers.

    [bold]Examples[/bold]

      [cyan]capsules reproduce table1[/cyan]
      [cyan]capsules reproduce all --scenes published/ --out results[/cyan]
      [cyan]capsules reproduce table1 --weights weights[/cyan]
      [cyan]capsules reproduce beta --methods ds --draws 100[/cyan]
      [cyan]capsules reproduce faces --more[/cyan]
      [cyan]capsules reproduce examples --scenes published/[/cyan]
      [cyan]capsules reproduce equivariance[/cyan]
    """
    from models.errors import InputError

    others = (Study.faces, Study.equivariance)
    if study in others and (scenes, methods, weights) != (None, ALL_METHODS, None):
        raise InputError(
            "--scenes, --methods and --weights are options of the constellations, but the study is "
            f"{study}; leave them out"
        )
    if study is Study.examples and methods != ALL_METHODS:
        raise InputError("--methods is for tables, but the study is examples; leave it out")
    if study is Study.equivariance and draws is not None:
        raise InputError("equivariance has no --draws, it takes digits; leave it out")
    if study is not Study.equivariance and steps is not None:
        raise InputError(
            f"--steps is an option of equivariance, but the study is {study}; leave it out"
        )
    if study not in (Study.faces, Study.all) and (images, more) != (None, False):
        raise InputError(
            f"--images and --more are options of faces, but the study is {study}; leave them out"
        )
    if draws is not None and not 1 <= draws <= MAX_DRAWS:
        raise InputError(f"--draws must be 1 to {MAX_DRAWS:,}, got {draws:,}; try 250")
    if study is Study.equivariance:
        return _equivariance(STEPS if steps is None else steps, seed, out, fresh)
    with_faces = study in (Study.faces, Study.all)
    if with_faces:  # before the work, so that bad images are reported at once
        from capsules.faces.experiment import open_study

        faces = open_study(images)
    if study in (Study.examples, Study.all):
        _examples(scenes, draws or 512, seed, weights, out)
    if study not in (*others, Study.examples):
        _constellations(study, scenes, draws or 512, seed, methods, weights, out, fresh)
    if with_faces:
        reproduce_faces(faces, images is None, draws or 250, more, seed, out, fresh)


def _constellations(
    study: Study,
    scenes: Path | None,
    draws: int,
    seed: int,
    methods: str,
    weights: Path | None,
    out: Path,
    fresh: bool,
) -> None:
    from capsules.experiments import constellations
    from capsules.experiments.tables import write_tables
    from capsules.methods import EVERY_METHOD, TRAINED
    from models.errors import InputError

    names = [name.strip() for name in methods.split(",")]
    if unknown := [name for name in names if name not in EVERY_METHOD]:
        known = ", ".join(EVERY_METHOD)
        raise InputError(f"there is no method {unknown[0]!r}; give some of {known}")
    if weights is not None:
        names = list(dict.fromkeys([*names, *TRAINED]))
    cells = constellations.study_cells(study, names, weights)
    if not cells:
        raise InputError(f"{study} is a study of ds and gmm, but got {methods}; name one of them")
    tests = constellations.scene_sets(scenes, draws, seed)
    with open_store(out / "blocks") as store:
        found = constellations.entries_of(cells, tests, seed, store)
        blocks = [entry for entries in found.values() for entry in entries]
        if fresh:
            store.forget(blocks)
        say_what_is_there(sum(map(store.has, blocks)), len(blocks))
        with progress_of_blocks() as report:
            numbers = dict(constellations.run_cells(cells, tests, seed, store, report))
        for path in write_tables(study, numbers, tests, out):
            print(f"Wrote {path}.")


def _examples(scenes: Path | None, draws: int, seed: int, weights: Path | None, out: Path) -> None:
    from capsules.experiments.constellations import scene_sets
    from capsules.experiments.examples import write_examples

    tests = scene_sets(scenes, draws, seed)
    with open_store(out / "blocks"):  # makes the folder, for this run alone
        for path in write_examples(tests, weights, seed, out):
            print(f"Wrote {path}.")


def _equivariance(num_steps: int, seed: int, out: Path, fresh: bool) -> None:
    from capsules.methods import key_of, networks

    key_of(seed)  # before the work
    networks("equivariance")
    from capsules.experiments import digits
    from capsules.experiments.equivariance_report import write_equivariance

    fours = digits.fours()
    wanted = digits.networks_of(seed)
    with open_store(out / "blocks") as store:
        entries = [digits.entry_of(network, fours, num_steps, store) for network in wanted]
        if fresh:
            store.forget(entries)
        say_what_is_there(sum(map(store.has, entries)), len(entries))
        with progress_of_blocks() as report:
            found = digits.run_networks(wanted, fours, num_steps, store, report)
        for path in write_equivariance(found, seed, out):
            print(f"Wrote {path}.")
