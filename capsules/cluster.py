"""Blocks of scenes on a Dask cluster, of this machine or of many.

Scenes travel with their block and answers come back, so workers need this project and no shared
folder. A worker that is lost is Dask's business: its blocks go to another. Answers are those of one
process, bit by bit.
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
"""Blocks that the cluster has at a time: enough for it to grow by, little enough to hold."""

START_SECONDS = 300
"""How long a process of this machine may take to start: minutes, if others use the machine."""

PATIENT = {
    "distributed.comm.timeouts.connect": START_SECONDS,
    "distributed.comm.timeouts.tcp": START_SECONDS,  # the imports of a worker block its connection
    "distributed.scheduler.no-workers-timeout": START_SECONDS,
    "distributed.scheduler.worker-ttl": None,
}
"""A process that is slow is not lost; one that has ended is noticed by itself."""

_one_at_a_time = threading.Lock()
"""NumPyro's handlers are one stack for all threads of a process."""


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
                    f"the processes of --workers did not start ({reason_of(error)}); start again, "
                    "with fewer of them"
                ) from error
            stack.enter_context(there)
        client = distributed.Client(there, timeout=seconds, set_as_default=False)
        yield stack.enter_context(client)


def compute(client: "Client", work: Work, blocks: Sequence[int]) -> Iterator[int]:
    """Infer blocks on a cluster and keep their answers; yields the number of each as it is done."""
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
                "is kept, and the same command goes on"
            ) from error
        yield block
        for following in itertools.islice(left, 1):
            running.add(submit(following))


def _answer(
    block: Block, entry: Entry, numbers: Int[np.ndarray, " scenes"], source_there: str
) -> bytes:
    """On a worker: the file of an entry."""
    if source() != source_there:
        raise InputError(
            "a worker of the cluster has another source of this project; install the same there, "
            "and start the worker again"
        )
    with _one_at_a_time:
        return packed(entry, numbers, block.infer())
