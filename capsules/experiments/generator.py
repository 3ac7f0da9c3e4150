"""The scene generator of the constellations experiment.

Squares and triangles with noisy vertices are turned, scaled and moved, and each is left out with
probability 1/2. As in the generator that the paper uses, a whole chunk of draws is mapped to
[-1, 1] by the common extremes of all its coordinates, absent objects included, so the size of an
object does not depend on the other objects of its scene.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from models.errors import InputError
from models.scenes import Scene
from models.templates import SHAPES

CHUNK = 12_800
"""Draws that share one normalisation."""

MEMORY, ROW = 2 << 30, 100
"""Bytes that all scenes may take, and that one row takes, with copies."""

MAX_SIGMA = 1e3
"""Largest noise; nothing is left of a template, whose size is about 1, long before that."""


def sample_scenes(
    num_samples: int = 512,
    sigma: float = 0.0,
    seed: int = 0,
    objects: Sequence[str] = ("square", "triangle", "square"),
    centred: bool | None = None,
    presence: float = 0.5,
    keep_empty: bool = False,
    clutter: int = 0,
) -> Scene:
    """Draw scenes; the first draws are the same for any number of draws.

    Args:
        num_samples: draws, before empty scenes are dropped.
        sigma: standard deviation of the noise on the template's vertices.
        objects: shapes that a scene may contain; each has its own rows, in this order.
        centred: whether the shapes are centred before they are turned. By default as in the
            published test sets: if sigma > 0. If not centred, the turn moves them too.
        presence: probability that an object is present.
        keep_empty: keep draws without any point (all rows missing).
        clutter: rows for points that belong to no object, after those of the objects. Each is
            present with probability 1/2, uniform between -1 and 1, and labelled by the number of
            objects. The objects are the same as without clutter.
    """
    if num_samples < 1:
        raise InputError(f"the number of draws must be at least 1, got {num_samples}; try 512")
    if not 0 <= sigma <= MAX_SIGMA:
        raise InputError(
            f"the template noise sigma must be 0 to {MAX_SIGMA:,.0f}, got {sigma}; try 0.1"
        )
    if not 0 < presence <= 1:
        raise InputError(f"the presence must be above 0 and at most 1, got {presence}; try 0.5")
    if unknown := [name for name in objects if name not in SHAPES]:
        raise InputError(f"there is no shape {unknown[0]!r}; choose from {', '.join(SHAPES)}")
    if not objects:
        raise InputError("at least one object is required, got none; try square,triangle,square")
    if seed < 0:
        raise InputError(f"the seed must be 0 or more, got {seed}; try 0")
    if clutter < 0:
        raise InputError(f"the number of clutter points must be 0 or more, got {clutter}; try 3")
    centred = sigma > 0 if centred is None else centred
    owner = np.repeat(np.arange(len(objects)), [len(SHAPES[name]) for name in objects])
    most = MEMORY // (ROW * (len(owner) + clutter))
    if num_samples > most:
        raise InputError(
            f"{num_samples:,} draws of {len(owner) + clutter:,} points take more than "
            f"{MEMORY >> 30} GiB; give at most {most:,}, and write several files with different "
            "seeds"
        )
    num_chunks = -(-num_samples // CHUNK)
    chunks = [
        _chunk(np.random.default_rng([seed, chunk]), sigma, objects, centred, presence)
        for chunk in range(num_chunks)
    ]
    points = np.concatenate([points for points, _ in chunks])[:num_samples]
    object_present = np.concatenate([present for _, present in chunks])[:num_samples]
    present = object_present[:, owner]
    if clutter:
        stray = [_clutter(np.random.default_rng([seed, c, 1]), clutter) for c in range(num_chunks)]
        points = np.concatenate(
            [points, np.concatenate([x for x, _ in stray])[:num_samples]], axis=1
        )
        present = np.concatenate(
            [present, np.concatenate([x for _, x in stray])[:num_samples]], axis=1
        )
        owner = np.append(owner, np.full(clutter, len(objects)))
    scene = Scene(
        points=np.where(present[..., None], points, 0.0),
        present=present,
        object=np.where(present, owner, -1),
    )
    return scene if keep_empty else scene.take(present.any(axis=-1))


def _chunk(
    rng: np.random.Generator, sigma: float, objects: Sequence[str], centred: bool, presence: float
) -> tuple[Float[np.ndarray, "draws N 2"], Bool[np.ndarray, "draws K"]]:
    """One chunk of draws, all objects of all scenes, in common units."""
    posed = [_posed(rng, SHAPES[name], sigma, centred) for name in objects]
    points = np.concatenate(posed, axis=1)
    low, high = points.min(), points.max()
    return 2 * (points - low) / (high - low) - 1, rng.random((CHUNK, len(objects))) < presence


def _clutter(
    rng: np.random.Generator, count: int
) -> tuple[Float[np.ndarray, "draws C 2"], Bool[np.ndarray, "draws C"]]:
    """Points of a chunk that belong to no object, and which of them are present."""
    return rng.uniform(-1.0, 1.0, (CHUNK, count, 2)), rng.random((CHUNK, count)) < 0.5


def _posed(
    rng: np.random.Generator, shape: Float[np.ndarray, "n 2"], sigma: float, centred: bool
) -> Float[np.ndarray, "draws n 2"]:
    """A chunk of one shape: noisy vertices, turned about the origin, scaled and moved."""
    shape = shape - shape.mean(axis=0) if centred else shape
    vertices = shape + sigma * rng.standard_normal((CHUNK, *shape.shape))
    angle = np.pi * (rng.random(CHUNK) - 0.5)
    scale = 1 + 3 * rng.random(CHUNK)
    move = 24 * rng.random((CHUNK, 1, 2)) / scale[:, None, None]
    cosine, sine = np.cos(angle), np.sin(angle)
    turn = np.stack([np.stack([cosine, -sine], -1), np.stack([sine, cosine], -1)], -2)
    return scale[:, None, None] * np.einsum("bij,bnj->bni", turn, vertices) + move
