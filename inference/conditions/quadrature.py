"""Adaptive quadrature over one or two unconstrained variables.

The trapezoid rule on a lattice is exponentially accurate for a smooth integrand that vanishes at
both ends. The box grows until the integrand is 40 nats below its maximum at every face. Then the
spacing is halved until the integral no longer changes. The prior only sets where the search begins.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

REACH = 40.0
"""Nats below its maximum at which the integrand is treated as zero."""

FARTHEST = 48.0
"""If the box grows beyond this unconstrained value, the integral is taken to diverge."""

MAX_NODES = 20_000
_GROWTH = 4  # nodes by which a face of the box moves out
_FIRST = 12  # lattice cells over the initial range, at most

Node = tuple[int, ...]


class Lattice:
    """The nodes of one integral and the known log values of its integrand.

    Pass the values at the nodes that `wanted` returns to `learn`, until `wanted` returns none. No
    node is evaluated twice.
    """

    def __init__(self, ranges: Sequence[tuple[float, float]], tolerance: float) -> None:
        widths = [max(high - low, 1e-3) for low, high in ranges]
        self.spacing = np.array([2.0 ** math.ceil(math.log2(w / _FIRST)) for w in widths])
        low, high = np.array(ranges, float).T
        self.low = np.floor(low / self.spacing).astype(int)
        self.high = np.ceil(high / self.spacing).astype(int)
        self.known: dict[Node, float] = {}
        self.tolerance = tolerance
        self.log_integral: float | None = None
        self.stable = self.finished = False
        self.endless = False
        """Whether the integrand does not fall off, so the integral diverges."""

    def wanted(self) -> list[Node]:
        """Nodes to be evaluated; empty once the integral is known."""
        missing: list[Node] = []
        while not (self.finished or (missing := self._missing())):
            self._advance()
        return missing

    def learn(self, nodes: Sequence[Node], values: Sequence[float]) -> None:
        """Store the log integrand at some nodes."""
        self.known.update(zip(nodes, values, strict=True))

    def place(self, nodes: Sequence[Node]) -> Float[np.ndarray, "nodes axes"]:
        """The unconstrained values at some nodes."""
        return np.array(nodes, float).reshape(-1, len(self.spacing)) * self.spacing

    @property
    def log_cell(self) -> float:
        """Log of the volume of a lattice cell."""
        return float(np.log(self.spacing).sum())

    def _box(self) -> list[Node]:
        sides = (range(a, b + 1) for a, b in zip(self.low, self.high, strict=True))
        return list(itertools.product(*sides))

    def _missing(self) -> list[Node]:
        return [node for node in self._box() if node not in self.known]

    def _advance(self) -> None:
        """Once the whole box is evaluated: let it grow, refine it, or finish."""
        box = self._box()
        nodes, values = np.array(box), np.array([self.known[node] for node in box])
        near = nodes[values > values.max() - REACH]
        if not len(near):  # the integrand is zero everywhere
            self.finished, self.log_integral = True, -math.inf
            return
        grown_low = np.where(near.min(axis=0) == self.low, self.low - _GROWTH, self.low)
        grown_high = np.where(near.max(axis=0) == self.high, self.high + _GROWTH, self.high)
        if (grown_low < self.low).any() or (grown_high > self.high).any():
            self.low, self.high = grown_low, grown_high
            ends = np.abs([self.low * self.spacing, self.high * self.spacing])
            self.endless = self.finished = bool(ends.max() > FARTHEST)
            return
        self.low, self.high = near.min(axis=0) - 1, near.max(axis=0) + 1
        before, highest = self.log_integral, values.max()
        self.log_integral = float(highest + np.log(np.exp(values - highest).sum()) + self.log_cell)
        self.stable = before is not None and abs(self.log_integral - before) < self.tolerance
        if self.stable or 2 ** len(self.low) * len(box) > MAX_NODES:
            self.finished = True
            return
        self.spacing = self.spacing / 2
        self.low, self.high = 2 * self.low, 2 * self.high
        self.known = {tuple(2 * i for i in node): x for node, x in self.known.items()}
