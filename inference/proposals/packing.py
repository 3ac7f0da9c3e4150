"""The best parse of a scene with many objects: a set-packing problem, solved by HiGHS.

A beam (`inference.proposals.beam`) has many good parses, but may lose the best one: candidates
share points, and what is right shows only when nearly all objects are placed. As an integer program
the best one takes a fraction of a second.
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, hstack, vstack

from inference.proposals.candidates import Candidates
from inference.proposals.parses import Odds
from inference.proposals.plan import Plan
from models.numerics.arrays import AnyArray

ROUNDING = 1e-6
"""Nats below which two values are the same."""

MAX_NODES, SECONDS = 1000, 2.0
"""Branches and time after which the best parse so far is taken."""


class Packing(NamedTuple):
    """The packing problems of some scenes."""

    known: Odds
    candidates: Candidates
    gain: Float[AnyArray, "scenes K SC"]
    claims: Bool[AnyArray, "scenes kinds N SC"]
    present: Bool[AnyArray, "scenes N"]
    kept: Int[AnyArray, "scenes W K"]
    """The candidate of each object in the parses of the beam."""

    def choices(self, plan: Plan) -> Int[np.ndarray, "scenes W+1 K"]:
        """The parses of the beam, and the best packing where it is not sure to be among them."""
        costs = (self.known.outside, self.known.lack)
        each = zip(self.gain, self.claims, self.present, *costs, self.kept, strict=True)
        return np.array([_with_best(*own, plan=plan) for own in each])

    def joined(self, other: "Packing", num_states: int) -> "Packing":
        """The candidates of both, those of each state together."""

        def side_by_side(*both: np.ndarray) -> np.ndarray:
            apart = (x.reshape(*x.shape[:-1], num_states, -1) for x in both)
            whole = np.concatenate(list(apart), axis=-1)
            return whole.reshape(*whole.shape[:-2], -1)

        candidates = (self.candidates, other.candidates)
        return self._replace(
            candidates=jax.tree.map(lambda *x: np.concatenate(x, axis=-1), *candidates),
            gain=side_by_side(self.gain, other.gain),
            claims=side_by_side(self.claims, other.claims),
            kept=np.full_like(self.kept, -1),  # they number the candidates of one of them
        )


def _with_best(
    gain: Float[np.ndarray, "K C"],
    claims: Bool[np.ndarray, "kinds N C"],
    present: Bool[np.ndarray, " N"],
    outside: float,
    lack: float,
    kept: Int[np.ndarray, "W K"],
    *,
    plan: Plan,
) -> Int[np.ndarray, "W+1 K"]:
    """Some parses, and the best one where it may not be among them; else no parse, -1."""
    values = [
        value_of(choice, gain, claims, present, outside, lack, plan=plan)
        for choice in kept
        if (choice >= 0).all()
    ]
    other = np.full_like(kept[:1], -1)
    if max(values, default=-np.inf) < upper_bound(gain, claims, plan) - ROUNDING:
        best = best_packing(gain, claims, present, outside, lack, plan=plan)
        if not (kept == best).all(axis=1).any():
            other = best[None]
    return np.concatenate([kept, other])


def value_of(
    choice: Int[np.ndarray, " K"],
    gain: Float[np.ndarray, "K C"],
    claims: Bool[np.ndarray, "kinds N C"],
    present: Bool[np.ndarray, " N"],
    outside: float,
    lack: float,
    *,
    plan: Plan,
) -> float:
    """The value of a parse, as `inference.proposals.parses` has it."""
    placed = np.flatnonzero(choice < gain.shape[1])
    taken = int(sum(claims[plan.kind[k], :, choice[k]].sum() for k in placed))
    left_over = int(present.sum()) - taken
    beyond = left_over - (len(choice) - len(placed)) - plan.num_slots
    cost = max(lack * left_over, outside * max(beyond, 0))
    return float(gain[placed, choice[placed]].sum() - cost)


def upper_bound(
    gain: Float[np.ndarray, "K C"], claims: Bool[np.ndarray, "kinds N C"], plan: Plan
) -> float:
    """What no parse is worth more than.

    Each object has its best candidate, of twins each candidate counting once. Or each point has its
    best share of a candidate's gain. The smaller of the two sums.
    """
    gain = np.maximum(gain, 0.0)
    twins = zip(*np.unique(plan.twin, return_counts=True), strict=True)
    of_objects = sum(np.sort(gain[k])[-copies:].sum() for k, copies in twins)
    share = np.zeros((len(plan.first), gain.shape[1]))  # of a kind, that of its best object
    np.maximum.at(share, plan.kind, gain)
    share /= np.maximum(claims.sum(axis=1), 1)
    of_points = np.where(claims, share[:, None], 0.0).max(axis=(0, 2)).sum()
    return float(min(of_objects, of_points))


def best_packing(
    gain: Float[np.ndarray, "K C"],
    claims: Bool[np.ndarray, "kinds N C"],
    present: Bool[np.ndarray, " N"],
    outside: float,
    lack: float,
    *,
    plan: Plan,
) -> Int[np.ndarray, " K"]:
    """The candidate of each object, or C for none, in the parse of the largest value.

        maximise    gain' x - cost
        subject to  each point has at most one candidate, each object, too,
                    cost >= lack * (points left over),
                    cost >= outside * (points left over beyond free objects and slots of clutter)

    Twins, objects that differ in nothing, share their candidates.

    Args:
        gain: what each candidate of each object adds to the value of a parse.
        claims: the points of each candidate.
        present: which rows are points.
        outside, lack: what points that are left over cost; see `Odds`.
    """
    num_objects, some = gain.shape
    groups, of_object = np.unique(plan.twin, return_inverse=True)
    worthy = [np.flatnonzero(np.isfinite(gain[k])) for k in groups]
    group = np.repeat(np.arange(len(groups)), [len(own) for own in worthy])
    number = np.concatenate(worthy)
    points = csr_array(claims[plan.kind[groups[group]], :, number].T.astype(float))  # (N, x)
    objects = csr_array((np.arange(len(groups))[:, None] == group).astype(float))
    covered, placed = points.sum(axis=0), np.ones(len(number))
    # Both costs, with what does not depend on x on the right.
    costs = csr_array(np.stack([-lack * covered, -outside * (covered - placed)]))
    count = int(present.sum())
    limits = -np.array([lack * count, outside * (count - num_objects - plan.num_slots)])
    rows = vstack([hstack([x, csr_array((x.shape[0], 1))]) for x in (points, objects)])
    costs = hstack([costs, csr_array(-np.ones((2, 1)))])
    upper = np.concatenate([np.ones(len(present)), np.bincount(of_object), limits])
    found = milp(
        np.append(-gain[groups[group], number], 1.0),
        integrality=np.append(np.ones(len(number)), 0),
        bounds=Bounds(0, np.append(np.ones(len(number)), np.inf)),
        constraints=LinearConstraint(vstack([rows, costs]).tocsr(), -np.inf, upper),
        # Values are large, and nats count.
        options={"node_limit": MAX_NODES, "time_limit": SECONDS, "mip_rel_gap": 0.0},
    )
    choice = np.full(num_objects, some)
    if found.x is None:  # no parse within so many branches
        return choice
    for j in range(len(groups)):
        own = number[(group == j) & (found.x[:-1] > 0.5)]
        choice[np.flatnonzero(of_object == j)[: len(own)]] = own
    return choice


def well_placed(match: Int[np.ndarray, "scenes N"], plan: Plan) -> Bool[np.ndarray, "scenes N"]:
    """The points of objects that have two more than would fix any pose."""
    is_enough = np.stack(
        [
            (match[:, plan.owner == k] >= 0).sum(axis=1) >= plan.fewest + 2
            for k in range(len(plan.kind))
        ],
        axis=1,
    )
    of_part = np.append(is_enough, np.zeros((len(match), 1), bool), axis=1)[:, plan.owner]
    rows = np.arange(len(plan.owner))
    return ((match[..., None] == rows) & of_part[..., None]).any(axis=1)
