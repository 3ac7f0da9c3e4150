"""The command line: `capsules`. Heavy imports wait until a command runs, so that help is quick."""

import contextlib
import errno
import gc
import io
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from capsules.commands import faces
from capsules.commands.compare import compare
from capsules.commands.demo import demo
from capsules.commands.evaluate import evaluate
from capsules.commands.film import film
from capsules.commands.infer import infer
from capsules.commands.learn import learn, train
from capsules.commands.reproduce import reproduce
from capsules.commands.sample import sample

BAD_INPUT, INTERRUPTED = 2, 130
"""Exit codes; 0 is success and 1 an error that is not the user's."""

STOPPED = "interrupted; no file was left half written"

COLLECTED = 20_000
"""New objects between searches of the garbage collector. Importing and tracing make a million
objects that stay; at Python's default of 700 the searches take a tenth of a first answer."""


class _Sentences(TyperGroup):
    """Commands whose bad input ends in one sentence on stderr, never in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MemoryError:
            _say("there is not enough memory for this; give fewer scenes, restarts or objects")
            raise typer.Exit(BAD_INPUT) from None
        except ValueError as error:
            from models.errors import InputError

            if not isinstance(error, InputError):
                raise
            _say(str(error))
            raise typer.Exit(BAD_INPUT) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            if error.errno is None:  # our own sentence, not the system's
                _say(str(error))
            else:
                what = "standard output" if error.filename is None else error.filename
                _say(f"cannot use {what} ({error.strerror}); give another path, or make room")
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            print(STOPPED, file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


def _unraisable(ignored: Any) -> None:
    """Exit if an interruption comes within a destructor, from which Python raises nothing."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        return sys.__unraisablehook__(ignored)
    print(STOPPED, file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def _repair_output() -> None:
    """Make any name printable in any encoding, and ignore a closed standard output."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _keep_compiled_code() -> None:
    """Let JAX keep compiled code in the user's cache folder, unless a folder is set already.

    It is set in the environment, which JAX reads on import and which other processes inherit.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    with contextlib.suppress(OSError, RuntimeError):  # no home folder, or not a writable one
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = base / "generative-capsules"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "jax")
            os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def _say(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)


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

    Infer every scene of a file of any size; the same command resumes:
      [cyan]capsules infer scenes.npz --all --out answers[/cyan]

    Learn the noise and the poses from scenes without labels:
      [cyan]capsules learn scenes.npz --out learned.npz[/cyan]

    Measure a method on all of them, and make the tables of the paper:
      [cyan]capsules evaluate scenes.npz --method ransac[/cyan]
      [cyan]capsules reproduce table1[/cyan]

    [bold]Exit codes[/bold]

    0 success; 2 input that cannot be used, with one sentence on stderr about
    what was given, what is required and what to do; 130 interrupted; 1 an error
    in the program itself. Output files are written whole or not at all.
    """
    _keep_compiled_code()


for command in (demo, sample, infer, film, evaluate, compare, learn, reproduce, train):
    app.command()(command)
app.add_typer(faces.app, name="faces")


def main() -> None:
    """The entry point of `capsules`."""
    gc.set_threshold(COLLECTED)
    # ArviZ's daily advice to programmers does not belong on the terminal.
    warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    sys.unraisablehook = _unraisable
    _repair_output()
    try:
        try:
            app(prog_name="capsules")
        finally:
            sys.stdout.flush()  # a failed write is reported here, and not at exit
    except OSError as error:
        _say(f"cannot write ({error.strerror}); make room, or write to another place")
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BAD_INPUT)


if __name__ == "__main__":
    main()
