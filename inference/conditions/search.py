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
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpyro.distributions import Distribution

from inference.conditions.problem import Problem, read_problem
from inference.conditions.solve import Conditions, Runs, Solve, mixed, refuse_impossible
from inference.result import Result, join_results
from models.errors import ConjugacyError, InputError
from models.program.batches import Open
from models.program.reading import Program, described
from models.scenes import Scene

Read = Callable[[np.ndarray, np.ndarray], Problem]
"""From the scene and the set of present objects of each run."""

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


def search(program: Program, scenes: Scene, method: Solve, left_open: Open) -> Result:
    """Solve each scene for the sets of present objects that the search meets, and weigh them.

    The result is that of `inference.conditions.solve.solve` without the sets that were not met, so
    its ELBO is still a lower bound. `details["presence_search"]` says "greedy".

    Args:
        left_open: one discrete site, with an entry for each object whose first value means that the
            object is absent.
    """
    name, prior = next(iter(left_open.items()))
    read = functools.partial(_read, program, scenes, name)
    num_scenes = len(scenes.points)
    states = np.asarray(prior.enumerate_support(expand=False)).ravel()
    everything = np.full((num_scenes, *prior.shape()), states[-1])
    whole = read(np.arange(num_scenes), everything)
    objects = _objects(whole, prior, states, left_open)
    num_objects = len(objects.template)
    share = _shares(method(_loosened(whole)), objects)
    suggested = np.where(share > 0.5, objects.states[-1], objects.states[0])
    tried: list[set[bytes]] = [set() for _ in range(num_scenes)]
    best = np.full(num_scenes, -np.inf)
    near = functools.partial(_candidates, read, scenes, objects, share, tried)
    scene, flags = near({s: [own] for s, own in enumerate(suggested)})
    unmet = np.setdiff1d(np.arange(num_scenes), scene)
    if len(unmet):  # no set near the suggested one is possible: look near sets of any size
        more_scene, more_flags = near({s: _nested(objects, share[s]) for s in unmet.tolist()})
        scene, flags = np.append(scene, more_scene), np.concatenate([flags, more_flags])
        refuse_impossible(scenes, np.isin(np.arange(num_scenes), scene))
    found, scene_of, sets = [], [], []
    while len(scene):
        solved = method(read(scene, flags))
        value = solved.log_value + np.log([_ways(objects, own) for own in flags])
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
    joined = join_results(found)
    nowhere = np.zeros((len(flags), 0))
    log_weight = joined.log_value + np.log(ways)
    runs = Runs(joined, scene, np.arange(len(flags)), nowhere, log_weight)
    result = mixed(runs, scenes, Conditions({name: flags}, {}), np.eye(num_objects))
    how = {"presence_search": np.full(len(result), "greedy")}
    return replace(result, details=result.details | how)


def _read(
    program: Program,
    scenes: Scene,
    name: str,
    scene: Int[np.ndarray, " runs"],
    flags: Int[np.ndarray, "runs K"],
) -> Problem:
    """Some scenes, each with a set of present objects."""
    problem = read_problem(program, scenes.take(scene), {name: flags}, or_bound=True)
    if not isinstance(problem, Problem):
        further, prior = next(iter(problem.items()))
        raise ConjugacyError(
            further,
            f"{described(prior)} beside {name!r}, which has too many values to list",
            "no further site",
        )
    return problem._replace(is_conditional=True)


def _loosened(problem: Problem) -> Problem:
    """The same problem with objects that each may have any number of their parts."""
    model = problem.reading.model
    present = problem.scenes.present.T[:, None]
    logits = np.where(present, model.match_logits, 0.0)
    varies = replace(problem.reading.varies, match_logits=True)
    reading = problem.reading._replace(model=replace(model, match_logits=logits), varies=varies)
    return problem._replace(reading=reading, log_constant=np.zeros(problem.num_scenes))


def _objects(problem: Problem, prior: Distribution, states: np.ndarray, left_open: Open) -> Objects:
    """Objects are alike that have the same template and the same chance of being present."""
    template = np.array(problem.skeleton.alike)
    if len(left_open) > 1 or prior.shape() != template.shape:
        raise InputError(
            f"the discrete sites {', '.join(left_open)} have more joint values than can be listed, "
            "and a search is only known for a single site with an entry for each object, such as "
            "'presence'; use fewer objects"
        )
    log_prob = np.stack([np.broadcast_to(prior.log_prob(x), prior.shape()) for x in states])
    for k, first in enumerate(template):
        if not np.allclose(log_prob[:, k], log_prob[:, first]):
            template[k] = k
    return Objects(template, states)


def _shares(result: Result, objects: Objects) -> Float[np.ndarray, "scenes K"]:
    """The share of its parts that each object has met, of objects that are alike largest first."""
    of_object = (result.owner[:, None] == np.arange(len(objects.template))).astype(float)
    mass = np.einsum("smn,nk,sm->sk", result.match_probs, of_object, result.scene.present)
    share = mass / of_object.sum(axis=0)
    for first in np.unique(objects.template):
        own = objects.template == first
        share[:, own] = np.sort(share[:, own], axis=1)[:, ::-1]
    return share


def _candidates(
    read: Read,
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
    possible = _possible(read, scenes, where, flags)
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
    read: Read,
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
    finite = np.isfinite(read(scene[first], flags[first]).log_constant)
    return finite[inverse.ravel()]
