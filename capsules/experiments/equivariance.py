"""Are inferred parts equivariant? How far they are from where a turn of the scene should put them.

A scene is turned by an angle alpha about its origin. A part that had matrix A and place t before
the turn should then have R A and R t, with R the turn by alpha. If it does not, there are three
cases: it looks the same at another angle (its own symmetry), it has changed places with a part that
looks the same (a swap), or it is somewhere else (a failure).
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.optimize import linear_sum_assignment

from models.numerics.arrays import AnyArray

ANGLES = np.arange(8) * np.pi / 4
"""Angles of the scenes; all others are compared with the first."""

NUM_TURNS = 72
"""Turns at which two parts are compared: every five degrees."""

NEAR = 3.0
"""Largest distance of the ink, in pixels, at which a part is where it should be."""

ALIKE = 0.85
"""Smallest cosine between the ink of two templates that look the same."""


class Poses(NamedTuple):
    """Poses inferred from scenes at all `ANGLES`: part p maps its point v to matrix v + place."""

    matrix: Float[AnyArray, "scenes angles K 2 2"]
    place: Float[AnyArray, "scenes angles K 2"]
    presence: Float[AnyArray, "scenes angles K"]


class Residuals(NamedTuple):
    """Residuals of each part of each scene at each angle but the first, in pixels and degrees."""

    place: Float[np.ndarray, "scenes turned K"]
    angle: Float[np.ndarray, "scenes turned K"]
    symmetric_angle: Float[np.ndarray, "scenes turned K"]
    """The angle after the turn, among those at which the part looks the same, that brings its ink
    nearest."""
    ink: Float[np.ndarray, "scenes turned K"]
    """Root mean square distance of the part's ink from where it should be: place, turn, stretch and
    shear in one."""
    best_place: Float[np.ndarray, "scenes turned K"]
    """The place after relabelling parts that look the same so that their ink is nearest."""
    best_angle: Float[np.ndarray, "scenes turned K"]
    """The angle after relabelling, at one of the turns at which both parts look the same."""
    best_ink: Float[np.ndarray, "scenes turned K"]
    """The ink after relabelling."""
    still_place: Float[np.ndarray, "scenes turned K"]
    """The `place` of parts that stay where they are."""
    presence: Float[np.ndarray, "scenes turned K"]
    """Absolute change of presence."""
    weight: Float[np.ndarray, "scenes turned K"]
    """Presence at the first angle; the pose of an absent part has no meaning."""


def turn(angle: Float[AnyArray, "*batch"]) -> Float[np.ndarray, "*batch 2 2"]:
    """The rotation matrix of an angle."""
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.stack([np.stack([cosine, -sine], -1), np.stack([sine, cosine], -1)], -2)


def residuals(
    poses: Poses, alike: Bool[np.ndarray, "K K turns"], spread: Float[AnyArray, "K 2 2"]
) -> Residuals:
    """Compute how far parts are from where they should be.

    Args:
        alike: whether part q, turned by a multiple of 360 / `NUM_TURNS` degrees, looks like part p
            (`alike_templates`).
        spread: second moments of the ink of each part about its place, before its matrix.
    """
    matrix, place, presence = (np.asarray(x, float) for x in poses)
    R = turn(ANGLES[1:])
    count, K = matrix.shape[0], matrix.shape[2]
    wanted = np.einsum("ade,ske->sakd", R, place[:, 0])
    wanted_matrix = np.einsum("ade,skef->sakdf", R, matrix[:, 0])
    apart = np.linalg.norm(place[:, 1:, None] - wanted[:, :, :, None], axis=-1)
    own, allowed = np.eye(K, dtype=bool), alike.any(axis=-1) | np.eye(K, dtype=bool)
    angle, ink = np.full((2, count, len(R), K, K), np.inf)
    for p, q in np.argwhere(allowed):
        offsets = np.flatnonzero(alike[p, q] | (own[p, q] & (np.arange(NUM_TURNS) == 0)))
        found = matrix[:, 1:, None, q]
        goal = wanted_matrix[:, :, None, p] @ turn(offsets * 2 * np.pi / NUM_TURNS)
        square = _moved(found - goal, spread[q])
        nearest = square.argmin(axis=-1)[..., None]
        angles = _angle_between(found, goal)
        angle[..., p, q] = np.take_along_axis(angles, nearest, axis=-1)[..., 0]
        ink[..., p, q] = np.sqrt(apart[..., p, q] ** 2 + square.min(axis=-1))
    weight = np.broadcast_to(presence[:, :1], apart.shape[:-1])
    cost = weight[..., None] * np.where(allowed, ink, 0.0)
    best = _relabelling(np.where(allowed, cost, np.inf))[..., None]
    own_square = _moved(matrix[:, 1:] - wanted_matrix, np.asarray(spread))
    return Residuals(
        place=apart[..., own],
        angle=_angle_between(matrix[:, 1:], wanted_matrix),
        symmetric_angle=angle[..., own],
        ink=np.sqrt(apart[..., own] ** 2 + own_square),
        best_place=np.take_along_axis(apart, best, axis=-1)[..., 0],
        best_angle=np.take_along_axis(angle, best, axis=-1)[..., 0],
        best_ink=np.take_along_axis(ink, best, axis=-1)[..., 0],
        still_place=np.linalg.norm(place[:, :1] - wanted, axis=-1),
        presence=np.abs(presence[:, 1:] - presence[:, :1]),
        weight=weight,
    )


def _moved(
    change: Float[np.ndarray, "*batch 2 2"], spread: Float[AnyArray, "... 2 2"]
) -> Float[np.ndarray, "*batch"]:
    """Mean square distance by which a change of the matrix moves the ink."""
    return np.sum((change @ np.asarray(spread)) * change, axis=(-2, -1))


def _angle_between(
    found: Float[np.ndarray, "*batch 2 2"], wanted: Float[np.ndarray, "*batch 2 2"]
) -> Float[np.ndarray, "*batch"]:
    """Degrees of the turn nearest to found wanted^-1, 0 to 180; 0 where wanted is zero."""
    (a, b), (c, d) = np.moveaxis(wanted, (-2, -1), (0, 1))
    adjugate = np.stack([np.stack([d, -b], -1), np.stack([-c, a], -1)], -2)
    change = found @ (adjugate * np.sign(a * d - b * c)[..., None, None])
    sine, cosine = change[..., 1, 0] - change[..., 0, 1], change[..., 0, 0] + change[..., 1, 1]
    return np.degrees(np.abs(np.arctan2(sine, cosine)))


def _relabelling(
    cost: Float[np.ndarray, "scenes turned K K"],
) -> Int[np.ndarray, "scenes turned K"]:
    """For each part the one in its place, by the assignment of least total cost."""
    flat = np.where(np.isfinite(cost), cost, 1e6).reshape(-1, *cost.shape[-2:])
    return np.array([linear_sum_assignment(one)[1] for one in flat]).reshape(cost.shape[:-1])


def summary(found: Residuals) -> dict[str, float]:
    """Means weighted by presence, and the shares of parts that are right, swapped and lost.

    A part is right if its ink is within `NEAR` of where it should be, swapped if it is right only
    after the best relabelling and up to symmetries, and lost otherwise.
    """
    weight = found.weight / found.weight.sum()
    right, mended = found.ink <= NEAR, found.best_ink <= NEAR
    shares = {"right": right, "swapped": mended & ~right, "lost": ~mended & ~right}
    means = {name: getattr(found, name) for name in Residuals._fields if name != "weight"}
    return {name: float(np.sum(weight * x)) for name, x in (means | shares).items()}


def ink_centres(templates: Float[AnyArray, "K height width"]) -> Float[np.ndarray, "K 2"]:
    """Mean place of the ink of each template, (x, y) in pixels from the centre."""
    return _moments(templates)[0]


def ink_spread(templates: Float[AnyArray, "K height width"]) -> Float[np.ndarray, "K 2 2"]:
    """Second moments of the ink of each template about its mean."""
    return _moments(templates)[1]


def _moments(templates: AnyArray) -> tuple[np.ndarray, np.ndarray]:
    from capsules.baselines.pcae import grid

    ink = np.asarray(templates, float)
    ink = ink / ink.sum(axis=(1, 2), keepdims=True)
    x, y = np.meshgrid(grid(ink.shape[2]), grid(ink.shape[1]))
    places = np.stack([x, y], axis=-1)
    mean = np.einsum("khw,hwd->kd", ink, places)
    apart = places - mean[:, None, None]
    return mean, np.einsum("khw,khwd,khwe->kde", ink, apart, apart)


def alike_templates(templates: Float[AnyArray, "K height width"]) -> Bool[np.ndarray, "K K turns"]:
    """Whether template q, turned about the centre of its ink, looks like template p.

    Only turns at which two templates are most alike count. If a template looks the same at every
    turn, all turns count.
    """
    from capsules.baselines.pcae import warp

    ink, centres = np.asarray(templates, np.float32), ink_centres(templates)
    size = 2 * ink.shape[1]

    @jax.jit
    @jax.vmap
    def draw(one: Array, matrix: Array, place: Array) -> Array:
        return warp(one, matrix, place, size)

    def pictures(angle: float) -> Float[np.ndarray, "K pixels"]:
        matrix = np.broadcast_to(turn(np.asarray(angle)), (len(ink), 2, 2)).astype(np.float32)
        place = -np.einsum("kde,ke->kd", matrix, centres).astype(np.float32)
        flat = np.asarray(draw(ink, matrix, place)).reshape(len(ink), -1)
        return flat / np.linalg.norm(flat, axis=1, keepdims=True)

    turned = np.array([pictures(angle) for angle in np.arange(NUM_TURNS) * 2 * np.pi / NUM_TURNS])
    cosine = np.einsum("pu,tqu->pqt", turned[0], turned)
    peak = (cosine >= np.roll(cosine, 1, axis=-1)) & (cosine >= np.roll(cosine, -1, axis=-1))
    return (cosine >= ALIKE) & (peak | (cosine >= ALIKE).all(axis=-1, keepdims=True))
