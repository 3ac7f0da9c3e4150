"""Batches on several devices, by JAX's sharding and without communication.

Scenes are independent, so `shard_map` cuts a batch along its scene axis, and every device runs the
same compiled code on its own piece. There are no collectives, so a loop may end at a different time
on each device. (One thread for each device would not work: all threads share NumPyro's stack of
handlers, by which programs are read.)
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from models.errors import InputError

AXIS = "scenes"

QUICKLY = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 1}
"""XLA options that halve the compilation time; the compiled code is as fast."""


def compiled(function: Callable[..., Any]) -> Any:
    """`jax.jit` with options that compile quickly, except those that XLA_FLAGS sets."""
    flags = os.environ.get("XLA_FLAGS", "")
    options = {name: value for name, value in QUICKLY.items() if name not in flags}
    return jax.jit(function, compiler_options=options)


@functools.lru_cache(maxsize=8)
def mesh_of(devices: int) -> Mesh | None:
    """A mesh of the first `devices` local devices, or None for a single one."""
    there = jax.local_devices()
    if not 1 <= devices <= len(there):
        raise InputError(
            f"the number of devices must be 1 to {len(there)}, as many as JAX has here "
            f"({there[0].platform}), got {devices}; to use more cores of a processor, set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=2"
        )
    return None if devices == 1 else Mesh(np.array(there[:devices]), (AXIS,))


def sharded(
    function: Callable[..., Any], mesh: Mesh | None, axis: int = -1, out_axis: int = -1
) -> Callable[..., Any]:
    """Compile a function of batches so that each device computes a piece of them.

    Args:
        axis: the scene axis of all arguments. An argument of length one there is shared by all
            scenes, and every device gets all of it.
        out_axis: the scene axis of the results.
    """
    if mesh is None:
        return compiled(function)

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

    return compiled(on_each)
