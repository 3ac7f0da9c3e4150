"""Parses of large scenes: candidate objects, and the best sets of them that share no point.

The gate starts tight, and is widened while points stay unexplained or fit badly.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from inference.proposals.beam import beam_search
from inference.proposals.candidates import MAX_JUDGED, TIGHT, Candidates, find
from inference.proposals.packing import Packing, well_placed
from inference.proposals.parses import (
    EDGE,
    Odds,
    Parses,
    Pass,
    claims,
    gains,
    judged_at,
    odds,
    parses_of,
)
from inference.proposals.plan import Plan, make_plan
from models.numerics.devices import compiled
from models.program.batches import Reading, with_points
from models.program.reading import LinearGaussianModel

MANY_OBJECTS = 16
"""Beyond which gates stay narrow, and what is left over is searched again by itself."""

MANY_PARTS = 32
"""Parts of all objects beyond which only the most promising hypotheses are judged closely."""

ENTRIES = 1 << 13
"""Point-part pairs processed at a time, which bounds memory."""


class Effort(NamedTuple):
    """How far a search goes."""

    gate: float
    """Gate variance in units of the noise; zero for the noise capped at `TIGHT`."""
    candidates: int
    """Of each kind, before points are left out; as many as there are parts, at least."""
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
    many = readings[0].skeleton.num_objects > MANY_OBJECTS
    # Through a wide gate many objects have more candidates than can be packed.
    for effort in EFFORTS[:2] if many else EFFORTS:
        plan = _Hashable(make_plan(readings, log_prior, effort.more))
        compiled = _search(plan, effort, with_points(readings), whole, many)

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
def _search(
    hashable: _Hashable, effort: Effort, states: tuple[int, ...], whole: bool, many: bool
) -> Search:
    """Compiled once for each plan and effort.

    Args:
        many: whether there are more than `MANY_OBJECTS`.
    """
    plan = hashable.plan
    count = max(effort.candidates, len(plan.owner))

    def gate_of(model: LinearGaussianModel) -> Float[Array, "N d"]:
        variance = model.parts.variance
        return effort.gate * variance if effort.gate else jnp.minimum(variance, TIGHT)

    def candidates_of(
        models: tuple[LinearGaussianModel, ...],
        log_prior: Float[Array, "S K"],
        among: Bool[Array, " N"] | None = None,
    ) -> tuple[LinearGaussianModel, Odds, Candidates]:
        judged = [judged_at(model, gate_of(model)) if whole else model for model in models]
        outside = EDGE if whole else EDGE * EFFORTS[-1].gate
        known = odds(judged, log_prior, plan.owner, outside, EDGE if whole else 0.0)
        found: list[Candidates] = []
        for s in states:
            worth = known.pair[s] - known.alone[:, None]
            # Through a wide gate many points are near, and a table of them tells little.
            few = effort.gate and len(plan.owner) <= MANY_PARTS
            number = 16 * MAX_JUDGED if few else MAX_JUDGED
            seen = judged[s].seen if among is None else judged[s].seen & among[:, None]
            own = replace(judged[s], seen=seen)
            found.append(find(own, plan, gate_of(models[s]), worth, count, number))
        return judged[states[0]], known, jax.tree.map(lambda *x: jnp.stack(x), *found)

    def to_pack(
        models: tuple[LinearGaussianModel, ...],
        among: Bool[Array, " N"],
        log_prior: Float[Array, "S K"],
    ) -> Packing:
        model, known, found = candidates_of(models, log_prior, among)
        gain, present = gains(known, plan, found, states), model.seen.any(axis=1)
        claimed = claims(found, len(present))
        kept = beam_search(gain, claimed, present, plan, effort.width)
        return Packing(known, found, gain, claimed, present, kept)

    def ranked(
        models: tuple[LinearGaussianModel, ...],
        known: Odds,
        found: Candidates,
        choice: Int[Array, "W K"],
    ) -> Parses:
        own = models[states[0]]
        judged = judged_at(own, gate_of(own)) if whole else own
        parses = parses_of(judged, known, plan, found, states, choice)
        ratio = (gate_of(own) / judged.parts.variance).min(axis=1)
        narrowest = jnp.where(plan.owner < len(plan.kind), ratio, jnp.inf).min()
        return parses._replace(misfit=parses.misfit / (EDGE * narrowest))

    search, finish = over_scenes(to_pack, 1), over_scenes(ranked, 3)

    def by_packing(
        models: list[LinearGaussianModel], log_prior: Float[np.ndarray, "S K"]
    ) -> Parses:
        seen = np.asarray(models[0].seen).any(axis=1).T
        every = np.broadcast_to(seen, (models[0].points.shape[-1], len(plan.owner)))
        found = jax.tree.map(np.asarray, search(models, every, log_prior))
        # Through a wide gate few objects have more candidates than can be packed in time.
        choice = found.choices(plan) if many or not effort.gate else found.kept
        parses = finish(models, found.known, found.candidates, choice)
        if many and np.asarray(parses.left_over)[:, 0].any():
            # Among few points an object with few points comes to light.
            doubtful = every & ~well_placed(np.asarray(parses.match)[:, 0], plan)
            more = jax.tree.map(np.asarray, search(models, doubtful, log_prior))
            found = found.joined(more, len(states))
            parses = finish(models, found.known, found.candidates, found.choices(plan))
        return parses

    return by_packing


def over_scenes(function: Callable[..., Any], batched: int = 0) -> Callable[..., Any]:
    """Compile a function of the pieces of one scene for a batch of them.

    Args:
        batched: how many of the further arguments have an axis of scenes, the first.
    """

    @compiled
    def mapped(models: list[LinearGaussianModel], *others: Any) -> Any:
        width = models[0].points.shape[-1]
        axes = jax.tree.map(lambda x: -1 if x.shape[-1] == width else None, tuple(models))
        single = jax.tree.map(lambda x: x if x.shape[-1] == width else x[..., 0], tuple(models))
        each = tuple(0 if i < batched else None for i in range(len(others)))
        return jax.vmap(function, (axes, *each))(single, *others)

    return mapped
