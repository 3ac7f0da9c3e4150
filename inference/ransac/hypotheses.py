"""Hypotheses of RANSAC: put every tuple of points on every basis of a template.

A table with a row for each basis of each template (the table of geometric hashing) predicts the
places of all parts from the points of the basis. Functions treat one scene and one template and are
mapped over both; hypotheses, which are many, are the last axis.
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
"""Largest number of hypotheses per template that compete for the points, with distinct points."""

TIE_DECIMALS = 4
"""Decimals to which costs are compared, in units of a point at the tolerance. Without noise every
basis of an object fits, and the rest, shrinkage by the prior, should not decide between them."""


class Settings(NamedTuple):
    """The settings of `run`."""

    bases: Literal["all", "first"]
    tolerance: float
    refit: bool
    cost: Literal["total", "others"]
    cover: Literal["exact", "partial", "sequential"]
    features: int | None
    fewest_points: int | None
    has_clutter: bool = False


class Template(NamedTuple):
    """The pieces of the model that belong to one object."""

    F: Float[Array, "most d p"]
    """The design of each part."""
    offset: Float[Array, "most d"]
    """What a part predicts at a pose of zeros."""
    weight: Float[Array, "most d"]
    """1 / variance, 0 for features that the part lacks."""
    counted: Float[Array, "most d"]
    """1 for features that count in distances, else 0."""
    allowed: Bool[Array, "N most"]
    """Whether a point can be a part at all."""
    valid: Bool[Array, " most"]
    prior_precision: Float[Array, "p p"]
    prior_information: Float[Array, " p"]

    @classmethod
    def of(
        cls, model: LinearGaussianModel, k: Array, members: Array, valid: Array, settings: Settings
    ) -> "Template":
        """The template of object k of a program at one scene."""
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


class Hypotheses(NamedTuple):
    """Hypothetical objects of one kind; hypotheses last."""

    match: Int[Array, "most H"]
    """The point of each part, -1 for none."""
    fitted: Bool[Array, "most H"]
    """The parts to which the pose was fitted."""
    value: Float[Array, " H"]


class Fit(NamedTuple):
    """Poses fitted to matched points, and the places of the parts that they predict."""

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

    At the paper's noise precision it is practically the least-squares fit. For an appearance that
    the points do not determine it is the posterior of factor analysis.
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
    """Places of the parts as a linear function of the points of each basis, by B_k^-1 and F."""

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
    """Put every tuple of points on every basis; match the parts within tolerance, and cost it."""
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
    # By default more points than the basis itself.
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
    """Cost of a missing part or an unexplained point, in units of a point at the tolerance.

    It is 1 for partial covers; otherwise it exceeds any total misfit.
    """
    return 1.0 if settings.cover == "partial" else 1.0 + 2.0 * num_points


def stray_cost(settings: Settings, lack: float) -> float:
    """Cost of an unexplained point: 1 if it may be clutter, else that of a missing part."""
    return 1.0 if settings.has_clutter else lack


def distances(
    template: Template, predicted: Float[Array, "most d H"], points: Float[Array, "most d H"]
) -> Float[Array, "most H"]:
    """Squared distance of each point from the predicted place of its part."""
    return jnp.sum(template.counted[..., None] * (points - predicted) ** 2, axis=1)


def _distinct(
    match: Int[Array, "most H"], distance: Float[Array, "most H"]
) -> Bool[Array, "most H"]:
    """Whether a part has its point: of parts with the same nearest point, only the closest has."""
    most = len(match)
    rival = match[:, None] == match[None]
    first = np.tri(most, k=-1, dtype=bool)[..., None]  # ties go to the first
    closer = (distance[None] < distance[:, None]) | ((distance[None] == distance[:, None]) & first)
    return ~(rival & closer).any(axis=1)


def best_of_each_set(found: Hypotheses, num_points: int) -> tuple[Candidates, Hypotheses]:
    """Keep the best hypothesis for each set of points, and the best of these.

    Ties go to the hypothesis of the first basis.
    """
    claims = (found.match[:, None] == np.arange(num_points)[:, None]).any(axis=0)  # (N, H)
    codes = np.random.default_rng(0).integers(2**62, size=num_points)  # a hash of sets, by sums
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
    """All ordered tuples of different rows if they are few, else random tuples of points."""
    rows = len(present)
    if math.perm(rows, size) <= MAX_TUPLES:
        return jnp.asarray(np.array(list(itertools.permutations(range(rows), size))))
    noise = jax.random.uniform(key, (MAX_TUPLES, rows))
    return jax.lax.top_k(jnp.where(present, noise, -1.0), size)[1]
