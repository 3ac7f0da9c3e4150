"""The best parse of a scene with many objects: a set-packing problem, solved by HiGHS.

With some twenty objects a beam loses the best parse: thousands of candidates share points, and what
is right shows only when nearly all are placed. As an integer program it takes a fraction of a
second.
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

SECONDS = 2.0
"""After which the best parse so far is taken."""


class Packing(NamedTuple):
    """The packing problems of some scenes."""

    known: Odds
    candidates: Candidates
    gain: Float[AnyArray, "scenes K SC"]
    claims: Bool[AnyArray, "scenes kinds N SC"]
    present: Bool[AnyArray, "scenes N"]

    def choice(self, plan: Plan) -> Int[np.ndarray, "scenes 1 K"]:
        """The best packing of each scene."""
        costs = (self.known.outside, self.known.lack)
        each = zip(self.gain, self.claims, self.present, *costs, strict=True)
        return np.array([best_packing(*own, plan=plan) for own in each])[:, None]

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
        )


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
        options={"time_limit": SECONDS, "mip_rel_gap": 0.0},  # values are large, and nats count
    )
    choice = np.full(num_objects, some)
    if found.x is None:  # no parse within the time
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
