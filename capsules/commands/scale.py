"""Options of the commands that work off a whole file, and the work itself with its progress."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsules.commands.shared import progress_bar

if TYPE_CHECKING:
    from capsules.batch import Work

Chunk = Annotated[
    int | None,
    typer.Option(
        help="Scenes between two files, in whole thousands (1024); does not change an answer.",
        show_default="8192",
    ),
]
Devices = Annotated[
    int, typer.Option(help="Devices of this machine to spread scenes over (ds, gmm, ransac).")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Do not use what an earlier run has left.")]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Where several processes of one job meet: that of process 0."
    ),
]
Process = Annotated[int | None, typer.Option(help="The number of this process, from 0.")]
Processes = Annotated[int | None, typer.Option(help="How many processes share the job.")]


def check_processes(
    coordinator: str | None, process: int | None, processes: int | None
) -> tuple[int, int]:
    """The number of this process and of all; where there are several, they have met."""
    given = (coordinator, process, processes)
    if given == (None, None, None):
        return 0, 1
    if coordinator is None or process is None or processes is None:
        from models.errors import InputError

        raise InputError(
            "--coordinator, --process and --processes go together, but only some were given; give "
            "all of them, or none for a single process"
        )
    from capsules.cluster import meet

    meet(coordinator, process, processes)
    return process, processes


def say_what_is_kept(work: "Work", share: range) -> None:
    """Tell that an earlier run has left some parts."""
    if done := sum(map(work.is_done, share)):
        print(f"Resuming: {done} of {len(share)} parts are there from an earlier run.", flush=True)


def work_off(work: "Work", share: range) -> int:
    """Infer what is not there yet; says, and returns, how many parts are missing in the end."""
    left = [chunk for chunk in share if not work.is_done(chunk)]
    try:
        with progress_of_scenes(sum(len(work.scenes_of(chunk)) for chunk in left)) as report:
            for chunk in left:
                work.run(chunk, report(work, chunk))
    except KeyboardInterrupt:
        print(f"What was computed is kept in {work.folder}; the same command goes on there.")
        raise
    if missing := work.finish():
        print(
            f"The share of this process is done. {missing} of {len(work)} parts are still missing: "
            "the last process to end writes the manifest. If one was lost, run it again, or the "
            "same command without --coordinator."
        )
    return missing


@contextmanager
def progress_of_scenes(total: int) -> Iterator[Callable[["Work", int], Any]]:
    """A bar on the terminal; of a chunk it gives whom the work tells its progress."""
    with progress_bar() as bar:
        task = bar.add_task("scenes", total=total)
        before = [0]

        def report(work: "Work", chunk: int) -> Callable[[int, int], None]:
            begun, size = before[0], len(work.scenes_of(chunk))
            before[0] += size
            return lambda done, of: bar.update(task, completed=begun + size * done / of)

        yield report


def folder_of(out: Path | None) -> Path:
    from models.errors import InputError

    if out is None:
        raise InputError("--all wants a folder for the answers; give it with --out DIR")
    return out
