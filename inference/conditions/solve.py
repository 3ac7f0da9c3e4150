"""Sum and integrate over conditions: latent sites given which a program is linear and Gaussian.

Finite discrete conditions (which objects are present, their kinds) are summed over: the evidence of
a scene is the sum of the evidences at their values, and a sum of lower bounds is a lower bound.
Continuous scalars (a precision, a scale of the poses, a visibility) are integrated over by
quadrature (`inference.conditions.quadrature`). Of the values that differ only by a swap of alike
objects, one is solved.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Float, Int
from numpyro.distributions import Distribution, biject_to

from inference.conditions.alike import alike_objects, classes
from inference.conditions.combine import average, best_runs, evened, mix, ranked
from inference.conditions.listing import Conditions, list_conditions
from inference.conditions.quadrature import Lattice
from inference.result import Result, join_results
from models.errors import InputError
from models.program.batches import Open
from models.scenes import Scene

if TYPE_CHECKING:
    from inference.conditions.problem import Problem

_RUNS = 1 << 15  # problems that are solved together
_PRIOR_DRAWS = 255

Solve = Callable[..., Result]
"""A method with its settings: from a problem to a result with one entry for each scene."""

Search = Callable[..., Result | None]
"""Solves scenes whose discrete conditions have too many values to list."""


class Runs(NamedTuple):
    """Solved problems; each is a scene at a value of its conditions."""

    result: Result
    scene: Int[np.ndarray, " runs"]
    value: Int[np.ndarray, " runs"]
    """Index of the joint value of the discrete conditions."""
    node: Float[np.ndarray, "runs axes"]
    """Unconstrained values of the continuous conditions."""
    log_weight: Float[np.ndarray, " runs"]
    """Log evidence or ELBO with the prior of the conditions, of all values the run stands for."""


Finish = Callable[[Runs, Scene, Conditions, Float[np.ndarray, "K K"]], Result]
"""Combines the runs of each scene; the last argument is a matrix that averages alike objects."""


class Way(NamedTuple):
    """How scenes are read, solved and combined."""

    read: Callable[[Scene, Mapping[str, np.ndarray]], "Problem"]
    """Makes a problem from scenes and the values of the conditions for each scene."""
    method: Solve
    tolerance: float
    """Largest change of the log integral over continuous conditions that counts as converged."""
    finish: Finish
    merge: bool
    """Whether to solve only one of the values that differ by a swap of alike objects."""


def solve_open(way: Way, scenes: Scene, left_open: Open) -> Result:
    """Solve each scene of a batch, summing and integrating over the conditions of its program."""
    conditions = list_conditions(left_open)
    at_a_time = max(1, _RUNS // (conditions.num_values * 64 ** len(conditions.continuous)))
    whole = _integrated if conditions.continuous else _summed
    results = []
    for start in range(0, len(scenes.points), at_a_time):
        some = scenes.take(slice(start, start + at_a_time))
        results.append(whole(way, some, conditions))
    return join_results(results)


def refuse_impossible(scenes: Scene, possible: np.ndarray) -> None:
    """Raise an error if some scenes cannot be explained at all."""
    if not possible.all():
        size = int(scenes.present.sum(axis=1)[~possible][0])
        raise InputError(
            f"no match explains a scene of {size} points under this program, whatever values its "
            "discrete sites have; give its parts a visibility below 1, or use a program with a "
            "uniform match prior"
        )


# --- discrete conditions ------------------------------------------------------------------------


def _summed(way: Way, scenes: Scene, conditions: Conditions) -> Result:
    count = len(scenes.points)
    runs, alike = _solve_at(way, scenes, conditions, np.arange(count), np.zeros((count, 0)))
    return way.finish(runs, scenes, conditions, alike)


def _solve_at(
    way: Way,
    scenes: Scene,
    conditions: Conditions,
    scene: Int[np.ndarray, " nodes"],
    node: Float[np.ndarray, "nodes axes"],
) -> tuple[Runs, Float[np.ndarray, "K K"]]:
    """Solve each given scene at its node and at every value of the discrete conditions.

    Also returns the matrix that averages over alike objects.
    """
    count = conditions.num_values
    value = np.tile(np.arange(count), len(scene))
    scene, node = np.repeat(scene, count), np.repeat(node, count, axis=0)
    given, log_jacobian = conditions.given(value, node)
    problem = way.read(scenes.take(scene), given)
    template = alike_objects(problem.reading, conditions.values, count)
    chosen, ways = np.arange(count), np.ones(count)
    if way.merge:
        chosen, ways = classes(conditions.values, template)
    possible = np.isfinite(problem.log_constant) & np.isin(value, chosen)
    explained = np.isin(np.arange(len(scenes.points)), scene[possible])
    refuse_impossible(scenes, explained | ~np.isin(np.arange(len(scenes.points)), scene))
    which = np.flatnonzero(possible)
    result = way.method(problem.take(which))
    log_weight = result.log_value + np.log(ways[value[which]]) + log_jacobian[which]
    runs = Runs(result, scene[which], value[which], node[which], log_weight)
    same = (template[:, None] == template).astype(float)
    return runs, same / same.sum(axis=0)


# --- continuous conditions ----------------------------------------------------------------------


def _integrated(way: Way, scenes: Scene, conditions: Conditions) -> Result:
    """Integrate over the continuous conditions of each scene, each scene on its own lattice."""
    ranges = [_range(prior) for prior in conditions.continuous.values()]
    lattices = [Lattice(ranges, way.tolerance) for _ in scenes.points]
    collected: list[Runs] = []
    alike = np.eye(1)
    while True:
        wanted = [lattice.wanted() for lattice in lattices]
        scene = np.repeat(np.arange(len(lattices)), [len(nodes) for nodes in wanted])
        if not len(scene):
            break
        _refuse_endless(lattices, conditions)
        node = np.concatenate(
            [lattice.place(nodes) for lattice, nodes in zip(lattices, wanted, strict=True)]
        )
        runs, alike = _solve_at(way, scenes, conditions, scene, node)
        collected.append(runs)
        value = _by_node(runs, scene, node)
        ends = np.cumsum([len(nodes) for nodes in wanted])[:-1]
        for lattice, nodes, own in zip(lattices, wanted, np.split(value, ends), strict=True):
            lattice.learn(nodes, own.tolist())
    _refuse_endless(lattices, conditions)
    columns = [np.concatenate(x) for x in list(zip(*collected, strict=True))[1:]]
    runs = Runs(join_results([runs.result for runs in collected]), *columns)
    cell = np.array([lattice.log_cell for lattice in lattices])
    result = way.finish(
        runs._replace(log_weight=runs.log_weight + cell[runs.scene]), scenes, conditions, alike
    )
    stable = np.array([lattice.stable for lattice in lattices])
    return replace(result, converged=result.converged & stable)


def _by_node(
    runs: Runs, scene: Int[np.ndarray, " nodes"], node: Float[np.ndarray, "nodes axes"]
) -> Float[np.ndarray, " nodes"]:
    """Log of the integrand at each node, with the discrete conditions summed out."""
    number = {row.tobytes(): i for i, row in enumerate(np.c_[scene, node])}
    place = np.array([number[row.tobytes()] for row in np.c_[runs.scene, runs.node]], int)
    value = np.full(len(scene), -np.inf)
    np.logaddexp.at(value, place, runs.log_weight)
    return value


def _range(prior: Distribution) -> tuple[float, float]:
    """The range of prior draws in unconstrained space, where the search begins."""
    leaves = jax.tree.leaves(prior)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):  # it depends on the scene
        return -4.0, 4.0
    if isinstance(prior, dist.ImproperUniform):  # it expects nothing
        return -4.0, 4.0
    draws = prior.sample(jax.random.key(0), (_PRIOR_DRAWS,))
    u = np.asarray(biject_to(prior.support).inv(draws))
    u = u[np.isfinite(u)]
    return (float(u.min()), float(u.max())) if len(u) else (-4.0, 4.0)


def _refuse_endless(lattices: list[Lattice], conditions: Conditions) -> None:
    if any(lattice.endless for lattice in lattices):
        names = " and ".join(repr(name) for name in conditions.continuous)
        raise InputError(
            f"site {names}: its posterior density never falls off, so it cannot be integrated; "
            "perhaps a match fits the points exactly, and the density grows without bound as the "
            "noise vanishes: choose a prior that forbids this, or fix the site"
        )


# --- the mixture over conditions ----------------------------------------------------------------


def mixed(
    runs: Runs, scenes: Scene, conditions: Conditions, alike: Float[np.ndarray, "K K"]
) -> Result:
    """Mix the runs of each scene by their weights, and report the posterior of the conditions."""
    result, weight = mix(runs.result, scenes, runs.scene, runs.log_weight)
    num_scenes = len(scenes.points)
    is_exact = result.log_evidence is not None
    even = alike if is_exact else np.eye(len(alike))
    given, _ = conditions.given(runs.value, runs.node)
    details: dict[str, Any] = {}
    best = best_runs(weight, runs.scene, num_scenes)
    for name, x in given.items():
        if name in conditions.continuous:
            details[name] = average(x, runs.scene, weight, num_scenes)
            continue
        positive = average((x > 0).astype(float), runs.scene, weight, num_scenes)
        of_objects = x.ndim == 2 and x.shape[1] == len(even)
        details[name] = positive @ even if of_objects else positive
        details[f"{name}_sets"] = [
            ranked(x[runs.scene == s], weight[runs.scene == s]) for s in range(num_scenes)
        ]
    return replace(
        evened(result, even) if is_exact else result,
        conditions={name: x[best] for name, x in given.items()},
        details=result.details | details,
    )
