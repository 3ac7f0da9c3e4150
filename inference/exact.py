"""Exact inference: every match is summed over (`inference.enumeration`), on the program itself."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from inference import subsets
from inference.enumeration import LOG_ZERO, Draws, Plan, Posterior, draw, make_plan, posterior
from inference.result import Result
from models.errors import InputError
from models.match import MixtureMatch
from models.permanent import MAX_ROWS, log_permanent
from models.reading import Conjugate, Program, check_conjugate, check_program, read, what_varies
from models.scenes import Scene, check_scene

NUM_PARTITIONS = 8
"""Most probable partitions that are reported."""

_CHUNK = 32  # scenes at a time


def run(
    program: Program,
    scene: Scene,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """The exact posterior of one scene or of each scene of a batch.

    The result has `log_evidence`, exact match marginals, pose moments (of the mixture over matches
    that the pose posterior is) and, in `details`: `partitions`, the most probable partitions of the
    points with their probabilities, and `best_match`, the part of each row in the best match. The
    best match need not have the most probable partition, which sums over many matches, and where
    identical objects tie the two may name them differently.
    """
    began = time.perf_counter()
    scenes = check_scene(scene).batch()
    example = _checked(program, scenes.take(0))
    # Rows are exchangeable in name only: the points are moved to the front, and moved back after.
    order = np.argsort(~scenes.present, axis=1, kind="stable")
    sizes = scenes.present.sum(axis=1)
    logits = np.asarray(example.match_logits)
    moved = (order != np.arange(order.shape[1])).any() and not (logits == logits[0]).all()
    if moved and not what_varies(program, scenes.take(0)).match_logits:
        raise InputError(
            "the match prior of this program differs from row to row but not with the scene, and "
            "some scenes have missing rows before points; move the points to the front"
        )
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


def sample(program: Program, scene: Scene, key: Array | int = 0, num_draws: int = 1000) -> Draws:
    """Independent draws of (match, pose) from the exact posterior of one scene.

    Returns numpy arrays: the part of each row, (draws, N), -1 in dummy rows, and the poses.
    """
    if scene.is_batch:
        raise InputError("exact draws are for one scene, got a batch; use scene.take(i)")
    scene = check_scene(scene)
    _checked(program, scene)
    order = np.argsort(~scene.present, kind="stable")
    num_points = int(scene.present.sum())
    front = _reorder(scene.batch(), order[None]).take(0)
    plan, _ = _plan_for(program, num_points, scene.points.shape, scene.point_type is not None)
    base_key = jax.random.key(key) if isinstance(key, int) else key
    drawn = jax.jit(lambda k, s: draw(k, read(program, s), plan, num_draws))(base_key, front)
    match = np.full((num_draws, len(order)), -1)
    match[:, order[:num_points]] = drawn.match
    return Draws(match, np.asarray(drawn.pose))


def _checked(program: Program, scene: Scene) -> Conjugate:
    """The pieces at a scene, once it is clear that they can be summed over."""
    check_program(program, scene)
    check_conjugate(program, scene)
    example = read(program, scene)
    _check_supported(example)
    return example


@functools.lru_cache(maxsize=64)
def _plan_for(
    program: Program, num_points: int, shape: tuple[int, int], has_types: bool
) -> tuple[Plan, int]:
    """The plan for scenes of so many points, and how many configurations to report."""
    rows, _ = shape
    present = np.arange(rows) < num_points
    types = np.zeros(rows, int) if has_types else None
    blank = Scene(np.zeros(shape), present, point_type=types)
    varies = what_varies(program, blank)
    pieces = (varies.parts, varies.pose_mean, varies.pose_covariance, varies.match_logits)
    plan = make_plan(read(program, blank), not any(jax.tree.leaves(pieces)), num_points)
    swaps = math.prod(math.factorial(plan.template.count(first)) for first in set(plan.template))
    return plan, NUM_PARTITIONS * min(swaps, 8)


@functools.lru_cache(maxsize=64)
def _solver(
    program: Program, num_points: int, shape: tuple[int, int], has_types: bool
) -> Callable[[Scene], Posterior]:
    """Compiled once for each number of points."""
    plan, count = _plan_for(program, num_points, shape, has_types)
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
        if weight < 0.1 * LOG_ZERO:
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
