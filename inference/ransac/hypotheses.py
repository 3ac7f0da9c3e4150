"""Hypotheses of RANSAC: every tuple of points as every basis of a template, and what it explains.

A table of predictions, one row for each basis of each template (the table of geometric hashing),
turns the points of a basis into where all parts should be. One scene and one template at a time, to
be mapped over both; hypotheses, which are many, are the last axis.
"""

import itertools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from inference.ransac.covers import Candidates
from models.numerics.linalg import inverse_and_log_det
from models.program.reading import LinearGaussianModel

MAX_TUPLES = 4096
"""Largest number of point tuples to try; larger scenes try a random subset of this size."""

MAX_CANDIDATES = 64
"""Hypotheses of each template that compete for the points, no two with the same points."""

TIE_DECIMALS = 4
"""Decimals that count of a cost, in units of a point at the tolerance. Without noise every basis of
an object fits, and what is left, the pull of the prior, is no reason to prefer one."""


class Settings(NamedTuple):
    """What `run` was asked for."""

    bases: Literal["all", "first"]
    tolerance: float
    refit: bool
    cost: Literal["total", "others"]
    cover: Literal["exact", "partial", "sequential"]
    features: int | None
    fewest_points: int | None
    has_clutter: bool = False


class Hypotheses(NamedTuple):
    """Objects of one kind that the points suggest; hypotheses last."""

    match: Int[Array, "most H"]
    """The point of each part, -1 for none."""
    fitted: Bool[Array, "most H"]
    """The parts that the pose was fitted to."""
    value: Float[Array, " H"]


class Template(NamedTuple):
    """The pieces of the model that belong to one object."""

    F: Float[Array, "most d p"]
    offset: Float[Array, "most d"]
    weight: Float[Array, "most d"]
    """One over the variance, 0 for features that do not count."""
    counted: Float[Array, "most d"]
    """1 for the features that distances are measured in, else 0."""
    allowed: Bool[Array, "N most"]
    """Whether a point can be a part at all."""
    valid: Bool[Array, " most"]
    prior_precision: Float[Array, "p p"]
    prior_information: Float[Array, " p"]

    @classmethod
    def of(
        cls, model: LinearGaussianModel, k: Array, members: Array, valid: Array, settings: Settings
    ) -> "Template":
        """Object k of a program at one scene, as the search needs it."""
        parts = jax.tree.map(lambda x: x[members], model.parts)
        mask = parts.feature_mask.astype(float)
        precision, _ = inverse_and_log_det(model.pose_covariance[k])
        coordinates = np.arange(mask.shape[1]) < (settings.features or mask.shape[1])
        possible = jnp.isfinite(model.match_logits[:, members]) & model.seen.any(axis=1)[:, None]
        return cls(
            F=parts.F,
            offset=parts.offset,
            weight=mask / parts.variance,
            counted=mask * coordinates,
            allowed=possible & valid,
            valid=valid,
            prior_precision=precision,
            prior_information=precision @ model.pose_mean[k],
        )


class Fit(NamedTuple):
    """Poses fitted to some matched points, and where they put the parts."""

    mean: Float[Array, "p H"]
    covariance: Float[Array, "p p H"]
    predicted: Float[Array, "most d H"]


def fit(
    template: Template,
    points: Float[Array, "N d"],
    match: Int[Array, "most H"],
    fitted: Bool[Array, "most H"],
) -> Fit:
    """The posterior of the pose given the points of some parts (eqs. Lambda_k and mu_k).

    With the paper's noise precision it is the least-squares fit; for an appearance that the points
    leave open it is the posterior of factor analysis.
    """
    F, weight = template.F, template.weight
    on = fitted.astype(float)
    target = points[match] - template.offset[:, None]  # (most, H, d)
    certainty = jnp.einsum("ndp,nd,ndq->npq", F, weight, F)
    precision = template.prior_precision[..., None] + jnp.einsum("npq,nh->pqh", certainty, on)
    covariance, _ = inverse_and_log_det(precision)
    information = jnp.einsum("ndp,nd,nhd,nh->ph", F, weight, target, on)
    information = information + template.prior_information[:, None]
    mean = jnp.einsum("pqh,qh->ph", covariance, information)
    predicted = jnp.einsum("ndp,ph->ndh", F, mean) + template.offset[..., None]
    return Fit(mean, covariance, predicted)


def table(
    template: Template, basis: Int[Array, "bases size"]
) -> tuple[Float[Array, "bases most d size d"], Float[Array, "bases most d"]]:
    """Where the parts are as a linear function of the points of each basis: B_k^-1, and F."""

    def one(basis: Int[Array, " size"]) -> tuple[Array, Array]:
        F, weight = template.F[basis], template.weight[basis]
        precision = template.prior_precision + jnp.einsum("bdp,bd,bdq->pq", F, weight, F)
        covariance, _ = inverse_and_log_det(precision)
        solve = jnp.einsum("pq,bdq,bd->pbd", covariance, F, weight)  # the paper's B_k^-1
        at_zero = covariance @ template.prior_information
        at_zero = at_zero - jnp.einsum("pbd,bd->p", solve, template.offset[basis])
        linear = jnp.einsum("ndp,pbe->ndbe", template.F, solve)
        return linear, template.F @ at_zero + template.offset

    return jax.vmap(one)(basis)


def hypotheses(
    model: LinearGaussianModel,
    template: Template,
    tuples: Int[Array, "tuples size"],
    basis: Int[Array, "bases size"],
    basis_valid: Bool[Array, " bases"],
    settings: Settings,
) -> Hypotheses:
    """Every tuple of points as every basis: which parts are where they should be, and the cost."""
    points = model.points
    most = len(template.valid)
    linear, constant = table(template, basis)
    predicted = jnp.einsum("gndbe,tbe->ndgt", linear, points[tuples])
    predicted = predicted + jnp.moveaxis(constant, 0, 2)[..., None]
    predicted = predicted.reshape(*predicted.shape[:2], -1)  # (most, d, H)
    in_basis = (np.arange(most)[:, None, None] == basis).any(axis=-1)  # (most, bases)
    in_basis = jnp.repeat(in_basis, len(tuples), axis=1)

    squared = sum(
        template.counted[:, None, j, None] * (points[None, :, j, None] - predicted[:, j, None]) ** 2
        for j in range(points.shape[1])
    )  # (most, N, H)
    squared = jnp.where(template.allowed.T[..., None], squared, jnp.inf)
    match, distance = jnp.argmin(squared, axis=1), jnp.min(squared, axis=1)
    met = _distinct(match, distance) & (distance <= settings.tolerance**2)
    match = jnp.where(met, match, -1)
    fitted = met & in_basis
    if settings.refit:
        fitted = met
        again = fit(template, points, match, met)
        distance = distances(template, again.predicted, jnp.moveaxis(points[match], 1, 2))

    possible = template.allowed[tuples[None], basis[:, None]].all(axis=-1) & basis_valid[:, None]
    basis_met = (met | ~in_basis).all(axis=0)
    size = basis.shape[1]
    # More than any basis has by itself, unless one is content with less.
    enough = jnp.minimum(settings.fewest_points or size + 1, template.valid.sum())
    possible = possible.ravel() & basis_met & (met.sum(axis=0) >= enough)
    scaled = jnp.where(met, distance, 0.0) / settings.tolerance**2
    if settings.cost == "others":
        others = met & ~in_basis
        cost = jnp.where(others, scaled, 0.0).sum(axis=0) / jnp.maximum(others.sum(axis=0), 1)
    else:
        cost = scaled.sum(axis=0)
    missing = (template.valid[:, None] & ~met).sum(axis=0)
    lack = lack_cost(settings, len(points))
    value = cost + lack * missing - stray_cost(settings, lack) * met.sum(axis=0)
    return Hypotheses(match, fitted, jnp.where(possible, value, jnp.inf))


def lack_cost(settings: Settings, num_points: int) -> float:
    """What a missing part or an unexplained point costs, in units of a point at the tolerance.

    As much as that or, where covers should be exact, more than all misfit together.
    """
    return 1.0 if settings.cover == "partial" else 1.0 + 2.0 * num_points


def stray_cost(settings: Settings, lack: float) -> float:
    """What an unexplained point costs: a lack or, where it may be clutter, one at the tolerance."""
    return 1.0 if settings.has_clutter else lack


def distances(
    template: Template, predicted: Float[Array, "most d H"], points: Float[Array, "most d H"]
) -> Float[Array, "most H"]:
    """Squared distance of each point from where its part is predicted."""
    return jnp.sum(template.counted[..., None] * (points - predicted) ** 2, axis=1)


def _distinct(
    match: Int[Array, "most H"], distance: Float[Array, "most H"]
) -> Bool[Array, "most H"]:
    """Of parts that want the same point the closest one has it."""
    most = len(match)
    rival = match[:, None] == match[None]
    first = np.tri(most, k=-1, dtype=bool)[..., None]  # of equals, the first
    closer = (distance[None] < distance[:, None]) | ((distance[None] == distance[:, None]) & first)
    return ~(rival & closer).any(axis=1)


def best_of_each_set(found: Hypotheses, num_points: int) -> tuple[Candidates, Hypotheses]:
    """The best hypothesis for each set of points, and of these the best ones.

    Of equally good ones it is that of the first basis.
    """
    claims = (found.match[:, None] == np.arange(num_points)[:, None]).any(axis=0)  # (N, H)
    codes = np.random.default_rng(0).integers(2**62, size=num_points)  # equal sums: equal sets
    code = jnp.where(claims, codes[:, None], 0).sum(axis=0)
    order = jnp.lexsort((jnp.round(found.value, TIE_DECIMALS), code))
    first = jnp.concatenate([jnp.ones(1, bool), jnp.diff(code[order]) != 0])
    value = jnp.where(first, found.value[order], jnp.inf)
    lowest, place = jax.lax.top_k(-value, min(MAX_CANDIDATES, len(value)))
    kept = order[place]
    best = jax.tree.map(lambda x: x[..., kept], found)._replace(value=-lowest)
    return Candidates(-lowest, claims[:, kept].T), best


def tuples_of_points(
    key: Array, present: Bool[Array, " N"], size: int
) -> Int[Array, "tuples size"]:
    """All ordered tuples of different rows if they are few, else tuples of points at random."""
    rows = len(present)
    if math.perm(rows, size) <= MAX_TUPLES:
        return jnp.asarray(np.array(list(itertools.permutations(range(rows), size))))
    noise = jax.random.uniform(key, (MAX_TUPLES, rows))
    return jax.lax.top_k(jnp.where(present, noise, -1.0), size)[1]
