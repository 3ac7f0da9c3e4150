"""Scenes with their matches, drawn from a program, to train networks on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpyro.handlers import seed, trace

from models.errors import InputError
from models.numerics.arrays import AnyArray
from models.program.sites import Program

SPARE = 1.25
"""Scenes drawn for each one needed, because some have no points."""


class Draws(NamedTuple):
    """Scenes whose matches are known."""

    points: Float[AnyArray, "scenes N d"]
    present: Bool[AnyArray, "scenes N"]
    part: Int[AnyArray, "scenes N"]
    """The part that each point is; arbitrary in dummy rows."""

    def take(self, which: Any) -> "Draws":
        """Some of the draws, by number, slice or mask."""
        return Draws(*(field[which] for field in self))


Simulator = Callable[[Array, int], Draws]
"""Takes a random key and a number of scenes, and draws that many non-empty ones."""


def simulator_of(program: Program) -> Simulator:
    """A simulator that draws from a program.

    If the program has no prior on the number of points, so that all its draws are full, the number
    is uniform and the seen parts are a random subset.
    """

    def draw_one(rng_key: Array) -> tuple[Array, Array, Array]:
        sites = trace(seed(program, rng_key)).get_trace()
        likelihood = sites["points"]["fn"]
        seen = likelihood.seen.any(axis=-1)
        return sites["points"]["value"], seen, sites["match"]["value"].argmax(axis=-1)

    draw_many = jax.jit(jax.vmap(draw_one))

    def simulate(rng_key: Array, count: int) -> Draws:
        draw_key, number_key = jax.random.split(rng_key)
        drawn = draw_many(jax.random.split(draw_key, int(SPARE * count)))
        draws = Draws(*(np.asarray(x) for x in drawn))
        if draws.present.all():
            rows = draws.present.shape[1]
            number = jax.random.randint(number_key, (len(draws.present), 1), 1, rows + 1)
            draws = draws._replace(present=np.arange(rows) < np.asarray(number))
        return some(draws, count)

    return simulate


def some(draws: Draws, count: int) -> Draws:
    """Take `count` non-empty scenes, repeated if there are too few; zero in dummy rows."""
    full = np.flatnonzero(draws.present.any(axis=1))
    if not len(full):
        raise InputError(
            f"none of {len(draws.present)} scenes drawn from the program has a point; raise the "
            "probability that objects are present"
        )
    points = np.where(draws.present[..., None], draws.points, 0.0)
    return draws._replace(points=points).take(np.resize(full, count))


def as_arrays(draws: Any) -> Any:
    """Convert a tree of draws to 32-bit JAX arrays for a network."""
    kinds = {"f": jnp.float32, "i": jnp.int32}
    return jax.tree.map(lambda x: jnp.asarray(x, kinds.get(x.dtype.kind)), draws)
