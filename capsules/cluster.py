"""Processes of one job: they meet before anything is computed, and share nothing after that."""

import socket
import sys
import time

import jax

WAIT = 60
"""Seconds that processes wait for each other before they begin."""


def _refused(sentence: str) -> ValueError:
    """An `InputError`, imported late: importing `models` makes arrays, too early for a meeting."""
    from models.errors import InputError

    return InputError(sentence)


def meet(coordinator: str, process: int, processes: int) -> None:
    """Meet the other processes of a job, before anything is computed, and part again.

    JAX's coordinator makes sure that all of them are there. From then on they have nothing to say
    to each other, and are not connected: JAX would end them all for the loss of one.
    """
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdigit()):
        raise _refused(f"the coordinator is HOST:PORT, got {coordinator!r}; try 127.0.0.1:9876")
    if not 0 <= process < processes:
        raise _refused(
            f"of {processes} processes there is none with the number {process}; give 0 to "
            f"{processes - 1}"
        )
    print(
        f"Process {process} of {processes} waits up to {WAIT} s for the others at {coordinator}.",
        file=sys.stderr,
        flush=True,
    )
    if process:
        _wait_for(host, int(port))
    jax.distributed.initialize(
        coordinator, processes, process, initialization_timeout=WAIT, shutdown_timeout_seconds=WAIT
    )
    jax.local_devices()  # made here: the processes tell each other of them
    jax.distributed.shutdown()


def _wait_for(host: str, port: int) -> None:
    """Try the coordinator until it answers."""
    deadline = time.monotonic() + WAIT
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise _refused(
                    f"nothing answers at {host}:{port} ({error.strerror or error}); start process "
                    "0 there, and give all processes its address"
                ) from error
            time.sleep(0.2)
