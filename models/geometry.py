"""Pose designs: how the pose of an object moves its parts.

A design is one function from the coordinates of some parts, (parts, coordinates), to the matrices
F, (parts, features, pose), and the offsets m, (parts, features), of the paper's x = F y + m. Every
design is linear in the pose, which is what keeps the pose posterior Normal. To add one, write such
a function and put it in `DESIGNS`. Numpy arrays stay numpy arrays, and JAX arrays JAX arrays.

Angles. The y axis points up, and angles run clockwise. With F as printed in the paper (eq. nxycs),
a pose (t_x, t_y, s cos a, s sin a) then turns a part's *position* clockwise by a, and its own
*orientation* from phi to phi + a. That is the same turn, as the direction phi is the vector (cos
phi, -sin phi): a part at (1, 0) that points to the right, turned by 90 degrees, is at (0, -1) and
points down.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models.errors import InputError
from models.numerics.arrays import AnyArray

LinearMap = tuple[Float[AnyArray, "parts features pose"], Float[AnyArray, "parts features"]]
PoseDesign = Callable[[Float[AnyArray, "parts coordinates"]], LinearMap]


def translation(coordinates: Float[AnyArray, "parts d"]) -> LinearMap:
    """A shift, x = t + p, with pose t; the coordinates p of a part are its offset."""
    xp = coordinates.__array_namespace__()
    parts, d = coordinates.shape
    return xp.broadcast_to(xp.eye(d), (parts, d, d)), coordinates


def similarity(coordinates: Float[AnyArray, "parts 2"]) -> LinearMap:
    """A shift, turn and scaling of the plane: pose (t_x, t_y, s cos a, s sin a)."""
    x, y = _columns(coordinates, 2, "similarity")
    one, zero = x**0, 0 * x
    return _matrix([[one, zero, x, y], [zero, one, y, -x]])  # eq. nxycs, rows 1 and 2


def oriented_similarity(coordinates: Float[AnyArray, "parts 4"]) -> LinearMap:
    """A similarity of parts with a size and a direction: (x, y, size cos phi, size sin phi)."""
    x, y, cosine, sine = _columns(coordinates, 4, "oriented_similarity")
    one, zero = x**0, 0 * x
    return _matrix(  # eq. nxycs
        [
            [one, zero, x, y],
            [zero, one, y, -x],
            [zero, zero, cosine, -sine],
            [zero, zero, sine, cosine],
        ]
    )


def affine(coordinates: Float[AnyArray, "parts 2"]) -> LinearMap:
    """A shift and any linear map of the plane: pose (t_x, t_y, a_11, a_12, a_21, a_22)."""
    return _linear_map(coordinates, 2, "affine")


def affine_camera(coordinates: Float[AnyArray, "parts 3"]) -> LinearMap:
    """Points in space seen by an affine camera: pose (t_x, t_y, the 2 x 3 matrix by rows)."""
    return _linear_map(coordinates, 3, "affine_camera")


DESIGNS: dict[str, PoseDesign] = {
    design.__name__: design
    for design in (translation, similarity, oriented_similarity, affine, affine_camera)
}


def similarity_pose(
    translation: Float[Array, "*batch 2"],
    scale: Float[Array, "*batch"] | float = 1.0,
    angle: Float[Array, "*batch"] | float = 0.0,
) -> Float[Array, "*batch 4"]:
    """The pose vector of a similarity from its translation, scale and angle (radians)."""
    translation = jnp.asarray(translation, float)
    scale, angle = jnp.broadcast_arrays(jnp.asarray(scale, float), jnp.asarray(angle, float))
    linear = jnp.stack([scale * jnp.cos(angle), scale * jnp.sin(angle)], axis=-1)
    batch = jnp.broadcast_shapes(translation.shape[:-1], scale.shape)
    return jnp.concatenate(
        [jnp.broadcast_to(translation, (*batch, 2)), jnp.broadcast_to(linear, (*batch, 2))], axis=-1
    )


def pose_names(F: Float[np.ndarray, "parts d p"]) -> list[str]:
    """Names of the dimensions of a pose, found from the matrices of its parts.

    t_x, t_y for a shift, s_cos, s_sin for a turn and a scale (s cos a, s sin a), a_11, a_12, ...
    for a linear map. Any other dimension is named by its number.
    """
    p = F.shape[-1]
    names = [str(i) for i in range(p)]
    if F.shape[1] < 2 or p < 2 or not (F[:, :2, :2] == np.eye(2)).all():
        return names
    names[:2] = ["t_x", "t_y"]
    x, y = F[:, 0, 2:], F[:, 1, 2:]
    if p >= 4 and (x[:, 0] == -y[:, 1]).all() and (x[:, 1] == y[:, 0]).all():
        names[2:4] = ["s_cos", "s_sin"]
    half = (p - 2) // 2
    if p > 2 and p % 2 == 0 and (x[:, half:] == 0).all() and (y == np.roll(x, half, axis=1)).all():
        names[2:] = [f"a_{row}{column + 1}" for row in (1, 2) for column in range(half)]
    return names


def _linear_map(coordinates: Float[AnyArray, "parts c"], wanted: int, name: str) -> LinearMap:
    """F of x = t + A p with a 2 x c matrix A, read by rows."""
    _columns(coordinates, wanted, name)
    xp = coordinates.__array_namespace__()
    parts = coordinates.shape[0]
    moves = xp.broadcast_to(xp.eye(2), (parts, 2, 2))
    rows = xp.eye(2)[None, :, :, None] * coordinates[:, None, None, :]
    F = xp.concat([moves, rows.reshape(parts, 2, 2 * wanted)], axis=-1)
    return F, xp.zeros((parts, 2))


def _columns(
    coordinates: Float[AnyArray, "parts c"], wanted: int, name: str
) -> tuple[Float[AnyArray, " parts"], ...]:
    if coordinates.ndim != 2 or coordinates.shape[1] != wanted:
        raise InputError(
            f"the pose design {name} requires parts with {wanted} coordinates, an array (parts, "
            f"{wanted}), but got an array of shape {tuple(coordinates.shape)}; give each part "
            f"{wanted} numbers or choose another design ({', '.join(DESIGNS)})"
        )
    return tuple(coordinates.T)


def _matrix(rows: list[list[Float[AnyArray, " parts"]]]) -> LinearMap:
    xp = rows[0][0].__array_namespace__()
    F = xp.stack([xp.stack(row, axis=-1) for row in rows], axis=-2)
    return F, xp.zeros(F.shape[:2])
