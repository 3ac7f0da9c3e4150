"""Parses of large scenes: a beam search over candidate objects.

The gate starts tight, and is widened while points stay unexplained or fit badly.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from inference.devices import compiled
from inference.proposals.candidates import MAX_JUDGED, TIGHT, Candidates, find
from inference.proposals.parses import EDGE, Parses, Pass, best_parses, judged_at, odds, with_points
from inference.proposals.plan import Plan, make_plan
from models.program.batches import Reading
from models.program.reading import LinearGaussianModel

MANY_PARTS = 32
"""Parts of all objects beyond which only the most promising hypotheses are judged closely."""

ENTRIES = 1 << 13
"""Point-part pairs processed at a time, which bounds memory."""


class Effort(NamedTuple):
    """How far a search goes."""

    gate: float
    """Gate variance in units of the noise; zero for the noise capped at `TIGHT`."""
    candidates: int
    """Of each kind, before points are left out, at least; four for each object of a kind."""
    width: int
    """Of the beam: parses so far that are kept."""
    more: int
    """Points of a basis beyond those that fix a pose."""


EFFORTS = (
    Effort(0.0, 8, 16, 0),
    Effort(1.0, 32, 32, 0),
    Effort(4.0, 48, 64, 1),
    Effort(25.0, 256, 128, 2),
)


def passes(
    readings: list[Reading], log_prior: Float[np.ndarray, "S K"], whole: bool
) -> Iterator[Pass]:
    """One search per effort, each with a wider gate."""
    num_points, num_scenes = readings[0].model.points.shape[::2]
    block = int(np.clip(ENTRIES // num_points**2, 1, 64))
    for effort in EFFORTS:
        plan = _Hashable(make_plan(readings, log_prior, effort.more))
        compiled = _search(plan, effort, with_points(readings), whole)

        def search(some: Int[np.ndarray, " block"], compiled: Search = compiled) -> Parses:
            return compiled([reading.take(some) for reading in readings], log_prior)

        yield Pass(effort.gate, block, np.zeros(num_scenes, int), search)


Search = Callable[[list[LinearGaussianModel], Float[np.ndarray, "S K"]], Parses]


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

    def of_scene(log_prior: Float[Array, "S K"], models: tuple[LinearGaussianModel, ...]) -> Parses:
        judged = [judged_at(model, gate_of(model)) if whole else model for model in models]
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

    @compiled
    def search(models: list[LinearGaussianModel], log_prior: Float[Array, "S K"]) -> Parses:
        width = models[0].points.shape[-1]
        axes = jax.tree.map(lambda x: -1 if x.shape[-1] == width else None, tuple(models))
        single = jax.tree.map(lambda x: x if x.shape[-1] == width else x[..., 0], tuple(models))
        return jax.vmap(functools.partial(of_scene, log_prior), (axes,))(single)

    return search
