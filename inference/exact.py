"""Exact inference by summing over all matches, an object's subset of points at a time.

Given the match, poses integrate out in closed form and objects are independent. For each object and
each subset of the points the marginal likelihoods of all injections into its parts are summed; the
objects are then put together by dynamic programming over point sets. For the scenes of the paper
that is some ten thousand terms a template. The evidence is differentiable in the terms, and its
gradient in the log weight of a term is the posterior probability of that term, from which all
marginals and moments follow.
"""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from inference import subsets
from inference.result import Result
from inference.subsets import Injections, Level
from models.errors import InputError
from models.linalg import inverse_and_log_det
from models.match import MixtureMatch
from models.permanent import MAX_ROWS, log_permanent
from models.reading import Conjugate, Program, check_conjugate, check_program, read, what_varies
from models.scenes import Scene, check_scene

NUM_PARTITIONS = 8
"""Most probable partitions that are reported."""

_CHUNK = 32  # scenes at a time
_LOG_ZERO = -1e30  # a weight of zero: finite, so that gradients have no inf - inf


class Terms(NamedTuple):
    """The injections of one object: log weight, and the pose posterior that each implies."""

    log_weight: Float[Array, " terms"]
    pose_mean: Float[Array, "terms p"]
    covariance: Float[Array, "patterns p p"]
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
) -> Terms:
    """Log weight of every injection into the parts of object k, prior of the match included.

    log N(x; ...) integrated over the pose is sum log N(x; m, D) - 1/2 mu_0' D_0^-1 mu_0
    + 1/2 h' Lambda^-1 h + 1/2 log |D_0^-1| - 1/2 log |Lambda|, with h the information vector.
    """
    n = len(parts)
    points = model.points[:num_points]
    F, offset = model.parts.F[parts], model.parts.offset[parts]
    variance = model.parts.variance[parts]
    mask = model.parts.feature_mask[parts]
    weight = mask / variance
    centred = points - offset[:, None]  # (n, M, d)
    log_density = -0.5 * (
        mask[:, None] * (centred**2 / variance[:, None] + jnp.log(2 * jnp.pi * variance)[:, None])
    ).sum(axis=-1)
    paired = model.match_logits[:num_points, parts].T + log_density
    if num_points < len(model.points):
        unpaired = model.match_logits[-1, parts]
    else:  # no dummy rows: every part has a point
        unpaired = jnp.full(n, -jnp.inf)
    score = jnp.concatenate([paired, unpaired[:, None]], axis=1)  # (n, M + 1)
    votes = jnp.einsum("ndp,nd,nmd->nmp", F, weight, centred)
    votes = jnp.concatenate([votes, jnp.zeros((n, 1, votes.shape[-1]))], axis=1)

    prior_precision, prior_log_det = inverse_and_log_det(model.pose_covariance[k])
    prior_vote = prior_precision @ model.pose_mean[k]
    certainty = jnp.einsum("ndp,nd,ndq->npq", F, weight, F)
    met = jnp.asarray(subsets.members(np.arange(2**n), n), float)
    precision = prior_precision + jnp.einsum("Pn,npq->Ppq", met, certainty)
    covariance, log_det = inverse_and_log_det(jnp.moveaxis(precision, 0, -1))
    covariance = jnp.moveaxis(covariance, -1, 0)

    rows = np.arange(n)
    information = prior_vote + votes[rows, listed.point].sum(axis=1)
    pose_mean = jnp.einsum("tpq,tq->tp", covariance[listed.pattern], information)
    quadratic = (information * pose_mean).sum(axis=-1) - prior_vote @ model.pose_mean[k]
    # log_det is of Lambda; prior_log_det is of D_0, so -1/2 of it is 1/2 log |D_0^-1|.
    log_weight = score[rows, listed.point].sum(axis=1) + 0.5 * (
        quadratic - prior_log_det - log_det[listed.pattern]
    )
    return Terms(log_weight, pose_mean, covariance)


def subset_sums(log_weight: Float[Array, " terms"], listed: Injections) -> Float[Array, " subsets"]:
    """For each subset of points the log of the summed weight of its injections."""
    sums, start = [], 0
    for count, each in listed.blocks:
        block = log_weight[start : start + count * each].reshape(count, each)
        sums.append(_safe_logsumexp(block))
        start += count * each
    return jnp.concatenate(sums)


def combine(tables: tuple[Float[Array, " subsets"], ...], levels: tuple[Level, ...]) -> list[Array]:
    """The forward tables: log sum over all ways to fill each point set with the first k objects."""
    forward = [jnp.zeros(1)]
    for table, level in zip(tables, levels, strict=True):
        padded = jnp.append(table, _LOG_ZERO)
        forward.append(_safe_logsumexp(padded[level.subset] + forward[-1][level.rest]))
    return forward


def best_configurations(
    tables: tuple[Float[Array, " subsets"], ...], levels: tuple[Level, ...], count: int
) -> tuple[Int[Array, "count K"], Float[Array, " count"]]:
    """The `count` ways of the highest weight to give each object a subset."""
    scores = jnp.full((1, count), _LOG_ZERO).at[0, 0].set(0.0)
    pointers = []
    for table, level in zip(tables, levels, strict=True):
        padded = jnp.append(table, _LOG_ZERO)
        candidates = padded[level.subset][:, :, None] + scores[level.rest]
        flat = candidates.reshape(len(level.masks), -1)
        width = flat.shape[1]
        if width < count:
            flat = jnp.pad(flat, [(0, 0), (0, count - width)], constant_values=_LOG_ZERO)
        scores, which = jax.lax.top_k(flat, count)
        which = jnp.minimum(which, width - 1)
        split, rank = jnp.divmod(which, count)
        pointers.append((split, rank))
    mask, rank = jnp.zeros(count, int), jnp.arange(count)
    chosen = []
    for (split, ranks), level in zip(reversed(pointers), reversed(levels), strict=True):
        place = split[mask, rank]
        chosen.append(jnp.asarray(level.subset)[mask, place])
        mask, rank = jnp.asarray(level.rest)[mask, place], ranks[mask, rank]
    return jnp.stack(chosen[::-1], axis=-1), scores[0]


def _safe_logsumexp(values: Float[Array, "... n"]) -> Float[Array, "..."]:
    """Over the last axis, with weights of zero as very negative numbers: no NaN in gradients."""
    return logsumexp(jnp.maximum(values, _LOG_ZERO), axis=-1)


class _Plan(NamedTuple):
    """What is fixed for a program and a number of points. Objects of one template share terms."""

    parts: tuple[Int[np.ndarray, " n"], ...]
    template: tuple[int, ...]
    """For each object the first object with the same template and prior."""
    listed: tuple[Injections, ...]
    levels: tuple[Level, ...]
    num_points: int


def _plan(example: Conjugate, shared: bool, num_points: int) -> _Plan:
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
    return _Plan(
        parts,
        tuple(template),
        tuple(subsets.injections(num_points, size) for size in sizes),
        subsets.levels(num_points, sizes),
        num_points,
    )


def _terms(model: Conjugate, plan: _Plan) -> list[Terms]:
    terms: list[Terms] = []
    for k, (parts, listed) in enumerate(zip(plan.parts, plan.listed, strict=True)):
        first = plan.template[k]
        new = first == k
        terms.append(
            object_terms(model, k, parts, listed, plan.num_points) if new else terms[first]
        )
    return terms


def posterior(model: Conjugate, plan: _Plan, count: int) -> Posterior:
    """Everything that follows from the sum, for one scene whose points are its first rows."""
    terms = _terms(model, plan)
    tables = tuple(
        subset_sums(t.log_weight, listed) for t, listed in zip(terms, plan.listed, strict=True)
    )
    log_sum, of_subsets = jax.value_and_grad(lambda tables: combine(tables, plan.levels)[-1][0])(
        tables
    )
    columns, means, covariances = [], [], []
    for t, listed, table, prob in zip(terms, plan.listed, tables, of_subsets, strict=True):
        prob = prob[listed.subset] * jnp.exp(t.log_weight - table[listed.subset])
        columns += [
            jnp.zeros(plan.num_points + 1).at[listed.point[:, n]].add(prob)[: plan.num_points]
            for n in range(listed.point.shape[1])
        ]
        mean = prob @ t.pose_mean
        by_pattern = jnp.zeros(len(t.covariance)).at[listed.pattern].add(prob)
        spread = t.pose_mean - mean
        between = jnp.einsum("t,tp,tq->pq", prob, spread, spread)
        means.append(mean)
        covariances.append(jnp.einsum("P,Ppq->pq", by_pattern, t.covariance) + between)
    order = np.argsort(np.concatenate(plan.parts))
    config, config_weight = best_configurations(tables, plan.levels, count)
    return Posterior(
        log_sum=log_sum,
        match_probs=jnp.stack(columns, axis=1)[:, order],
        pose_mean=jnp.stack(means),
        pose_covariance=jnp.stack(covariances),
        config_subsets=config,
        config_log_weight=config_weight,
        best_match=_best_match(terms, plan),
        dummies_alike=jnp.all(model.match_logits[plan.num_points :] == model.match_logits[-1]),
    )


def _best_match(terms: list[Terms], plan: _Plan) -> Int[Array, " M"]:
    """The same dynamic program with the best injection of each subset in place of their sum."""
    best, start_of = [], []
    for t, listed in zip(terms, plan.listed, strict=True):
        values, places, start = [], [], 0
        for number, each in listed.blocks:
            block = t.log_weight[start : start + number * each].reshape(number, each)
            values.append(block.max(axis=1))
            places.append(start + np.arange(number) * each + block.argmax(axis=1))
            start += number * each
        best.append(jnp.maximum(jnp.concatenate(values), _LOG_ZERO))
        start_of.append(jnp.concatenate(places))
    config, _ = best_configurations(tuple(best), plan.levels, 1)
    match = jnp.zeros(plan.num_points + 1, int)
    for k, (parts, listed) in enumerate(zip(plan.parts, plan.listed, strict=True)):
        term = start_of[k][config[0, k]]
        match = match.at[jnp.asarray(listed.point)[term]].set(jnp.asarray(parts))
    return match[: plan.num_points]


def run(
    program: Program,
    scene: Scene,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """The exact posterior of one scene or of each scene of a batch.

    The result has `log_evidence`, exact match marginals, pose moments (of the mixture over matches
    that the pose posterior is) and, in `details`: `partitions`, the most probable partitions of the
    points with their probabilities, and `best_match`, the part of each row in the best match.
    """
    began = time.perf_counter()
    check_program(program, scene.batch().take(0))
    check_conjugate(program, scene.batch().take(0))
    example = read(program, scene.batch().take(0))
    scenes = check_scene(scene, example.parts.num_parts, example.parts.num_features).batch()
    _check_supported(example)
    # Rows are exchangeable in name only: the points are moved to the front, and moved back after.
    order = np.argsort(~scenes.present, axis=1, kind="stable")
    sizes = scenes.present.sum(axis=1)
    outputs: list[Any] = [None] * len(sizes)
    finished = 0
    for num_points in np.unique(sizes):
        chosen = np.flatnonzero(sizes == num_points)
        solve = _solver(
            program,
            int(num_points),
            scenes.points.shape[1:],
            scenes.point_type is not None,
        )
        for start in range(0, len(chosen), _CHUNK):
            some = chosen[start : start + _CHUNK]
            padded = np.resize(some, _CHUNK if len(chosen) > 1 else 1)
            front = _reorder(scenes.take(padded), order[padded])
            found = jax.tree.map(np.asarray, solve(front))
            for i, s in enumerate(some):
                outputs[s] = jax.tree.map(lambda x, i=i: x[i], found)
            finished += len(some)
            if progress is not None:
                progress(finished, len(sizes))
    result = _gather(outputs, scenes, order, sizes, example, program)
    result = result if scene.is_batch else result.take(0)
    return replace(result, seconds=time.perf_counter() - began)


@functools.lru_cache(maxsize=64)
def _solver(
    program: Program, num_points: int, shape: tuple[int, int], has_types: bool
) -> Callable[[Scene], Posterior]:
    """Compiled once for each number of points."""
    rows, _ = shape
    present = np.arange(rows) < num_points
    types = np.zeros(rows, int) if has_types else None
    blank = Scene(np.zeros(shape), present, point_type=types)
    varies = what_varies(program, blank)
    pieces = (varies.parts, varies.pose_mean, varies.pose_covariance, varies.match_logits)
    plan = _plan(read(program, blank), not any(jax.tree.leaves(pieces)), num_points)
    swaps = math.prod(math.factorial(plan.template.count(first)) for first in set(plan.template))
    count = NUM_PARTITIONS * min(swaps, 8)
    return jax.jit(jax.vmap(lambda scene: posterior(read(program, scene), plan, count)))


def _check_supported(example: Conjugate) -> None:
    if example.match_family is MixtureMatch:
        raise InputError(
            "exact inference sums over permutations, but the match prior is a MixtureMatch; use "
            "PermutationMatch or DoublyStochasticMatch in the program, or the method gmm"
        )
    if example.precision_prior is not None:
        raise InputError(
            "exact inference wants a fixed precision, but the program has a site 'precision' with "
            "a Gamma prior; fix it in the program, or use the method ds"
        )
    seen = np.asarray(example.seen)
    if not (seen == seen[:, :1]).all():
        raise InputError(
            "exact inference wants points that are seen whole or not at all, but some features of "
            "a point are missing; use the method ds"
        )


def _reorder(scenes: Scene, order: Int[np.ndarray, "scenes N"]) -> Scene:
    """Each scene with its rows in the given order, without the truth."""
    rows = np.arange(len(order))[:, None]
    return Scene(**{name: np.asarray(x)[rows, order] for name, x in scenes.observed.items()})


def log_prior_normalizer(program: Program, scenes: Scene) -> Float[np.ndarray, " scenes"]:
    """log perm(A) of the match prior of each scene, once if it is the same for all."""
    first = scenes.take(0)
    observed = Scene(**scenes.observed)
    if not what_varies(program, first).match_logits:
        logits = np.asarray(read(program, first).match_logits)[None]
    else:
        logits = np.asarray(jax.vmap(lambda s: read(program, s).match_logits)(observed))
    size = logits.shape[-1]
    if (logits == logits[:, :1, :1]).all():
        values = size * logits[:, 0, 0] + math.lgamma(size + 1)
    elif size <= MAX_ROWS:
        values = np.asarray(jax.jit(log_permanent)(logits))
    else:
        raise InputError(
            f"the normaliser of a match prior that is not uniform wants at most {MAX_ROWS} parts, "
            f"got {size}; use a uniform prior or the method ds"
        )
    return np.broadcast_to(values, len(scenes.points))


def _gather(
    outputs: list[Posterior],
    scenes: Scene,
    order: Int[np.ndarray, "scenes N"],
    sizes: Int[np.ndarray, " scenes"],
    example: Conjugate,
    program: Program,
) -> Result:
    """Put the rows back in their places and the scenes together."""
    owner = np.asarray(example.parts.owner)
    num_scenes, rows = scenes.present.shape
    if not all(bool(out.dummies_alike) for out in outputs):
        raise InputError(
            "exact inference wants dummy rows that are all alike, but the match prior of this "
            "program tells them apart; give every missing point the same prior"
        )
    match_probs = np.zeros((num_scenes, rows, rows))
    objects = np.full((num_scenes, rows), -1)
    best_match = np.full((num_scenes, rows), -1)
    log_sums = np.zeros(num_scenes)
    partitions = []
    part_sizes = tuple(np.bincount(owner))
    for i, (out, size) in enumerate(zip(outputs, sizes, strict=True)):
        points, dummies = order[i, :size], order[i, size:]
        match_probs[i, points] = out.match_probs
        if len(dummies):
            match_probs[i, dummies] = (1.0 - out.match_probs.sum(axis=0)) / len(dummies)
        best_match[i, points] = out.best_match
        log_sums[i] = out.log_sum + math.lgamma(len(dummies) + 1)
        found = _partitions(out, int(size), part_sizes, points, rows)
        partitions.append(found)
        objects[i] = found[0][0]
    return Result(
        method="exact",
        scene=scenes,
        match_probs=match_probs,
        pose_mean=np.stack([out.pose_mean for out in outputs]),
        pose_covariance=np.stack([out.pose_covariance for out in outputs]),
        object=objects,
        owner=owner,
        converged=np.ones(num_scenes, bool),
        steps=np.ones(num_scenes, int),
        log_evidence=log_sums - log_prior_normalizer(program, scenes),
        details={"partitions": partitions, "best_match": best_match},
    )


def _partitions(
    out: Posterior,
    num_points: int,
    part_sizes: tuple[int, ...],
    points: Int[np.ndarray, " M"],
    rows: int,
) -> list[tuple[Int[np.ndarray, " N"], float]]:
    """Most probable partitions: the object of each row, and the probability of that grouping.

    Ways that group the points alike, such as two identical objects swapped, are one partition and
    their probabilities are added.
    """
    groupings: dict[bytes, tuple[np.ndarray, float]] = {}
    for config, weight in zip(out.config_subsets, out.config_log_weight, strict=True):
        probability = math.exp(min(weight - out.log_sum, 0.0))
        if weight < 0.1 * _LOG_ZERO:
            continue
        labels = np.full(rows, -1)
        for k, position in enumerate(config):
            mask = subsets.injections(num_points, part_sizes[k]).subsets[position]
            labels[points[subsets.members(mask, num_points)]] = k
        alike = (labels[:, None] == labels[None]).tobytes()
        known, sum_so_far = groupings.get(alike, (labels, 0.0))
        groupings[alike] = (known, sum_so_far + probability)
    ranked = sorted(groupings.values(), key=lambda pair: -pair[1])
    return ranked[:NUM_PARTITIONS]
