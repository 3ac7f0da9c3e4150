"""Parses of large scenes: find candidate objects, and the best sets of them that share no point."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from inference.proposals.candidates import MAX_JUDGED, TIGHT, Candidates, find
from inference.proposals.packing import (
    ROUNDING,
    Columns,
    Points,
    best_parses,
    given_away,
    relax,
    value_of,
    well_placed,
)
from inference.proposals.parses import (
    EDGE,
    NUM_PARSES,
    Odds,
    Parses,
    gains,
    judged_at,
    odds,
)
from inference.proposals.plan import Plan
from models.numerics.arrays import AnyArray
from models.numerics.devices import compiled
from models.program.reading import LinearGaussianModel

MANY_OBJECTS = 16
"""With more objects, gates stay narrow and points that are not well placed are searched again."""

MANY_PARTS = 32
"""With more parts in total, only `MAX_JUDGED` hypotheses of a kind are evaluated at any gate."""


class Effort(NamedTuple):
    """The extent of a search."""

    gate: float
    """Gate variance in units of the noise; zero for the noise capped at `TIGHT`."""
    candidates: int
    """Candidates of each kind, before points are left out; at least the number of parts is used."""


TIGHTEST = Effort(0.0, 8)
MANY = Effort(1.0, 32)
WIDEST = 25.0
"""The largest gate, in units of the noise."""
PRICED = tuple(Effort(gate, 128) for gate in (1.0, 4.0, WIDEST))

PLACE = 2
"""Number of features that say where a point is."""

MAX_ROUNDS = 30
"""Largest number of rounds of column generation."""


Search = Callable[[list[LinearGaussianModel], Float[np.ndarray, "S K"]], Parses]


class HashablePlan:
    """A plan as a cache key for compiled code."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        leaves = jax.tree.leaves(plan)
        self.name = tuple((np.asarray(x).tobytes(), np.shape(x)) for x in leaves)

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashablePlan) and self.name == other.name


class Found(NamedTuple):
    """The candidates of some scenes, scenes first."""

    known: Odds
    candidates: Candidates
    """Candidates in each of the states in which objects may have points."""
    gain: Float[AnyArray, "scenes K SC"]
    present: Bool[AnyArray, "scenes N"]
    whole: bool
    """Whether whole objects are preferred; otherwise an object may have any single point."""

    def columns(self, i: int, plan: Plan, states: tuple[int, ...]) -> Columns:
        """The candidates of a scene as columns of a packing problem."""
        groups = np.unique(plan.twin)
        gain = np.asarray(self.gain[i])[groups]
        group, cell = np.nonzero(np.isfinite(gain))
        state, number = np.divmod(cell, self.candidates.score.shape[-1])
        kind = plan.kind[groups[group]]
        match = np.asarray(self.candidates.match[i])[state, kind, :, number]
        points = (match[..., None] == np.arange(len(self.present[i]))).any(axis=1)
        misfit = np.asarray(self.candidates.misfit[i])[state, kind, number]
        columns = Columns(group, np.array(states)[state], match, points, gain[group, cell], misfit)
        return columns if self.whole else columns.joined(self._single(i, plan))

    def _single(self, i: int, plan: Plan) -> Columns:
        """Objects with a single point, on the part and in the state of the largest weight."""
        groups, rows = np.unique(plan.twin), np.flatnonzero(self.present[i])
        group, row = (x.ravel() for x in np.meshgrid(np.arange(len(groups)), rows, indexing="ij"))
        parts = plan.members[groups]  # padded with parts of the same object
        weight = np.asarray(self.known.single[i])[:, row[:, None], parts[group]]  # (S, x, most)
        state, part = np.unravel_index(
            np.moveaxis(weight, 0, 1).reshape(len(row), -1).argmax(axis=1),
            (len(weight), parts.shape[1]),
        )
        each = np.arange(len(row))
        match = np.full((len(row), parts.shape[1]), -1)
        match[each, part] = row
        points = row[:, None] == np.arange(len(self.present[i]))
        gain = weight[state, each, part] - np.asarray(self.known.alone[i])[row]
        return Columns(group, state, match, points, gain, np.zeros(len(row))).take(
            np.isfinite(gain)
        )

    def points(self, i: int) -> Points:
        """The points of a scene, and the costs of leaving them over."""
        outside, lack = (float(x[i]) for x in (self.known.outside, self.known.lack))
        return Points(np.asarray(self.present[i]), outside, lack, self.whole)


@functools.lru_cache(maxsize=64)
def _finder(
    hashable: HashablePlan, effort: Effort, states: tuple[int, ...], whole: bool
) -> Callable[..., Found]:
    """The search for candidates, compiled once for each plan and effort.

    It takes the models at each state, which points may have candidates, the prices of the points,
    and the log prior of the states.
    """
    plan, is_priced = hashable.plan, effort in PRICED
    count = max(effort.candidates, len(plan.owner))

    def gate_of(model: LinearGaussianModel) -> Float[Array, "N d"]:
        variance = model.parts.variance
        return effort.gate * variance if effort.gate else jnp.minimum(variance, TIGHT)

    def find_candidates(
        models: tuple[LinearGaussianModel, ...],
        among: Bool[Array, " N"],
        price: Float[Array, " N"],
        log_prior: Float[Array, "S K"],
    ) -> tuple[Odds, Candidates, Array, Array]:
        judged = [judged_at(model, gate_of(model)) if whole else model for model in models]
        outside = EDGE if whole else EDGE * WIDEST
        known = odds(judged, log_prior, plan.owner, outside, EDGE if whole else 0.0)
        each: list[Candidates] = []
        for s in states:
            gate = gate_of(models[s])
            worth = known.pair[s] + known.lack - (known.alone + price)[:, None]
            # With a wide gate many points are near, so the table of the plane tells little.
            few = effort.gate and len(plan.owner) <= MANY_PARTS
            number = 16 * MAX_JUDGED if few else MAX_JUDGED
            own = replace(judged[s], seen=judged[s].seen & among[:, None])
            one = find(own, plan, gate, worth, count, number, tight=not is_priced)
            ratio = (gate / judged[s].parts.variance).min(axis=1)
            narrowest = jnp.where(plan.owner < len(plan.kind), ratio, jnp.inf).min()
            misfit = jnp.maximum(one.misfit - _expected(own, plan, one.match), 0.0)
            each.append(one._replace(misfit=misfit / (EDGE * narrowest)))
        found = jax.tree.map(lambda *x: jnp.stack(x), *each)
        present = judged[states[0]].seen.any(axis=1)
        return known, found, gains(known, plan, found, states), present

    mapped = over_scenes(find_candidates, 2)

    def finder(*given: Any) -> Found:
        known, found, gain, present = jax.tree.map(np.asarray, mapped(*given))
        return Found(known, found, gain, present, whole)

    return finder


def _expected(
    model: LinearGaussianModel, plan: Plan, match: Int[Array, "kinds most C"]
) -> Float[Array, "kinds C"]:
    """The misfit that features other than the place of a point are expected to have."""
    members = plan.members[plan.first]
    counted = model.seen[match] & jnp.asarray(model.parts.feature_mask)[members][:, :, None]
    number = (counted & (match >= 0)[..., None])[..., PLACE:].sum(axis=-1)
    return 0.5 * number.sum(axis=1)


def search_of(
    hashable: HashablePlan, effort: Effort, states: tuple[int, ...], whole: bool, many: bool
) -> Search:
    """The search for parses.

    Args:
        many: whether there are more than `MANY_OBJECTS`.
    """
    plan, find_candidates = hashable.plan, _finder(hashable, effort, states, whole)

    def by_packing(
        models: list[LinearGaussianModel], log_prior: Float[np.ndarray, "S K"]
    ) -> Parses:
        seen = np.asarray(models[0].seen).any(axis=1).T
        every = np.broadcast_to(seen, (models[0].points.shape[-1], len(plan.owner)))
        free = np.zeros(every.shape)

        def candidates(
            price: Float[np.ndarray, "scenes N"],
            among: Bool[np.ndarray, "scenes N"] = every,
            find: Callable[..., Found] = find_candidates,
        ) -> Found:
            return find(models, among, price, log_prior)

        found = candidates(free)
        columns = [found.columns(i, plan, states) for i in range(len(every))]
        if effort in PRICED:
            (own,) = columns
            if not whole:  # densities do not depend on the gate: add candidates of the tight one
                tight = candidates(free, every, _finder(hashable, TIGHTEST, states, whole))
                own = own.joined(tight.columns(0, plan, states))
            columns = [_priced(own, candidates, found.points(0), plan, states)]
        parses = [_parses(own, found, i, plan) for i, own in enumerate(columns)]
        if many and any(own.left_over[0] for own in parses):
            # Search the doubtful points again: among fewer points, small objects are found.
            sure = np.stack([well_placed(own.match[0], plan) for own in parses])
            more = candidates(free, every & ~sure)
            columns = [own.joined(more.columns(i, plan, states)) for i, own in enumerate(columns)]
            parses = [_parses(own, found, i, plan) for i, own in enumerate(columns)]
        return jax.tree.map(lambda *x: np.stack(x), *parses)

    return by_packing


def _priced(
    columns: Columns,
    candidates: Callable[[Float[np.ndarray, "1 N"]], Found],
    points: Points,
    plan: Plan,
    states: tuple[int, ...],
) -> Columns:
    """Column generation: add the candidates that are best at the prices of the points.

    With a wide gate an object has thousands of candidates that are nearly as good as the best one,
    and most take points that other objects need. The prices of points measure this need. Candidates
    that gain more than their prices are added and prices updated, until there are none.
    """
    for _ in range(MAX_ROUNDS):
        price = relax(columns, points, plan)
        new = candidates(price.point[None]).columns(0, plan, states)
        gained = -given_away(new, price, points, plan).min(initial=0.0)
        columns = columns.joined(new)
        if gained < ROUNDING:
            break
    return columns


def _parses(columns: Columns, found: Found, i: int, plan: Plan) -> Parses:
    """The best parses of a scene."""
    points = found.points(i)
    price = relax(columns, points, plan)
    # With many objects, look only for the best parse: the next ones differ in single objects.
    count = 1 if len(plan.kind) > MANY_OBJECTS else NUM_PARSES
    chosen = best_parses(columns, price, points, plan, count)
    num_objects, known = len(plan.kind), found.known
    match = np.full((NUM_PARSES, len(plan.owner)), -1)
    state = np.tile(known.state[i].argmax(axis=0), (NUM_PARSES, 1))
    value, misfit = np.full(NUM_PARSES, -np.inf), np.zeros(NUM_PARSES)
    number = np.zeros((NUM_PARSES, num_objects), int)
    for w, own in enumerate(map(columns.take, chosen)):
        twins = [list(np.flatnonzero(plan.twin == k)) for k in np.unique(plan.twin)]
        for c, group in enumerate(own.group):
            k = twins[group].pop(0)
            match[w, plan.members[k][plan.valid[k]]] = own.match[c][plan.valid[k]]
            state[w, k], number[w, k] = own.state[c], own.points[c].sum()
        value[w], misfit[w] = value_of(own, points, plan), own.misfit.sum()
    left_over = points.present.sum() - number.sum(axis=1)
    enough = np.minimum(plan.fewest + 1, plan.sizes)
    is_clear = (left_over <= plan.num_slots) & ((number == 0) | (number >= enough)).all(axis=1)
    of_part = np.append(state, np.zeros_like(state[:, :1]), axis=1)[:, plan.owner]
    may_miss = known.may_miss[i][of_part, np.arange(len(plan.owner))] | (plan.owner == num_objects)
    is_clear &= (may_miss | (match >= 0)).all(axis=1)
    missing = ((number > 0) * (plan.sizes - number)).sum(axis=1)
    return Parses(match, state, value, misfit, left_over, missing, is_clear)


def over_scenes(function: Callable[..., Any], batched: int = 0) -> Callable[..., Any]:
    """Compile a function of the pieces of one scene for a batch of scenes.

    Args:
        batched: number of the further arguments that have a leading scene axis; they come first.
    """

    @compiled
    def mapped(models: list[LinearGaussianModel], *others: Any) -> Any:
        width = models[0].points.shape[-1]
        axes = jax.tree.map(lambda x: -1 if x.shape[-1] == width else None, tuple(models))
        single = jax.tree.map(lambda x: x if x.shape[-1] == width else x[..., 0], tuple(models))
        each = tuple(0 if i < batched else None for i in range(len(others)))
        return jax.vmap(function, (axes, *each))(single, *others)

    return mapped
