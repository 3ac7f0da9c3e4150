"""Relabelling: bring draws of a symmetric posterior into one common frame.

A sampler may call the square on the left "square 1" in one chain and "square 2" in the next, or
turn it by 90 degrees. All are equally true, but averages over such draws mean nothing, and R-hat is
large. So each draw is mapped by the element of the program's symmetry group
(`inference.posterior.symmetry`) that makes it the most probable under a reference, a Normal for
each object, and the match is renamed accordingly. The remaining differences are real.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from inference.posterior.densities import (
    Draws,
    flat,
    likelihood_at,
    log_joint,
    marginal_prior_draws,
    match_matrix,
    points_of,
)
from inference.posterior.symmetry import Symmetry
from inference.result import Result
from models.errors import InputError
from models.program.sites import Program
from models.scenes import Scene


class Frame(NamedTuple):
    """A reference for relabelling: a Normal for the pose of each object."""

    mean: Float[np.ndarray, "K p"]
    covariance: Float[np.ndarray, "K p p"]

    def log_density(
        self, k: int, pose: Float[np.ndarray, "draws p"]
    ) -> Float[np.ndarray, " draws"]:
        """Log density of poses under the Normal of object k."""
        factor = np.linalg.cholesky(self.covariance[k])
        scaled = np.linalg.solve(factor, (pose - self.mean[k]).T)
        log_det = 2 * np.log(np.diag(factor)).sum()
        return -0.5 * ((scaled**2).sum(axis=0) + log_det + len(factor) * np.log(2 * np.pi))


class Renaming(NamedTuple):
    """For each draw, the element of the symmetry group that takes it to the frame."""

    pose: Float[np.ndarray, "draws K p"]
    """The renamed poses."""
    part: Int[np.ndarray, "draws N"]
    """The new index of each part."""
    object: Int[np.ndarray, "draws K"]
    """The new index of each object."""


def frame_of(program: Program, result: Result) -> Frame:
    """The frame of a result: q itself, or the poses given one good match.

    For a variational result it is q(Y). The moments of an exact result are averages over all copies
    of a mode, so the frame is that of its best match. For a sampler it is that of the match of the
    most probable draw.
    """
    if result.is_batch:
        raise InputError("a frame requires one scene, got a result for a batch; use result.take(i)")
    if result.best_match is not None:
        return frame_at_match(program, result.scene, result.best_match, result.conditions)
    if result.elbo is not None:
        return Frame(result.pose_mean, result.pose_covariance)
    if result.draws is None:
        raise InputError(
            f"a result of the method {result.method!r} cannot be a reference for relabelling; give "
            "a result of ds, svi, exact, nuts or gibbs"
        )
    drawn = flat(result.draws)
    best = int(np.argmax(log_joint(program, result.scene, drawn)))
    values = {name: x[best] for name, x in drawn.items() if name != "match"}
    return frame_at_match(program, result.scene, drawn["match"][best], values)


def frame_at_match(
    program: Program, scene: Scene, match: Int[np.ndarray, " N"], values: dict[str, Any]
) -> Frame:
    """`frames_at` for a single match."""
    return frames_at(program, scene, match[None], values)[0]


def frames_at(
    program: Program, scene: Scene, matches: Int[np.ndarray, "matches N"], values: dict[str, Any]
) -> list[Frame]:
    """The Normals of the poses given each match, with the pose prior approximated by a Normal.

    Args:
        matches: the part of each row, -1 for none.
        values: values of other latent sites, such as the precision.
    """
    prior = marginal_prior_draws(program, scene, jax.random.key(0))["pose"]
    mean = prior.mean(axis=0)
    covariance = np.stack(
        [np.cov(prior[:, k].T).reshape(2 * prior.shape[2:]) for k in range(len(mean))]
    )
    likelihood = likelihood_at(program, scene, values)
    parts = likelihood.parts
    F, mask = np.asarray(parts.F), np.asarray(parts.feature_mask)
    counted = np.asarray(likelihood.seen)[:, None] & mask
    weight = counted / np.asarray(likelihood.noise_variance)  # for each row as each part
    centred = points_of(program, scene)[:, None] - np.asarray(parts.offset)
    certainty = np.einsum("ndp,mnd,ndq->mnpq", F, weight, F)
    votes = np.einsum("ndp,mnd,mnd->mnp", F, weight, centred)
    owner = np.asarray(parts.owner)
    owns = match_matrix(matches)[:, None] * (owner == np.arange(len(mean))[:, None])[:, None, :]
    precision = np.linalg.inv(covariance)
    posterior = np.linalg.inv(precision + np.einsum("skmn,mnpq->skpq", owns, certainty))
    information = np.einsum("kpq,kq->kp", precision, mean)
    information = information + np.einsum("skmn,mnp->skp", owns, votes)
    means = np.einsum("skpq,skq->skp", posterior, information)
    return [Frame(*frame) for frame in zip(means, posterior, strict=True)]


def rename(symmetry: Symmetry, frame: Frame, pose: Float[np.ndarray, "draws K p"]) -> Renaming:
    """For each draw, find the renaming under which it is the most probable in the frame."""
    count, num_objects, _ = pose.shape
    score = np.full((count, num_objects, num_objects), -np.inf)
    best_turn = np.zeros((count, num_objects, num_objects), int)
    for (source, target), turns in symmetry.turns.items():
        scores = np.stack([frame.log_density(target, turn(pose[:, source])) for turn in turns])
        best_turn[:, source, target] = _first_largest(scores)
        score[:, source, target] = scores.max(axis=0)
    score += 1e-6 * np.eye(num_objects)  # break ties in favour of no swap
    forbidden = np.nanmin(np.where(np.isfinite(score), score, np.nan)) - 1.0
    score = np.where(np.isfinite(score), score, num_objects * min(forbidden, -1.0) * 2)
    target_of = np.stack([linear_sum_assignment(s, maximize=True)[1] for s in score])

    renamed = np.empty_like(pose)
    parts = [np.flatnonzero(symmetry.owner == k) for k in range(num_objects)]
    part = np.tile(np.arange(len(symmetry.owner)), (count, 1))  # clutter keeps its slots
    for (source, target), turns in symmetry.turns.items():
        for i, turn in enumerate(turns):
            chosen = (target_of[:, source] == target) & (best_turn[:, source, target] == i)
            renamed[chosen, target] = turn(pose[chosen, source])
            part[np.ix_(chosen, parts[source])] = parts[target][turn.part]
    return Renaming(renamed, part, target_of)


def relabel(symmetry: Symmetry, frame: Frame, draws: Draws) -> dict[str, np.ndarray]:
    """Relabel draws by site, (chains, draws, ...), to a frame."""
    pose, match = np.asarray(draws["pose"]), np.asarray(draws["match"])
    renaming = rename(symmetry, frame, pose.reshape(-1, *pose.shape[2:]))
    old = match.reshape(-1, match.shape[-1])
    new = np.where(old >= 0, np.take_along_axis(renaming.part, np.maximum(old, 0), axis=1), -1)
    renamed = dict(draws) | {
        "pose": renaming.pose.reshape(pose.shape),
        "match": new.reshape(match.shape),
    }
    came_from = renaming.object.argsort(axis=1)
    for name in symmetry.sites:  # values of an object move with it
        x = np.asarray(draws[name])
        own = x.reshape(-1, *x.shape[2:])
        renamed[name] = own[np.arange(len(own))[:, None], came_from].reshape(x.shape)
    return renamed


def match_probs(draws: Draws) -> Float[np.ndarray, "N N"]:
    """The frequency with which each row is each part."""
    return match_matrix(np.asarray(draws["match"])).mean(axis=(0, 1))


def _first_largest(scores: Float[np.ndarray, "turns draws"]) -> Int[np.ndarray, " draws"]:
    """The first turn of the largest score, up to rounding; the identity comes first."""
    return (scores > scores.max(axis=0) - 1e-6).argmax(axis=0)
