"""Exact inference: every match is summed over, on the program itself.

`inference.enumeration` sums over permutations, `inference.assignments` over those of a mixture, and
`inference.solutions` has them compiled.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.stats import gamma

from inference import assignments, presence
from inference.assignments import Listing
from inference.enumeration import sum_over_matches
from inference.mixture import NUM_PARTITIONS, average, mix
from inference.normalizer import data_log_prob, log_prior_normalizer
from inference.parses import Draws, draw
from inference.presence_sets import has_presence, possible_sets
from inference.result import Result
from inference.solutions import MAX_PARSES, Solution, ordered, plan_of, solutions
from models import AnyArray
from models.batches import Skeleton, reader, skeleton
from models.conjugacy import check_conjugate, check_program
from models.errors import InputError
from models.permanent import MAX_ROWS
from models.reading import Conjugate, Program, read
from models.scenes import Scene, check_scene

NUM_GIVEN = 16
"""Partitions that are listed where it is given which objects are present, or how precise points
are: their probabilities are added up over such conditions, so none should leave out much."""

_TAIL, _SPACING = 1e-6, 0.25  # of the grid over the log precision


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
    identical objects tie the two may name them differently. Partitions are listed as far as it is
    proven that no other one goes before them; `proven` says so of the first.
    """
    began = time.perf_counter()
    scenes = check_scene(scene).batch()
    check_program(program, scenes.take(0))
    if has_presence(program, scenes.take(0)):
        solve = functools.partial(run, progress=progress)
        result = presence.run(solve, program, scenes)
        result = result if scene.is_batch else result.take(0)
        return replace(result, seconds=time.perf_counter() - began)
    example = _checked(program, scenes.take(0))
    if example.precision_prior is None:
        result = _proven_only(_solved(program, scenes, example, None, progress))
    else:
        result = _over_precisions(program, scenes, example, progress)
    result = result if scene.is_batch else result.take(0)
    return replace(result, seconds=time.perf_counter() - began)


def _over_precisions(
    program: Program,
    scenes: Scene,
    example: Conjugate,
    progress: Callable[[int, int], None] | None,
) -> Result:
    """An unknown precision is summed over too, on a grid of its logarithm.

    The integrand is smooth and vanishes at both ends, where the trapezoid rule is exponentially
    accurate; its width is that of a log-gamma with some ten degrees of freedom or more.
    """
    assert example.precision_prior is not None
    prior = gamma(float(example.precision_prior[0]), scale=1 / float(example.precision_prior[1]))
    low, high = np.log(prior.ppf(_TAIL)), np.log(prior.isf(_TAIL))
    nodes = np.linspace(low, high, 1 + max(8, math.ceil((high - low) / _SPACING)))
    log_prior = prior.logpdf(np.exp(nodes)) + nodes + np.log(nodes[1] - nodes[0])
    scene_of, node = np.divmod(np.arange(len(scenes.points) * len(nodes)), len(nodes))
    precision = np.exp(nodes)[node]
    found = _solved(program, scenes.take(scene_of), example, precision, progress)
    assert found.log_evidence is not None
    result, weight = mix(found, scenes, scene_of, found.log_evidence + log_prior[node])
    mean = average(precision, scene_of, weight, len(scenes.points))
    return replace(result, details=result.details | {"precision": mean})


def _solved(
    program: Program,
    scenes: Scene,
    example: Conjugate,
    precision: Float[np.ndarray, " scenes"] | None,
    progress: Callable[[int, int], None] | None,
) -> Result:
    """Every scene of a batch, each at its own precision where the program leaves it open."""
    owner = np.asarray(example.parts.owner)
    num_scenes, num_rows = scenes.present.shape
    order, sizes = _points_first(scenes.present)
    log_sum = np.zeros(num_scenes)
    match_probs = np.zeros((num_scenes, num_rows, num_rows))
    pose_mean = np.zeros((num_scenes, *example.pose_mean.shape))
    pose_covariance = np.zeros((num_scenes, *example.pose_covariance.shape))
    parts = np.full((num_scenes, num_rows), -1)
    partitions: list[list[tuple[np.ndarray, float]]] = [[] for _ in sizes]
    unlisted = np.zeros(num_scenes)
    is_condition = precision is not None or scenes.layout.num_objects is not None
    num_parses = (NUM_GIVEN,) if is_condition else (NUM_PARTITIONS, MAX_PARSES)
    given = (program, scenes, order, sizes, precision, num_parses)
    for some, plan, solution in solutions(*given, progress):
        points = order[some, : plan.num_points]
        match_probs[some[:, None], order[some]] = np.moveaxis(solution.moments.match_probs, -1, 0)
        parts[some[:, None], points] = solution.best_match.T
        pose_mean[some] = np.moveaxis(solution.moments.pose_mean, -1, 0)
        pose_covariance[some] = np.moveaxis(solution.moments.pose_covariance, -1, 0)
        log_sum[some], unlisted[some] = solution.log_sum, solution.unlisted
        listed = _partitions(solution, points, num_rows, num_parses[0])
        for s, found in zip(some, listed, strict=True):
            partitions[s] = found
    nothing = np.full(num_rows, -1)  # where numbers are so extreme that no weight is above zero
    return Result(
        method="exact",
        scene=scenes,
        match_probs=match_probs,
        pose_mean=pose_mean,
        pose_covariance=pose_covariance,
        object=np.stack([found[0][0] if found else nothing for found in partitions]),
        owner=owner,
        converged=np.ones(num_scenes, bool),
        steps=np.ones(num_scenes, int),
        log_evidence=log_sum - _known_normalizer(program, scenes) + data_log_prob(program, scenes),
        details={"partitions": partitions, "best_match": parts, "unlisted": unlisted},
    )


def _proven_only(result: Result) -> Result:
    """Without partitions that others, which are not listed, might go before."""
    details = dict(result.details)
    unlisted = details.pop("unlisted")
    details["partitions"] = [
        listed[:1] + [found for found in listed[1:] if found[1] >= least]
        for listed, least in zip(details["partitions"], unlisted, strict=True)
    ]
    first = np.array([listed[0][1] for listed in details["partitions"]])
    return replace(result, details=details | {"proven": first >= unlisted})


def sample(program: Program, scene: Scene, key: Array | int = 0, num_draws: int = 1000) -> Draws:
    """Independent draws of (match, pose) from the exact posterior of one scene.

    Returns numpy arrays: the part of each row, (draws, N), -1 in dummy rows, and the poses; where
    the program leaves it open which objects are there, those too.
    """
    if scene.is_batch:
        raise InputError("exact draws are for one scene, got a batch; use scene.take(i)")
    scenes = check_scene(scene).batch()
    base_key = jax.random.key(key) if isinstance(key, int) else key
    if has_presence(program, scenes.take(0)):
        return _sample_with_presence(program, scenes, base_key, num_draws)
    if _checked(program, scenes.take(0)).precision_prior is not None:
        raise InputError(
            "exact draws want a fixed precision, but the program has a site 'precision' with a "
            "Gamma prior; fix it in the program, or draw with the method gibbs"
        )
    order, sizes = _points_first(scenes.present)
    sampler = _sampler(skeleton(program, scenes.layout), int(sizes[0]), num_draws)
    pieces = reader(program, scenes.layout)(Scene(**scenes.observed))
    drawn = jax.tree.map(np.asarray, sampler(base_key, pieces, order))
    match = np.full((num_draws, scenes.points.shape[1]), -1)
    match[:, order[0, : sizes[0]]] = drawn.match
    return Draws(match, drawn.pose)


def _sample_with_presence(program: Program, scenes: Scene, key: Array, num_draws: int) -> Draws:
    """A set of present objects by its evidence for each draw, and match and poses given the set."""
    sets = np.asarray(possible_sets(program, scenes.take(0)).flags)
    given = scenes.take(np.zeros(len(sets), int))._replace(presence=sets)
    log_evidence = run(program, given).log_evidence
    assert log_evidence is not None
    choice = np.asarray(jax.random.categorical(key, log_evidence, shape=(num_draws,)))
    drawn = {
        s: sample(program, given.take(s), jax.random.fold_in(key, s), num_draws)
        for s in np.unique(choice).tolist()
    }
    match = np.stack([drawn[s].match[i] for i, s in enumerate(choice)])
    pose = np.stack([drawn[s].pose[i] for i, s in enumerate(choice)])
    return Draws(match, pose, sets[choice])


def _checked(program: Program, scene: Scene) -> Conjugate:
    """The pieces at a scene, once it is clear that they can be summed over."""
    check_program(program, scene)
    check_conjugate(program, scene)
    example = read(program, scene)
    if example.part_prior is not None:
        raise InputError(
            "exact inference wants fixed part probabilities, but the program has a site "
            "'part_probs' with a Dirichlet prior; fix them in the program, or use the method gmm"
        )
    return example


def _points_first(
    present: Bool[np.ndarray, "scenes N"],
) -> tuple[Int[np.ndarray, "scenes N"], Int[np.ndarray, " scenes"]]:
    """An order of the rows with the points before the dummies, and the numbers of points."""
    return np.argsort(~present, axis=1, kind="stable"), present.sum(axis=1)


@functools.lru_cache(maxsize=64)
def _sampler(
    skeleton: Skeleton, num_points: int, num_draws: int
) -> Callable[[Array, Conjugate, Int[AnyArray, "1 N"]], Draws]:
    plan = plan_of(skeleton, num_points)

    @jax.jit
    def sampler(key: Array, pieces: Conjugate, order: Int[AnyArray, "1 N"]) -> Draws:
        model, _ = ordered(pieces, plan, order, None)
        if isinstance(plan, Listing):
            sums = assignments.sum_over_assignments(model, plan)
            return assignments.draw(key, model, plan, sums, num_draws)
        return draw(key, model, plan, sum_over_matches(model, plan), num_draws)

    return sampler


def _known_normalizer(program: Program, scenes: Scene) -> Float[np.ndarray, " scenes"]:
    values = log_prior_normalizer(program, scenes)
    if np.isnan(values).any():
        raise InputError(
            f"the normaliser of a match prior that is not uniform wants at most {MAX_ROWS} points "
            "that can meet the same parts, and this scene has more; use a uniform prior or the "
            "method ds"
        )
    return values


def _partitions(
    solution: Solution, points: Int[np.ndarray, "some M"], num_rows: int, num_listed: int
) -> Iterator[list[tuple[Int[np.ndarray, " N"], float]]]:
    """Most probable partitions of each scene: the object of each row, and the probability.

    Ways that group the points alike, such as two identical objects swapped, are one partition.
    """
    labels = solution.labels.T  # (scenes, best, M)
    probability = solution.label_probs.T
    together = labels[..., :, None] == labels[..., None, :]
    for i, rows in enumerate(points):
        found: dict[bytes, tuple[np.ndarray, float]] = {}
        for j in np.argsort(-probability[i], kind="stable"):
            name = together[i, j].tobytes()
            if name not in found and probability[i, j] > 0:
                full = np.full(num_rows, -1)
                full[rows] = labels[i, j]
                found[name] = (full, float(min(probability[i, j], 1.0)))
        yield list(found.values())[:num_listed]
