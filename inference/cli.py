"""The command line: `capsules`. Heavy imports wait until a command runs, so that help is quick."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.table import Table

    from inference.result import Result
    from models.scenes import Scene

BAD_INPUT, INTERRUPTED = 2, 130
"""Exit codes; 0 is success and 1 an error that is not the user's."""

PICTURE_FORMATS = (".png", ".pdf", ".svg")
DEMO_SHAPES = "square,triangle,square"
MAX_DRAWS = 1_000_000
DEMO_DRAWS = 64
"""Draws among which the demo takes the first that is not empty."""


class _Sentences(TyperGroup):
    """Commands whose bad input ends in one sentence on stderr, never in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            from models.errors import InputError

            if not isinstance(error, InputError):
                raise
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            print("interrupted; no output file was changed", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    name="capsules",
    cls=_Sentences,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def capsules() -> None:
    """Generative capsule models: draw scenes, and infer which point is which part of which object.

    A scene is a set of points: the vertices of squares, triangles and other
    shapes that were turned, scaled, moved and mixed up. The model knows the
    shapes; inference finds the objects.

    [bold]Examples[/bold]

    Draw a scene, infer it with every method, compare them in a table and in
    the picture demo.png:
      [cyan]capsules demo[/cyan]

    Write the scenes of an experiment to a file and infer the fourth of them:
      [cyan]capsules sample scenes.npz --draws 512 --sigma 0.1[/cyan]
      [cyan]capsules demo --scenes scenes.npz --index 3[/cyan]

    [bold]Exit codes[/bold]

    0 success; 2 input that cannot be used, with one sentence on stderr about
    what was given, what was wanted and what to do; 130 interrupted. Output
    files are written whole or not at all.
    """


@app.command()
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
    ] = DEMO_SHAPES,
    centred: Annotated[
        bool | None,
        typer.Option(
            "--centred/--no-centred",
            help="Centre the shapes before they are turned.",
            show_default="as in the published sets: centred if sigma > 0",
        ),
    ] = None,
) -> None:
    """Draw scenes of the constellations experiment and write them to a file.

    It is an npz file of plain arrays: [bold]points[/bold] (scenes, rows, 2),
    [bold]present[/bold] (scenes, rows), false where a row has no point, and
    [bold]object[/bold] (scenes, rows), the true object of each row, -1 where it
    has none. The same seed gives the same scenes, and the first ones are
    the same however many are drawn.

    [bold]Examples[/bold]

      [cyan]capsules sample test.npz[/cyan]
      [cyan]capsules sample clean.npz --draws 10000 --sigma 0 --seed 1[/cyan]
      [cyan]capsules sample pentagons.npz --shapes pentagon,pentagon,L[/cyan]
    """
    from models.errors import InputError
    from models.generator import sample_scenes
    from models.scenes import save_scenes

    if draws > MAX_DRAWS:
        raise InputError(
            f"{draws:,} draws are more than fit into memory with ease, wanted at most "
            f"{MAX_DRAWS:,}; write several files with different seeds"
        )
    scenes = sample_scenes(draws, sigma, seed, _shape_names(shapes), centred)
    kept = len(scenes.points)
    if not kept:
        raise InputError(
            f"{draws} draws with seed {seed} gave no object at all, so there is no scene to write; "
            "draw more, or choose another seed"
        )
    save_scenes(out, scenes)
    print(f"Wrote {kept} scenes to {out} ({draws} draws, {draws - kept} of them empty).")


@app.command()
def demo(
    seed: Annotated[
        int, typer.Option(help="Seed of the scene and of the methods' random starts.")
    ] = 51,
    sigma: Annotated[
        float, typer.Option(help="Standard deviation of the noise on a template's vertices.")
    ] = 0.1,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture to write: .png, .pdf or .svg.")
    ] = Path("demo.png"),
    scenes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz", help="Take the scene from this file instead of drawing one."
        ),
    ] = None,
    index: Annotated[
        int, typer.Option(help="Which scene of the file, from 0; empty ones do not count.")
    ] = 0,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="The objects of the model and of the drawn scene.",
            show_default="the model's own: square,triangle,square",
        ),
    ] = None,
    precision: Annotated[
        float | None,
        typer.Option(
            help="Precision of the noise that the model assumes.",
            show_default="the model's own: 1e4",
        ),
    ] = None,
) -> None:
    """Infer one scene with every method, print a table and write a picture.

    The table has for each method the ELBO or, where the method gives it, the
    exact log evidence, in nats; whether its objects are those of the truth
    (scene accuracy 1 or 0); and the time of a call with everything compiled,
    beside that of the first call, which compiles. Compiled code is kept in the
    user's cache folder (XDG_CACHE_HOME or ~/.cache), so that a second demo
    starts faster.

    The picture shows the points, the truth, and for each method the objects
    that it found and its match probabilities.

    [bold]Examples[/bold]

      [cyan]capsules demo[/cyan]
      [cyan]capsules demo --seed 14 --sigma 0.25 --precision 660 --out noisy.png[/cyan]
      [cyan]capsules demo --shapes square,pentagon --seed 2[/cyan]
      [cyan]capsules demo --scenes scenes.npz --index 3[/cyan]
    """
    from models.scenes import whole_file

    _check_picture_format(out)
    with whole_file(out) as file:  # opened before the work: a bad path is found out at once
        _keep_compiled_code()
        from inference.methods import METHODS, templates
        from inference.plots import object_names, plot_demo

        names = _shape_names(shapes or DEMO_SHAPES)
        objects = None if shapes is None else names
        scene = _drawn_scene(names, sigma, seed) if scenes is None else _stored_scene(scenes, index)
        timed = _infer_all(list(METHODS), scene, seed, objects, precision)
        _print_table(timed, scene)
        results = [result for result, _ in timed]
        parts = templates(None if objects is None else tuple(objects))
        labels = object_names(names) if len(names) == parts.num_objects else None
        figure = plot_demo(results, parts, labels)
        figure.savefig(file, dpi=110, format=out.suffix[1:].lower())
    print(f"The picture is in {out}.")


def main() -> None:
    """The entry point of `capsules`."""
    app(prog_name="capsules")


def _shape_names(shapes: str) -> list[str]:
    from models.errors import InputError
    from models.templates import SHAPES

    names = [name.strip() for name in shapes.split(",")]
    if unknown := [name for name in names if name not in SHAPES]:
        raise InputError(
            f"there is no shape {unknown[0]!r}; give some of {', '.join(SHAPES)}, with commas "
            f"between them, as in {DEMO_SHAPES}"
        )
    return names


def _drawn_scene(names: Sequence[str], sigma: float, seed: int) -> "Scene":
    from models.generator import sample_scenes

    return sample_scenes(DEMO_DRAWS, sigma, seed, names).take(0)


def _stored_scene(path: Path, index: int) -> "Scene":
    from models.errors import InputError
    from models.scenes import load_scenes

    stored = load_scenes(path)
    count = len(stored.points)
    if not 0 <= index < count:
        raise InputError(
            f"{path} has {count} scenes with points, so there is no scene {index}; give an index "
            f"from 0 to {count - 1}"
        )
    return stored.take(index)


def _infer_all(
    methods: Sequence[str],
    scene: "Scene",
    seed: int,
    objects: Sequence[str] | None,
    precision: float | None,
) -> list[tuple["Result", float]]:
    """The result of each method, timed without compilation, and the seconds of its first call."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from inference.methods import infer

    timed = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        for name in methods:
            task = bar.add_task(f"{name}: compiling, then inferring", total=None)

            def report(done: int, total: int, task: Any = task) -> None:
                bar.update(task, completed=done, total=total)

            given: dict[str, Any] = {"objects": objects, "precision": precision}
            began = time.perf_counter()
            infer(name, scene, seed, progress=report, **given)
            first = time.perf_counter() - began
            bar.update(task, description=f"{name}: once more, for the time without compilation")
            timed.append((infer(name, scene, seed, **given), first))
            bar.update(task, description=f"{name}: done", total=1, completed=1)
    return timed


def _print_table(timed: Sequence[tuple["Result", float]], scene: "Scene") -> None:
    from rich.console import Console

    console = Console()
    console.print(_table(timed, scene))
    console.print(
        "ds and exact share a program, so the ELBO of ds is a lower bound of the log evidence; gmm "
        "has another prior over matches and is not comparable.\n"
        "'first call' includes compilation, or loading it from the cache.",
        highlight=False,
        style="dim",
    )


def _table(timed: Sequence[tuple["Result", float]], scene: "Scene") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=f"A scene of {int(scene.present.sum())} points", box=box.SIMPLE_HEAD)
    table.add_column("method", style="bold")
    table.add_column("quantity")
    table.add_column("nats", justify="right")
    table.add_column("scene accuracy", justify="right")
    table.add_column("time", justify="right")
    table.add_column("first call", justify="right")
    for result, first in timed:
        exact = result.log_evidence is not None
        value = result.log_evidence if exact else result.elbo
        table.add_row(
            result.method if result.converged else f"{result.method} (not converged)",
            "log evidence" if exact else "-" if value is None else "ELBO",
            "-" if value is None else f"{float(value):.2f}",
            _accuracy(result, scene),
            _seconds(result.seconds),
            _seconds(first),
        )
    return table


def _accuracy(result: "Result", scene: "Scene") -> str:
    import numpy as np

    from inference.metrics import partition_metrics

    if scene.object is None:
        return "truth unknown"
    metrics = partition_metrics(np.asarray(scene.object)[None], result.object[None])
    return f"{metrics['scene_accuracy'][0]:.0f}"


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _keep_compiled_code() -> None:
    """Switch on JAX's persistent compilation cache, unless there is one or none can be written."""
    import jax

    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(base).expanduser() / "generative-capsules" / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _check_picture_format(path: Path) -> None:
    from models.errors import InputError

    if path.suffix.lower() not in PICTURE_FORMATS:
        raise InputError(
            f"the picture {path} should end in {', '.join(PICTURE_FORMATS)}, which says its "
            f"format, but ends in {path.suffix!r}; try demo.png"
        )


if __name__ == "__main__":
    main()
