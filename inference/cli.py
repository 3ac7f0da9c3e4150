"""The command line: `capsules`. Heavy imports wait until a command runs, so that help is quick."""

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from inference.commands import faces
from inference.commands.compare import compare
from inference.commands.demo import demo
from inference.commands.evaluate import evaluate
from inference.commands.film import film
from inference.commands.infer import infer
from inference.commands.reproduce import reproduce
from inference.commands.sample import sample

BAD_INPUT, INTERRUPTED = 2, 130
"""Exit codes; 0 is success and 1 an error that is not the user's."""


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

    Draw a scene, infer it with several methods, compare them in a table and in
    the picture demo.png:
      [cyan]capsules demo[/cyan]

    Write the scenes of an experiment to a file and infer the fourth of them:
      [cyan]capsules sample scenes.npz --draws 512 --sigma 0.1[/cyan]
      [cyan]capsules infer scenes.npz --index 3[/cyan]

    Watch coordinate ascent find its objects:
      [cyan]capsules film scenes.npz --index 3 --out fit.gif[/cyan]

    Measure a method on all of them, and make the tables of the paper:
      [cyan]capsules evaluate scenes.npz --method ransac[/cyan]
      [cyan]capsules reproduce table1[/cyan]

    [bold]Exit codes[/bold]

    0 success; 2 input that cannot be used, with one sentence on stderr about
    what was given, what was wanted and what to do; 130 interrupted. Output
    files are written whole or not at all.
    """


for command in (demo, sample, infer, film, evaluate, compare, reproduce):
    app.command()(command)
app.add_typer(faces.app, name="faces")


def main() -> None:
    """The entry point of `capsules`."""
    app(prog_name="capsules")


if __name__ == "__main__":
    main()
