"""Programs with a `presence` site: every set of present objects that can explain a scene is tried.

Given which objects are present a program is an ordinary one, with its evidence or ELBO. The sets
are weighed by it: the evidence of the scene is the sum over sets, and so is a lower bound on it.
Sets that differ only in which of several objects that are alike is present are tried once.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from inference.mixture import average, mix
from inference.presence_sets import classes_of, refuse_unexplained
from inference.result import Result
from models.reading import Program
from models.scenes import Scene

NUM_SETS = 4
"""Most probable sets of present objects that are reported."""

Solve = Callable[[Program, Scene], Result]
"""A method with its settings; its result has a value for each scene of a batch."""


def run(solve: Solve, program: Program, scenes: Scene) -> Result:
    """Solve each scene for each set of present objects, in one batch, and weigh the sets.

    The result is the mixture over sets: its match probabilities and pose moments, and in `details`
    `presence`, the probability of each object being present, `presence_sets`, the most probable
    sets with their probabilities, and `presence_search`: that all sets were tried. Sets name the
    first of objects that are alike first, and so do the probabilities of a variational result;
    those of an exact one are the same for all of them.

    A partition's probability is the sum of those under each set that lists it; what it has under
    sets where it is far down the ranks is left out.
    """
    sets, ways, log_prior, alike = classes_of(program, scenes)
    possible = np.isfinite(log_prior)
    refuse_unexplained(scenes, ~possible.any(axis=1))
    scene, which = np.nonzero(possible)
    found = solve(program, scenes.take(scene)._replace(presence=sets[which]))
    even = alike if found.log_evidence is not None else np.eye(len(alike))
    result = weighed(found, scenes, scene, sets[which], ways[which], even)
    return replace(result, details=result.details | {"presence_search": "all"})


def weighed(
    found: Result,
    scenes: Scene,
    scene_of: Int[np.ndarray, " runs"],
    sets: Int[np.ndarray, "runs K"],
    ways: Int[np.ndarray, " runs"],
    even: Float[np.ndarray, "K K"],
) -> Result:
    """Results for some sets of each scene as one, each by its evidence or ELBO.

    Args:
        found: a result for each run, that is a scene and a set.
        ways: sets that each stands for.
        even: averages over objects that are alike, or the identity.
    """
    value = found.elbo if found.log_evidence is None else found.log_evidence
    result, weight = mix(found, scenes, scene_of, np.asarray(value) + np.log(ways))
    num_scenes = len(scenes.points)
    flags = (sets > 0).astype(float)
    details = {
        "presence": average(flags, scene_of, weight, num_scenes) @ even,
        "presence_sets": [
            ranked(sets[scene_of == s], weight[scene_of == s]) for s in range(num_scenes)
        ],
    }
    return replace(_evened(result, even), details=result.details | details)


def _evened(result: Result, even: Float[np.ndarray, "K K"]) -> Result:
    """The same result averaged over objects that are alike."""
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
    """The same average over parts: those in the same place of objects that are alike."""
    place = np.array([np.sum(owner[:n] == owner[n]) for n in range(len(owner))])
    return even[np.ix_(owner, owner)] * (place[:, None] == place)


def ranked(
    sets: Int[np.ndarray, "sets K"], weight: Float[np.ndarray, " sets"]
) -> list[tuple[np.ndarray, float]]:
    """The sets of largest weight, with it."""
    order = np.argsort(-weight, kind="stable")[:NUM_SETS]
    return [(sets[i], float(weight[i])) for i in order]
