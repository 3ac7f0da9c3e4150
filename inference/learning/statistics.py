"""Sufficient statistics of q(match, pose) for the M-step, and the expected log joint density.

Given q, E_q log p(points, match, pose, conditions) depends only on the arrays of the program.
It is expanded around the posterior mean of each pose. With a_mn = x_m - F_n E y_k - offset_n,

    E z_mn |x_m - F_n y_k - offset_n|^2 = r_mn a_mn^2 - 2 a_mn F_n shift_mn + F_n spread_mn F_n',

which has no cancellation when points are precise.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from models.distributions.match import MixtureMatch
from models.numerics.arrays import AnyArray
from models.numerics.linalg import inverse_and_log_det
from models.numerics.permanent import log_permanent
from models.program.reading import LinearGaussianModel
from models.templates import pose_of_part

_NO_POINT = 1e-9  # an object with fewer expected points has none


class Statistics(NamedTuple):
    """Statistics of a run, a scene at a value of its conditions; many runs have a leading axis."""

    match_probs: Float[AnyArray, "N N"]
    pose_mean: Float[AnyArray, "K p"]
    pose_covariance: Float[AnyArray, "K p p"]
    shift: Float[AnyArray, "N N p"] | None = None
    """E[z_mn (y_k - E y_k)]; None, for zero, if q(match) and q(pose) are independent."""
    spread: Float[AnyArray, "N d p p"] | None = None
    """E[z_mn (y_k - E y_k)(y_k - E y_k)'], summed over the points m whose feature is seen; None if
    q(match) and q(pose) are independent, as it then follows from the other moments."""


def expected_log_joint(
    model: LinearGaussianModel, statistics: Statistics, with_normalizer: bool
) -> Float[Array, ""]:
    """E_q log p(points, match, pose, conditions), with the arrays that were read from a program.

    Args:
        with_normalizer: include the normaliser of the match prior, which is a constant unless the
            prior depends on learnt parameters.
    """
    r = statistics.match_probs
    total = _of_points(model, statistics) + _of_poses(model, statistics)
    possible = jnp.isfinite(model.match_logits)  # elsewhere r is zero up to rounding
    total += jnp.sum(r * jnp.where(possible, model.match_logits, 0.0))
    if with_normalizer:
        total -= _log_normalizer(model)
    return total + model.log_constant


def _of_points(model: LinearGaussianModel, q: Statistics) -> Float[Array, ""]:
    """E_q log p(points | match, pose), eq. p_X."""
    parts = model.parts
    object_of = pose_of_part(parts.owner, model.num_objects)
    counted = model.seen[:, None] & parts.feature_mask  # (N, N, d)
    number = jnp.where(counted, q.match_probs[..., None], 0.0).sum(axis=0)
    predicted = jnp.einsum("ndp,np->nd", parts.F, q.pose_mean[object_of]) + parts.offset
    apart = model.points[:, None] - predicted
    squares = q.match_probs[..., None] * apart**2
    if q.shift is not None:
        squares -= 2 * apart * jnp.einsum("mnp,ndp->mnd", q.shift, parts.F)
    squares = jnp.where(counted, squares, 0.0).sum(axis=0)
    if q.spread is None:
        covariance = q.pose_covariance[object_of]
        squares += number * jnp.einsum("ndp,npq,ndq->nd", parts.F, covariance, parts.F)
    else:
        spread = jnp.einsum("ndp,ndpq,ndq->nd", parts.F, q.spread, parts.F)
        squares += jnp.where(parts.feature_mask, spread, 0.0)
    variance = parts.variance
    return -0.5 * jnp.sum(squares / variance + number * jnp.log(2 * math.pi * variance))


def _of_poses(model: LinearGaussianModel, q: Statistics) -> Float[Array, ""]:
    """E_q log p(pose), eq. p_Y, of objects that have points.

    The posterior of a pose without points is its prior, which tells nothing about the parameters.
    Including it with q fixed would be valid but slow: it would pull the new prior to the old one.
    """

    precision, log_det = inverse_and_log_det(jnp.moveaxis(model.pose_covariance, 0, -1))
    apart = q.pose_mean - model.pose_mean
    second = q.pose_covariance + apart[:, :, None] * apart[:, None, :]
    squares = jnp.einsum("pqk,kpq->k", precision, second)
    size = q.pose_mean.shape[-1]
    each = -0.5 * (squares + log_det + size * math.log(2 * math.pi))
    of_points = jnp.where(model.seen.any(axis=1)[:, None], q.match_probs, 0.0).sum(axis=0)
    owner = model.parts.owner
    has_points = jnp.zeros(model.num_objects + 1).at[owner].add(of_points)[:-1] > _NO_POINT
    return jnp.where(has_points, each, 0.0).sum()


def _log_normalizer(model: LinearGaussianModel) -> Float[Array, ""]:
    if model.match_family is MixtureMatch:
        return logsumexp(model.match_logits, axis=-1).sum()
    return log_permanent(model.match_logits)
