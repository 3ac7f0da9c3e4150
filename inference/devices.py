"""Many devices and many processes: JAX's own sharding, and nothing to say to each other.

Scenes do not depend on each other, so a batch is cut along its scene axis by `shard_map`, and every
device goes through the same compiled code on its own piece, loops with their own ends included: no
collective is in it. (Threads with a device each would not do: NumPyro's stack of handlers, which a
program is read with, is one for all threads.)
"""

import functools
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from models.errors import InputError

AXIS = "scenes"

WAIT = 60
"""Seconds that processes wait for each other before they begin."""


@functools.lru_cache(maxsize=8)
def mesh_of(devices: int) -> Mesh | None:
    """The first so many devices of this process; none where there is nothing to cut."""
    there = jax.local_devices()
    if not 1 <= devices <= len(there):
        raise InputError(
            f"wanted {devices} devices, but JAX has {len(there)} here ({there[0].platform}); give "
            "1 to that number, or make more of a processor's cores into devices with "
            "XLA_FLAGS=--xla_force_host_platform_device_count=2"
        )
    return None if devices == 1 else Mesh(np.array(there[:devices]), (AXIS,))


def sharded(
    function: Callable[..., Any], mesh: Mesh | None, axis: int = -1, out_axis: int = -1
) -> Callable[..., Any]:
    """Compile a function of batches so that each device does its piece of them.

    Args:
        axis: the axis of scenes in all arguments; where it is of length one, all scenes have the
            same, and every device gets it whole.
        out_axis: the axis of scenes in what is returned.
    """
    if mesh is None:
        return jax.jit(function)

    def cut(axis: int, x: Any) -> PartitionSpec:
        names: list[str | None] = [None] * len(x.shape)
        if x.shape[axis] > 1:
            names[axis] = AXIS
        return PartitionSpec(*names)

    def on_each(*batches: Any) -> Any:
        specs = jax.tree.map(functools.partial(cut, axis), batches)
        answer = jax.eval_shape(function, *batches)
        out_specs = jax.tree.map(functools.partial(cut, out_axis), answer)
        return jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False
        )(*batches)

    return jax.jit(on_each)


def meet(coordinator: str, process: int, processes: int) -> None:
    """Meet the other processes of a job, before anything is computed, and part again.

    JAX's coordinator makes sure that all of them are there. From then on they have nothing to say
    to each other, and are not connected: JAX would end them all for the loss of one.
    """
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdigit()):
        raise InputError(f"the coordinator is HOST:PORT, got {coordinator!r}; try 127.0.0.1:9876")
    if not 0 <= process < processes:
        raise InputError(
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
                raise InputError(
                    f"nothing answers at {host}:{port} ({error.strerror or error}); start process "
                    "0 there, and give all processes its address"
                ) from error
            time.sleep(0.2)
