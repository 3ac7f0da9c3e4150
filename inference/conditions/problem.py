"""A problem: scenes with a program read at each of them, and how a closed-form method solves it.

Where the program leaves conditions open, `inference.conditions.solve` puts problems together.

Its constants are what else is observed, and the normaliser of the match prior: what the weights of
all matches sum to. They are of no interest to the fit, but an ELBO or an evidence is not worth much
without them.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.sparse.csgraph import connected_components
from scipy.special import logsumexp

from inference.conditions.listing import MAX_VALUES, count_values
from inference.conditions.solve import (
    Finish,
    Search,
    Solve,
    Way,
    mixed,
    refuse_impossible,
    solve_open,
)
from inference.result import Result
from models.distributions.match import MixtureMatch
from models.errors import ConjugacyError
from models.numerics.permanent import MAX_ROWS, log_permanent
from models.program.batches import Open, Reading, Skeleton, read_scenes
from models.program.reading import FACTORS
from models.program.sites import Program, Values, described
from models.scenes import Scene


class Problem(NamedTuple):
    """Scenes, a program read at each of them, and the constant of each scene's evidence."""

    scenes: Scene
    reading: Reading
    log_constant: Float[np.ndarray, " scenes"]
    """Log density of all sites but poses, match and points, less the match prior's normaliser;
    -inf where no match is possible, NaN where the normaliser is out of reach."""
    is_conditional: bool = False
    """Whether it is one of several, at values of conditions, that are put together."""

    @property
    def skeleton(self) -> Skeleton:
        """What is fixed about the program, whatever its numbers are."""
        return self.reading.skeleton

    @property
    def owner(self) -> Int[np.ndarray, " N"]:
        """The object of each part."""
        return np.array(self.skeleton.owner)

    @property
    def num_scenes(self) -> int:
        """How many scenes there are."""
        return len(self.scenes.points)

    def take(self, which: Any) -> "Problem":
        """The problem of some of the scenes."""
        return self._replace(
            scenes=self.scenes.take(which),
            reading=self.reading.some(which),
            log_constant=self.log_constant[which],
        )


def solve_scenes(
    program: Program,
    scenes: Scene,
    method: Solve,
    *,
    factors: frozenset[str] = FACTORS,
    or_bound: bool = False,
    tolerance: float = 1e-7,
    search: Search | None = None,
    max_values: int = MAX_VALUES,
    finish: Finish | None = None,
) -> Result:
    """Solve each scene of a batch, summed over the conditions that its program leaves open.

    Match probabilities and pose moments are those of the mixture over conditions. `details` has
    for each discrete site, under its name, the probability that each of its entries is positive,
    and under `<name>_sets` its most probable values with their probabilities; for each continuous
    site its posterior mean; and under `conditions` all values of the run of the largest weight.

    Args:
        method: solves a problem that leaves no condition open.
        factors: sites that the method has a factor for.
        or_bound: whether the method takes a bound for a normaliser that is out of reach.
        tolerance: of the log of an integral over continuous conditions.
        search: solves scenes whose discrete conditions have more than `max_values` joint values at
            some of them, or returns None if it knows no way to choose.
        finish: puts the runs of some scenes together, in the place of `mixed`. No run stands for
            others then: each value is solved by itself.
    """
    found, factors = _first_reading(program, scenes, factors, or_bound)
    if isinstance(found, Problem):
        possible = ~np.isneginf(found.log_constant)
        if not possible.all():
            refuse_impossible(scenes, possible)
        return method(found)
    if search is not None and count_values(found) > max_values:
        result = search(program, scenes, method, found, finish or mixed)
        if result is not None:
            return result

    def read(some: Scene, given: Mapping[str, np.ndarray]) -> Problem:
        problem = read_problem(program, some, given, factors=factors, or_bound=or_bound)
        if not isinstance(problem, Problem):
            name, prior = next(iter(problem.items()))
            raise ConjugacyError(
                name, f"{described(prior)} beside further conditions", "sites that are always there"
            )
        return problem._replace(is_conditional=True)

    way = Way(read, method, tolerance, finish or mixed, merge=finish is None)
    return solve_open(way, scenes, found)


def _first_reading(
    program: Program, scenes: Scene, factors: frozenset[str], or_bound: bool
) -> tuple[Problem | Open, frozenset[str]]:
    """A reading without conditions, or those that are open, and which factors the method keeps.

    A precision that the poses depend on too is no factor of the family, but may be a condition.
    """
    try:
        return read_problem(program, scenes, factors=factors, or_bound=or_bound), factors
    except ConjugacyError:
        if factors:
            found = read_problem(program, scenes, factors=frozenset(), or_bound=or_bound)
            if not isinstance(found, Problem) and "precision" in found:
                return found, frozenset()
        raise


def read_problem(
    program: Program,
    scenes: Scene,
    given: Values | None = None,
    *,
    factors: frozenset[str] = FACTORS,
    or_bound: bool = False,
) -> Problem | Open:
    """Read a program at each scene of a batch, or say which conditions it leaves open.

    Args:
        given: values of conditions, one for each scene.
        factors: sites that the method has a factor for (see `models.program.reading`).
        or_bound: put an upper bound in the place of a normaliser that is out of reach.
    """
    reading = read_scenes(program, scenes, given, factors)
    if isinstance(reading, dict):
        return reading
    normalizer = log_prior_normalizer(reading, scenes.present, or_bound=or_bound)
    others = np.broadcast_to(np.asarray(reading.model.log_constant), len(scenes.points))
    possible = np.isfinite(others) & ~np.isneginf(normalizer)
    constant = np.where(possible, others - np.where(possible, normalizer, 0.0), -np.inf)
    return Problem(scenes, reading, constant)


def log_prior_normalizer(
    reading: Reading, present: Bool[np.ndarray, "scenes N"], *, or_bound: bool = False
) -> Float[np.ndarray, " scenes"]:
    """Log of the sum of exp(sum_mn z_mn log a_mn) over all matches, for each scene.

    For a prior over permutations it is log perm(A). A permanent of more than `MAX_ROWS` rows is out
    of reach unless the prior forbids so many pairs that it falls into smaller ones. It is NaN then
    or, with `or_bound`, replaced by an upper bound, the product of the row sums.
    """
    if reading.model.part_prior is not None:  # unknown part probabilities are normalised already
        return np.zeros(len(present))
    logits = np.moveaxis(np.asarray(reading.model.match_logits), -1, 0)
    if reading.skeleton.match_family is MixtureMatch:
        values = logsumexp(logits, axis=-1).sum(axis=-1)
    elif (logits == logits[:, :1, :1]).all():
        size = logits.shape[-1]
        values = size * logits[:, 0, 0] + math.lgamma(size + 1)
    else:
        known: dict[bytes, float] = {}
        values = np.zeros(len(logits))
        for i, (matrix, mask) in enumerate(zip(logits, present[: len(logits)], strict=True)):
            name = matrix.tobytes() + mask.tobytes()
            if name not in known:
                order = np.lexsort((*matrix.T, mask))  # rows in any order have the same permanent
                in_order = matrix[order].tobytes() + mask[order].tobytes()
                if in_order not in known:
                    known[in_order] = _log_permanent_by_components(matrix, mask)
                known[name] = known[in_order]
            values[i] = known[name]
        if or_bound:
            row_sums = logsumexp(logits, axis=-1).sum(axis=-1)
            values = np.where(np.isnan(values), row_sums, values)
    return np.broadcast_to(values, len(present))


def _log_permanent_by_components(
    logits: Float[np.ndarray, "N N"], present: Bool[np.ndarray, " N"]
) -> float:
    """log perm of one matrix, a product over groups of points and parts that can meet.

    Dummy rows that are all alike, with weight u_n for part n, take whatever parts the points
    leave, in any order: with D of them

        perm(A) = D! prod_n u_n  *  sum over injections of the points of prod a_mn / u_n,

    and the sum is a product over the groups.
    """
    points, dummies = logits[present], logits[~present]
    if len(dummies) and not ((dummies == dummies[0]).all() and np.isfinite(dummies[0]).all()):
        points, dummies = logits, logits[:0]
    unmet = dummies[0] if len(dummies) else np.zeros(logits.shape[1])
    relative = points - unmet
    allowed = np.isfinite(relative)
    graph = np.block(
        [
            [np.zeros((len(points), len(points))), allowed],
            [allowed.T, np.zeros((allowed.shape[1],) * 2)],
        ]
    )
    count, label = connected_components(graph, directed=False)
    log_sum = math.lgamma(len(dummies) + 1) + float(unmet.sum())
    for group in range(count):
        rows, columns = (np.flatnonzero(x == group) for x in np.split(label, [len(points)]))
        if not len(rows):
            log_sum += 0.0 if len(dummies) else -math.inf  # a part that no point can meet
            continue
        block = relative[np.ix_(rows, columns)]
        if len(rows) > len(columns):
            return -math.inf
        if (block == block[0, 0]).all():
            log_sum += len(rows) * float(block[0, 0]) + math.lgamma(len(columns) + 1)
            log_sum -= math.lgamma(len(columns) - len(rows) + 1)
        elif len(rows) <= MAX_ROWS:
            log_sum += float(log_permanent(jnp.asarray(block)))
        else:
            return math.nan
    return log_sum
