"""Slice sampling of one real variable for many replicas at once (Neal 2003, stepping out)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

WIDTH = 1.0
"""Initial width of the interval, and the step by which it grows."""

MAX_OUT = 16
"""Largest size of the interval, in units of `WIDTH`."""

MAX_STEPS = 128
"""Evaluations after which a replica keeps its value; its interval has vanished long before."""

_LEFT, _RIGHT, _SHRINK, _DONE = range(4)


class _Search(NamedTuple):
    """The state of the search for the next value of each replica."""

    step: Int[Array, ""]
    key: Array
    phase: Int[Array, " replicas"]
    """Stepping out to the left, to the right, shrinking, done."""
    value: Float[Array, " replicas"]
    left: Float[Array, " replicas"]
    right: Float[Array, " replicas"]
    steps_left: Int[Array, " replicas"]
    """Number of steps by which the left end may still move out; `steps_right` for the right end."""
    steps_right: Int[Array, " replicas"]


def slice_draw(
    key: Array,
    log_density: Callable[[Float[Array, " replicas"]], Float[Array, " replicas"]],
    start: Float[Array, " replicas"],
) -> Float[Array, " replicas"]:
    """Draw a new value for each replica by a step that leaves its density invariant.

    Each iteration of the loop makes one evaluation for all replicas, each in its own phase.

    Args:
        log_density: the log density of each replica at its own value.
    """
    key, level_key, place_key, share_key = jax.random.split(key, 4)
    level = log_density(start) - jax.random.exponential(level_key, start.shape)
    left = start - WIDTH * jax.random.uniform(place_key, start.shape)
    steps_left = jax.random.randint(share_key, start.shape, 0, MAX_OUT)
    steps_right = MAX_OUT - 1 - steps_left
    phase = jnp.full(start.shape, _LEFT)
    begun = (phase, start, left, left + WIDTH, steps_left, steps_right)

    def step(search: _Search) -> _Search:
        key, own_key = jax.random.split(search.key)
        left, right, phase = search.left, search.right, search.phase
        tried = left + jax.random.uniform(own_key, start.shape) * (right - left)
        tried = jnp.where(phase == _LEFT, left, jnp.where(phase == _RIGHT, right, tried))
        inside = log_density(tried) > level
        out_left = (phase == _LEFT) & inside & (search.steps_left > 0)
        out_right = (phase == _RIGHT) & inside & (search.steps_right > 0)
        missed = (phase == _SHRINK) & ~inside
        stays = out_left | out_right | missed | (phase == _DONE)
        return _Search(
            search.step + 1,
            key,
            jnp.where(stays, phase, phase + 1),
            jnp.where((phase == _SHRINK) & inside, tried, search.value),
            jnp.where(out_left, left - WIDTH, jnp.where(missed & (tried < start), tried, left)),
            jnp.where(out_right, right + WIDTH, jnp.where(missed & (tried >= start), tried, right)),
            search.steps_left - out_left,
            search.steps_right - out_right,
        )

    def goes_on(search: _Search) -> Array:
        return jnp.any(search.phase != _DONE) & (search.step < MAX_STEPS)

    return jax.lax.while_loop(goes_on, step, _Search(jnp.zeros((), int), key, *begun)).value
