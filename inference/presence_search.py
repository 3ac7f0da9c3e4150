"""A greedy search for the objects that are present, where their sets are too many to try them all.

First each scene is solved as if every object might have any number of its points, as under the
uniform match prior: the objects that have most of theirs suggest a set. Of the sets nearest to it
those that can explain the number of points are solved; then sets that differ from the best one in
the presence of one to three objects (one more, one less, one in place of another), as long as the
ELBO goes up. Sets that differ only in which of several objects that are alike is present are one.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from numpyro.primitives import Messenger

from inference.presence import Solve, weighed
from inference.presence_sets import log_constants, refuse_unexplained, states_of
from inference.result import Result
from models.batches import skeleton
from models.match import PermutationMatch
from models.reading import Program, placeholder, trace_sites
from models.scenes import Scene

WIDTH = 4
"""Sets of a scene that are solved in a round, the nearest to what the points suggest."""

CHANGES = 3
"""Objects whose presence may differ between a set and its neighbours."""

_BETTER = 1e-2  # nats by which the ELBO has to go up for the search to go on


class Objects(NamedTuple):
    """What is fixed about the objects of a program."""

    template: Int[np.ndarray, " K"]
    """For each object the first one that is alike."""
    states: np.ndarray
    """Of an object, absence first."""


def search(solve: Solve, program: Program, scenes: Scene) -> Result:
    """Solve each scene for the sets of present objects that the search meets, and weigh them.

    The result is that of `inference.presence.run` without the sets that were not met, so its ELBO
    is still a lower bound. `details["presence_search"]` says "greedy".
    """
    objects = _objects(program, scenes.take(0))
    num_scenes, num_objects = len(scenes.points), len(objects.template)
    everything = np.full((num_scenes, num_objects), objects.states[-1])
    loose = solve(relaxed(program), scenes._replace(presence=everything))
    share = _shares(loose, objects)
    suggested = np.where(share > 0.5, objects.states[-1], objects.states[0])
    tried: list[set[bytes]] = [set() for _ in range(num_scenes)]
    best = np.full(num_scenes, -np.inf)
    near = functools.partial(_candidates, program, scenes, objects, share, tried)
    scene, flags = near({s: [own] for s, own in enumerate(suggested)})
    unmet = np.setdiff1d(np.arange(num_scenes), scene)
    if len(unmet):  # no set near the suggested one is possible: look near sets of any size
        more_scene, more_flags = near({s: _nested(objects, share[s]) for s in unmet.tolist()})
        scene, flags = np.append(scene, more_scene), np.concatenate([flags, more_flags])
        refuse_unexplained(scenes, ~np.isin(np.arange(num_scenes), scene))
    found, scene_of, sets = [], [], []
    while len(scene):
        solved = solve(program, scenes.take(scene)._replace(presence=flags))
        assert solved.elbo is not None
        value = solved.elbo + np.log([_ways(objects, own) for own in flags])
        found.append(solved)
        scene_of.append(scene)
        sets.append(flags)
        improved = {}
        for s in np.unique(scene):
            own = np.flatnonzero(scene == s)
            first = own[value[own].argmax()]
            if value[first] > best[s] + _BETTER:
                best[s] = value[first]
                improved[int(s)] = [flags[first]]
        scene, flags = near(improved)
    flags, scene = np.concatenate(sets), np.concatenate(scene_of)
    ways = np.array([_ways(objects, own) for own in flags])
    result = weighed(_joined(found), scenes, scene, flags, ways, np.eye(num_objects))
    return replace(result, details=result.details | {"presence_search": "greedy"})


class _loosened(Messenger):
    """Effect handler: dummy rows take any part, and no data but the points count."""

    def __init__(self, fn: Program, present: Bool[np.ndarray, " N"]) -> None:
        self.present = present
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or msg["name"] == "points":
            return
        if msg["name"] == "match":
            logits = jnp.where(self.present[:, None], msg["fn"].log_weights, 0.0)
            msg["fn"] = PermutationMatch(logits)
        elif msg["is_observed"]:
            msg["fn"] = msg["fn"].mask(False)


@functools.lru_cache(maxsize=32)  # methods compile once for each program, told apart by identity
def relaxed(program: Program) -> Program:
    """The program with all objects there, each with any number of its parts."""

    def loose(points: Any, present: Any, **given: Any) -> Any:
        return _loosened(program, present)(points, present, **given)

    return loose


def _objects(program: Program, scene: Scene) -> Objects:
    """Objects are alike that have the same template and the same chance of being present."""
    states = states_of(program, scene)
    site = trace_sites(program, scene, lambda site: placeholder(site, {}))["presence"]["fn"]
    log_prob = np.stack([np.broadcast_to(site.log_prob(state), site.shape()) for state in states])
    template = np.array(skeleton(program, scene.layout).alike)
    for k, first in enumerate(template):
        if not np.allclose(log_prob[:, k], log_prob[:, first]):
            template[k] = k
    return Objects(template, states)


def _shares(result: Result, objects: Objects) -> Float[np.ndarray, "scenes K"]:
    """The share of its parts that each object has met, of objects that are alike largest first."""
    of_object = np.eye(result.owner.max() + 1)[result.owner]
    mass = np.einsum("smn,nk,sm->sk", result.match_probs, of_object, result.scene.present)
    share = mass / of_object.sum(axis=0)
    for first in np.unique(objects.template):
        own = objects.template == first
        share[:, own] = np.sort(share[:, own], axis=1)[:, ::-1]
    return share


def _candidates(
    program: Program,
    scenes: Scene,
    objects: Objects,
    share: Float[np.ndarray, "scenes K"],
    tried: list[set[bytes]],
    centres: dict[int, list[np.ndarray]],
) -> tuple[Int[np.ndarray, " runs"], Int[np.ndarray, "runs K"]]:
    """The possible sets near some sets of each scene, the nearest to what the points suggest."""
    scene: list[int] = []
    sets: list[np.ndarray] = []
    for s, around in centres.items():
        all_near = (flags for centre in around for flags in _neighbours(objects, centre))
        near = {flags.tobytes(): flags for flags in all_near}
        new = [flags for name, flags in near.items() if name not in tried[s]]
        scene += [s] * len(new)
        sets += new
    if not sets:
        return np.zeros(0, int), np.zeros((0, len(objects.template)), objects.states.dtype)
    where, flags = np.array(scene), np.stack(sets)
    possible = _possible(program, scenes, where, flags)
    distance = np.abs((flags > 0) - share[where]).sum(axis=1)
    chosen: list[int] = []
    for s in centres:
        own = np.flatnonzero((where == s) & possible)
        nearest = own[np.argsort(distance[own], kind="stable")[:WIDTH]]
        tried[s].update(flags[i].tobytes() for i in nearest)
        chosen += nearest.tolist()
    return where[chosen], flags[chosen]


def _nested(objects: Objects, share: Float[np.ndarray, " K"]) -> list[np.ndarray]:
    """Sets of every size, of the objects that have met the largest share of their parts."""
    rank = np.argsort(np.argsort(-share, kind="stable"))
    absent, there = objects.states[0], objects.states[-1]
    return [np.where(rank < size, there, absent) for size in range(len(share) + 1)]


def _neighbours(objects: Objects, flags: Int[np.ndarray, " K"]) -> Iterator[np.ndarray]:
    """The set itself and those that differ in at most `CHANGES` objects, alike ones once."""
    for count in range(CHANGES + 1):
        for some in itertools.combinations(range(len(flags)), count):
            others = [[x for x in objects.states if x != flags[k]] for k in some]
            for states in itertools.product(*others):
                new = flags.copy()
                new[list(some)] = states
                yield _canonical(objects, new)


def _canonical(objects: Objects, flags: Int[np.ndarray, " K"]) -> Int[np.ndarray, " K"]:
    """Of objects that are alike, the first ones in the last states."""
    flags = flags.copy()
    for first in np.unique(objects.template):
        own = objects.template == first
        flags[own] = np.sort(flags[own])[::-1]
    return flags


def _ways(objects: Objects, flags: Int[np.ndarray, " K"]) -> int:
    """How many sets are the same but for which of the objects that are alike is in them."""
    product = 1
    for first in np.unique(objects.template):
        counts = Counter(flags[objects.template == first].tolist()).values()
        product *= math.factorial(sum(counts)) // math.prod(map(math.factorial, counts))
    return product


def _possible(
    program: Program,
    scenes: Scene,
    scene: Int[np.ndarray, " runs"],
    flags: Int[np.ndarray, "runs K"],
) -> Bool[np.ndarray, " runs"]:
    """Which sets can explain their scenes, by the number of points and the match prior.

    Neither depends on where the points are, so scenes with as many of them share the answer.
    """
    size = scenes.present.sum(axis=1)[scene]
    keys = np.c_[size, flags]
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    padded = np.resize(first, 1 << (len(first) - 1).bit_length())  # few widths, few compilations
    constants = log_constants(program, scenes.take(scene[padded]), flags[padded])
    finite = np.isfinite(np.stack(constants)).all(axis=0)
    return np.asarray(finite)[: len(first)][inverse.ravel()]


def _joined(results: list[Result]) -> Result:
    """Results for batches as one."""
    names = ("match_probs", "pose_mean", "pose_covariance", "object", "converged", "steps", "elbo")
    fields: dict[str, Any] = {
        name: np.concatenate([getattr(result, name) for result in results]) for name in names
    }
    fields["details"] = {
        name: np.concatenate([r.details[name] for r in results]) for name in results[0].details
    }
    return replace(results[0], **fields)
