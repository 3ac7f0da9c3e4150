"""Candidate objects: sets of points on the parts of each kind of object, with scores.

A hypothesis puts a basis of an object's parts on a tuple of points, which fixes the pose. The pose
predicts the other parts, and each part is matched to the nearest point within a gate, if there is
one. The pose is then refitted to the matched points, and they are matched again. A candidate's
score is the log marginal likelihood of its points on its parts with the pose integrated out, a term
of the sum of exact inference.

Functions treat one scene and are mapped over a batch. Hypotheses are the last axis.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.special import chdtri

from inference.proposals.frames import OUTSIDE, Put, frames_of, promising, put_on
from inference.proposals.plan import Plan, tuples_of_points
from models.numerics.linalg import (
    cholesky,
    condition,
    innovations,
    inverse_and_log_det,
    largest,
    total,
)
from models.program.reading import LinearGaussianModel
from models.templates import Parts

TIGHT = 1e-6
"""Largest noise variance of the first gate, even if that of the program is larger."""

MAX_JUDGED = 1 << 12
"""Largest number of hypotheses of a kind that are evaluated for a tight gate. If there are more,
the most promising ones are."""


class Candidates(NamedTuple):
    """Candidate matches for each kind of object."""

    match: Int[Array, "kinds most C"]
    """The point of each part, -1 for none."""
    score: Float[Array, "kinds C"]
    """log p(points on these parts); -inf for an empty entry."""
    misfit: Float[Array, "kinds C"]
    """Half the sum of squared residuals of the points, in units of the noise."""


def find(
    model: LinearGaussianModel,
    plan: Plan,
    gate: Float[Array, "N d"],
    worth: Float[Array, "N N"],
    count: int,
    judged: int = MAX_JUDGED,
    *,
    tight: bool = True,
) -> Candidates:
    """Find the best candidates of every kind, including those with one point left out.

    Args:
        gate: noise variance, per feature and part, that defines the gate.
        worth: value of each point as each part, before the density at its place is added.
        count: number of candidates of each kind, before points are left out.
        judged: largest number of hypotheses of each kind that are evaluated.
        tight: match a part to the nearest point within the gate; otherwise to the point whose
            `worth` exceeds its misfit the most.
    """
    tuples = tuples_of_points(len(model.points), plan.fewest)
    of_kind = functools.partial(
        _of_kind, model, tuples, gate, worth, count, judged, plan.fewest, tight
    )
    first = plan.first
    own = (first, plan.members[first], plan.valid[first], plan.bases, plan.basis_valid)
    return jax.lax.map(lambda own: of_kind(*own), jax.tree.map(jnp.asarray, own))


def _of_kind(
    model: LinearGaussianModel,
    tuples: Int[np.ndarray, "tuples size"],
    gate: Float[Array, "N d"],
    worth: Float[Array, "N N"],
    count: int,
    judged: int,
    fewest: int,
    tight: bool,
    k: Int[Array, ""],
    members: Int[Array, " most"],
    valid: Bool[Array, " most"],
    basis: Int[Array, "bases size"],
    basis_valid: Bool[Array, " bases"],
) -> Candidates:
    parts = jax.tree.map(lambda x: jnp.asarray(x)[members], model.parts)
    parts = parts._replace(feature_mask=parts.feature_mask & valid[:, None])
    allowed = valid & jnp.isfinite(model.match_logits[:, members]) & model.seen.any(axis=1)[:, None]
    worth = worth[:, members]
    near = functools.partial(_nearest, model, parts, allowed, None if tight else worth)

    # Hypotheses: every tuple of points on every basis.
    frames = frames_of(model, parts, gate[members], k, basis)
    whole = (model.seen[:, None] | ~parts.feature_mask).all(axis=-1) & allowed
    sound = whole[tuples[None], basis[:, None]].all(axis=-1) & basis_valid[:, None]
    number = jnp.arange(sound.size)
    if sound.size > judged:
        number = promising(model, parts, frames, basis, tuples, sound, judged)
    which, row = jnp.divmod(number, len(tuples))
    put = put_on(model, parts, frames, basis, which, jnp.asarray(tuples)[row])
    met = near(put.predicted, put.spread, put.fixed)
    value = _value(model, parts, put, met, worth)
    value = jnp.where(sound[which, row], value, -jnp.inf)
    met, _, _ = _best_sets(met, value, len(model.points), count)

    # Refit the best hypotheses to their matched points, and match again.
    pose, covariance = _pose(model, parts, gate[members], k, met)
    predicted = jnp.einsum("ndp,ph->ndh", parts.F, pose) + parts.offset[..., None]
    left_open = jnp.einsum("ndp,pqh,ndq->ndh", parts.F, covariance, parts.F)
    again = near(predicted, gate[members][..., None] + left_open, jnp.full_like(met, -1))
    met = jnp.where((met >= 0).any(axis=0), again, -1)
    left_out = jnp.eye(len(members), dtype=bool)[:, :, None]
    fewer = jnp.where(left_out, -1, met[:, None]).reshape(len(members), -1)
    match = jnp.concatenate([met, fewer], axis=1)
    enough = (match >= 0).sum(axis=0) >= fewest
    score, misfit = log_marginal(model, k, members, match)
    pairs = jnp.where(match >= 0, worth[match, np.arange(len(members))[:, None]], 0.0)
    value = jnp.where(enough, score + total(pairs, axis=0), -jnp.inf)
    match, value, kept = _best_sets(match, value, len(model.points), match.shape[1])
    return Candidates(match, jnp.where(jnp.isfinite(value), score[kept], -jnp.inf), misfit[kept])


def _value(
    model: LinearGaussianModel,
    parts: Parts,
    put: Put,
    match: Int[Array, "most H"],
    worth: Float[Array, "N most"],
) -> Float[Array, " H"]:
    """Approximate score of each hypothesis, relative to explaining each point alone.

    The other points are treated as independent given the basis. The noise is the smaller of that of
    the program and that of the gate.
    """
    counted = model.seen[match] & parts.feature_mask[:, None]  # (most, H, d)
    residual = jnp.moveaxis(model.points[match], -1, 1) - put.predicted
    energy = residual**2 / put.variance + jnp.log(2 * jnp.pi * put.variance)
    log_density = -0.5 * total(jnp.where(jnp.moveaxis(counted, -1, 1), energy, 0.0), axis=1)
    others = jnp.where((match >= 0) & (put.fixed < 0), log_density, 0.0)
    numbers = np.arange(len(match))[:, None]
    others += jnp.where(match >= 0, worth[match, numbers], 0.0)
    return put.log_basis + total(others, axis=0)


def _pose(
    model: LinearGaussianModel,
    parts: Parts,
    gate: Float[Array, "most d"],
    k: Int[Array, ""],
    match: Int[Array, "most H"],
) -> tuple[Float[Array, "p H"], Float[Array, "p p H"]]:
    """The pose given the points on some parts, and its covariance (eqs. Lambda_k and mu_k)."""
    weight = (parts.feature_mask / gate)[:, None] * model.seen[match]
    weight = jnp.where((match >= 0)[..., None], weight, 0.0)
    prior_precision, _ = inverse_and_log_det(model.pose_covariance[k])
    precision = jnp.einsum("ndp,nhd,ndq->pqh", parts.F, weight, parts.F)
    covariance, _ = inverse_and_log_det(precision + prior_precision[..., None])
    votes = jnp.einsum(
        "ndp,nhd,nhd->ph", parts.F, weight, model.points[match] - parts.offset[:, None]
    )
    votes = votes + (prior_precision @ model.pose_mean[k])[:, None]
    return jnp.einsum("pqh,qh->ph", covariance, votes), covariance


def _nearest(
    model: LinearGaussianModel,
    parts: Parts,
    allowed: Bool[Array, "N most"],
    worth: Float[Array, "N most"] | None,
    predicted: Float[Array, "most d H"],
    spread: Float[Array, "most d #H"],
    fixed: Int[Array, "most H"],
) -> Int[Array, "most H"]:
    """The point matched to each part, -1 for none; basis points stay fixed.

    A point is matched if it is within the gate or, with `worth`, if its worth exceeds its misfit.
    """
    weight = parts.feature_mask[..., None] / spread
    seen = model.seen[:, None] & parts.feature_mask  # (N, most, d)
    if worth is None:
        limit = jnp.asarray(chdtri(np.arange(1, parts.num_features + 1), OUTSIDE))
        slack = limit[jnp.maximum(seen.sum(axis=-1) - 1, 0)][..., None]
        constant = jnp.zeros_like(spread)
    else:
        slack = 2 * worth[..., None]
        constant = jnp.where(parts.feature_mask[..., None], jnp.log(2 * jnp.pi * spread), 0.0)
    for j in range(parts.num_features):
        residual = model.points[:, None, j, None] - predicted[:, j]  # (N, most, H)
        energy = weight[:, j] * residual**2 + constant[:, j]
        slack = slack - model.seen[:, None, j, None] * energy
    slack = jnp.where(allowed[..., None], slack, 0.0)
    closest = largest(slack, axis=0)
    match = jnp.where(fixed >= 0, fixed, jnp.argmax(slack, axis=0))
    closest = jnp.where(fixed >= 0, jnp.inf, closest)
    # A point that is nearest to two parts goes to the closer one.
    rival = match[:, None] == match[None]
    first = np.tri(len(match), k=-1, dtype=bool)[..., None]
    closer = (closest[None] > closest[:, None]) | ((closest[None] == closest[:, None]) & first)
    met = (closest > 0) & ~(rival & closer).any(axis=1)
    return jnp.where(met, match, -1)


def _best_sets(
    match: Int[Array, "most H"], value: Float[Array, " H"], num_points: int, count: int
) -> tuple[Int[Array, "most C"], Float[Array, " C"], Int[Array, " C"]]:
    """The matches of the highest value, one per set of points, with their values and indices."""
    codes = np.random.default_rng(0).integers(1 << 30, size=num_points)  # a hash of sets, by sums
    value, best = best_few(value, min(8 * count, len(value)))
    match = match[:, best]
    code = jnp.where(match >= 0, jnp.asarray(codes)[match], 0).sum(axis=0)
    order = jnp.argsort(code, stable=True)  # among equal sets the best comes first
    again = jnp.append(False, code[order][1:] == code[order][:-1])
    value = value.at[order].set(jnp.where(again, -jnp.inf, value[order]))
    value, kept = best_few(value, min(count, len(value)))
    return jnp.where(jnp.isfinite(value), match[:, kept], -1), value, best[kept]


def best_few(value: Float[Array, " H"], count: int) -> tuple[Float[Array, " C"], Int[Array, " C"]]:
    """The largest values and their indices.

    They are compared in 32 bits, relative to the largest, which makes XLA some 20 times as fast.
    """
    below = value - jnp.maximum(value.max(), -1e30)
    _, best = jax.lax.top_k(below.astype(jnp.float32), count)
    return value[best], best


def log_marginal(
    model: LinearGaussianModel,
    k: Int[Array, ""],
    members: Int[Array, " most"],
    match: Int[Array, "most C"],
) -> tuple[Float[Array, " C"], Float[Array, " C"]]:
    """log p(points on the parts of object k) with its pose integrated out, and the misfit.

    Conditions on one feature after another, as in `exact.permutations.object_grid`.
    """
    parts = jax.tree.map(lambda x: jnp.asarray(x)[members], model.parts)
    counted = parts.feature_mask[:, None] & model.seen[match] & (match >= 0)[..., None]
    scale = counted / jnp.sqrt(parts.variance)[:, None]  # (most, C, d)
    expected = parts.offset + parts.F @ model.pose_mean[k]
    residual = scale * (model.points[match] - expected[:, None])
    design = scale[..., None] * parts.F[:, None]  # (most, C, d, p)
    rows = jnp.moveaxis(design, 1, -1).reshape(-1, design.shape[-1], match.shape[1])
    steps = condition(cholesky(model.pose_covariance[k])[..., None], rows)
    observed = jnp.moveaxis(residual, 1, -1).reshape(-1, match.shape[1])
    z, mean = innovations(steps, observed, jnp.zeros((design.shape[-1], 1)))
    noise = jnp.where(counted, jnp.log(2 * jnp.pi * parts.variance)[:, None], 0.0)
    energy = 0.5 * (z**2).sum(axis=0)
    log_density = -energy - jnp.log(steps.deviation).sum(axis=0) - 0.5 * noise.sum(axis=(0, 2))
    prior_precision, _ = inverse_and_log_det(model.pose_covariance[k])
    of_pose = 0.5 * total(mean * total(prior_precision[..., None] * mean, axis=1), axis=0)
    return log_density, energy - of_pose
