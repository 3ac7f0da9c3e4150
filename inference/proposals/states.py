"""Solve a scene at the object states of its best parses.

A discrete site with one entry per object, such as `presence`, has too many joint values to
enumerate. The best parses of the scene show which of them have weight.
"""

import itertools
import math
from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Float, Int
from numpyro.distributions import Distribution

from inference.conditions.listing import Conditions
from inference.conditions.problem import Problem, read_problem
from inference.conditions.solve import Finish, Runs, Solve, mixed, refuse_impossible
from inference.proposals.parses import Parses
from inference.proposals.propose import CLOSE, propose
from inference.result import Result
from models.errors import ConjugacyError
from models.program.batches import Open, Skeleton, twins, with_points
from models.program.sites import Program, described
from models.scenes import Scene

MAX_SETS = 8
"""Largest number of joint states solved per scene."""

MAX_SWAPS = 8
"""Largest number of state exchanges among identical objects that are all solved."""

CHANGES = 3
"""Objects whose states are changed when no parse is possible under the program."""


def solve_likely_states(
    program: Program, scenes: Scene, method: Solve, left_open: Open, finish: Finish = mixed
) -> Result | None:
    """Solve each scene at the states of its best parses, and mix these by weight.

    Returns None unless the program leaves open exactly one site, with an entry for each object. The
    result is that of `inference.conditions.problem.solve_scenes` without the states that no parse
    near the best one has, so its ELBO is still a lower bound. States that differ only by an
    exchange of identical objects are all solved if they are few; otherwise one of them is.

    Args:
        left_open: the sites that the program leaves open.
        finish: as in `inference.conditions.problem.solve_scenes`.
    """
    name, prior = next(iter(left_open.items()))
    if len(left_open) > 1 or not _is_of_objects(prior):
        return None
    support = np.asarray(prior.enumerate_support(expand=False)).ravel()
    num_scenes = len(scenes.points)
    each = np.arange(len(support) * num_scenes).reshape(len(support), num_scenes)
    everything = np.repeat(support, num_scenes)[:, None] * np.ones(prior.shape(), support.dtype)
    reading = _read(program, scenes.take(each.ravel() % num_scenes), name, everything).reading
    if reading.skeleton.num_objects != prior.shape()[0]:
        return None
    log_prior = np.stack([np.broadcast_to(prior.log_prob(x), prior.shape()) for x in support])
    readings = [reading.some(own) for own in each]
    parses = propose(readings, log_prior, whole=False)
    twin = twins(readings, log_prior)
    changed = _with_changes(*_by_state(parses), with_points(readings), reading.skeleton)
    scene, flags, own = _without_duplicates(*_with_swaps(*changed, twin, reading.skeleton.parts))
    problem = _read(program, scenes.take(scene), name, support[flags])
    possible = np.isfinite(problem.log_constant)
    unmet = np.setdiff1d(np.arange(num_scenes), scene[possible])
    if len(unmet):  # no parse has a possible state: try nearby ones
        near = [_neighbours(np.asarray(parses.state[s, 0]), len(support)) for s in unmet]
        scene = np.append(scene, np.repeat(unmet, [len(x) for x in near]))
        flags = np.concatenate([flags, *near])
        own = jax.tree.map(lambda x, y: np.concatenate([x, y[scene[len(x) :]]]), own, parses)
        problem = _read(program, scenes.take(scene), name, support[flags])
        possible = np.isfinite(problem.log_constant)
    kept = _worth_solving(scene, np.where(possible, own.value[:, 0], -np.inf))
    refuse_impossible(scenes, np.isin(np.arange(num_scenes), scene[kept]))
    scene, flags = scene[kept], flags[kept]
    found = method(problem.take(kept), jax.tree.map(lambda x: x[kept], own))
    runs = Runs(found, scene, np.arange(len(scene)), np.zeros((len(scene), 0)), found.log_value)
    return finish(runs, scenes, Conditions({name: support[flags]}, {}), np.eye(flags.shape[1]))


def _is_of_objects(prior: Distribution) -> bool:
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(prior))
    is_finite = prior.has_enumerate_support and not prior.event_shape
    return is_finite and not is_traced and len(prior.shape()) == 1


def _read(program: Program, scenes: Scene, name: str, flags: np.ndarray) -> Problem:
    """Read scenes, each at a joint state of its objects, which may be impossible.

    At least two are read: a single one is not traced, and NumPyro would warn of impossible values.
    """
    count = len(flags)
    rows = np.arange(max(count, 2)) % count
    problem = read_problem(program, scenes.take(rows), {name: flags[rows]}, or_bound=True)
    if not isinstance(problem, Problem):
        further, prior = next(iter(problem.items()))
        raise ConjugacyError(
            further, f"{described(prior)} beside {name!r}", "sites that are always there"
        )
    return problem.take(np.arange(count))._replace(is_conditional=True)


def _by_state(
    parses: Parses,
) -> tuple[Int[np.ndarray, " runs"], Int[np.ndarray, "runs K"], Parses]:
    """Scene and joint state of each run, with the parses that have this state, best first."""
    scene, flags, order = [], [], []
    for s, states in enumerate(parses.state):
        own: dict[bytes, list[int]] = {}
        for w in np.flatnonzero(np.isfinite(parses.value[s])):
            own.setdefault(states[w].tobytes(), []).append(int(w))
        scene += [s] * len(own)
        flags += [states[places[0]] for places in own.values()]
        order += [places + [-1] * (len(states) - len(places)) for places in own.values()]
    rows, columns = np.array(scene), np.array(order)
    chosen = jax.tree.map(lambda x: x[rows[:, None], columns], parses)
    chosen = chosen._replace(value=np.where(columns >= 0, chosen.value, -np.inf))
    return rows, np.stack(flags), chosen


def _with_changes(
    scene: Int[np.ndarray, " runs"],
    flags: Int[np.ndarray, "runs K"],
    own: Parses,
    states: tuple[int, ...],
    skeleton: Skeleton,
) -> tuple[Int[np.ndarray, " more"], Int[np.ndarray, "more K"], Parses]:
    """Add other states of the objects of each scene's best parse, if there are at most `MAX_SETS`.

    A parse has the best state of each object given its points, but others may come close.

    Args:
        states: the states in which objects may have points.
    """
    met = np.stack([(own.match[:, 0][:, parts] >= 0).any(axis=1) for parts in skeleton.parts], 1)
    known = {(s, state.tobytes()) for s, state in zip(scene, flags, strict=True)}
    runs, more = list(range(len(scene))), list(flags)
    for i in np.unique(scene, return_index=True)[1]:
        choices = [states if has else (state,) for has, state in zip(met[i], flags[i], strict=True)]
        if math.prod(map(len, choices)) > MAX_SETS:
            continue
        others = (np.array(x, flags.dtype) for x in itertools.product(*choices))
        new = [state for state in others if (scene[i], state.tobytes()) not in known]
        runs += [i] * len(new)
        more += new
    return scene[runs], np.stack(more), jax.tree.map(lambda x: np.asarray(x)[runs], own)


def _with_swaps(
    scene: Int[np.ndarray, " runs"],
    flags: Int[np.ndarray, "runs K"],
    own: Parses,
    twin: Int[np.ndarray, " K"],
    parts: list[np.ndarray],
) -> tuple[Int[np.ndarray, " more"], Int[np.ndarray, "more K"], Parses]:
    """Add the states with identical objects exchanged, if there are at most `MAX_SWAPS`."""
    runs, sources = [], []
    for i, state in enumerate(flags):
        swaps = list(itertools.islice(_exchanges(state, twin), MAX_SWAPS + 1))
        swaps = swaps if len(swaps) <= MAX_SWAPS else swaps[:1]
        runs += [i] * len(swaps)
        sources += swaps
    source = np.array(sources)  # the object that each object replaces
    part_of = np.tile(np.arange(own.match.shape[-1]), (len(runs), 1))
    for row, order in zip(part_of, source, strict=True):
        for k, j in enumerate(order):
            row[parts[k]] = parts[j]
    more = jax.tree.map(lambda x: np.asarray(x)[runs], own)
    more = more._replace(match=np.take_along_axis(more.match, part_of[:, None], axis=2))
    return scene[runs], np.take_along_axis(flags[runs], source, axis=1), more


def _without_duplicates(
    scene: Int[np.ndarray, " runs"], flags: Int[np.ndarray, "runs K"], own: Parses
) -> tuple[Int[np.ndarray, " fewer"], Int[np.ndarray, "fewer K"], Parses]:
    """Keep each joint state of a scene once, with its best parses, so that none is summed twice."""
    best: dict[tuple[int, bytes], int] = {}
    for i in np.argsort(-own.value[:, 0], kind="stable"):
        best.setdefault((int(scene[i]), flags[i].tobytes()), int(i))
    kept = sorted(best.values())
    return scene[kept], flags[kept], jax.tree.map(lambda x: x[kept], own)


def _exchanges(state: Int[np.ndarray, " K"], twin: Int[np.ndarray, " K"]) -> Iterator[list[int]]:
    """Permutations of twins, one per distinct joint state; the identity first."""

    def fill(k: int, order: list[int]) -> Iterator[list[int]]:
        if k == len(state):
            yield order
            return
        free = [j for j in range(len(state)) if twin[j] == twin[k] and j not in order]
        free.sort(key=lambda j: (state[j] != state[k], j))
        known = set()
        for j in free:
            if state[j] not in known:
                known.add(state[j])
                yield from fill(k + 1, [*order, j])

    return fill(0, [])


def _neighbours(flags: Int[np.ndarray, " K"], num_states: int) -> Int[np.ndarray, "near K"]:
    """Joint states that change at most `CHANGES` objects, and the one with all in the last."""
    near = [np.full_like(flags, num_states - 1)]
    for count in range(1, CHANGES + 1):
        for some in itertools.combinations(range(len(flags)), count):
            others = [[x for x in range(num_states) if x != flags[k]] for k in some]
            for states in itertools.product(*others):
                near.append(flags.copy())
                near[-1][list(some)] = states
    return np.array(near)


def _worth_solving(
    scene: Int[np.ndarray, " runs"], value: Float[np.ndarray, " runs"]
) -> Int[np.ndarray, " kept"]:
    """Possible runs that are close to the best of their scene, at most `MAX_SETS` per scene."""
    kept = []
    for s in np.unique(scene):
        own = np.flatnonzero((scene == s) & np.isfinite(value))
        own = own[np.argsort(-value[own], kind="stable")[:MAX_SETS]]
        kept += own[value[own] >= value[own].max(initial=-np.inf) - CLOSE].tolist()
    return np.array(kept, int)
