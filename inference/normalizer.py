"""The constants of an evidence: the normaliser of the match prior, and what else is observed.

The normaliser is what the weights of all matches sum to, a constant of the scene: of no interest to
the fit, but an ELBO or an evidence is not worth much without it. Where the prior does not depend on
the scene it is computed once, and where it is uniform in closed form.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float
from scipy.sparse.csgraph import connected_components

from guides.projections import PROJECTIONS
from models.batches import what_varies
from models.match import MixtureMatch
from models.permanent import MAX_ROWS, log_permanent
from models.reading import Program, log_prob_of_data, read
from models.scenes import Scene


def log_prior_normalizer(
    program: Program, scenes: Scene, *, or_bound: bool = False
) -> Float[np.ndarray, " scenes"]:
    """Log of the sum of exp(sum_mn z_mn log a_mn) over all matches, for each scene.

    For a prior over permutations it is log perm(A). A permanent of more than `MAX_ROWS` rows is out
    of reach unless the prior forbids so many pairs that it falls into smaller ones. It is NaN then
    or, with `or_bound`, replaced by an upper bound, the product of the row sums.
    """
    observed = Scene(**scenes.observed)
    first = scenes.take(0)
    example = read(program, first)
    if what_varies(program, scenes.layout).match_logits:
        logits = np.asarray(_logits_reader(program)(observed))
    else:
        logits = np.asarray(example.match_logits)[None]
    if example.match_family is MixtureMatch:
        values = np.asarray(logsumexp(logits, axis=-1).sum(axis=-1))
    elif (logits == logits[:, :1, :1]).all():
        size = logits.shape[-1]
        values = size * logits[:, 0, 0] + math.lgamma(size + 1)
    else:
        known: dict[bytes, float] = {}
        values = np.zeros(len(logits))
        for i, (matrix, mask) in enumerate(zip(logits, scenes.present[: len(logits)], strict=True)):
            order = np.lexsort((*matrix.T, mask))  # that of the rows does not change a permanent
            name = matrix[order].tobytes() + mask[order].tobytes()
            if name not in known:
                known[name] = _log_permanent_by_components(matrix, mask)
            values[i] = known[name]
        if or_bound:
            row_sums = np.asarray(logsumexp(logits, axis=-1).sum(axis=-1))
            values = np.where(np.isnan(values), row_sums, values)
    return np.broadcast_to(values, len(scenes.points))


def elbo_constant(program: Program, projection: str, scenes: Scene) -> Float[np.ndarray, " scenes"]:
    """What `guides.meanfield.elbo_terms` leaves out of the ELBO with one of the projections."""
    num_parts = scenes.layout.num_rows
    constant = PROJECTIONS[projection].log_bound(num_parts) + data_log_prob(program, scenes)
    if read(program, scenes.take(0)).part_prior is None:  # unknown ones are normalised already
        constant = constant - log_prior_normalizer(program, scenes, or_bound=True)
    return constant


def data_log_prob(program: Program, scenes: Scene) -> Float[np.ndarray, " scenes"]:
    """Log density of what the program observes besides the points, for each scene."""
    return np.asarray(_evaluator(program)(Scene(**scenes.observed)))


@functools.lru_cache(maxsize=32)
def _logits_reader(program: Program) -> Callable[[Scene], Float[Array, "scenes N N"]]:
    return jax.jit(jax.vmap(lambda scene: read(program, scene).match_logits))


@functools.lru_cache(maxsize=32)
def _evaluator(program: Program) -> Callable[[Scene], Float[Array, " scenes"]]:
    return jax.jit(jax.vmap(lambda scene: log_prob_of_data(program, scene)))


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
