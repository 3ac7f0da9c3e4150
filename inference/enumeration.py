"""The sum over all matches of a scene, an object's subset of points at a time.

Given the match, poses integrate out in closed form and objects are independent. For each object
and each subset of the points the marginal likelihoods of all placements on its parts are summed;
the objects are then put together by dynamic programming over point sets, forwards for the evidence
and backwards for the posterior probability of every placement, from which all marginals and
moments follow. Scene axes last, as in `guides.meanfield`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from inference.subsets import Level, Placements, fewest, levels, placements, refuse_if_too_large
from models import AnyArray
from models.batches import Skeleton
from models.linalg import inverse_and_log_det, total
from models.reading import Conjugate

LOG_ZERO = -1e30
"""The log of a weight of zero: finite, so that differences of two of them are no NaN."""


class Plan(NamedTuple):
    """What is fixed for a program and a number of points."""

    parts: tuple[Int[np.ndarray, " n"], ...]
    template: tuple[int, ...]
    """For each object the first one with the same template and prior: they share their tables."""
    placed: tuple[Placements, ...]
    levels: tuple[Level, ...]
    num_points: int

    @property
    def num_cells(self) -> int:
        """Terms that are worked on at a time, for each scene."""
        return max(placed.subset.size for placed in self.placed)

    @property
    def owner(self) -> Int[np.ndarray, " N"]:
        """The object that each part belongs to."""
        return np.repeat(np.arange(len(self.parts)), [len(p) for p in self.parts])[
            np.argsort(np.concatenate(self.parts))
        ]


class Grid(NamedTuple):
    """The log weight of every pair of rows of `Placements`, prior included.

    The posterior mean of the pose given a placement is the sum of what its two rows contribute.
    What one row does depends also on which parts the other row meets, its pattern.
    """

    log_weight: Float[Array, "left right *scenes"]
    left_mean: Float[Array, "left right_patterns p *scenes"]
    right_mean: Float[Array, "left_patterns right p *scenes"]
    covariance: Float[Array, "left_patterns right_patterns p p *scenes"]


class Tables(NamedTuple):
    """The sums, for each object and for each level."""

    grids: tuple[Grid, ...]
    subsets: tuple[Float[Array, "subsets *scenes"], ...]
    """Log of the summed weight of the placements of each subset."""
    forward: tuple[Float[Array, "sets *scenes"], ...]
    """Log of the sum over all ways to fill each point set with the first 0, 1, ..., K objects."""

    @property
    def evidence(self) -> Float[Array, "*scenes"]:
        """Log of the sum over all matches of the points."""
        return self.forward[-1][0]


class Moments(NamedTuple):
    """Posterior marginals and moments; the pose posterior is a mixture over matches."""

    match_probs: Float[AnyArray, "M N *scenes"]
    pose_mean: Float[AnyArray, "K p *scenes"]
    pose_covariance: Float[AnyArray, "K p p *scenes"]


def make_plan(skeleton: Skeleton, num_points: int) -> Plan:
    """Lay out the sums."""
    sizes = tuple(len(p) for p in skeleton.parts)
    refuse_if_too_large(num_points, sizes)
    return Plan(
        parts=tuple(skeleton.parts),
        template=skeleton.exchangeable,
        placed=tuple(
            placements(num_points, size, fewest(num_points, sizes, k))
            for k, size in enumerate(sizes)
        ),
        levels=levels(num_points, sizes),
        num_points=num_points,
    )


def sum_over_matches(model: Conjugate, plan: Plan) -> Tables:
    """The forward pass; the points are the first rows of the model."""
    grids: list[Grid] = []
    subsets: list[Array] = []
    for k, (first, placed) in enumerate(zip(plan.template, plan.placed, strict=True)):
        if first < k:
            grids.append(grids[first])
            subsets.append(subsets[first])
        else:
            grids.append(object_grid(model, k, plan.parts[k], placed, plan.num_points))
            subsets.append(log_sum((flat(grids[k]), placed.ways)))
    forward = [jnp.zeros((1, *subsets[0].shape[1:]))]
    for table, level in zip(subsets, plan.levels, strict=True):
        forward.append(log_sum((table, level.subset_of_set), (forward[-1], level.rest_of_set)))
    return Tables(tuple(grids), tuple(subsets), tuple(forward))


def object_grid(
    model: Conjugate, k: int, parts: Int[np.ndarray, " n"], placed: Placements, num_points: int
) -> Grid:
    """The marginal likelihood of every placement on the parts of object k, pose integrated out.

    It is sum log N(x; m, D) + 1/2 (h' C h - mu_0' D_0^-1 mu_0 + log |D_0^-1| + log |C|) with
    C the covariance and h = D_0^-1 mu_0 + votes the information vector of the pose given the
    placement. C depends only on which parts have a point, and with h = h_left + h_right

        1/2 h' C h = 1/2 h_left' C h_left + h_left' C h_right + 1/2 h_right' C h_right.
    """
    score, votes = pair_terms(model, parts, num_points)
    half = placed.left.shape[1]
    left_met, right_met = (met.astype(float) for met in (placed.left_met, placed.right_met))
    F = model.parts.F[parts]
    weight = (model.parts.feature_mask / model.parts.variance)[parts]
    certainty = jnp.einsum("nd...,ndp...,ndq...->npq...", weight, F, F)
    prior_precision, prior_log_det = inverse_and_log_det(model.pose_covariance[k])
    prior_vote = total(prior_precision * model.pose_mean[k], axis=1)
    prior_term = total(prior_vote * model.pose_mean[k], axis=0) + prior_log_det
    precision = (  # eq. Lambda_k, for every pattern of parts that have a point
        prior_precision
        + jnp.einsum("ln,npq...->lpq...", left_met, certainty[:half])[:, None]
        + jnp.einsum("rn,npq...->rpq...", right_met, certainty[half:])
    )
    inverse, log_det = inverse_and_log_det(jnp.moveaxis(precision, (0, 1), (2, 3)))
    covariance = jnp.moveaxis(inverse, (2, 3), (0, 1))

    information = prior_vote + _over_parts(votes[:, :half], placed.left)
    vote = _over_parts(votes[:, half:], placed.right)
    of_left, of_right = placed.left_pattern, placed.right_pattern
    left_mean = total(covariance[of_left] * information[:, None, None], axis=3)
    right_mean = total(covariance[:, of_right] * vote[:, None], axis=3)
    quadratic = total(information[:, None] * left_mean, axis=2) - log_det[of_left] - prior_term
    left_term = _over_parts(score[:, :half], placed.left)[:, None] + 0.5 * quadratic
    right_term = _over_parts(score[:, half:], placed.right) + 0.5 * total(vote * right_mean, axis=2)

    def row(inputs: tuple[Array, Array, Array]) -> Float[Array, "right *scenes"]:
        pattern, term, mean = inputs
        return term[of_right] + right_term[pattern] + total(mean[of_right] * vote, axis=1)

    log_weight = jax.lax.map(row, (jnp.asarray(of_left), left_term, left_mean))
    return Grid(jnp.maximum(log_weight, LOG_ZERO), left_mean, right_mean, covariance)


def pair_terms(
    model: Conjugate, parts: Int[np.ndarray, " n"], num_points: int
) -> tuple[Float[Array, "M+1 n *scenes"], Float[Array, "M+1 n p *scenes"]]:
    """Each point as each part: its log weight at the part's offset, and its vote for the pose.

    The last row is for no point at all: a dummy row takes the part.
    """
    own = jax.tree.map(lambda x: x[parts], model.parts)
    centred = model.points[:num_points, None] - own.offset  # (M, n, d, scenes)
    log_density = -0.5 * (centred**2 / own.variance + jnp.log(2 * jnp.pi * own.variance))
    score = model.match_logits[:num_points, parts] + total(own.feature_mask * log_density, axis=2)
    weighted = own.feature_mask / own.variance * centred
    votes = total(own.F * weighted[..., None, :], axis=2)
    if num_points < len(model.points):
        unmet = model.match_logits[-1, parts]
    else:  # no dummy rows: every part has a point
        unmet = jnp.full((len(parts), 1), LOG_ZERO)
    unmet = jnp.broadcast_to(unmet, score.shape[1:])[None]
    score = jnp.maximum(jnp.concatenate([score, unmet]), LOG_ZERO)
    return score, jnp.concatenate([votes, jnp.zeros_like(votes[:1])])


def _over_parts(
    values: Float[Array, "M+1 n *rest"], rows: Int[np.ndarray, "rows n"]
) -> Float[Array, "rows *rest"]:
    """The sum over parts of what the point on each contributes."""
    start = jnp.zeros((len(rows), *values.shape[2:]))
    return sum((values[rows[:, a], a] for a in range(rows.shape[1])), start)


def moments(plan: Plan, tables: Tables) -> Moments:
    """The backward pass: the posterior probability of every placement, and what follows from it."""
    after = jnp.zeros((1, *tables.evidence.shape))  # log weight of what goes with each point set
    by_object: dict[int, tuple[Array, Array, Array]] = {}
    for k in reversed(range(len(plan.parts))):
        level, table, before = plan.levels[k], tables.subsets[k], tables.forward[k]
        if plan.template[k] == k:  # objects that are alike have the same marginals
            others = log_sum((after, level.set_of_subset), (before, level.rest_of_subset))
            by_object[k] = _object_moments(plan, k, tables.grids[k], others - tables.evidence)
        after = log_sum((after, level.set_of_rest), (table, level.subset_of_rest))
    columns, means, covariances = zip(*(by_object[first] for first in plan.template), strict=True)
    order = np.argsort(np.concatenate(plan.parts))
    return Moments(
        jnp.concatenate(columns, axis=1)[:, order], jnp.stack(means), jnp.stack(covariances)
    )


def _object_moments(
    plan: Plan, k: int, grid: Grid, outside: Float[Array, "subsets *scenes"]
) -> tuple[Float[Array, "M n *scenes"], Float[Array, "p *scenes"], Float[Array, "p p *scenes"]]:
    """Of one object, from the log weight of all that goes with each of its subsets.

    One row of the grid after another; nothing as large as the grid is kept.
    """
    placed = plan.placed[k]
    of_right = placed.right_pattern
    num_left, num_right = len(placed.left_met), len(placed.right_met)
    outside = jnp.concatenate([outside, jnp.full_like(outside[:1], 2 * LOG_ZERO)])

    def add_row(
        sums: tuple[Array, Array], inputs: tuple[Array, Array, Array, Array]
    ) -> tuple[tuple[Array, Array], Array]:
        pattern, subset, log_weight, mean = inputs
        probs = jnp.exp(log_weight + outside[subset])
        by_pattern = jnp.stack([probs[of_right == r].sum(axis=0) for r in range(num_right)])
        new = (probs, probs[:, None] * mean[of_right])
        return jax.tree.map(lambda x, y: x.at[pattern].add(y), sums, new), by_pattern

    columns, scenes = grid.log_weight.shape[1:]
    start = (
        jnp.zeros((num_left, columns, scenes)),
        jnp.zeros((num_left, columns, grid.left_mean.shape[2], scenes)),
    )
    rows = (
        jnp.asarray(placed.left_pattern),
        jnp.asarray(placed.subset),
        grid.log_weight,
        grid.left_mean,
    )
    # Probabilities by left pattern and right row, the left rows' share of the mean summed
    # likewise, and probabilities by left row and right pattern.
    (right_probs, left_shares), left_probs = jax.lax.scan(add_row, start, rows)

    halves = ((placed.left, left_probs.sum(axis=1)), (placed.right, right_probs.sum(axis=0)))
    match_probs = [
        jnp.einsum("im,i...->m...", _one_hot(rows[:, a], plan.num_points), probs)
        for rows, probs in halves
        for a in range(rows.shape[1])
    ]
    shares = ((left_probs, grid.left_mean), (right_probs, grid.right_mean))
    mean = jnp.zeros(grid.left_mean.shape[2:])
    second = jnp.zeros((len(mean), *mean.shape))
    for probs, share in shares:
        mean = mean + jnp.einsum("ab...,abp...->p...", probs, share)
        second = second + jnp.einsum("ab...,abp...,abq...->pq...", probs, share, share)
    cross = jnp.einsum("ljp...,ljq...->pq...", left_shares, grid.right_mean)
    by_patterns = jnp.einsum("il,ir...->lr...", _one_hot(placed.left_pattern, num_left), left_probs)
    within = jnp.einsum("lr...,lrpq...->pq...", by_patterns, grid.covariance)
    between = second + cross + jnp.swapaxes(cross, 0, 1) - mean[:, None] * mean
    return jnp.stack(match_probs, axis=1), mean, within + between


Lists = tuple[Float[Array, "n *scenes"], Int[np.ndarray, "most out"]]
"""Values, and lists of places among them down the columns; see `inference.subsets`."""


def log_sum(*terms: Lists) -> Float[Array, "out *scenes"]:
    """Log of the sum over each list of exp of the terms' sum.

    An entry of all lists at a time, so that memory is read along the scenes.
    """
    entry, most = _entries(terms)
    highest = _accumulate(jnp.maximum, entry, most)
    summed = _accumulate(jnp.add, lambda n: jnp.exp(entry(n) - highest), most)
    return jnp.maximum(highest + jnp.log(summed), LOG_ZERO)


def largest_sum(*terms: Lists) -> Float[Array, "out *scenes"]:
    """The largest of the terms' sums over each list."""
    return jnp.maximum(_accumulate(jnp.maximum, *_entries(terms)), LOG_ZERO)


def flat(grid: Grid) -> Float[Array, "cells *scenes"]:
    return grid.log_weight.reshape(-1, *grid.log_weight.shape[2:])


def _entries(terms: tuple[Lists, ...]) -> tuple[Callable[[Any], Array], int]:
    """The n-th entry of all lists as a function of n, and the number of entries."""
    values = [jnp.concatenate([x, jnp.full_like(x[:1], LOG_ZERO)]) for x, _ in terms]
    places = [jnp.asarray(lists) for _, lists in terms]

    def entry(n: Any) -> Float[Array, "out *scenes"]:
        looked_up = [x[place[n]] for x, place in zip(values, places, strict=True)]
        return sum(looked_up[1:], looked_up[0])

    return entry, len(places[0])


def _accumulate(
    add: Callable[[Array, Array], Array], entry: Callable[[Any], Array], count: int
) -> Array:
    return jax.lax.fori_loop(1, count, lambda n, so_far: add(so_far, entry(n)), entry(0))


def _one_hot(values: Int[np.ndarray, " n"], size: int) -> Float[np.ndarray, "n size"]:
    """Rows of zeros for values beyond."""
    return (values[:, None] == np.arange(size)).astype(float)
