"""Adaptive quadrature over one or two unconstrained variables, placed by the integrand itself.

The trapezoid rule on a lattice is exponentially accurate for a smooth integrand that vanishes at
both ends. The box grows until the integrand has lost 40 nats at every face, and the spacing is
halved until the integral no longer changes; no node is evaluated twice. Where the prior expects the
mass only says where the search begins.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

REACH = 40.0
"""Nats below the largest value at which the integrand counts as gone."""

FARTHEST = 48.0
"""Unconstrained values beyond which an integrand counts as one that never falls off."""

MAX_NODES = 20_000
_GROWTH = 4  # nodes by which a face moves out
_FIRST = 12  # nodes over the range where the search begins

Node = tuple[int, ...]


class Lattice:
    """The nodes of one integral and what is known of its integrand, in logs.

    Ask for `wanted` nodes and tell their values to `learn` until none is wanted any more.
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
        """Whether the integrand never falls off, so that there is no integral."""

    def wanted(self) -> list[Node]:
        """Nodes whose values are missing; none once the integral is known."""
        missing: list[Node] = []
        while not (self.finished or (missing := self._missing())):
            self._go_on()
        return missing

    def learn(self, nodes: Sequence[Node], values: Sequence[float]) -> None:
        """Take note of the log integrand at some nodes."""
        self.known.update(zip(nodes, values, strict=True))

    def place(self, nodes: Sequence[Node]) -> Float[np.ndarray, "nodes axes"]:
        """Where nodes are."""
        return np.array(nodes, float).reshape(-1, len(self.spacing)) * self.spacing

    @property
    def log_cell(self) -> float:
        """Log of what each node stands for."""
        return float(np.log(self.spacing).sum())

    def _box(self) -> list[Node]:
        sides = (range(a, b + 1) for a, b in zip(self.low, self.high, strict=True))
        return list(itertools.product(*sides))

    def _missing(self) -> list[Node]:
        return [node for node in self._box() if node not in self.known]

    def _go_on(self) -> None:
        """The box is known: let it grow, or refine it, or be done."""
        box = self._box()
        nodes, values = np.array(box), np.array([self.known[node] for node in box])
        near = nodes[values > values.max() - REACH]
        if not len(near):  # nowhere is the integrand above zero
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
