"""Where coordinate ascent starts from: a random R, or poses that the points themselves suggest.

One scene at a time, scene axes first, to be mapped over a batch.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from models.reading import Conjugate

MAX_HYPOTHESES = 512
"""Hypotheses scored for each object; tuples of points beyond that are drawn at random."""

_FLOOR = 10.0  # nats; what a part that nothing meets costs, at most
_NOBODY = 0.6  # share of its parts that an object has to meet to be better than absent


class Structure(NamedTuple):
    """What is fixed about a program: which parts belong together. Plain numpy, never traced."""

    owner: Int[np.ndarray, " N"]
    members: Int[np.ndarray, "K most"]
    """Parts of each object, padded with its first part."""
    valid: Bool[np.ndarray, "K most"]
    basis_size: int
    """Points that fix a pose: ceil(pose dimensions / features), but never more than an object has."""
    pose_dim: int


def structure(model: Conjugate) -> Structure:
    """Read it off one scene's concrete pieces."""
    owner = np.asarray(model.parts.owner)
    num_objects, pose_dim = model.pose_mean.shape
    groups = [np.flatnonzero(owner == k) for k in range(num_objects)]
    most = max(len(group) for group in groups)
    members = np.array([np.r_[g, np.repeat(g[0], most - len(g))] for g in groups])
    valid = np.arange(most) < np.array([len(g) for g in groups])[:, None]
    features = np.asarray(model.parts.feature_mask).sum(axis=1).max()
    basis_size = min(-(-pose_dim // int(features)), min(len(g) for g in groups))
    return Structure(owner, members, valid, basis_size, pose_dim)


def uniform(key: Array, model: Conjugate, structure: Structure) -> Float[Array, "N N"]:
    """Log weights of the paper's start: entries uniform in [0, 1] where the prior allows a pair."""
    uniform = jax.random.uniform(key, model.match_logits.shape, minval=1e-6)
    return jnp.where(jnp.isfinite(model.match_logits), jnp.log(uniform), -jnp.inf)


def poses(key: Array, model: Conjugate, structure: Structure) -> Float[Array, "N N"]:
    """Log weights from pose hypotheses: a minimal set of points fixes a pose, all its parts judge it.

    Objects go one after another in random order. Each draws one of its hypotheses in proportion to
    exp(score), or none, and leaves the points that it claims to the others no more. How sharply
    a hypothesis is judged is drawn too, so that restarts differ in more than chance.
    """
    num_objects = len(structure.members)
    sharp_key, order_key, key = jax.random.split(key, 3)
    sharpness = 10.0 ** jax.random.uniform(sharp_key, minval=-1.5, maxval=0.0)
    model = _with_sharpness(model, sharpness)
    order = jax.random.permutation(order_key, num_objects)

    def place(
        free: Bool[Array, " N"], inputs: tuple[Array, Array]
    ) -> tuple[Bool[Array, " N"], Float[Array, "N most"]]:
        key, k = inputs
        closeness, score, members = _hypotheses(key, model, structure, k, free)
        choice = jax.random.categorical(key, jnp.append(score, _none_score(structure)[k]))
        none = choice == len(score)
        chosen = closeness[jnp.where(none, 0, choice)]
        chosen = jnp.where(none, -0.8 * _FLOOR, chosen)
        claimed = (chosen > -0.5 * _FLOOR).any(axis=1)
        return free & ~claimed, chosen

    free = model.seen.any(axis=1)
    keys = jax.random.split(key, num_objects)
    _, closeness = jax.lax.scan(place, free, (keys, order))
    by_object = jnp.zeros_like(closeness).at[order].set(closeness)  # (K, N, most)
    columns = jnp.zeros(model.match_logits.shape)
    for k, (members, valid) in enumerate(zip(structure.members, structure.valid, strict=True)):
        columns = columns.at[:, members[valid]].set(by_object[k][:, valid])
    weights = jnp.where(model.seen.any(axis=1)[:, None], columns, 0.0)
    return jnp.where(jnp.isfinite(model.match_logits), weights, -jnp.inf)


def _hypotheses(
    key: Array, model: Conjugate, structure: Structure, k: Int[Array, ""], free: Bool[Array, " N"]
) -> tuple[Float[Array, "H N most"], Float[Array, " H"], Int[Array, " most"]]:
    """Poses of object k from tuples of free points: how close each point is to each part, and scores."""
    members = jnp.asarray(structure.members)[k]
    valid = jnp.asarray(structure.valid)[k]
    basis_key, tuple_key = jax.random.split(key)
    basis = _random_basis(basis_key, valid, structure.basis_size)
    tuples = _tuples(tuple_key, len(model.points), structure.basis_size)
    parts = jax.tree.map(lambda x: x[members], model.parts)
    weight = parts.feature_mask / parts.variance
    prior_precision = jnp.linalg.inv(model.pose_covariance[k])

    F, w = parts.F[basis], weight[basis]
    precision = prior_precision + jnp.einsum("bdp,bd,bdq->pq", F, w, F)
    votes = jnp.einsum(
        "bdp,bd,hbd->hp", F, w, model.points[tuples] - parts.offset[basis]
    )  # every pose is what eq. mu_k gives for these points alone
    pose = (votes + prior_precision @ model.pose_mean[k]) @ jnp.linalg.inv(precision)

    predicted = jnp.einsum("ndp,hp->hnd", parts.F, pose) + parts.offset
    residual = model.points[:, None] - predicted[:, None]  # (H, N, most, d)
    energy = (residual**2 * weight * model.seen[:, None]).sum(axis=-1)
    allowed = valid & free[:, None] & jnp.isfinite(model.match_logits[:, members])
    closeness = jnp.where(allowed, jnp.maximum(-0.5 * energy, -_FLOOR), -_FLOOR)
    # Counted from both sides, so that two parts that share a point count once.
    by_part = (closeness.max(axis=1) + _FLOOR).sum(axis=-1)
    by_point = (closeness.max(axis=2) + _FLOOR).sum(axis=-1)
    distinct = (tuples[:, :, None] == tuples[:, None, :]).sum(axis=(1, 2)) == structure.basis_size
    possible = distinct & free[tuples].all(axis=1)
    return closeness, jnp.where(possible, jnp.minimum(by_part, by_point), -jnp.inf), members


def _none_score(structure: Structure) -> Float[Array, " K"]:
    return jnp.asarray(_NOBODY * _FLOOR * structure.valid.sum(axis=1))


def _with_sharpness(model: Conjugate, sharpness: Float[Array, ""]) -> Conjugate:
    """The same model with its noise variances divided by the sharpness."""
    precision = 1.0
    if model.precision_prior is not None:
        precision = model.precision_prior[0] / model.precision_prior[1]
    parts = model.parts._replace(variance=model.parts.variance / (sharpness * precision))
    return replace(model, parts=parts)


def _random_basis(key: Array, valid: Bool[Array, " most"], size: int) -> Int[Array, " size"]:
    scores = jnp.where(valid, jax.random.uniform(key, valid.shape), -1.0)
    return jax.lax.top_k(scores, size)[1]


def _tuples(key: Array, num_points: int, size: int) -> Int[Array, "H size"]:
    """All tuples of points if there are few, else some at random."""
    if num_points**size <= MAX_HYPOTHESES:
        return jnp.asarray(np.indices((num_points,) * size).reshape(size, -1).T)
    return jax.random.randint(key, (MAX_HYPOTHESES, size), 0, num_points)
