"""Reading a program for many scenes at once, and what does not change when its numbers do.

Compiled code is kept by a program's `Skeleton`, and a program's numbers are handed to it as arrays.
So an edited prior costs the little compilation of a `reader`, and none of the methods'.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Distribution

from models.reading import Conjugate, Program, read
from models.scenes import Layout, Scene

Seen = TypeVar("Seen")


class Skeleton(NamedTuple):
    """What is fixed about a program whatever its numbers are; hashable."""

    owner: tuple[int, ...]
    """The object of each part."""
    alike: tuple[int, ...]
    """For each object the first one that has the same template and the same pose prior."""
    exchangeable: tuple[int, ...]
    """For each object the first one that is alike and has the same match prior."""
    pose_dim: int
    num_features: int
    match_family: type[Distribution]

    @property
    def num_objects(self) -> int:
        return len(self.alike)

    @property
    def parts(self) -> list[np.ndarray]:
        """The parts of each object."""
        return [np.flatnonzero(np.array(self.owner) == k) for k in range(self.num_objects)]


@functools.lru_cache(maxsize=128)
def skeleton(program: Program, layout: Layout) -> Skeleton:
    """The skeleton of a program on scenes of this layout."""
    return _trace_pieces(program, layout, skeleton_of)


def skeleton_of(pieces: Conjugate) -> Skeleton:
    """The skeleton of pieces; what depends on the scene, and is abstract, counts as different."""
    owner = np.asarray(pieces.parts.owner)
    parts = [np.flatnonzero(owner == k) for k in range(pieces.num_objects)]
    of_parts = [x for x in pieces.parts if x is not pieces.parts.owner]

    def alike(j: int, k: int) -> bool:
        if len(parts[j]) != len(parts[k]):
            return False
        pairs = [(x[parts[j]], x[parts[k]]) for x in of_parts]
        pairs += [(x[j], x[k]) for x in (pieces.pose_mean, pieces.pose_covariance)]
        return _are_equal(pairs)

    def exchangeable(j: int, k: int) -> bool:
        logits = pieces.match_logits
        return alike(j, k) and _are_equal([(logits[:, parts[j]], logits[:, parts[k]])])

    def firsts(same: Callable[[int, int], bool]) -> tuple[int, ...]:
        objects = range(len(parts))
        return tuple(next(j for j in objects if j == k or same(j, k)) for k in objects)

    return Skeleton(
        tuple(owner.tolist()),
        firsts(alike),
        firsts(exchangeable),
        pieces.pose_mean.shape[-1],
        pieces.parts.num_features,
        pieces.match_family,
    )


@functools.lru_cache(maxsize=128)
def reader(program: Program, layout: Layout) -> Callable[[Scene], Conjugate]:
    """Compiled: `read_batch` for scenes of this layout."""
    varies = what_varies(program, layout)

    def read_scenes(scenes: Scene) -> Conjugate:
        return read_batch(program, scenes, varies)

    return jax.jit(read_scenes)


def read_batch(program: Program, scenes: Scene, varies: Conjugate) -> Conjugate:
    """Read a batch of scenes, with the scene axis last: of length one where nothing `varies`."""
    axes = jax.tree.map(lambda flag: -1 if flag else None, varies)
    pieces = jax.vmap(lambda scene: read(program, scene), out_axes=axes)(scenes)
    pieces = jax.tree.map(jnp.asarray, pieces)
    return jax.tree.map(lambda flag, x: x if flag else x[..., None], varies, pieces)


def map_scenes(
    function: Callable[..., Seen], pieces: Conjugate, *others: Any, axis: int = 0
) -> Seen:
    """Map a function of one scene's pieces over a batch, as `read_batch` gives it.

    Args:
        others: further arguments, with the scene axis first.
        axis: where the scene axis goes in what is returned.
    """
    width = pieces.points.shape[-1]
    axes = jax.tree.map(lambda x: -1 if x.shape[-1] == width else None, pieces)
    single = jax.tree.map(lambda x: x if x.shape[-1] == width else x[..., 0], pieces)
    return jax.vmap(function, (axes, *(0 for _ in others)), axis)(single, *others)


def what_varies(program: Program, layout: Layout) -> Conjugate:
    """For each piece whether it depends on the scene: found out by tracing, not by trying."""
    return _trace_pieces(
        program,
        layout,
        lambda pieces: jax.tree.map(lambda x: isinstance(x, jax.core.Tracer), pieces),
    )


def _trace_pieces(program: Program, layout: Layout, look: Callable[[Conjugate], Seen]) -> Seen:
    """Look at the pieces of a program as they are traced for a batch of scenes of this layout.

    What depends on the scene is abstract there, and all the rest is concrete: templates and priors
    seldom depend on it, and to repeat them for each scene of a batch costs more memory traffic than
    all the rest.
    """
    seen = []

    def trace_one(scene: Scene) -> int:
        seen.append(look(read(program, scene)))
        return 0

    jax.vmap(trace_one)(layout.blank().batch())
    return seen[0]


def _are_equal(pairs: list[tuple[Any, Any]]) -> bool:
    return all(not isinstance(a, jax.core.Tracer) and np.array_equal(a, b) for a, b in pairs)
