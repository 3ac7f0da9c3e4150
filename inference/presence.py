"""Programs with a `presence` site: every set of present objects that can explain a scene is tried.

Given which objects are present a program is an ordinary one, with its evidence or ELBO. The sets
are weighed by it: the evidence of the scene is the sum over sets, and so is a lower bound on it.
Sets that differ only in which of several objects that are alike is present are tried once.

The site is a Bernoulli or, where present objects may be in one of several states (small or large,
say), a Categorical whose first value means that the object is absent.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from inference.mixture import average, mix
from inference.normalizer import data_log_prob, log_prior_normalizer
from inference.result import Result
from models.batches import skeleton
from models.errors import InputError
from models.reading import Program, is_latent, placeholder, trace_sites
from models.scenes import Scene

MAX_SETS = 4096
"""Sets of present objects (and of their states) beyond which a program is refused."""

NUM_SETS = 4
"""Most probable sets of present objects that are reported."""

Solve = Callable[[Program, Scene], Result]
"""A method with its settings; its result has a value for each scene of a batch."""


def has_presence(program: Program, scene: Scene) -> bool:
    """Whether the program has a `presence` site that the scene leaves open."""
    return scene.presence is None and is_latent(program, scene, "presence")


def run(solve: Solve, program: Program, scenes: Scene) -> Result:
    """Solve each scene for each set of present objects, in one batch, and weigh the sets.

    The result is the mixture over sets: its match probabilities and pose moments, and in `details`
    `presence`, the probability of each object being present, and `presence_sets`, the most probable
    sets with their probabilities. Sets name the first of objects that are alike first, and so do
    the probabilities of a variational result; those of an exact one are the same for all of them.

    A partition's probability is the sum of those under each set that lists it; what it has under
    sets where it is far down the ranks is left out.
    """
    sets, ways, log_prior, alike = _sets(program, scenes)
    possible = np.isfinite(log_prior)
    if not possible.any(axis=1).all():
        size = int(scenes.present.sum(axis=1)[~possible.any(axis=1)][0])
        raise InputError(
            f"no set of present objects explains a scene of {size} points under this program; "
            "give its parts a visibility below 1, or use a program with a uniform match prior"
        )
    scene, which = np.nonzero(possible)
    found = solve(program, scenes.take(scene)._replace(presence=sets[which]))
    value = found.elbo if found.log_evidence is None else found.log_evidence
    result, weight = mix(found, scenes, scene, np.asarray(value) + np.log(ways[which]))
    even = alike if found.log_evidence is not None else np.eye(len(alike))
    flags = (sets[which] > 0).astype(float)
    details = {
        "presence": average(flags, scene, weight, len(scenes.points)) @ even,
        "presence_sets": [
            _ranked(sets[which[scene == s]], weight[scene == s]) for s in range(len(scenes.points))
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


def _sets(
    program: Program, scenes: Scene
) -> tuple[
    Int[np.ndarray, "sets K"],
    Int[np.ndarray, " sets"],
    Float[np.ndarray, "scenes sets"],
    Float[np.ndarray, "K K"],
]:
    """Sets of present objects up to swaps of those that are alike.

    With them: how many sets each stands for, its log prior at each scene, -inf where no match is
    possible, and the matrix that averages over objects that are alike.
    """
    template = np.array(skeleton(program, scenes.take(0).layout).alike)
    num_objects = len(template)
    states = _states(program, scenes.take(0))
    if len(states) ** num_objects > MAX_SETS:
        raise InputError(
            f"the program has {num_objects} objects, {len(states)}^{num_objects} sets of present "
            f"ones, more than the limit of {MAX_SETS}; use a program without a presence site"
        )
    sets = np.array(list(itertools.product(states[::-1], repeat=num_objects)))
    constants = [_log_constants(program, scenes, flags) for flags in sets]
    log_data, normalizer = (np.stack(column, axis=1) for column in zip(*constants, strict=True))
    for k, first in enumerate(template):  # alike only if a swap changes nothing
        order = np.arange(num_objects)
        order[[first, k]] = k, first
        swapped = _place(sets[:, order], len(states))
        if not all(np.allclose(x, x[:, swapped]) for x in (log_data, normalizer)):
            template[k] = k
    known: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for place, flags in enumerate(sets):
        name = tuple(sorted(zip(template.tolist(), flags.tolist(), strict=True)))
        known.setdefault(name, []).append(place)
    chosen = np.array([places[0] for places in known.values()])
    ways = np.array([len(places) for places in known.values()])
    log_prior = np.where(np.isfinite(normalizer), log_data, -np.inf)[:, chosen] + np.log(ways)
    alike = (template[:, None] == template).astype(float)
    return sets[chosen], ways, log_prior, alike / alike.sum(axis=0)


def _states(program: Program, scene: Scene) -> np.ndarray:
    """The values that the presence of an object can have, absence first."""
    site = trace_sites(program, scene, lambda site: placeholder(site, {}))["presence"]["fn"]
    values = np.asarray(site.enumerate_support(expand=False)).ravel()
    return values.astype(bool) if len(values) == 2 else values


def _place(sets: Int[np.ndarray, "sets K"], num_states: int) -> Int[np.ndarray, " sets"]:
    """Where sets stand in the list of all of them, that of the last states first."""
    return (num_states - 1 - sets) @ num_states ** np.arange(sets.shape[1])[::-1]


def _log_constants(
    program: Program, scenes: Scene, flags: Int[np.ndarray, " K"]
) -> tuple[Float[np.ndarray, " scenes"], Float[np.ndarray, " scenes"]]:
    """Log probability of a set and of all data but the points, and of the match prior's sum."""
    given = scenes._replace(presence=np.tile(flags, (len(scenes.points), 1)))
    return data_log_prob(program, given), log_prior_normalizer(program, given, or_bound=True)


def _of_parts(
    even: Float[np.ndarray, "K K"], owner: Int[np.ndarray, " N"]
) -> Float[np.ndarray, "N N"]:
    """The same average over parts: those in the same place of objects that are alike."""
    place = np.array([np.sum(owner[:n] == owner[n]) for n in range(len(owner))])
    return even[np.ix_(owner, owner)] * (place[:, None] == place)


def _ranked(
    sets: Int[np.ndarray, "sets K"], weight: Float[np.ndarray, " sets"]
) -> list[tuple[np.ndarray, float]]:
    order = np.argsort(-weight, kind="stable")[:NUM_SETS]
    return [(sets[i], float(weight[i])) for i in order]
