"""Search for matches that a variational result may have missed.

With missing parts a point can often be one part as well as another, so the posterior has a mode for
each of many matches, and coordinate ascent finds some. The search starts at the matches of its
optima and at prior draws. It moves to every match that differs by one change, as long as matches
explain the points about as well as the best one. If there are few matches, all are searched;
otherwise a mode that is far from all others may be missed.
"""

import itertools
import math
from typing import Any

import numpy as np
from jaxtyping import Array, Int
from scipy.optimize import linear_sum_assignment

from inference.posterior.densities import log_joint, prior_draws
from inference.posterior.relabel import Frame, frames_at
from inference.result import Result
from models.program.sites import Program
from models.scenes import Scene

REACH = 12.0
"""The search does not continue from matches this many nats below the best."""

LISTED = 5040
"""Largest number of matches to search exhaustively: seven points on seven parts."""

_DRAWN = 512  # draws from the prior at which the search starts
_KEPT = 1000  # largest number of Normals returned


def neighbouring_frames(
    program: Program, result: Result, values: dict[str, Any], key: Array
) -> list[Frame]:
    """The Normals of the poses given each match that the search finds, the best match first.

    Args:
        result: a variational result for one scene, or a batch of local optima of one scene.
        values: values of other latent sites, such as the precision.
    """
    scene = result.scene.take(0) if result.is_batch else result.scene
    drawn = prior_draws(program, scene, key, _DRAWN)["match"]
    shared = any(len(set(row[row >= 0])) < np.sum(row >= 0) for row in drawn)  # a mixture
    seeds = [_own_matches(result, scene), drawn, _listed(scene, shared)]
    fresh = np.unique(np.concatenate(seeds), axis=0)
    frames: list[Frame] = []
    scores = np.zeros(0)
    known = {tuple(row) for row in fresh}
    while len(fresh) and len(frames) < LISTED:
        found = frames_at(program, scene, fresh, values)
        score = _scores(program, scene, found, values)
        frames, scores = frames + found, np.append(scores, score)
        near = fresh[score > scores.max() - REACH]
        ahead = {tuple(row) for match in near for row in _changes(match, shared)} - known
        known |= ahead
        fresh = np.array(sorted(ahead), int).reshape(-1, fresh.shape[1])
    order = np.argsort(-scores)[:_KEPT]
    return [frames[i] for i in order if scores[i] > scores.max() - REACH]


def _listed(scene: Scene, shared: bool) -> Int[np.ndarray, "matches N"]:
    """All matches if there are at most `LISTED`, else none."""
    num_parts, rows = len(scene.present), np.flatnonzero(scene.present)
    count = num_parts ** len(rows) if shared else math.perm(num_parts, len(rows))
    matches = np.full((count if count <= LISTED else 0, num_parts), -1)
    if len(matches):
        choices = (
            itertools.product(range(num_parts), repeat=len(rows))
            if shared
            else itertools.permutations(range(num_parts), len(rows))
        )
        matches[:, rows] = list(choices)
    return matches


def _own_matches(result: Result, scene: Scene) -> Int[np.ndarray, "optima N"]:
    """The most probable one-to-one match under each q."""
    rows = np.flatnonzero(scene.present)
    probs = np.asarray(result.match_probs).reshape(-1, *result.match_probs.shape[-2:])
    matches = np.full(probs.shape[:2], -1)
    for match, table in zip(matches, probs, strict=True):
        log_probs = np.log(np.maximum(table[rows], 1e-300))
        match[rows] = linear_sum_assignment(log_probs, maximize=True)[1]
    return matches


def _scores(
    program: Program, scene: Scene, frames: list[Frame], values: dict[str, Any]
) -> np.ndarray:
    """Approximate log evidence of each match: log p - log q of its Normal at the mean."""
    means = np.stack([frame.mean for frame in frames])
    repeated = {name: np.stack([x] * len(frames)) for name, x in values.items()}
    covariance = np.stack([frame.covariance for frame in frames])
    own = -0.5 * np.linalg.slogdet(2 * np.pi * covariance)[1].sum(axis=-1)
    return log_joint(program, scene, repeated | {"pose": means}) - own


def _changes(match: Int[np.ndarray, " N"], shared: bool) -> Int[np.ndarray, "changes N"]:
    """All matches that move one point to another part; unless parts are shared, points swap."""
    changed = []
    for row in np.flatnonzero(match >= 0):
        for part in np.delete(np.arange(len(match)), match[row]):
            other = match.copy()
            if not shared:
                other[match == part] = match[row]
            other[row] = part
            changed.append(other)
    return np.array(changed)
