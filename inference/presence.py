"""Programs with a `presence` site: every set of present objects that can explain a scene is tried.

Given which objects are present a program is an ordinary one, with its evidence or ELBO. The sets
are weighed by it: the evidence of the scene is the sum over sets, and so is a lower bound on it.
Sets that differ only in which of several identical templates is present are tried once.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from inference.mixture import average, mix
from inference.normalizer import data_log_prob, log_prior_normalizer
from inference.result import Result
from models.errors import InputError
from models.reading import Program, is_latent, templates_alike, trace_pieces
from models.scenes import Scene

MAX_OBJECTS = 12
"""Objects beyond which the 2^K sets are refused."""

Solve = Callable[[Program, Scene], Result]
"""A method with its settings; its result has a value for each scene of a batch."""


def has_presence(program: Program, scene: Scene) -> bool:
    """Whether the program has a `presence` site that the scene leaves open."""
    return scene.presence is None and is_latent(program, scene, "presence")


def run(solve: Solve, program: Program, scenes: Scene) -> Result:
    """Solve each scene for each set of present objects, in one batch, and weigh the sets.

    The result is the mixture over sets: its match probabilities and pose moments, and in `details`
    `presence`, the probability of each object being present (of identical objects, the first are
    named first), and `presence_sets`, the most probable sets with their probabilities.
    """
    sets, ways = _sets(program, scenes.take(0))
    log_prior = _log_prior(program, scenes, sets) + np.log(ways)
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
    flags = sets[which].astype(float)
    details = {
        "presence": average(flags, scene, weight, len(scenes.points)),
        "presence_sets": [
            _ranked(sets[which[scene == s]], weight[scene == s]) for s in range(len(scenes.points))
        ],
    }
    return replace(result, details=result.details | details)


def _sets(
    program: Program, scene: Scene
) -> tuple[Bool[np.ndarray, "sets K"], Int[np.ndarray, " sets"]]:
    """Sets of present objects up to swaps of identical ones, and how many ways each stands for."""
    template = trace_pieces(program, scene.layout, templates_alike)
    if len(template) > MAX_OBJECTS:
        raise InputError(
            f"the program has {len(template)} objects, 2^{len(template)} sets of present ones, "
            f"more than the limit of 2^{MAX_OBJECTS}; use a program without a presence site"
        )
    known: dict[tuple[int, ...], list[Any]] = {}
    for flags in itertools.product((True, False), repeat=len(template)):
        name = tuple(sorted(template[k] for k, here in enumerate(flags) if here))
        entry = known.setdefault(name, [np.array(flags), 0])
        entry[1] += 1
    vectors, ways = zip(*known.values(), strict=True)
    return np.stack(vectors), np.array(ways)


def _log_prior(
    program: Program, scenes: Scene, sets: Bool[np.ndarray, "sets K"]
) -> Float[np.ndarray, "scenes sets"]:
    """Log probability of each set and of all data but the points, for each scene.

    It is -inf where no match is possible.
    """
    columns = []
    for flags in sets:
        given = scenes._replace(presence=np.tile(flags, (len(scenes.points), 1)))
        explained = np.isfinite(log_prior_normalizer(program, given, or_bound=True))
        columns.append(np.where(explained, data_log_prob(program, given), -np.inf))
    return np.stack(columns, axis=1)


def _ranked(
    sets: Bool[np.ndarray, "sets K"], weight: Float[np.ndarray, " sets"], count: int = 4
) -> list[tuple[np.ndarray, float]]:
    order = np.argsort(-weight, kind="stable")[:count]
    return [(sets[i], float(weight[i])) for i in order]
