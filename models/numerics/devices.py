"""Many devices and many processes: JAX's own sharding, and nothing to say to each other.

Scenes do not depend on each other, so a batch is cut along its scene axis by `shard_map`, and every
device goes through the same compiled code on its own piece, loops with their own ends included: no
collective is in it. (Threads with a device each would not do: NumPyro's stack of handlers, which a
program is read with, is one for all threads.)
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
"""Options of XLA under which compilation takes half the time, and what is compiled is as fast."""


def compiled(function: Callable[..., Any]) -> Any:
    """`jax.jit` with options that compile quickly, but for those that XLA_FLAGS sets."""
    flags = os.environ.get("XLA_FLAGS", "")
    options = {name: value for name, value in QUICKLY.items() if name not in flags}
    return jax.jit(function, compiler_options=options)


@functools.lru_cache(maxsize=8)
def mesh_of(devices: int) -> Mesh | None:
    """A mesh of the first `devices` local devices, or None for a single one."""
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
