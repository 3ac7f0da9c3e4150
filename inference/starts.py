"""Where coordinate ascent starts from: a random R, or poses that the points themselves suggest.

One scene at a time, scene axes first, to be mapped over a batch.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from models.batches import Skeleton
from models.linalg import inverse_and_log_det, largest, loop_total, total
from models.reading import Conjugate
from models.templates import Parts

MAX_HYPOTHESES = 512
"""Hypotheses scored for each object; tuples of points beyond that are drawn at random."""

_FLOOR = 10.0  # nats; what a part that nothing meets costs, at most
_REFITS = 1
_ABSENT = 0.75  # share of its parts that an object has to meet to be better than absent


class Start(NamedTuple):
    """Where a run begins: log weights that are projected to R, and the annealing parameter."""

    weights: Float[Array, "N N"]
    beta: Float[Array, ""]


class Structure(NamedTuple):
    """What is fixed about a program: which parts belong together. Plain numpy, never traced."""

    owner: Int[np.ndarray, " N"]
    members: Int[np.ndarray, "K most"]
    """Parts of each object, padded with its first part."""
    valid: Bool[np.ndarray, "K most"]
    basis_size: int
    """Points that fix a pose: ceil(pose dimensions / features), at most what an object has."""
    pose_dim: int


def structure(skeleton: Skeleton) -> Structure:
    """Lay out which parts belong together."""
    groups = skeleton.parts
    most = max(len(group) for group in groups)
    members = np.array([np.r_[g, np.repeat(g[0], most - len(g))] for g in groups])
    valid = np.arange(most) < np.array([len(g) for g in groups])[:, None]
    enough = -(-skeleton.pose_dim // skeleton.num_features)
    basis_size = min(enough, min(len(g) for g in groups))
    return Structure(np.array(skeleton.owner), members, valid, basis_size, skeleton.pose_dim)


def uniform(
    key: Array, model: Conjugate, structure: Structure, beta_start: float, beta_max: float
) -> Start:
    """The paper's start: entries of R uniform in [0, 1], where the prior allows a pair."""
    entries = jax.random.uniform(key, model.match_logits.shape, minval=1e-6)
    return Start(_where_allowed(model, jnp.log(entries)), jnp.asarray(beta_start, float))


def poses(
    key: Array, model: Conjugate, structure: Structure, beta_start: float, beta_max: float
) -> Start:
    """Pose hypotheses: a minimal set of points fixes a pose, and all its parts judge it.

    One object after another is placed: of all hypotheses of all objects that are left one is drawn
    in proportion to exp(score), or none any more, and the points that it claims are taken. The beta
    at which hypotheses are judged is drawn too, so that restarts differ in more than chance, and is
    the one that the run goes on with.
    """
    num_objects, most = structure.members.shape
    beta_key, basis_key, rest_key, key = jax.random.split(key, 4)
    lowest = jnp.log(beta_start / beta_max)
    beta = beta_max * jnp.exp(lowest * jax.random.uniform(beta_key) ** 2)
    sharp = _at_beta(model, beta)
    tuple_key, *basis_keys = jax.random.split(basis_key, num_objects + 1)
    tuples = _tuples(tuple_key, len(model.points), structure.basis_size)
    closeness = jnp.stack(
        [_closeness(key, sharp, structure, k, tuples) for k, key in enumerate(basis_keys)]
    )  # (K, N, most, H), hypotheses last: they are many, and sums run along them
    of_points = largest(closeness, axis=2)
    absent = _ABSENT * _FLOOR * structure.valid.sum(axis=1)
    distinct = (tuples[:, :, None] == tuples[:, None, :]).sum(axis=(1, 2)) == structure.basis_size

    def place(
        state: tuple[Array, Array, Array], key: Array
    ) -> tuple[tuple[Array, Array, Array], None]:
        free, left, placed = state
        masked = jnp.where(free[:, None, None], closeness, 0.0)
        # Counted from both sides, so that two parts that share a point count once.
        by_part = total(largest(masked, axis=1), axis=1)
        by_point = total(jnp.where(free[:, None], of_points, 0.0), axis=1)
        score = jnp.minimum(by_part, by_point) - absent[:, None]
        possible = left[:, None] & (distinct & free[tuples].all(axis=1))
        logits = jnp.append(jnp.where(possible, score, -jnp.inf).ravel(), 0.0)
        choice = jax.random.categorical(key, logits)
        k, hypothesis = jnp.divmod(choice, len(tuples))
        none = k == num_objects
        k = jnp.where(none, 0, k)
        chosen = closeness[k, :, :, hypothesis]
        claimed = free & (chosen > 0.5 * _FLOOR).any(axis=1)
        new = (free & ~claimed, left.at[k].set(False), placed.at[k].set(chosen))
        return jax.tree.map(lambda old, new: jnp.where(none, old, new), state, new), None

    shape = (num_objects, len(model.points), most)
    start = (
        model.seen.any(axis=1),
        jnp.ones(num_objects, bool),
        # Objects that are not placed start at random: alike, identical ones would stay alike.
        (0.5 * _FLOOR + jnp.log(jax.random.uniform(rest_key, shape, minval=1e-6))).astype(
            jnp.float32
        ),
    )
    (_, _, placed), _ = jax.lax.scan(place, start, jax.random.split(key, num_objects))
    weights = jnp.zeros(model.match_logits.shape)
    for k, (members, valid) in enumerate(zip(structure.members, structure.valid, strict=True)):
        weights = weights.at[:, members[valid]].set(placed[k][:, valid])
    weights = jnp.where(model.seen.any(axis=1)[:, None], weights, _FLOOR)
    return Start(_where_allowed(model, weights), beta)


def _closeness(
    key: Array, model: Conjugate, structure: Structure, k: int, tuples: Int[Array, "H size"]
) -> Float[Array, "N most H"]:
    """How close each point is to each part of object k, under the pose that each tuple suggests.

    In nats, from `_FLOOR` for a point that sits on the part down to zero. A pose is first fitted to
    the tuple alone, put on parts drawn at random, and then once more to the closest point of every
    part: with noise, two points of four say little.
    """
    members, valid = structure.members[k], structure.valid[k]
    basis = jax.random.permutation(key, np.flatnonzero(valid))[: structure.basis_size]
    parts = jax.tree.map(lambda x: x[members], model.parts)
    shape = (len(members), len(tuples))
    match = jnp.zeros(shape, int).at[basis].set(tuples.T)
    used = jnp.zeros(shape, bool).at[basis].set(True)
    for _ in range(1 + _REFITS):
        pose, covariance = _fit(model, parts, k, match, used)
        closeness = _judge(model, parts, k, pose, covariance)
        allowed = valid & jnp.isfinite(model.match_logits[:, members])
        closeness = jnp.where(allowed[..., None], closeness, 0.0)
        match, used = closeness.argmax(axis=0), largest(closeness, axis=0) > 0
    return closeness.astype(jnp.float32)  # seven digits of ten nats, at half the traffic


def _fit(
    model: Conjugate, parts: Parts, k: int, match: Int[Array, "most H"], used: Bool[Array, "most H"]
) -> tuple[Float[Array, "p H"], Float[Array, "p p H"]]:
    """The pose of object k given the points on some of its parts, and its covariance."""
    weight = (parts.feature_mask / parts.variance)[:, None] * model.seen[match]
    weight = jnp.where(used[..., None], weight, 0.0)
    prior_precision, _ = inverse_and_log_det(model.pose_covariance[k])
    precision = jnp.einsum("ndp,nhd,ndq->pqh", parts.F, weight, parts.F)  # eq. Lambda_k
    covariance, _ = inverse_and_log_det(precision + prior_precision[..., None])
    residual = model.points[match] - parts.offset[:, None]
    votes = jnp.einsum("ndp,nhd,nhd->ph", parts.F, weight, residual)
    votes = votes + (prior_precision @ model.pose_mean[k])[:, None]
    return jnp.einsum("pqh,qh->ph", covariance, votes), covariance  # eq. mu_k


def _judge(
    model: Conjugate,
    parts: Parts,
    k: int,
    pose: Float[Array, "p H"],
    covariance: Float[Array, "p p H"],
) -> Float[Array, "N most H"]:
    """How close the points are to the parts under each pose, in nats.

    Distances are in units of the noise and of what the fit leaves open: a nose says where the eyes
    are, but little of what they look like. Of a part with d features the energy is most probably
    d - 2, and only what is beyond that speaks against it.
    """
    predicted = jnp.einsum("ndp,ph->ndh", parts.F, pose) + parts.offset[..., None]
    # Where the pose is fixed, judge by the noise alone; where it is hardly known better than the
    # prior knows it, by the uncertainty that is left.
    before = jnp.einsum("ndp,pq,ndq->nd", parts.F, model.pose_covariance[k], parts.F)[..., None]
    after = jnp.einsum("ndp,pqh,ndq->ndh", parts.F, covariance, parts.F)
    left_open = after**2 / jnp.where(before > 0, before, 1.0)
    weight = parts.feature_mask[..., None] / (parts.variance[..., None] + left_open)

    def of_feature(j: Any) -> Float[Array, "N most H"]:
        residual = model.points[:, None, j, None] - predicted[:, j]
        return model.seen[:, None, j, None] * (weight[:, j] * residual**2)

    usual = jnp.maximum((model.seen[:, None] & parts.feature_mask).sum(axis=2) - 2, 0)
    energy = jnp.maximum(loop_total(of_feature, predicted.shape[1]) - usual[..., None], 0.0)
    closeness = jnp.maximum(_FLOOR - 0.5 * energy, 0.0)
    return jnp.where(model.seen.any(axis=1)[:, None, None], closeness, 0.0)


def _where_allowed(model: Conjugate, weights: Float[Array, "N N"]) -> Float[Array, "N N"]:
    return jnp.where(jnp.isfinite(model.match_logits), weights, -jnp.inf)


def _at_beta(model: Conjugate, beta: Float[Array, ""]) -> Conjugate:
    """The same model at this beta and, if the precision is unknown, at its prior mean."""
    precision: Any = 1.0
    if model.precision_prior is not None:
        precision = model.precision_prior[0] / model.precision_prior[1]
    parts = model.parts._replace(variance=model.parts.variance / (beta * precision))
    return replace(model, parts=parts)


def _tuples(key: Array, num_points: int, size: int) -> Int[Array, "H size"]:
    """All tuples of points if there are few, else some at random."""
    if num_points**size <= MAX_HYPOTHESES:
        return jnp.asarray(np.indices((num_points,) * size).reshape(size, -1).T)
    return jax.random.randint(key, (MAX_HYPOTHESES, size), 0, num_points)
