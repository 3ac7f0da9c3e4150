"""Proposals: the parses of each scene that inference begins with.

The gate that points are met with is tight at first, and wider where points stay unexplained or fit
badly.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.stats import chi2

from inference.proposals.candidates import MAX_JUDGED, TIGHT, Candidates, find
from inference.proposals.frames import OUTSIDE
from inference.proposals.parses import Parses, best_parses, odds
from inference.proposals.plan import Plan, make_plan
from models.program.batches import Reading
from models.program.reading import LinearGaussianModel

NUM_PARSES = 16
"""Parses of a scene that are kept."""

CLOSE = 10.0
"""Nats that a parse may be behind the best one and still be worth a run."""

EDGE = float(0.5 * chi2.isf(OUTSIDE, 2))
"""Nats that a point at the edge of a gate costs, in units of the gate."""

MANY_PARTS = 32
"""Parts of all objects beyond which only the most promising hypotheses are judged closely."""

BLOCK = 64
"""Scenes that are searched at a time, fewer where they are large: what is in work stays small."""


class Effort(NamedTuple):
    """How far a search goes."""

    gate: float
    """Variance that points are met with, in units of the noise; at most `TIGHT` if it is zero."""
    candidates: int
    """Of each kind, before points are left out, at least; four for each object of a kind."""
    width: int
    """Of the beam: parses so far that are kept."""
    more: int
    """Points of a basis beyond those that fix a pose."""


EFFORTS = (
    Effort(0.0, 8, NUM_PARSES, 0),
    Effort(1.0, 32, 32, 0),
    Effort(4.0, 48, 64, 1),
    Effort(25.0, 256, 128, 2),
)


def propose(
    readings: Sequence[Reading], log_prior: Float[np.ndarray, "S K"], *, whole: bool
) -> Parses:
    """The best parses of every scene, with the axis of scenes first.

    Args:
        readings: of the same scenes, at each state that an object may have.
        log_prior: log probability of each state.
        whole: prefer whole objects, and take the noise for what the gate is made for: for programs
            under which a missing part costs nothing. Else parses are ranked by their density under
            the program.
    """
    readings = [reading.at_prior_mean() for reading in readings]
    states = tuple(s for s, reading in enumerate(readings) if _may_have_points(reading))
    num_points, num_scenes = readings[0].model.points.shape[0], readings[0].model.points.shape[-1]
    block = 1 if num_scenes == 1 else int(np.clip(BLOCK * 11**2 // num_points**2, 1, BLOCK))
    best: Any = None
    left = np.arange(num_scenes)
    for effort in EFFORTS:
        plan = _Hashable(make_plan(readings, log_prior, effort.more))
        search = functools.partial(
            _search_block, _search(plan, effort, states, whole), readings, log_prior, block
        )
        blocks = [left[i : i + block] for i in range(0, len(left), block)]
        found = jax.tree.map(lambda *x: np.concatenate(x), *_in_threads(search, blocks))
        if best is None:
            best = found
        else:
            better = found.value[:, 0] > best.value[left, 0]
            for known, new in zip(best, found, strict=True):
                known[left[better]] = new[better]
        enough = _is_enough(jax.tree.map(lambda x, own=left: x[own, 0], best), effort, whole)
        left = left[~enough]
        if not len(left):
            break
    return best


def _is_enough(first: Parses, effort: Effort, whole: bool) -> Bool[np.ndarray, " scenes"]:
    """Whether no wider gate can have a better parse than the first of each scene.

    What is outside of the gate would cost more than all misfit within, and no point is left over
    that could be explained; of a gate for the program's own noise, what is left over is clutter.
    """
    if whole and effort.gate:
        explained = first.left_over + first.missing == 0
    else:
        explained = (first.left_over == 0) | (effort.gate >= 1)
    return np.asarray(first.is_clear & (first.misfit <= 1) & explained)


Search = Callable[[list[LinearGaussianModel], Float[np.ndarray, "S K"]], Parses]


def _search_block(
    search: Search,
    readings: list[Reading],
    log_prior: Float[np.ndarray, "S K"],
    block: int,
    some: Int[np.ndarray, " scenes"],
) -> Parses:
    padded = np.resize(some, block)
    found = search([reading.take(padded) for reading in readings], log_prior)
    return jax.tree.map(lambda x: np.array(x)[: len(some), :NUM_PARSES], found)


def _in_threads(function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """Map over items in a thread for each core; the first item by itself, as it may compile."""
    first = function(items[0])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [first, *pool.map(function, items[1:])]


def _may_have_points(reading: Reading) -> bool:
    """Whether some object may have a point."""
    model = reading.model
    of_objects = ~np.asarray(model.parts.is_clutter)[:, 0]
    of_points = model.seen.any(axis=1)[:, None]
    return bool((np.isfinite(model.match_logits[:, of_objects]) & of_points).any())


class _Hashable:
    """A plan that compiled code can be kept by."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        leaves = jax.tree.leaves(plan)
        self.name = tuple((np.asarray(x).tobytes(), np.shape(x)) for x in leaves)

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable) and self.name == other.name


@functools.lru_cache(maxsize=64)
def _search(hashable: _Hashable, effort: Effort, states: tuple[int, ...], whole: bool) -> Search:
    """Compiled once for each plan and effort."""
    plan = hashable.plan
    copies = int(np.bincount(plan.kind).max())
    count = max(effort.candidates, 4 * copies)

    def gate_of(model: LinearGaussianModel) -> Float[Array, "N d"]:
        variance = model.parts.variance
        return effort.gate * variance if effort.gate else jnp.minimum(variance, TIGHT)

    def as_judged(model: LinearGaussianModel) -> LinearGaussianModel:
        if not whole:
            return model
        is_clutter = model.parts.is_clutter[:, None]
        variance = jnp.where(is_clutter, model.parts.variance, gate_of(model))
        return replace(model, parts=model.parts._replace(variance=variance))

    def of_scene(log_prior: Float[Array, "S K"], models: tuple[LinearGaussianModel, ...]) -> Parses:
        judged = [as_judged(model) for model in models]
        outside = EDGE if whole else EDGE * EFFORTS[-1].gate
        known = odds(judged, log_prior, plan.owner, outside, EDGE if whole else 0.0)
        found: list[Candidates] = []
        for s in states:
            worth = known.pair[s] - known.alone[:, None]
            # Through a wide gate many points are near, and a table of them tells little.
            few = effort.gate and len(plan.owner) <= MANY_PARTS
            number = 16 * MAX_JUDGED if few else MAX_JUDGED
            found.append(find(judged[s], plan, gate_of(models[s]), worth, count, number))
        candidates = jax.tree.map(lambda *x: jnp.stack(x), *found)
        parses = best_parses(judged[states[0]], known, plan, candidates, states, effort.width)
        ratio = (gate_of(models[states[0]]) / judged[states[0]].parts.variance).min(axis=1)
        narrowest = jnp.where(plan.owner < len(plan.kind), ratio, jnp.inf).min()
        return parses._replace(misfit=parses.misfit / (EDGE * narrowest))

    @jax.jit
    def search(models: list[LinearGaussianModel], log_prior: Float[Array, "S K"]) -> Parses:
        width = models[0].points.shape[-1]
        axes = jax.tree.map(lambda x: -1 if x.shape[-1] == width else None, tuple(models))
        single = jax.tree.map(lambda x: x if x.shape[-1] == width else x[..., 0], tuple(models))
        return jax.vmap(functools.partial(of_scene, log_prior), (axes,))(single)

    return search
