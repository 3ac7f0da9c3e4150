"""Blocks of scenes on a Dask cluster, of this machine or of many.

Scenes travel with their block and answers come back, so workers need this project but no shared
folder. If a worker is lost, Dask gives its blocks to another one. Answers are the same as those of
one process, bit by bit.
"""

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from capsules.batch import Block, Work, packed
from capsules.commands.scale import CONNECT_SECONDS, dask
from capsules.files.inputs import reason_of
from capsules.store import Entry, source
from models.errors import InputError

if TYPE_CHECKING:
    from distributed import Client, Future

AHEAD = 64
"""Blocks that are submitted at a time: enough for a growing cluster, few enough for memory."""

START_SECONDS = 300
"""How long a process of this machine may take to start: minutes, if others use the machine."""

PATIENT = {
    "distributed.comm.timeouts.connect": START_SECONDS,
    "distributed.comm.timeouts.tcp": START_SECONDS,  # the imports of a worker block its connection
    "distributed.scheduler.no-workers-timeout": START_SECONDS,
    "distributed.scheduler.worker-ttl": None,
}
"""Slow processes do not count as lost; processes that have ended are noticed anyway."""

_one_at_a_time = threading.Lock()
"""All threads of a process share NumPyro's stack of handlers."""


@contextlib.contextmanager
def client_of(address: str | None, workers: int) -> Iterator["Client"]:
    """Connect to the scheduler at an address or, without one, to new processes of this machine."""
    distributed = dask()
    from dask import config

    with contextlib.ExitStack() as stack:
        there: Any = address
        seconds = CONNECT_SECONDS
        if address is None:
            seconds = START_SECONDS
            stack.enter_context(config.set(PATIENT))
            options: dict[str, Any] = {"threads_per_worker": 1, "memory_limit": 0}
            options |= {"dashboard_address": ":0", "silence_logs": logging.CRITICAL}
            options |= {"death_timeout": START_SECONDS}
            try:
                there = distributed.LocalCluster(n_workers=workers, **options)
            except (RuntimeError, OSError) as error:
                raise InputError(
                    f"the processes of --workers did not start ({reason_of(error)}); try again "
                    "with fewer of them"
                ) from error
            stack.enter_context(there)
        client = distributed.Client(there, timeout=seconds, set_as_default=False)
        yield stack.enter_context(client)


def compute(client: "Client", work: Work, blocks: Sequence[int]) -> Iterator[int]:
    """Infer blocks on a cluster and store their answers; yields the number of each when done."""
    from distributed import CancelledError, KilledWorker, as_completed
    from distributed.scheduler import NoWorkerError

    assert work.store is not None
    number_of = {work.entries[block].address: block for block in blocks}

    def submit(block: int) -> "Future":
        entry = work.entries[block]
        arguments = (work.block(block), entry, work.numbers_of(block), source())
        return client.submit(_answer, *arguments, key=entry.address)

    left = iter(blocks)
    running = as_completed(map(submit, itertools.islice(left, AHEAD)), loop=client.loop)
    for future in running:
        block = number_of[future.key]
        try:
            work.store.write(work.entries[block], future.result())
        except (CancelledError, KilledWorker, NoWorkerError, OSError) as error:
            raise InputError(
                f"the cluster did not compute part {block} ({reason_of(error)}); what was computed "
                "is kept, and the same command resumes"
            ) from error
        yield block
        for following in itertools.islice(left, 1):
            running.add(submit(following))


def _answer(
    block: Block, entry: Entry, numbers: Int[np.ndarray, " scenes"], source_there: str
) -> bytes:
    """Infer a block on a worker; returns the content of its entry."""
    if source() != source_there:
        raise InputError(
            "a worker of the cluster has another source of this project; install the same source "
            "there and restart the worker"
        )
    with _one_at_a_time:
        return packed(entry, numbers, block.infer())
