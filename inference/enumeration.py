"""The sum over all matches of a scene, an object's subset of points at a time.

Given the match, poses integrate out in closed form and objects are independent. For each object and
each subset of the points the marginal likelihoods of all injections into its parts are summed; the
objects are then put together by dynamic programming over point sets. For the scenes of the paper
that is some ten thousand terms a template. The evidence is differentiable in these sums, and its
gradient in the log of one is the posterior probability of that subset, from which all marginals
and moments follow.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from inference import subsets
from inference.subsets import Injections, Level
from models import AnyArray
from models.linalg import inverse_and_log_det
from models.reading import Conjugate

LOG_ZERO = -1e30
"""The log of a weight of zero: finite, so that gradients have no inf - inf."""


class Terms(NamedTuple):
    """The injections of subsets of one size into an object's parts."""

    log_weight: Float[Array, "subsets ways"]
    pose_mean: Float[Array, "subsets ways p"]
    covariance: Float[Array, "ways p p"]
    """Depends on which parts are met and not on the points."""


class Posterior(NamedTuple):
    """What the sum gives for one scene with its points first; arrays only."""

    log_sum: Float[Array, ""]
    match_probs: Float[Array, "M N"]
    pose_mean: Float[Array, "K p"]
    pose_covariance: Float[Array, "K p p"]
    config_subsets: Int[Array, "best K"]
    """The most probable ways to give each object a subset of the points."""
    config_log_weight: Float[Array, " best"]
    best_match: Int[Array, " M"]
    """The part of each point in the most probable match."""
    dummies_alike: Bool[Array, ""]


def object_terms(
    model: Conjugate, k: int, parts: Int[np.ndarray, " n"], listed: Injections, num_points: int
) -> tuple[Terms, ...]:
    """Every injection into the parts of object k, for each size of the subset; prior included.

    log N(x; ...) integrated over the pose is sum log N(x; m, D) - 1/2 mu_0' D_0^-1 mu_0
    + 1/2 h' Lambda^-1 h + 1/2 log |D_0^-1| - 1/2 log |Lambda|, with h the information vector.
    """
    score, unmet, votes = _pair_terms(model, parts, num_points)
    F, weight = model.parts.F[parts], (model.parts.feature_mask / model.parts.variance)[parts]
    certainty = jnp.einsum("ndp,nd,ndq->npq", F, weight, F)
    prior_precision, prior_log_det = inverse_and_log_det(model.pose_covariance[k])
    prior_vote = prior_precision @ model.pose_mean[k]
    terms = []
    for block in listed.blocks:
        met = subsets.members(block.pattern, len(parts))
        precision = prior_precision + jnp.einsum("wn,npq->wpq", met.astype(float), certainty)
        covariance, log_det = inverse_and_log_det(jnp.moveaxis(precision, 0, -1))
        covariance = jnp.moveaxis(covariance, -1, 0)
        # Sums over the points of an injection, as products with its one-hot matrix.
        placed = np.eye(len(parts))[block.parts]  # (ways, size, n)
        pairs = jnp.einsum("wsn,cns->cw", placed, score[block.points].swapaxes(1, 2))
        information = prior_vote + jnp.einsum("wsn,csnp->cwp", placed, votes[block.points])
        pose_mean = jnp.einsum("wpq,cwq->cwp", covariance, information)
        quadratic = (information * pose_mean).sum(axis=-1) - prior_vote @ model.pose_mean[k]
        left_out = jnp.where(met, 0.0, unmet).sum(axis=1)
        # log_det is of Lambda; prior_log_det is of D_0, so -1/2 of it is 1/2 log |D_0^-1|.
        log_weight = pairs + left_out + 0.5 * (quadratic - prior_log_det - log_det)
        terms.append(Terms(jnp.maximum(log_weight, LOG_ZERO), pose_mean, covariance))
    return tuple(terms)


def _pair_terms(
    model: Conjugate, parts: Int[np.ndarray, " n"], num_points: int
) -> tuple[Float[Array, "M n"], Float[Array, " n"], Float[Array, "M n p"]]:
    """For each point as each part its log weight at the offset and its vote, and parts left out."""
    F, offset, variance, mask = (
        x[parts]
        for x in (
            model.parts.F,
            model.parts.offset,
            model.parts.variance,
            model.parts.feature_mask,
        )
    )
    centred = model.points[:num_points, None] - offset  # (M, n, d)
    log_density = -0.5 * (mask * (centred**2 / variance + jnp.log(2 * jnp.pi * variance))).sum(-1)
    score = model.match_logits[:num_points, parts] + log_density
    if num_points < len(model.points):
        unmet = model.match_logits[-1, parts]
    else:  # no dummy rows: every part has a point
        unmet = jnp.full(len(parts), LOG_ZERO)
    votes = jnp.einsum("ndp,nd,mnd->mnp", F, mask / variance, centred)
    return jnp.maximum(score, LOG_ZERO), jnp.maximum(unmet, LOG_ZERO), votes


def subset_sums(terms: tuple[Terms, ...]) -> Float[Array, " subsets"]:
    """For each subset of points the log of the summed weight of its injections."""
    return jnp.concatenate([_safe_logsumexp(t.log_weight) for t in terms])


def combine(tables: tuple[Float[Array, " subsets"], ...], levels: tuple[Level, ...]) -> list[Array]:
    """The forward tables: log sum over all ways to fill each point set with the first k objects."""
    forward = [jnp.zeros(1)]
    for table, level in zip(tables, levels, strict=True):
        padded = jnp.append(table, LOG_ZERO)
        forward.append(_safe_logsumexp(padded[level.subset] + forward[-1][level.rest]))
    return forward


def best_configurations(
    tables: tuple[Float[Array, " subsets"], ...], levels: tuple[Level, ...], count: int
) -> tuple[Int[Array, "count K"], Float[Array, " count"]]:
    """The ways of the highest weight to give each object a subset, at most `count` of them."""
    scores, widths, pointers = jnp.zeros((1, 1)), [1], []
    for table, level in zip(tables, levels, strict=True):
        padded = jnp.append(table, LOG_ZERO)
        candidates = padded[level.subset][:, :, None] + scores[level.rest]
        flat = candidates.reshape(len(level.masks), -1)
        widths.append(min(count, flat.shape[1]))
        scores, which = jax.lax.top_k(flat, widths[-1])
        pointers.append(jnp.divmod(which, widths[-2]))
    found = widths[-1]
    mask, rank = jnp.zeros(found, int), jnp.arange(found)
    chosen = []
    for (split, ranks), level in zip(reversed(pointers), reversed(levels), strict=True):
        place = split[mask, rank]
        chosen.append(jnp.asarray(level.subset)[mask, place])
        mask, rank = jnp.asarray(level.rest)[mask, place], ranks[mask, rank]
    return jnp.stack(chosen[::-1], axis=-1), scores[0]


def _safe_logsumexp(values: Float[Array, "... n"]) -> Float[Array, "..."]:
    """Over the last axis, with weights of zero as very negative numbers: no NaN in gradients."""
    return logsumexp(jnp.maximum(values, LOG_ZERO), axis=-1)


class Plan(NamedTuple):
    """What is fixed for a program and a number of points. Objects of one template share terms."""

    parts: tuple[Int[np.ndarray, " n"], ...]
    template: tuple[int, ...]
    """For each object the first object with the same template and prior."""
    listed: tuple[Injections, ...]
    levels: tuple[Level, ...]
    num_points: int


def make_plan(example: Conjugate, shared: bool, num_points: int) -> Plan:
    owner = np.asarray(example.parts.owner)
    parts = tuple(np.flatnonzero(owner == k) for k in range(example.num_objects))
    sizes = tuple(len(p) for p in parts)
    subsets.refuse_if_too_large(num_points, sizes)

    def pieces(k: int) -> list[np.ndarray]:
        own = [np.asarray(x)[parts[k]] for x in example.parts if x is not example.parts.owner]
        prior = [np.asarray(example.pose_mean[k]), np.asarray(example.pose_covariance[k])]
        return [*own, *prior, np.asarray(example.match_logits)[:, parts[k]]]

    template: list[int] = []
    for k in range(len(parts)):
        same = [
            j
            for j in range(k)
            if shared
            and sizes[j] == sizes[k]
            and all(np.array_equal(a, b) for a, b in zip(pieces(j), pieces(k), strict=True))
        ]
        template.append(template[same[0]] if same else k)
    return Plan(
        parts,
        tuple(template),
        tuple(subsets.injections(num_points, size) for size in sizes),
        subsets.levels(num_points, sizes),
        num_points,
    )


def _terms(model: Conjugate, plan: Plan) -> list[tuple[Terms, ...]]:
    terms: list[tuple[Terms, ...]] = []
    for k, (parts, listed) in enumerate(zip(plan.parts, plan.listed, strict=True)):
        first = plan.template[k]
        new = first == k
        terms.append(
            object_terms(model, k, parts, listed, plan.num_points) if new else terms[first]
        )
    return terms


def posterior(model: Conjugate, plan: Plan, count: int) -> Posterior:
    """Everything that follows from the sum, for one scene whose points are its first rows."""
    terms = _terms(model, plan)
    tables = tuple(subset_sums(t) for t in terms)
    log_sum, of_subsets = jax.value_and_grad(lambda t: combine(t, plan.levels)[-1][0])(tables)
    columns, means, covariances = [], [], []
    for t, listed, table, prob in zip(terms, plan.listed, tables, of_subsets, strict=True):
        probs = _term_probs(t, listed, table, prob)
        columns.append(_part_marginals(probs, listed, plan.num_points))
        mean = sum(jnp.einsum("cw,cwp->p", w, x.pose_mean) for w, x in zip(probs, t, strict=True))
        covariance = sum(
            jnp.einsum("w,wpq->pq", w.sum(axis=0), x.covariance)
            + jnp.einsum("cw,cwp,cwq->pq", w, x.pose_mean - mean, x.pose_mean - mean)
            for w, x in zip(probs, t, strict=True)
        )
        means.append(mean)
        covariances.append(covariance)
    order = np.argsort(np.concatenate(plan.parts))
    config, config_weight = best_configurations(tables, plan.levels, count)
    return Posterior(
        log_sum=log_sum,
        match_probs=jnp.concatenate(columns, axis=1)[:, order],
        pose_mean=jnp.stack(means),
        pose_covariance=jnp.stack(covariances),
        config_subsets=config,
        config_log_weight=config_weight,
        best_match=_best_match(terms, plan),
        dummies_alike=jnp.all(model.match_logits[plan.num_points :] == model.match_logits[-1]),
    )


def _term_probs(
    terms: tuple[Terms, ...],
    listed: Injections,
    table: Float[Array, " subsets"],
    prob: Float[Array, " subsets"],
) -> list[Float[Array, "subsets ways"]]:
    """Posterior probability of each injection, from that of its subset."""
    probs, start = [], 0
    for t in terms:
        here = slice(start, start + len(t.log_weight))
        probs.append(prob[here, None] * jnp.exp(t.log_weight - table[here, None]))
        start = here.stop
    return probs


def _part_marginals(
    probs: list[Float[Array, "subsets ways"]], listed: Injections, num_points: int
) -> Float[Array, "M n"]:
    """Probability of each point being each part of an object."""
    size = 1 + max(int(block.parts.max(initial=0)) for block in listed.blocks)
    result: Any = 0.0
    for w, block in zip(probs, listed.blocks, strict=True):
        by_part = jnp.einsum("cw,wsn->csn", w, np.eye(size)[block.parts])
        result = result + jnp.einsum("csm,csn->mn", np.eye(num_points)[block.points], by_part)
    return result


def _best_match(terms: list[tuple[Terms, ...]], plan: Plan) -> Int[Array, " M"]:
    """The same dynamic program with the best injection of each subset in place of their sum."""
    best = tuple(jnp.concatenate([x.log_weight.max(axis=1) for x in t]) for t in terms)
    config = best_configurations(best, plan.levels, 1)[0][0]
    match = jnp.zeros(plan.num_points + 1, int)
    for t, parts, listed, position in zip(terms, plan.parts, plan.listed, config, strict=True):
        ways = jnp.concatenate([x.log_weight.argmax(axis=1) for x in t])
        point, part = _placement(listed, position, ways[position], plan.num_points)
        match = match.at[point].set(jnp.asarray(parts)[part])
    return match[: plan.num_points]


def _placement(
    listed: Injections, position: Int[Array, ""], way: Int[Array, ""], num_points: int
) -> tuple[Int[Array, " most"], Int[Array, " most"]]:
    """Points and parts of one injection, padded with the point M beyond its size."""
    most = len(listed.blocks) - 1
    point, part, start = jnp.full(most, num_points), jnp.zeros(most, int), 0
    for size, block in enumerate(listed.blocks):
        here = (position >= start) & (position < start + len(block.points))
        row = jnp.asarray(block.points)[jnp.clip(position - start, 0, len(block.points) - 1)]
        column = jnp.asarray(block.parts)[jnp.clip(way, 0, len(block.parts) - 1)]
        point = jnp.where(here, point.at[:size].set(row), point)
        part = jnp.where(here, part.at[:size].set(column), part)
        start += len(block.points)
    return point, part


class Draws(NamedTuple):
    """Independent draws from the posterior of one scene."""

    match: Int[AnyArray, "draws M"]
    """The part of each point."""
    pose: Float[AnyArray, "draws K p"]


def draw(key: Array, model: Conjugate, plan: Plan, count: int) -> Draws:
    """Walk the tables back for each object's subset, then draw its injection, then its pose."""
    terms = _terms(model, plan)
    tables = tuple(subset_sums(t) for t in terms)
    forward = combine(tables, plan.levels)
    mask = jnp.zeros(count, int)
    match = jnp.zeros((count, plan.num_points + 1), int)
    poses: list[Array] = []
    for k in reversed(range(len(tables))):
        key, split_key, way_key, noise_key = jax.random.split(key, 4)
        level = plan.levels[k]
        subset, rest = jnp.asarray(level.subset)[mask], jnp.asarray(level.rest)[mask]
        logits = jnp.append(tables[k], LOG_ZERO)[subset] + forward[k][rest]
        split = jax.random.categorical(split_key, logits)[:, None]
        position = jnp.take_along_axis(subset, split, axis=1)[:, 0]
        mask = jnp.take_along_axis(rest, split, axis=1)[:, 0]
        way = _draw_ways(way_key, terms[k], position)
        placement = jax.vmap(lambda s, w, k=k: _placement(plan.listed[k], s, w, plan.num_points))
        point, part = placement(position, way)
        parts = jnp.asarray(plan.parts[k])[part]
        match = match.at[jnp.arange(count)[:, None], point].set(parts)
        poses.append(_draw_poses(noise_key, terms[k], position, way))
    return Draws(match[:, : plan.num_points], jnp.stack(poses[::-1], axis=1))


def _draw_ways(
    key: Array, terms: tuple[Terms, ...], position: Int[Array, " n"]
) -> Int[Array, " n"]:
    """An injection of each drawn subset, in proportion to its weight."""
    way, start = jnp.zeros(len(position), int), 0
    for size, t in enumerate(terms):
        number = len(t.log_weight)
        here = (position >= start) & (position < start + number)
        logits = t.log_weight[jnp.clip(position - start, 0, number - 1)]
        drawn = jax.random.categorical(jax.random.fold_in(key, size), logits)
        way = jnp.where(here, drawn, way)
        start += number
    return way


def _draw_poses(
    key: Array, terms: tuple[Terms, ...], position: Int[Array, " n"], way: Int[Array, " n"]
) -> Float[Array, "n p"]:
    """A pose of an object given the drawn injections."""
    pose_dim = terms[0].pose_mean.shape[-1]
    noise = jax.random.normal(key, (len(position), pose_dim))
    pose, start = jnp.zeros_like(noise), 0
    for t in terms:
        number, ways = t.log_weight.shape
        here = (position >= start) & (position < start + number)
        chosen = jnp.clip(way, 0, ways - 1)
        mean = t.pose_mean[jnp.clip(position - start, 0, number - 1), chosen]
        factor = jnp.linalg.cholesky(t.covariance)[chosen]
        drawn = mean + jnp.einsum("npq,nq->np", factor, noise)
        pose = jnp.where(here[:, None], drawn, pose)
        start += number
    return pose
