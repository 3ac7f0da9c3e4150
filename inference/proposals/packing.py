"""The best parses of a scene, composed of candidates: a set-packing problem.

An object has at most one candidate, and candidates share no point. The linear relaxation allows
fractions of candidates. Its dual variables are prices of points and objects. The loss of a
candidate is the price of its points and object minus its gain. The losses of a parse's candidates
add up to at most its distance from the relaxed optimum. So the best parses consist of candidates
with small losses, and can be listed.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array, hstack, vstack

from inference.proposals.plan import Plan

ROUNDING = 1e-6
"""Numbers that differ by less than this count as equal."""

NEAR = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Distances from the relaxed optimum, in nats, within which parses are listed, tried in turn."""

MAX_NODES, MAX_COLUMNS = 100, 1000
"""Limits on branches and columns of the integer program, which is solved if no parse is that near.
There is no time limit, so answers do not depend on the load of the machine."""

ENOUGH = 8.0
"""Distance in nats beyond which no further parses are sought."""

MAX_PARTIAL = 1 << 15
"""Largest number of partial parses that are continued: those with the smallest losses."""

MAX_LISTED = 256
"""Largest number of parses that are compared by value: those with the smallest losses."""

MAX_PAIRS = 1 << 20
"""Pairs of a partial parse and a column that are processed together, which bounds memory."""


class Points(NamedTuple):
    """The points of a scene, and the costs of leaving them over (see `Odds`)."""

    present: Bool[np.ndarray, " N"]
    outside: float
    lack: float
    free: bool
    """Whether each object without a candidate takes one point at no cost."""


class Columns(NamedTuple):
    """The columns of the problem: candidates, each for any object of a group of twins."""

    group: Int[np.ndarray, " x"]
    """Index of the group, in the order of `np.unique(plan.twin)`."""
    state: Int[np.ndarray, " x"]
    match: Int[np.ndarray, "x most"]
    """The point of each part, -1 for none."""
    points: Bool[np.ndarray, "x N"]
    gain: Float[np.ndarray, " x"]
    """The amount that the candidate adds to the value of a parse."""
    misfit: Float[np.ndarray, " x"]

    def take(self, which: Bool[np.ndarray, " x"] | Int[np.ndarray, " y"]) -> "Columns":
        """Select some columns."""
        return jax.tree.map(lambda x: x[which], self)

    def joined(self, other: "Columns") -> "Columns":
        """Concatenate two sets of columns; keep the best for each group, state and point set."""
        both: Columns = jax.tree.map(lambda *x: np.concatenate(x), self, other)
        order = np.argsort(-both.gain, kind="stable")
        what = np.column_stack([both.group, both.state, both.points])[order]
        _, first = np.unique(what, axis=0, return_index=True)
        return both.take(order[np.sort(first)])


class Prices(NamedTuple):
    """The solution of the linear relaxation."""

    value: float
    """Upper bound on the value of any parse that is made of the columns."""
    rows: Float[np.ndarray, " rows"]
    """Dual variables of the constraints; they are at most zero."""
    point: Float[np.ndarray, " N"]
    """Price of each point to other objects, minus the cost of leaving it over."""
    parse: Int[np.ndarray, " columns"] | None
    """The best parse, if the solution is integral."""


def _constraints(
    columns: Columns, points: Points, plan: Plan
) -> tuple[csr_array, Float[np.ndarray, " rows"]]:
    """The rows of the constraints, over the columns and the cost, and their upper limits.

    Each point and each object has at most one candidate, and

        cost >= lack * (points left over)
        cost >= outside * (points left over beyond slots of clutter and objects that are free)
    """
    copies = _copies(plan)
    objects = np.arange(len(copies))[:, None] == columns.group
    covered = columns.points.sum(axis=1)
    costs = np.stack([-points.lack * covered, -points.outside * (covered - points.free)])
    count, free = points.present.sum(), points.free * copies.sum() + plan.num_slots
    rows = vstack([csr_array(x.astype(float)) for x in (columns.points.T, objects, costs)])
    of_cost = np.append(np.zeros(rows.shape[0] - 2), [-1.0, -1.0])[:, None]
    limits = [-points.lack * count, -points.outside * (count - free)]
    upper = np.concatenate([np.ones(len(points.present)), copies, limits])
    return hstack([rows, csr_array(of_cost)]).tocsr(), upper


def _copies(plan: Plan) -> Int[np.ndarray, " groups"]:
    return np.unique(plan.twin, return_counts=True)[1]


def relax(columns: Columns, points: Points, plan: Plan) -> Prices:
    """Solve the linear relaxation."""
    rows, upper = _constraints(columns, points, plan)
    found = linprog(np.append(-columns.gain, 1.0), A_ub=rows, b_ub=upper)
    dual = found.ineqlin.marginals
    left_over = points.lack * dual[-2] + points.outside * dual[-1]
    is_whole = (np.abs(found.x[:-1] - np.round(found.x[:-1])) < ROUNDING).all()
    parse = np.flatnonzero(found.x[:-1] > 0.5) if is_whole else None
    return Prices(-found.fun, dual, left_over - dual[: len(points.present)], parse)


def given_away(
    columns: Columns, price: Prices, points: Points, plan: Plan
) -> Float[np.ndarray, " x"]:
    """The loss of each column: the prices of its points and object, minus its gain."""
    rows, _ = _constraints(columns, points, plan)
    return -columns.gain - (rows.T @ price.rows)[:-1]


def value_of(parse: Columns, points: Points, plan: Plan) -> float:
    """The value of a parse: the gains of its columns minus the cost of points left over."""
    left_over = points.present.sum() - parse.points.sum()
    free = points.free * (len(plan.kind) - len(parse.gain))
    beyond = left_over - free - plan.num_slots
    cost = max(points.lack * left_over, points.outside * max(beyond, 0))
    return float(parse.gain.sum() - cost)


def best_parses(
    columns: Columns, price: Prices, points: Points, plan: Plan, count: int
) -> list[Int[np.ndarray, " columns"]]:
    """The columns of the best parses, best first.

    The first is the optimum, unless `MAX_PARTIAL` or the limits of the integer program were
    reached.
    """
    loss = np.maximum(given_away(columns, price, points, plan), 0.0)
    best = [np.zeros(0, int) if price.parse is None else price.parse]
    if price.parse is not None and count == 1:
        return best
    for near in NEAR if price.parse is None else (ENOUGH,):
        listed, is_all = _parses_within(near, loss, columns, price, points, plan)
        if not any(set(own) == set(best[0]) for own in listed):
            listed.append(best[0])
        listed, values = _ranked(listed, columns, points, plan)
        is_near = price.value - values <= near
        best = listed[: max(1, min(count, is_near.sum()))]
        if is_near[0] and (len(best) == count or near >= ENOUGH or not is_all):
            return best
    least = np.argsort(loss, kind="stable")[:MAX_COLUMNS]
    chosen = least[_by_integers(columns.take(least), points, plan)]
    return _ranked([*best, chosen], columns, points, plan)[0][:1]


def _ranked(
    parses: list[Int[np.ndarray, " columns"]], columns: Columns, points: Points, plan: Plan
) -> tuple[list[Int[np.ndarray, " columns"]], Float[np.ndarray, " parses"]]:
    """Parses and their values, best first."""
    values = np.array([value_of(columns.take(own), points, plan) for own in parses])
    order = np.argsort(-values, kind="stable")
    return [parses[i] for i in order], values[order]


def _by_integers(columns: Columns, points: Points, plan: Plan) -> Int[np.ndarray, " columns"]:
    """The best parse that an integer program finds within `MAX_NODES` branches."""
    rows, upper = _constraints(columns, points, plan)
    found = milp(
        np.append(-columns.gain, 1.0),
        integrality=np.append(np.ones(len(columns.gain)), 0),
        bounds=Bounds(0, np.append(np.ones(len(columns.gain)), np.inf)),
        constraints=LinearConstraint(rows, -np.inf, upper),
        # Values are large, but single nats matter.
        options={"node_limit": MAX_NODES, "mip_rel_gap": 0.0},
    )
    return np.zeros(0, int) if found.x is None else np.flatnonzero(found.x[:-1] > 0.5)


class _Partial(NamedTuple):
    """Partial parses."""

    settled: Int[np.ndarray, "partial words"]
    """Points that have a candidate or were left over, one bit each."""
    used: Int[np.ndarray, "partial groups"]
    loss: Float[np.ndarray, " partial"]
    chosen: Int[np.ndarray, "partial K"]
    """Columns, -1 for those that are still to be chosen."""


def _parses_within(
    near: float,
    loss: Float[np.ndarray, " x"],
    columns: Columns,
    price: Prices,
    points: Points,
    plan: Plan,
) -> tuple[list[Int[np.ndarray, " columns"]], bool]:
    """The parses with a loss below `near`, and whether these are all.

    Each partial parse is continued at the free point with the fewest columns, which is given to one
    of these or left over. A point of price zero cannot always be left over without loss, because
    its worth may be in the price of its object; `lost_rents` accounts for this.
    """
    copies = _copies(plan)
    kept = np.flatnonzero(loss < near)
    kept = kept[np.argsort(loss[kept], kind="stable")]
    loss, group, claimed = loss[kept], columns.group[kept], columns.points[kept][:, points.present]
    left_over = -price.rows[: len(points.present)][points.present]
    rent = -price.rows[len(points.present) : -2]
    bits, bit_of = _words(claimed), _words(np.eye(claimed.shape[1], dtype=bool))
    scarcity = np.argsort(np.argsort(claimed.sum(axis=0), kind="stable"))
    with_point = [np.flatnonzero(own) for own in claimed.T]

    def lost_rents(states: _Partial) -> Float[np.ndarray, " partial"]:
        """The summed prices of objects for which no column is left."""
        lost = np.zeros(len(states.loss))
        step = max(1, MAX_PAIRS // max(len(loss), 1))
        for i in range(0, len(lost), step):
            settled, used = states.settled[i : i + step], states.used[i : i + step]
            fits = np.ones((len(settled), len(loss)), bool)
            for word, mine in zip(settled.T, bits.T, strict=True):
                fits &= (word[:, None] & mine) == 0
            idle = np.stack([~fits[:, group == j].any(axis=1) for j in range(len(copies))], 1)
            lost[i : i + step] = (idle * (copies - used)) @ rent
        return lost

    def continued(states: _Partial, point: int) -> list[_Partial]:
        over = states._replace(
            settled=states.settled | bit_of[point], loss=states.loss + left_over[point]
        )
        over = _some(over, over.loss < near)
        more = [_some(over, over.loss + lost_rents(over) < near)]
        own = with_point[point]
        step = max(1, MAX_PAIRS // max(len(own), 1))
        for i in range(0, len(states.loss), step):
            block = _some(states, slice(i, i + step))
            fits = block.loss[:, None] + loss[own] < near
            fits &= (block.used < copies)[:, group[own]]
            for word, mine in zip(block.settled.T, bits[own].T, strict=True):
                fits &= (word[:, None] & mine) == 0
            state, column = np.nonzero(fits)
            new = _some(block, state)
            column, rows = own[column], np.arange(len(column))
            new.chosen[rows, new.used.sum(axis=1)] = kept[column]
            new.used[rows, group[column]] += 1
            more.append(
                new._replace(settled=new.settled | bits[column], loss=new.loss + loss[column])
            )
        return more

    num_points = claimed.shape[1]
    states = _Partial(
        np.zeros((1, bits.shape[1]), np.uint64),
        np.zeros((1, len(copies)), int),
        np.zeros(1),
        np.full((1, len(plan.kind)), -1),
    )
    whole: list[_Partial] = []
    is_all = True
    for _ in range(num_points + 1):
        settled = np.unpackbits(states.settled.view(np.uint8), axis=1, bitorder="little")
        is_free = settled[:, :num_points] == 0
        is_whole = ~is_free.any(axis=1)
        whole.append(_some(states, is_whole))
        states = _some(states, ~is_whole)
        if not len(states.loss):
            break
        pivot = np.where(is_free[~is_whole], scarcity, num_points).argmin(axis=1)
        more = [
            new
            for point in np.unique(pivot)
            for new in continued(_some(states, pivot == point), point)
        ]
        states = _Partial(*map(np.concatenate, zip(*more, strict=True)))
        if len(states.loss) > MAX_PARTIAL:
            is_all = False
            least = np.argpartition(states.loss, MAX_PARTIAL)[:MAX_PARTIAL]
            states = _some(states, least)
    found = np.concatenate([own.chosen for own in whole])
    least = np.argsort(np.concatenate([own.loss for own in whole]), kind="stable")
    return [row[row >= 0] for row in found[least[:MAX_LISTED]]], is_all


def _some(states: _Partial, which: Any) -> _Partial:
    return _Partial(*(x[which] for x in states))


def _words(rows: Bool[np.ndarray, "rows N"]) -> Int[np.ndarray, "rows words"]:
    """Pack sets of points into 64-bit words."""
    padded = np.zeros((len(rows), max(1, -(-rows.shape[1] // 64)) * 64), bool)
    padded[:, : rows.shape[1]] = rows
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint64)


def well_placed(match: Int[np.ndarray, " N"], plan: Plan) -> Bool[np.ndarray, " N"]:
    """The points of objects that have at least two more points than fix a pose."""
    met = [match[plan.owner == k] for k in range(len(plan.kind))]
    sure = [own[own >= 0] for own in met if (own >= 0).sum() >= plan.fewest + 2]
    return np.isin(np.arange(len(match)), np.concatenate([*sure, np.zeros(0, int)]))
