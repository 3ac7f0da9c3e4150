"""Read a program at each scene of a batch, and solve the scenes with a closed-form method.

If the program has further latent sites (conditions), `inference.conditions.solve` combines problems
at several values of them.

The constant of a scene is the log density of all other sites, minus the log normaliser of the match
prior. The fit does not depend on it; the ELBO and the log evidence do.
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
    """Log density of all sites other than poses, match and points, minus the log normaliser of the
    match prior; -inf where no match is possible, NaN where the normaliser is too expensive."""
    is_conditional: bool = False
    """Whether this is one of several problems at values of the conditions that will be combined."""

    @property
    def skeleton(self) -> Skeleton:
        """The structure of the program, which does not depend on its numbers."""
        return self.reading.skeleton

    @property
    def owner(self) -> Int[np.ndarray, " N"]:
        """The object of each part."""
        return np.array(self.skeleton.owner)

    @property
    def num_scenes(self) -> int:
        """Number of scenes."""
        return len(self.scenes.points)

    def take(self, which: Any) -> "Problem":
        """The problem for some of the scenes."""
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
    """Solve each scene of a batch, summing or integrating over the conditions of its program.

    Match probabilities and pose moments are those of the mixture over conditions. For a discrete
    site `name`, `details[name]` has the posterior probability that each entry is positive, and
    `details["<name>_sets"]` the most probable values with their probabilities. For a continuous
    site `details[name]` is its posterior mean. `Result.conditions` has the values of all sites in
    the run of the largest weight.

    Args:
        method: solves a problem without open conditions.
        factors: sites for which the method has a factor.
        or_bound: whether an upper bound may replace a normaliser that is too expensive.
        tolerance: the log integral over continuous conditions has converged if it changes by less
            when the grid is refined.
        search: used if the discrete conditions have more than `max_values` joint values. Solves
            the scenes at some of these values, or returns None if it has no way to choose them.
        finish: combines the runs of each scene, in place of `mixed`. Every value is then solved,
            also those that differ only by a swap of alike objects.
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
    """The program as read, or its open conditions; and the sites that keep a factor.

    A precision on which the poses depend, too, cannot be a factor; it becomes a condition instead.
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
    """Read a program at each scene of a batch, or return the conditions that it leaves open.

    Args:
        given: values of the conditions, one for each scene.
        factors: sites for which the method has a factor (see `models.program.reading`).
        or_bound: use an upper bound in place of a normaliser that is too expensive.
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

    For a prior over permutations it is log perm(A). A permanent of more than `MAX_ROWS` rows is too
    expensive, unless the pairs that the prior forbids split it into smaller ones. The value is then
    NaN or, with `or_bound`, an upper bound: the log of the product of the row sums.
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
    """log perm of one matrix, computed by connected groups of points and parts.

    If all dummy rows are equal, with weight u_n for part n, they take the parts left by the points
    in any order. With D dummy rows

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
            log_sum += 0.0 if len(dummies) else -math.inf  # a part that no point can be
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
