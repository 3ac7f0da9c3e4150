"""Predict an object from a few points: tuples of points are put on a basis of its parts.

Functions treat one scene and are mapped over a batch. Hypotheses are the last axis.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.special import chdtri

from models.numerics.linalg import inverse_and_log_det, total
from models.program.reading import LinearGaussianModel
from models.templates import Parts

OUTSIDE = 1e-6
"""Probability that a gate excludes the point of a part."""

CELLS, AROUND = 512, 4
"""Cells along each side of the table of the plane, and the radius in cells of a neighbourhood."""


class Frames(NamedTuple):
    """For each basis, the predicted place of all parts, which is linear in the basis points."""

    linear: Float[Array, "bases most d size d"]
    at_zero: Float[Array, "bases most d"]
    """Places of the parts if the points of the basis are at the origin."""
    spread: Float[Array, "bases most d"]
    """Predictive variance of a part given the basis, with the noise of the gate."""
    variance: Float[Array, "bases most d"]
    """The same with the smaller of the noise of the gate and that of the program. Points within a
    tight gate are evidence for an object even if the program allows much noise."""
    mean: Float[Array, "bases size d"]
    """Prior mean of the basis points; the next fields give their prior density."""
    inverse: Float[Array, "bases size*d size*d"]
    log_det: Float[Array, " bases"]
    counted: Float[Array, "bases size d"]


def frames_of(
    model: LinearGaussianModel,
    parts: Parts,
    gate: Float[Array, "most d"],
    k: Int[Array, ""],
    basis: Int[Array, "bases size"],
) -> Frames:
    """The frames of object k for each basis of its parts."""
    prior_precision, _ = inverse_and_log_det(model.pose_covariance[k])

    def one(basis: Int[Array, " size"]) -> Frames:
        F, mask = parts.F[basis], parts.feature_mask[basis]

        def left_open(variance: Float[Array, "most d"]) -> tuple[Array, Array]:
            precision = prior_precision + jnp.einsum("bdp,bd,bdq->pq", F, mask / variance[basis], F)
            covariance, _ = inverse_and_log_det(precision)  # eq. Lambda_k
            spread = jnp.einsum("ndp,pq,ndq->nd", parts.F, covariance, parts.F)
            return covariance, variance + spread

        covariance, spread = left_open(gate)
        gain = jnp.einsum("pq,bdq,bd->pbd", covariance, F, mask / gate[basis])
        pose = covariance @ (prior_precision @ model.pose_mean[k])  # eq. mu_k
        pose = pose - jnp.einsum("pbd,bd->p", gain, parts.offset[basis])
        rows = (F * mask[..., None]).reshape(-1, F.shape[-1])
        noise = jnp.where(mask, parts.variance[basis], 1.0).ravel()
        joint = jnp.einsum("ip,pq,jq->ij", rows, model.pose_covariance[k], rows) + jnp.diag(noise)
        return Frames(
            jnp.einsum("ndp,pbe->ndbe", parts.F, gain),
            parts.F @ pose + parts.offset,
            spread,
            left_open(jnp.minimum(gate, parts.variance))[1],
            (parts.offset + parts.F @ model.pose_mean[k])[basis],
            *inverse_and_log_det(joint),
            mask.astype(float),
        )

    return jax.vmap(one)(basis)


class Put(NamedTuple):
    """Tuples of points that were put on bases; hypotheses last."""

    predicted: Float[Array, "most d H"]
    """Predicted places of the parts."""
    spread: Float[Array, "most d H"]
    """Their predictive variance with the noise of the gate."""
    variance: Float[Array, "most d H"]
    """The same with the smaller of the noise of the gate and that of the program."""
    log_basis: Float[Array, " H"]
    """log p(points of the basis)."""
    fixed: Int[Array, "most H"]
    """The points of the basis, on their parts; -1 elsewhere."""


def put_on(
    model: LinearGaussianModel,
    parts: Parts,
    frames: Frames,
    basis: Int[Array, "bases size"],
    which: Int[Array, " H"],
    tuples: Int[Array, "H size"],
) -> Put:
    """Put each tuple of points on the basis with the index `which`."""
    own = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1)[..., which], frames)
    points = jnp.moveaxis(model.points[tuples], 0, -1)  # (size, d, H)
    size, features = points.shape[:2]
    predicted = own.at_zero + sum(
        own.linear[:, :, b, e] * points[b, e] for b in range(size) for e in range(features)
    )
    residual = ((points - own.mean) * own.counted).reshape(-1, len(which))
    energy = total(residual * total(own.inverse * residual[None], axis=1), axis=0)
    number = own.counted.sum(axis=(0, 1))
    log_basis = -0.5 * (energy + own.log_det + number * jnp.log(2 * jnp.pi))
    is_part = jnp.arange(len(parts.F))[:, None, None] == basis[which]  # (most, H, size)
    fixed = (is_part * (tuples + 1)).sum(axis=-1) - 1
    return Put(predicted, own.spread, own.variance, log_basis, fixed)


def promising(
    model: LinearGaussianModel,
    parts: Parts,
    frames: Frames,
    basis: Int[Array, "bases size"],
    tuples: Int[np.ndarray, "tuples size"],
    sound: Bool[Array, "bases tuples"],
    judged: int,
) -> Int[Array, " judged"]:
    """The hypotheses with the most predicted parts near some point.

    Uses geometric hashing, which the paper suggests: a table of the plane, in which the time of a
    lookup does not depend on the number of points. Only the first two features are used.
    """
    seen = model.seen[:, :2].all(axis=1)
    points = model.points[:, :2]
    reach = jnp.sqrt(chdtri(2, OUTSIDE) * frames.spread[..., :2].max(axis=-1))  # (bases, most)
    low = jnp.where(seen[:, None], points, jnp.inf).min(axis=0)
    high = jnp.where(seen[:, None], points, -jnp.inf).max(axis=0)
    cell = jnp.maximum((high - low).max() / (CELLS - 2 * AROUND - 1), reach.max() / (AROUND - 0.5))

    def place(x: Float[Array, "*shape 2"]) -> tuple[Int[Array, "*shape"], Bool[Array, "*shape"]]:
        across = jnp.floor((x - low) / cell).astype(jnp.int32) + AROUND
        inside = ((across >= 0) & (across < CELLS)).all(axis=-1)
        return across[..., 0] * CELLS + across[..., 1], inside

    # The table: distance, in cells, of the middle of each cell from the nearest point.
    steps = np.stack(np.meshgrid(*[np.arange(-AROUND, AROUND + 1)] * 2), axis=-1).reshape(-1, 2)
    corner = jnp.floor((points - low) / cell)
    apart = corner[:, None] + steps + 0.5 - ((points - low) / cell)[:, None]
    distance = jnp.where(seen[:, None], jnp.sqrt((apart**2).sum(axis=-1)), jnp.inf)
    cells = place(points)[0][:, None] + steps @ np.array([CELLS, 1])
    table = jnp.full(CELLS**2, jnp.inf, jnp.float32)
    table = table.at[cells].min(distance.astype(jnp.float32), mode="drop")
    put = jnp.moveaxis(points[tuples], 0, -1)  # (size, 2, tuples)

    def of_basis(own: tuple[Frames, Array, Array, Array]) -> Float[Array, " tuples"]:
        frame, basis, sound, reach = own
        predicted = frame.at_zero[:, :2, None] + sum(
            frame.linear[:, :2, b, e, None] * put[b, e] for b in range(len(put)) for e in (0, 1)
        )
        where, inside = place(jnp.moveaxis(predicted, 1, -1))
        far = table[jnp.where(inside, where, 0)] - np.sqrt(0.5)
        other = (jnp.arange(len(parts.F))[:, None] != basis).all(axis=1) & parts.feature_mask[:, 0]
        hit = other[:, None] & inside & (far <= (reach / cell)[:, None])
        return jnp.where(sound, total(hit.astype(jnp.float32), axis=0), -1.0)

    hits = jax.lax.map(of_basis, (frames, basis, sound, reach))
    _, best = jax.lax.top_k(hits.ravel(), judged)
    return best
