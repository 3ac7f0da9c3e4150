"""Where coordinate ascent starts from: a random R, or poses that the points themselves suggest.

One scene at a time, scene axes first, to be mapped over a batch.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from models.numerics.linalg import inverse_and_log_det, largest, loop_total, total
from models.program.batches import Skeleton
from models.program.reading import LinearGaussianModel
from models.templates import Parts

MAX_HYPOTHESES, FEWEST_HYPOTHESES = 4096, 1024
"""Hypotheses scored for each object, in scenes of up to 64 rows and in very large ones; tuples of
points beyond that are drawn at random."""

_PAIRS = 1 << 18  # of points and hypotheses, which bounds memory in between

KEPT_HYPOTHESES = 24
"""Of those the best of each object, which objects are placed by."""

_COMPARED = 512  # hypotheses, the best, among which repetitions are looked for

BEAM = 16
"""Placements of the objects so far that are kept while one after another is placed."""

_FLOOR = 40.0  # nats; what a part that nothing meets costs, at most
_ABSENT = 0.75  # share of its parts that an object has to meet to be better than absent


class Start(NamedTuple):
    """Where a run begins: log weights that are projected to R, and the annealing parameter."""

    weights: Float[Array, "N N"]
    beta: Float[Array, ""]


class Structure(NamedTuple):
    """What is fixed about a program: which parts belong together. Plain numpy, never traced."""

    owner: Int[np.ndarray, " N"]
    members: Int[np.ndarray, "K most"]
    """Parts of each object, padded with its first part; the background is no object."""
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
    key: Array,
    model: LinearGaussianModel,
    structure: Structure,
    beta_start: float,
    beta_max: float,
) -> Start:
    """The paper's start: entries of R uniform in [0, 1], where the prior allows a pair."""
    entries = jax.random.uniform(key, model.match_logits.shape, minval=1e-6)
    return Start(_where_allowed(model, jnp.log(entries)), jnp.asarray(beta_start, float))


def parses(
    key: Array,
    model: LinearGaussianModel,
    match: Int[Array, " N"],
    beta_max: float,
) -> Start:
    """A parse: each part with its point, and what is left over at random.

    Args:
        match: the point of each part, -1 for none.
    """
    points = jnp.arange(len(model.points))
    pairs = points[:, None] == match
    taken = pairs.any(axis=1)[:, None] | pairs.any(axis=0)
    # Identical objects that begin alike would stay alike.
    rest = jnp.log(jax.random.uniform(key, pairs.shape, minval=1e-6))
    rest = jnp.where(model.seen.any(axis=1)[:, None], rest, 0.0)
    weights = jnp.where(pairs, _FLOOR, jnp.where(taken, 0.0, _FLOOR + rest))
    return Start(_where_allowed(model, weights), jnp.asarray(beta_max, float))


def poses(
    key: Array,
    model: LinearGaussianModel,
    structure: Structure,
    beta_start: float,
    beta_max: float,
) -> Start:
    """Pose hypotheses: a minimal set of points fixes a pose, and all its parts judge it.

    Of the hypotheses of all objects those are taken that together explain the points best, with
    some chance. The beta at which they are judged is drawn too, mostly near the highest, so that
    restarts differ in more than chance, and is the one that the run goes on with.
    """
    num_objects, most = structure.members.shape
    beta_key, tuple_key, basis_key, rest_key, key = jax.random.split(key, 5)
    lowest = jnp.log(beta_start / beta_max)
    beta = beta_max * jnp.exp(lowest * jax.random.uniform(beta_key) ** 4)
    sharp = _at_beta(model, beta)
    seen = model.seen.any(axis=1)
    tuples = _tuples(tuple_key, model.points, seen, structure.basis_size)
    # (K, N, most, H), hypotheses last: they are many, and sums run along them. One object at a
    # time, in a loop: to have it compiled once for each object takes long where there are many.
    closeness, possible = jax.lax.map(
        lambda of: _hypotheses(sharp, structure.basis_size, tuples, seen, *of),
        (
            jax.random.split(basis_key, num_objects),
            jnp.arange(num_objects),
            jnp.asarray(structure.members),
            jnp.asarray(structure.valid),
        ),
    )
    # Restarts differ by chance added to the scores: the best placement is then a draw, in
    # proportion to exp(score) if there is but one object.
    chance = jnp.where(possible, jax.random.gumbel(key, possible.shape), -jnp.inf)
    absent = _ABSENT * _FLOOR * structure.valid.sum(axis=1)
    # XLA finds the largest of 32-bit numbers some twenty times as fast as those of 64-bit ones.
    bonus = (chance - absent[:, None]).astype(closeness.dtype)
    choice = _place(closeness, bonus, seen, largest_first(structure))
    placed = jnp.take_along_axis(closeness, jnp.maximum(choice, 0)[:, None, None, None], axis=3)
    # Objects that are not placed start at random: alike, identical ones would stay alike.
    shape = (num_objects, len(model.points), most)
    rest = 0.5 * _FLOOR + jnp.log(jax.random.uniform(rest_key, shape, minval=1e-6))
    placed = jnp.where((choice >= 0)[:, None, None], placed[..., 0], rest)
    weights = jnp.full(model.match_logits.shape, 0.5 * _FLOOR)  # of clutter, as of the rest
    for k, (members, valid) in enumerate(zip(structure.members, structure.valid, strict=True)):
        weights = weights.at[:, members[valid]].set(placed[k][:, valid])
    weights = jnp.where(seen[:, None], weights, _FLOOR)
    return Start(_where_allowed(model, weights), beta)


def largest_first(structure: Structure) -> Int[np.ndarray, " K"]:
    """The order in which objects are placed.

    By chance three points look like a triangle where there are many, but hardly six like a plane.
    Placed last, a triangle has but the points to choose from that the others leave.
    """
    return np.argsort(-structure.valid.sum(axis=1), kind="stable")


def _score(closeness: Float[Array, "N most H"]) -> Float[Array, " H"]:
    """How well each hypothesis explains the points.

    Counted from both sides, so that two parts that share a point count once.
    """
    by_part = total(largest(closeness, axis=0), axis=0)
    by_point = total(largest(closeness, axis=1), axis=0)
    return jnp.minimum(by_part, by_point)


def _claims(closeness: Float[Array, "N most H"]) -> Bool[Array, "N H"]:
    """Points that are the closest ones to a part."""
    closest = largest(closeness, axis=0)
    return ((closeness == closest) & (closest > 0)).any(axis=1)


def _best(
    key: Array, claims: Bool[Array, "N H"], score: Float[Array, " H"], count: int
) -> tuple[Float[Array, " best"], Int[Array, " best"]]:
    """Scores and numbers of the best hypotheses of which no two claim the same points."""
    bits = jax.random.bits(key, claims.shape[:1], jnp.uint32)
    name = total(jnp.where(claims, bits[:, None], 0), axis=0)
    number = jnp.arange(len(score))
    if len(score) > _COMPARED:
        score, number = jax.lax.top_k(score, _COMPARED)
        name = name[number]
    before = (score > score[:, None]) | ((score == score[:, None]) & (number < number[:, None]))
    repeated = ((name == name[:, None]) & before).any(axis=1)
    score, best = jax.lax.top_k(jnp.where(repeated, -jnp.inf, score), min(count, len(score)))
    return score, number[best]


def _place(
    closeness: Float[Array, "K N most H"],
    bonus: Float[Array, "K H"],
    seen: Bool[Array, " N"],
    order: Int[np.ndarray, " K"],
) -> Int[Array, " K"]:
    """The hypothesis of each object, -1 for none, that together explain the points best.

    One object after another is placed, or is not, and the best few placements so far are kept.
    """
    num_objects, num_points, _, num_hypotheses = closeness.shape

    def place(
        state: tuple[Array, Array, Array], object: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array, Array], None]:
        total, free, choice = state
        k, closeness, bonus = object
        left = jnp.where(free[:, :, None, None], closeness, 0.0)
        gain = jax.vmap(_score)(left) + bonus
        totals = jnp.append(total[:, None] + gain, total[:, None], axis=1)  # the last is: none
        best, place = jax.lax.top_k(totals.ravel(), len(total))
        before, chosen = jnp.divmod(place, num_hypotheses + 1)
        none = chosen == num_hypotheses
        # Not from `left`, which is large and need never be as a whole.
        own = jnp.where(free[before].T[:, None], closeness[..., jnp.where(none, 0, chosen)], 0.0)
        claimed = _claims(own).T & ~none[:, None]
        chosen = jnp.where(none, -1, chosen)
        return (best, free[before] & ~claimed, choice[before].at[:, k].set(chosen)), None

    start = (
        jnp.where(jnp.arange(BEAM) == 0, 0.0, -jnp.inf).astype(bonus.dtype),
        jnp.broadcast_to(seen, (BEAM, num_points)),
        jnp.full((BEAM, num_objects), -1),
    )
    objects = jax.tree.map(lambda x: x[order], (jnp.arange(num_objects), closeness, bonus))
    (_, _, choice), _ = jax.lax.scan(place, start, objects)
    return choice[0]


def _hypotheses(
    model: LinearGaussianModel,
    basis_size: int,
    tuples: Int[Array, "tuples size"],
    seen: Bool[Array, " N"],
    key: Array,
    k: Int[Array, ""],
    members: Int[Array, " most"],
    valid: Bool[Array, " most"],
) -> tuple[Float[Array, "N most H"], Bool[Array, " H"]]:
    """How close each point is to each part of object k, under the best of its hypotheses.

    In nats, from `_FLOOR` for a point that sits on the part down to zero. A pose is first fitted to
    a tuple alone, put on parts drawn at random; the best are fitted once more to the closest point
    of every part: with noise, two points of four say little. Says, too, which are hypotheses at
    all: no repetitions, and made of different points that can be those parts.
    """
    basis_key, name_key = jax.random.split(key)
    basis = jnp.argsort(jax.random.uniform(basis_key, valid.shape) + ~valid)[:basis_size]
    parts = jax.tree.map(lambda x: jnp.asarray(x)[members], model.parts)
    allowed = valid & jnp.isfinite(model.match_logits[:, members]) & seen[:, None]

    def fit_and_judge(match: Int[Array, "most H"], used: Bool[Array, "most H"]) -> Array:
        closeness = _judge(model, parts, k, *_fit(model, parts, k, match, used))
        # Seven digits are enough for so few nats, at half the traffic.
        return jnp.where(allowed[..., None], closeness, 0.0).astype(jnp.float32)

    shape = (len(members), len(tuples))
    match = jnp.zeros(shape, int).at[basis].set(tuples.T)
    used = jnp.zeros(shape, bool).at[basis].set(True)
    closeness = fit_and_judge(match, used)
    distinct = (tuples[:, :, None] == tuples[:, None, :]).sum(axis=(1, 2)) == basis_size
    # A point that cannot be the part says nothing of the pose: what is left would fit everything.
    sound = distinct & allowed[tuples, basis].all(axis=1)
    score = jnp.where(sound, _score(closeness), -jnp.inf)
    score, best = _best(name_key, _claims(closeness), score, KEPT_HYPOTHESES)
    closeness = closeness[..., best]
    closeness = fit_and_judge(closeness.argmax(axis=0), largest(closeness, axis=0) > 0)
    return closeness, jnp.isfinite(score)


def _fit(
    model: LinearGaussianModel,
    parts: Parts,
    k: Int[Array, ""],
    match: Int[Array, "most H"],
    used: Bool[Array, "most H"],
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
    model: LinearGaussianModel,
    parts: Parts,
    k: Int[Array, ""],
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


def _where_allowed(model: LinearGaussianModel, weights: Float[Array, "N N"]) -> Float[Array, "N N"]:
    return jnp.where(jnp.isfinite(model.match_logits), weights, -jnp.inf)


def _at_beta(model: LinearGaussianModel, beta: Float[Array, ""]) -> LinearGaussianModel:
    """The same model at this beta and, if the precision is unknown, at its prior mean."""
    precision: Any = 1.0
    if model.precision_prior is not None:
        precision = model.precision_prior[0] / model.precision_prior[1]
    parts = model.parts._replace(variance=model.parts.variance_at(beta * precision))
    return replace(model, parts=parts)


def _tuples(
    key: Array, points: Float[Array, "N d"], seen: Bool[Array, " N"], size: int
) -> Int[Array, "H size"]:
    """All tuples of points if there are few, else some at random.

    The first point of those is any, and the others are rather near it than far, as the points of
    one object are: their rank by distance is uniform in its logarithm.
    """
    num_points = len(points)
    most = max(FEWEST_HYPOTHESES, min(MAX_HYPOTHESES, _PAIRS // num_points))
    if num_points**size <= most:
        return jnp.asarray(np.indices((num_points,) * size).reshape(size, -1).T)
    first_key, rank_key = jax.random.split(key)
    apart = ((points[:, None] - points) ** 2).sum(axis=-1)
    by_distance = jnp.argsort(jnp.where(seen, apart, jnp.inf), axis=1)
    first = jax.random.categorical(first_key, jnp.log(seen), shape=(most,))
    height = jnp.log(jnp.maximum(seen.sum(), 2).astype(float))
    rank = jnp.exp(jax.random.uniform(rank_key, (most, size - 1)) * height)
    others = by_distance[first[:, None], rank.astype(int)]
    return jnp.concatenate([first[:, None], others], axis=1)
