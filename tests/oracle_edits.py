"""What an edited program should give, in plain numpy: sums over matches, integrals over the rest.

`Assumed` is what a program assumes about one scene once everything but poses and match is known.
Its arrays may have leading axes, one entry for each node of a grid. `Oracle` says what else is
unknown: discrete sites are summed over, continuous ones integrated on a fine grid that is placed
where the integrand is. Nothing of the project is imported, so agreement with it means something.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tests import oracle

NODES = 2_000
"""Of a grid over one continuous site."""

MIXTURE_NODES = 40
"""Where points may share parts: fewer, for a bound is compared with it, and it costs 100 times."""

PLANE_NODES = 60
"""Along each axis of a grid over two continuous sites."""

NEGLIGIBLE = 40.0
"""Nats below the maximum of an integrand at which its grid ends."""

Log = Callable[[np.ndarray, np.ndarray], np.ndarray]


# --- densities ------------------------------------------------------------------------------------


def normal(residual: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return -0.5 * (residual / scale) ** 2 - np.log(scale) - 0.5 * math.log(2 * math.pi)


def laplace(residual: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return -np.abs(residual) / scale - np.log(2 * scale)


def student(df: float, residual: np.ndarray, scale: np.ndarray) -> np.ndarray:
    constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    return constant - np.log(scale) - (df + 1) / 2 * np.log1p((residual / scale) ** 2 / df)


def multivariate_normal(value: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Of vectors in the last axis; leading axes broadcast."""
    factor = np.linalg.cholesky(covariance)
    white = np.linalg.solve(factor, (value - mean)[..., None])[..., 0]
    log_det = 2 * np.log(np.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)
    return -0.5 * ((white**2).sum(axis=-1) + log_det + white.shape[-1] * math.log(2 * math.pi))


def gamma(concentration: float, rate: float, value: Any) -> np.ndarray:
    constant = concentration * math.log(rate) - math.lgamma(concentration)
    return constant + (concentration - 1) * np.log(value) - rate * np.asarray(value)


def log_normal(location: float, scale: float, value: Any) -> np.ndarray:
    return normal(np.log(value) - location, np.asarray(scale)) - np.log(value)


def half_normal(scale: float, value: Any) -> np.ndarray:
    return math.log(2) + normal(np.asarray(value), np.asarray(scale))


def beta(first: float, second: float, value: Any) -> np.ndarray:
    constant = math.lgamma(first + second) - math.lgamma(first) - math.lgamma(second)
    return constant + (first - 1) * np.log(value) + (second - 1) * np.log1p(-np.asarray(value))


def binomial(count: int, total: np.ndarray, prob: Any) -> np.ndarray:
    """Log mass, -inf where the count is impossible."""
    if total < count:
        return np.full(np.shape(prob), -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        unseen = np.where(total == count, 0.0, (total - count) * np.log1p(-np.asarray(prob)))
    return math.log(math.comb(total, count)) + count * np.log(prob) + unseen


# --- what is assumed, given everything but poses and match ----------------------------------------


class Assumed(NamedTuple):
    """One scene and what a program assumes about it; leading axes for the nodes of a grid."""

    points: np.ndarray  # (N, d), padded
    present: np.ndarray  # (N,)
    F: np.ndarray  # (N, d, p)
    owner: np.ndarray  # (N,)
    pose_mean: np.ndarray  # (..., K, p)
    pose_covariance: np.ndarray  # (..., K, p, p)
    variance: np.ndarray  # (..., N, d)
    match_logits: np.ndarray  # (..., N, N), -inf forbids a pair
    offset: np.ndarray | float = 0.0  # (N, d)
    log_constant: np.ndarray | float = 0.0
    noise: Log = normal

    @property
    def num_objects(self) -> int:
        return self.pose_mean.shape[-2]


def log_evidence_given(assumed: Assumed, family: str = "permutation") -> np.ndarray:
    """log p(points): every match is summed over, with the direct Normal density of its points.

    An object's share depends on which points it has only, so the sum over matches is a product of
    objects for each way to divide the points among them.
    """
    total = _sum_over_divisions(assumed, family, with_points=True)
    normaliser = _log_normaliser(assumed, family)
    possible = normaliser > -np.inf
    return np.where(possible, total - np.where(possible, normaliser, 0), -np.inf) + (
        assumed.log_constant
    )


def log_density_given(assumed: Assumed, pose: np.ndarray, family: str = "permutation") -> float:
    """log p(points, pose), the matches summed out one by one; any noise."""
    prior = multivariate_normal(pose, assumed.pose_mean, assumed.pose_covariance).sum()
    return float(prior) + log_likelihood_given(assumed, pose, family)


def log_likelihood_given(assumed: Assumed, pose: np.ndarray, family: str = "permutation") -> float:
    """log p(points | pose) and the constant, the matches summed out one by one; any noise."""
    predicted = oracle.predicted_parts(
        assumed.F, np.zeros(assumed.F.shape[:2]), assumed.owner, pose
    )
    residual = assumed.points[:, None] - predicted - assumed.offset
    table = assumed.noise(residual, np.sqrt(assumed.variance)).sum(axis=-1)
    table = np.where(assumed.present[:, None], table, 0.0)
    logits = assumed.match_logits
    if family == "mixture":
        rows = [
            oracle.log_sum(a + b) - oracle.log_sum(a) for a, b in zip(logits, table, strict=True)
        ]
        return float(sum(rows)) + float(assumed.log_constant)
    columns = oracle.permutations(len(logits))
    normaliser = oracle.log_normaliser(logits, columns)
    if normaliser == -np.inf:
        return -np.inf
    joint = oracle.log_normaliser(logits + table, columns)
    return joint - normaliser + float(assumed.log_constant)


def powered(
    assumed: Assumed,
    points: float = 1.0,
    pose: float = 1.0,
    match: float = 1.0,
    family: str = "permutation",
) -> Assumed:
    """With densities raised to powers, as NumPyro's `scale` does; a uniform match prior only.

    A Normal density to a power is a narrower one times a constant.
    """
    logits = assumed.match_logits
    assert np.ptp(logits) == 0 and np.ptp(assumed.variance) == 0
    features = int(assumed.present.sum()) * assumed.F.shape[1]
    log_two_pi = math.log(2 * math.pi)

    def constant(power: float, count: int, log_det: float) -> float:
        whole = count * log_two_pi + log_det
        return 0.5 * (whole - count * math.log(power)) - 0.5 * power * whole

    dims = assumed.pose_mean[..., 0].size * assumed.pose_mean.shape[-1]
    log_det = float(np.linalg.slogdet(assumed.pose_covariance)[1].sum())
    change = constant(points, features, features * math.log(assumed.variance.flat[0]))
    change += constant(pose, dims, log_det)
    rows = len(logits)
    matches = rows * math.log(rows) if family == "mixture" else math.lgamma(rows + 1)
    change += (1 - match) * matches  # as many as there are, each of one over their number
    return assumed._replace(
        variance=assumed.variance / points,
        pose_covariance=assumed.pose_covariance / pose,
        log_constant=assumed.log_constant + change,
    )


def _sum_over_divisions(assumed: Assumed, family: str, with_points: bool) -> np.ndarray:
    rows = np.flatnonzero(assumed.present)
    full = (1 << len(rows)) - 1
    total = None
    for k in range(assumed.num_objects):
        table = _object_table(assumed, k, rows, family, with_points)
        total = table if total is None else _subset_convolution(total, table)
    dummies = len(assumed.points) - len(rows)
    return total[..., full] + (math.lgamma(dummies + 1) if family != "mixture" else 0.0)


def _log_normaliser(assumed: Assumed, family: str) -> np.ndarray:
    if family == "mixture":
        points = assumed.match_logits[..., assumed.present, :]
        return _log_sum(points, axis=-1).sum(axis=-1)
    return _sum_over_divisions(assumed, family, with_points=False)


def _subset_convolution(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """log sum over S of exp(first[S] + second[the rest]), for every set of points."""
    size = first.shape[-1]
    out = []
    for mask in range(size):
        some = [s for s in range(size) if s & mask == s]
        out.append(_log_sum(first[..., some] + second[..., [mask ^ s for s in some]], axis=-1))
    return np.stack(out, axis=-1)


def _object_table(
    assumed: Assumed, k: int, rows: np.ndarray, family: str, with_points: bool
) -> np.ndarray:
    """For every set of points: log sum over the ways in which they are parts of object k."""
    logits = assumed.match_logits
    parts = np.flatnonzero(assumed.owner == k)
    dummies = logits[..., ~assumed.present, :]
    assert (dummies == dummies[..., :1, :]).all(), "dummy rows must be alike"
    table = np.full((*_leading(assumed), 1 << len(rows)), -np.inf)
    choose = (
        itertools.combinations_with_replacement if family == "mixture" else itertools.combinations
    )
    most = len(rows) if family == "mixture" else min(len(rows), len(parts))
    for size in range(most + 1):
        masks, tuples = _tuples(len(rows), size)
        for columns in choose(parts, size):
            columns = list(columns)
            log_weight = logits[..., rows[tuples], columns].sum(axis=-1)  # (..., sets, orders)
            if family == "mixture":  # orders of points on one part are one match
                log_weight = log_weight - _log_repeats(tuple(columns))
            elif dummies.shape[-2]:
                left = [n for n in parts if n not in columns]
                log_weight = log_weight + dummies[..., 0, left].sum(axis=-1)[..., None, None]
            if with_points and size:
                log_weight = log_weight + _log_marginal(assumed, k, rows[tuples], columns)
            ways = np.broadcast_to(_log_sum(log_weight, axis=-1), (*table.shape[:-1], len(masks)))
            table[..., masks] = np.logaddexp(table[..., masks], ways)
    return table


def _log_marginal(assumed: Assumed, k: int, tuples: np.ndarray, columns: list[int]) -> np.ndarray:
    """The Normal density of ordered points on some parts of an object, its pose integrated out."""
    mean, covariance = assumed.pose_mean[..., k, :], assumed.pose_covariance[..., k, :, :]
    F = assumed.F[columns].reshape(-1, mean.shape[-1])  # all features below each other
    variance = assumed.variance[..., columns, :]
    variance = variance.reshape(*variance.shape[:-2], -1)
    whole = F @ covariance @ F.T + variance[..., None] * np.eye(len(F))
    offset = np.broadcast_to(assumed.offset, assumed.F.shape[:2])[columns].ravel()
    expected = np.einsum("fp,...p->...f", F, mean) + offset
    x = assumed.points[tuples].reshape(-1, len(F))
    factor = np.linalg.cholesky(whole)
    residual = x.T - expected[..., None]  # (..., features, tuples)
    white = np.linalg.solve(*_broadcast(factor, residual))
    log_det = 2 * np.log(np.diagonal(factor, axis1=-2, axis2=-1)).sum(axis=-1)
    constant = log_det + len(F) * math.log(2 * math.pi)
    found = -0.5 * ((white**2).sum(axis=-2) + constant[..., None])
    return found.reshape(*found.shape[:-1], *tuples.shape[:-1])


def _broadcast(factor: np.ndarray, residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    leading = np.broadcast_shapes(factor.shape[:-2], residual.shape[:-2])
    shapes = ((*leading, *x.shape[-2:]) for x in (factor, residual))
    first, second = (np.broadcast_to(x, s) for x, s in zip((factor, residual), shapes, strict=True))
    return first, second


@functools.cache
def _tuples(num_points: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sets of points as bit masks, and the orders of each, (sets, orders, size)."""
    sets = list(itertools.combinations(range(num_points), size))
    masks = np.array([sum(1 << m for m in some) for some in sets])
    orders = np.array([list(itertools.permutations(some)) for some in sets], int)
    return masks, orders.reshape(len(sets), math.factorial(size), size)


@functools.cache
def _log_repeats(columns: tuple[int, ...]) -> float:
    return sum(math.lgamma(columns.count(n) + 1) for n in set(columns))


def _leading(assumed: Assumed) -> tuple[int, ...]:
    return np.broadcast_shapes(
        assumed.pose_mean.shape[:-2],
        assumed.pose_covariance.shape[:-3],
        assumed.variance.shape[:-2],
        assumed.match_logits.shape[:-2],
        np.shape(assumed.log_constant),
    )


def _log_sum(values: np.ndarray, axis: int) -> np.ndarray:
    highest = np.max(values, axis=axis, keepdims=True)
    shift = np.where(np.isfinite(highest), highest, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(values - shift).sum(axis=axis)) + np.squeeze(shift, axis)


# --- what else is unknown -------------------------------------------------------------------------


class Scalar(NamedTuple):
    """A continuous site of one number."""

    log_prob: Callable[[np.ndarray], np.ndarray]
    """Of the value itself."""
    reach: tuple[float, float] = (-10.0, 22.0)
    """Where the unconstrained value can be at all, for the search of the integrand."""
    unit_interval: bool = False
    """Between 0 and 1, through the logistic function; else positive, through exp."""

    def value(self, free: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-free)) if self.unit_interval else np.exp(free)

    def log_slope(self, free: np.ndarray) -> np.ndarray:
        if self.unit_interval:
            return -np.logaddexp(0, free) - np.logaddexp(0, -free)
        return free


@dataclass(frozen=True)
class Oracle:
    """The numbers that a program should give.

    Args:
        assumed: of the values of the further sites by name. Those of continuous sites may have one
            axis for the nodes of a grid.
        discrete: for each further discrete site its values and their log probabilities.
        continuous: the further continuous sites, two at most.
        log_pose: log density of the poses, and of what they are computed from, where it is not the
            Normal of `assumed`; of all values.
        pose: the poses that are computed from the values.
    """

    assumed: Callable[..., Assumed]
    discrete: Mapping[str, list[tuple[Any, float]]] = field(default_factory=dict)
    continuous: Mapping[str, Scalar] = field(default_factory=dict)
    log_pose: Callable[[dict[str, np.ndarray]], float] | None = None
    pose: Callable[[dict[str, np.ndarray]], np.ndarray] = lambda values: values["pose"]

    def log_evidence(self, family: str = "permutation") -> float:
        assert self.log_pose is None, "no closed form for the poses"
        return oracle.log_sum(
            np.array(
                [log_prob + self._integral(given, family) for given, log_prob in self._states()]
            )
        )

    def log_density(self, values: dict[str, np.ndarray], family: str = "permutation") -> float:
        """log p(points, values), with the match and all discrete sites summed out."""
        scalars = {name: np.asarray(values[name]) for name in self.continuous}
        own = sum(float(site.log_prob(scalars[n])) for n, site in self.continuous.items())
        terms = []
        for given, log_prob in self._states():
            assumed = self.assumed(**given, **scalars)
            pose = self.pose(values)
            if self.log_pose is None:
                terms.append(log_prob + log_density_given(assumed, pose, family))
            else:
                likelihood = log_likelihood_given(assumed, pose, family)
                terms.append(log_prob + likelihood + self.log_pose(values))
        return own + oracle.log_sum(np.array(terms))

    def _states(self) -> list[tuple[dict[str, Any], float]]:
        names = list(self.discrete)
        return [
            ({n: value for n, (value, _) in zip(names, some, strict=True)}, sum(p for _, p in some))
            for some in itertools.product(*self.discrete.values())
        ]

    def _integral(self, given: dict[str, Any], family: str) -> float:
        if not self.continuous:
            return float(log_evidence_given(self.assumed(**given), family))
        sites = list(self.continuous.items())

        def integrand(family: str, *free: np.ndarray) -> np.ndarray:
            """At a list of nodes, one array for each site."""
            values = {n: s.value(u) for (n, s), u in zip(sites, free, strict=True)}
            prior = sum(
                s.log_prob(values[n]) + s.log_slope(u)
                for (n, s), u in zip(sites, free, strict=True)
            )
            chunks = range(0, len(free[0]), 500)  # a grid at once would take gigabytes
            some = [{n: x[start : start + 500] for n, x in values.items()} for start in chunks]
            found = [log_evidence_given(self.assumed(**given, **x), family) for x in some]
            return prior + np.concatenate(
                [
                    np.broadcast_to(f, len(next(iter(x.values()))))
                    for f, x in zip(found, some, strict=True)
                ]
            )

        nodes = MIXTURE_NODES if family == "mixture" else NODES
        nodes = nodes if len(sites) == 1 else PLANE_NODES
        boxes = [s.reach for _, s in sites]
        for _ in range(4):  # ever closer to where the integrand is
            axes = [np.linspace(*box, 66 if len(sites) == 1 else 24) for box in boxes]
            grid = np.meshgrid(*axes, indexing="ij")
            # Placed by the sum over permutations for a mixture too: cheaper, and as wide.
            found = integrand("permutation", *(g.ravel() for g in grid)).reshape(grid[0].shape)
            if not np.isfinite(found).any():
                return -np.inf
            near = np.argwhere(found >= np.nanmax(found) - NEGLIGIBLE)
            boxes = [
                (axis[max(low - 1, 0)], axis[min(high + 1, len(axis) - 1)])
                for axis, low, high in zip(axes, near.min(axis=0), near.max(axis=0), strict=True)
            ]
        axes = [np.linspace(*box, nodes) for box in boxes]
        grid = np.meshgrid(*axes, indexing="ij")
        found = integrand(family, *(g.ravel() for g in grid))
        return oracle.log_sum(found) + sum(math.log(axis[1] - axis[0]) for axis in axes)
