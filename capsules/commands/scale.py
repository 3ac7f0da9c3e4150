"""Shared by commands that infer whole files: options, resuming, progress, the scheduler."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsules.commands.shared import progress_bar

if TYPE_CHECKING:
    from capsules.store import Store
    from inference.result import Report

Devices = Annotated[
    int, typer.Option(help="Devices of this machine to spread scenes over (ds, gmm, ransac).")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Do not use the answers of an earlier run.")]
Workers = Annotated[
    int | None, typer.Option(help="Processes of this machine that share the scenes, by Dask.")
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS", help="The Dask scheduler whose workers share the scenes: HOST:PORT."
    ),
]

CONNECT_SECONDS = 3
"""How long a scheduler may take to answer."""


@contextmanager
def open_store(folder: Path) -> Iterator["Store"]:
    """The store in a folder, for this run alone; after an interruption, says how to resume."""
    from capsules.store import Store

    store = Store(folder)
    with store.alone():
        try:
            yield store
        except KeyboardInterrupt:
            say(f"What was computed is kept in {folder}; the same command resumes there.")
            raise


def say(sentence: str) -> None:
    """Print on standard error; standard output is for answers."""
    print(sentence, file=sys.stderr, flush=True)


def say_what_is_there(done: int, in_all: int) -> None:
    """Report how many parts an earlier run has left."""
    if done:
        say(f"Resuming: {done} of {in_all} parts are there from an earlier run.")


@contextmanager
def progress_of_scenes(total: int) -> Iterator[Callable[[int], "Report"]]:
    """A bar on the terminal; call it with the size of the next block for a report on that block."""
    with progress_bar() as bar:
        task, before = bar.add_task("scenes", total=total), 0

        def report(size: int) -> "Report":
            nonlocal before
            begun, before = before, before + size
            return lambda done, of: bar.update(task, completed=begun + size * done / of)

        yield report


def dask() -> Any:
    """Import Dask; an InputError says how to install it."""
    try:
        import distributed
    except ImportError as error:
        from models.errors import InputError

        raise InputError(
            "--cluster and --workers need Dask, which is not installed; install this project with "
            "its extra `cluster`"
        ) from error
    return distributed


def check_scheduler(address: str) -> None:
    """Raise `ConnectionError`, a sentence, unless a Dask scheduler answers at the address.

    The Dask client itself may wait indefinitely.
    """
    import asyncio

    distributed = dask()

    async def ask() -> str:
        security = distributed.Security().get_connection_args("client")
        async with (
            asyncio.timeout(CONNECT_SECONDS),
            distributed.rpc(address, connection_args=security) as there,
        ):
            return str((await there.identity())["type"])

    try:
        if (kind := asyncio.run(ask())) != "Scheduler":
            raise ValueError(f"a {kind} is there")
    except Exception as error:  # Dask raises many kinds for bad addresses and connections
        late = isinstance(error, TimeoutError)
        reason = f"nothing within {CONNECT_SECONDS} s" if late else str(error) or repr(error)
        raise ConnectionError(
            f"no Dask scheduler answers at {address} ({' '.join(reason.split())}); give its "
            "address as in tcp://host:8786, or leave --cluster out"
        ) from error
