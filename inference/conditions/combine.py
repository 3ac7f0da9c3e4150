"""Combine the results of a scene under several conditions, weighted by their evidence.

A condition is a value of a latent site that the closed forms require to be known, such as which
objects are present or how large the noise is. The evidence of a scene is the sum of the evidences
under its conditions, and a sum of lower bounds is a lower bound.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.linalg import block_diag

from inference.result import Result, grouping_of
from models.scenes import Scene

NUM_PARTITIONS = 4
"""How many of the most probable partitions are reported."""

NUM_SETS = 4
"""How many of the most probable values of a discrete condition are reported."""

TIE = 1e-6
"""Weights within this share of each other count as equal."""


def mix(
    found: Result,
    scenes: Scene,
    scene_of: Int[np.ndarray, " runs"],
    log_weight: Float[np.ndarray, " runs"],
) -> tuple[Result, Float[np.ndarray, " runs"]]:
    """Mix the runs of each scene, and return the posterior weight of each run.

    Match probabilities and pose moments are those of the mixture. The partition is the most
    probable one if the method lists partitions, and that of the best run otherwise.

    Args:
        found: a batch of results, one for each run.
        scene_of: the scene of each run.
        log_weight: log evidence or ELBO of each run, including the log prior of its condition.
    """
    num_scenes = len(scenes.points)
    total, weight = weigh(log_weight, scene_of, num_scenes)
    best = best_runs(weight, scene_of, num_scenes)
    mean = average(found.pose_mean, scene_of, weight, num_scenes)
    shift = found.pose_mean - mean[scene_of]
    covariance = found.pose_covariance + shift[..., :, None] * shift[..., None, :]
    names = (name for name in ("sparse", "attempt") if name in found.details)
    labels, listed = found.labels[best], None
    if found.partitions is not None:
        listed = [
            _merged(found.partitions, weight, scene_of == s, mean.shape[1])
            for s in range(num_scenes)
        ]
        labels = np.stack([partitions[0][0] for partitions in listed])
    is_exact = found.log_evidence is not None
    result = replace(
        found,
        scene=scenes,
        match_probs=average(found.match_probs, scene_of, weight, num_scenes),
        pose_mean=mean,
        pose_covariance=average(covariance, scene_of, weight, num_scenes),
        labels=labels,
        converged=found.converged[best],
        steps=found.steps[best],
        elbo=None if is_exact else total,
        log_evidence=total if is_exact else None,
        best_match=None if found.best_match is None else found.best_match[best],
        partitions=listed,
        history=None,
        details={name: found.details[name][best] for name in names},
    )
    return result, weight


def weigh(
    log_weight: Float[np.ndarray, " runs"], scene_of: Int[np.ndarray, " runs"], num_scenes: int
) -> tuple[Float[np.ndarray, " scenes"], Float[np.ndarray, " runs"]]:
    """Log of the total weight of each scene, and the normalised weight of each run."""
    highest = np.full(num_scenes, -np.inf)
    np.maximum.at(highest, scene_of, log_weight)
    summed = np.bincount(scene_of, np.exp(log_weight - highest[scene_of]), num_scenes)
    total = highest + np.log(summed)
    return total, np.exp(log_weight - total[scene_of])


def best_runs(
    weight: Float[np.ndarray, " runs"], scene_of: Int[np.ndarray, " runs"], num_scenes: int
) -> Int[np.ndarray, " scenes"]:
    """The run of largest weight of each scene: the first one, where rounding tells them apart."""
    best = np.zeros(num_scenes, int)
    for s in range(num_scenes):
        own = np.flatnonzero(scene_of == s)
        best[s] = own[np.argmax(weight[own] >= (1.0 - TIE) * weight[own].max())]
    return best


def average(
    values: Float[np.ndarray, "runs ..."],
    scene_of: Int[np.ndarray, " runs"],
    weight: Float[np.ndarray, " runs"],
    num_scenes: int,
) -> Float[np.ndarray, "scenes ..."]:
    """The weighted mean over the runs of each scene."""
    result = np.zeros((num_scenes, *values.shape[1:]))
    np.add.at(result, scene_of, weight.reshape(-1, *(1,) * (values.ndim - 1)) * values)
    return result


def _merged(
    partitions: list[list[tuple[np.ndarray, float]]],
    weight: Float[np.ndarray, " runs"],
    chosen: Bool[np.ndarray, " runs"],
    num_objects: int,
) -> list[tuple[np.ndarray, float]]:
    """Merge the partitions of some runs: add up the weighted probabilities of equal groupings."""
    known: dict[bytes, tuple[np.ndarray, float]] = {}
    for run in np.flatnonzero(chosen):
        for labels, probability in partitions[run]:
            name = grouping_of(labels, num_objects).tobytes()
            first, so_far = known.get(name, (labels, 0.0))
            known[name] = (first, so_far + float(weight[run]) * probability)
    ranked = sorted(known.values(), key=lambda pair: -pair[1])
    return ranked[:NUM_PARTITIONS]


def evened(result: Result, even: Float[np.ndarray, "K K"]) -> Result:
    """Average match probabilities and pose moments over objects that are alike."""
    mean = even @ result.pose_mean
    outer = result.pose_mean[..., :, None] * result.pose_mean[..., None, :]
    second = np.einsum("jk,skpq->sjpq", even, result.pose_covariance + outer)
    return replace(
        result,
        match_probs=result.match_probs @ _of_parts(even, result.owner),
        pose_mean=mean,
        pose_covariance=second - mean[..., :, None] * mean[..., None, :],
    )


def _of_parts(
    even: Float[np.ndarray, "K K"], owner: Int[np.ndarray, " N"]
) -> Float[np.ndarray, "N N"]:
    """The averaging matrix for parts: it averages over the same part of objects that are alike."""
    place = np.array([np.sum(owner[:n] == owner[n]) for n in range(len(owner))])
    even = block_diag(even, 1.0)  # the background is alike to no object
    return even[np.ix_(owner, owner)] * (place[:, None] == place)


def ranked(
    values: np.ndarray, weight: Float[np.ndarray, " runs"]
) -> list[tuple[np.ndarray, float]]:
    """The distinct values of largest total weight, each with its weight."""
    distinct, place = np.unique(values, axis=0, return_inverse=True)
    total = np.bincount(place.ravel(), weights=weight, minlength=len(distinct))
    order = np.argsort(-total, kind="stable")[:NUM_SETS]
    return [(distinct[i], float(total[i])) for i in order]
