"""Five programs with an unknown scalar, and its posterior on 2,000 nodes in plain numpy."""

import functools
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy import special, stats

from models.constellation import presence_constellation
from models.distributions.likelihood import MatchedParts
from models.distributions.match import PermutationMatch
from models.scenes import make_scene
from models.templates import Parts, with_clutter

POINTS, POSE, NODES = 4, 2, 2000
NOISE = {1: 0.3, 3: 0.3, 10: 0.03, 40: 0.03}
"""Features of a point, and the noise of a scene. With 160 clean features the posterior of the noise
is far from where its prior is."""


class Grid(NamedTuple):
    """The posterior of a scalar, at nodes that are evenly spaced in its unconstrained value."""

    log_evidence: float
    value: np.ndarray
    weight: np.ndarray

    def mean(self, function=lambda x: x):
        return np.sum(self.weight * function(self.value))

    def deviation(self, function=lambda x: x):
        return np.sqrt(self.mean(lambda x: (function(x) - self.mean(function)) ** 2))


class Case(NamedTuple):
    site: str
    program: Callable
    scene: object
    grid: Grid


def case(name: str, num_features: int) -> Case:
    return (_of_visibility if name in OWNERS else _of_noise)(name, num_features)


def _on_nodes(log_density, constrain, log_jacobian) -> Grid:
    """The rectangle rule wherever the integrand is within 45 nats of its largest value."""

    def log_integrand(u):
        return np.array([log_density(x) for x in constrain(u)]) + log_jacobian(u)

    coarse = np.linspace(-24, 24, 961)
    values = log_integrand(coarse)
    near = coarse[values > values.max() - 45]
    nodes = np.linspace(near.min() - 0.05, near.max() + 0.05, NODES)
    values = log_integrand(nodes)
    log_sum = special.logsumexp(values)
    return Grid(log_sum + np.log(nodes[1] - nodes[0]), constrain(nodes), np.exp(values - log_sum))


def _parts(num_objects: int, rows: int, num_features: int) -> Parts:
    shape = (num_objects * rows, num_features)
    F = np.random.default_rng(num_features).normal(size=(*shape, POSE))
    return Parts(
        F=jnp.asarray(F),
        offset=jnp.zeros(shape),
        variance=jnp.ones(shape),
        owner=np.repeat(np.arange(num_objects), rows),
        type=np.zeros(num_objects * rows, int),
        feature_mask=np.ones(shape, bool),
    )


# --- how precise the points are, or how wide the poses ------------------------------------------

PRIORS = {
    "precision ~ Gamma": ("precision", dist.Gamma(2.0, 2.0), lambda x: (x, 1.0)),
    "precision ~ LogNormal": ("precision", dist.LogNormal(1.0, 1.0), lambda x: (x, 1.0)),
    "sigma ~ HalfNormal": ("sigma", dist.HalfNormal(1.0), lambda x: (x**-2, 1.0)),
    "pose scale ~ HalfNormal": ("scale", dist.HalfNormal(1.0), lambda x: (50.0, x)),
}
"""A site, its prior, and the precision and the scale of the poses at a value of it."""

LOG_PRIORS = {
    "precision ~ Gamma": stats.gamma(2.0, scale=0.5).logpdf,
    "precision ~ LogNormal": stats.lognorm(1.0, scale=np.e).logpdf,
    "sigma ~ HalfNormal": stats.halfnorm(scale=1.0).logpdf,
    "pose scale ~ HalfNormal": stats.halfnorm(scale=1.0).logpdf,
}


def one_object(points, present, *, parts, prior):
    name, distribution, numbers = PRIORS[prior]
    precision, scale = numbers(numpyro.sample(name, distribution))
    with numpyro.plate("object", 1):
        covariance = scale**2 * jnp.eye(POSE)
        pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.zeros(POSE), covariance))
    match = numpyro.sample("match", PermutationMatch(jnp.zeros((POINTS, POINTS))))
    likelihood = MatchedParts(match, pose, parts, precision=precision, present=present)
    numpyro.sample("points", likelihood, obs=points)


def scene_of_one_object(num_features: int, noise: float):
    """The scene and its parts."""
    parts = _parts(1, POINTS, num_features)
    rng = np.random.default_rng(7)
    clean = np.asarray(parts.predict(np.array([[0.7, -0.4]])))
    points = clean + noise * rng.normal(size=clean.shape)
    return make_scene(points[rng.permutation(POINTS)], POINTS), parts


@functools.cache
def _of_noise(prior: str, num_features: int) -> Case:
    name, _, numbers = PRIORS[prior]
    scene, parts = scene_of_one_object(num_features, NOISE[num_features])
    F = np.asarray(parts.F)
    orders = list(itertools.permutations(range(POINTS)))
    stacked = np.stack([F[list(order)].reshape(-1, POSE) for order in orders])
    x = np.asarray(scene.points).ravel()
    squares = np.einsum("odp,odq->opq", stacked, stacked)
    products = np.einsum("odp,d->op", stacked, x)

    def log_density(value):
        precision, scale = numbers(value)
        # N(x; 0, scale^2 F F' + I / precision), by the matrix determinant lemma and Woodbury.
        inner = np.eye(POSE) / scale**2 + precision * squares
        log_det = np.linalg.slogdet(inner)[1] + 2 * POSE * np.log(scale)
        mean = np.linalg.solve(inner, precision * products[..., None])[..., 0]
        residual = x - np.einsum("odp,op->od", stacked, mean)
        distance = precision * np.sum(residual**2, axis=1) + np.sum(mean**2, axis=1) / scale**2
        each = -0.5 * (distance + log_det + len(x) * np.log(2 * np.pi / precision))
        return special.logsumexp(each) - np.log(len(orders)) + LOG_PRIORS[prior](value)

    grid = _on_nodes(log_density, np.exp, lambda u: u)
    return Case(name, partial(one_object, parts=parts, prior=prior), scene, grid)


# --- how often a part is seen -------------------------------------------------------------------

OWNERS = {
    "visibility ~ Beta": (0, 0, 0, 0, 1, 1),
    "visibility ~ Beta, presence unknown": (0, 0, 1, 1, 2, 2),
}
"""The object of each part; the last two are slots for clutter, and the points need one object."""

FIRST, SECOND = 4.0, 2.0
SLOTS, THERE, CLUTTER, PRECISION = 2, 0.6, 0.3, 20.0


def some_objects(points, present, *, parts):
    """Objects that may be absent, and points that may belong to none."""
    return presence_constellation(
        points,
        present,
        presence_prob=THERE,
        visibility=numpyro.sample("visibility", dist.Beta(FIRST, SECOND)),
        clutter_prob=CLUTTER,
        precision=PRECISION,
        parts=parts,
    )


@functools.cache
def _of_visibility(name: str, num_features: int) -> Case:
    parts, scene = _scene_of_some_objects(name, num_features)
    log_weight, seen, unseen = _visible_terms(name, num_features)

    def log_density(value):
        each = log_weight + seen * np.log(value) + unseen * np.log1p(-value)
        return special.logsumexp(each) + stats.beta(FIRST, SECOND).logpdf(value)

    def log_jacobian(u):
        return special.log_expit(u) + special.log_expit(-u)

    grid = _on_nodes(log_density, special.expit, log_jacobian)
    program = partial(some_objects, parts=with_clutter(parts, SLOTS))
    return Case("visibility", program, scene, grid)


def log_evidence_by_betas(name: str, num_features: int) -> float:
    """The integral over the visibility in closed form."""
    log_weight, seen, unseen = _visible_terms(name, num_features)
    ratio = special.betaln(FIRST + seen, SECOND + unseen) - special.betaln(FIRST, SECOND)
    return special.logsumexp(log_weight + ratio)


def _scene_of_some_objects(name: str, num_features: int):
    """All parts but one are seen, and there is a stray point."""
    num_objects = OWNERS[name][-1]
    parts = _parts(num_objects, POINTS // num_objects, num_features)
    rng = np.random.default_rng(7)
    pose = np.array([[0.7, -0.4], [-0.9, 0.6]])[:num_objects]
    points = np.asarray(parts.predict(pose))
    points = points + PRECISION**-0.5 * rng.normal(size=points.shape)
    points[-1] = rng.normal(size=num_features)
    return parts, make_scene(points[rng.permutation(POINTS)], len(OWNERS[name]))


@functools.cache
def _visible_terms(name: str, num_features: int):
    """All ways to read the scene, those alike added up: log weights, parts seen and not seen.

    Each part of an object that is there is seen, and each slot is in use, whatever the others are;
    the points come in any order.
    """
    parts, scene = _scene_of_some_objects(name, num_features)
    points = np.asarray(scene.points)[:POINTS]
    log_density = functools.cache(partial(_log_density, np.asarray(parts.F), points))
    owner = OWNERS[name]
    background = owner[-1]
    terms: dict[tuple[int, int], list[float]] = {}
    for presence in itertools.product((False, True), repeat=background):
        log_prior = sum(np.log(THERE if there else 1 - THERE) for there in presence)
        possible = [n for n, k in enumerate(owner) if (*presence, True)[k]]
        for places in itertools.permutations(possible, POINTS):
            owned = [
                tuple((m, n) for m, n in enumerate(places) if owner[n] == k)
                for k in range(background + 1)
            ]
            used = len(owned[-1])
            seen = POINTS - used
            log_weight = log_prior + used * np.log(CLUTTER) + (SLOTS - used) * np.log(1 - CLUTTER)
            log_weight += sum(log_density(pairs) for pairs in owned) - math.lgamma(POINTS + 1)
            terms.setdefault((seen, len(possible) - SLOTS - seen), []).append(log_weight)
    rows = [(special.logsumexp(weights), *counts) for counts, weights in terms.items()]
    return tuple(np.array(column) for column in zip(*rows, strict=True))


def _log_density(F, points, pairs) -> float:
    """Points as parts of one object, its pose integrated out, or as clutter."""
    if not pairs:
        return 0.0
    x = np.concatenate([points[m] for m, _ in pairs])
    if pairs[0][1] >= len(F):
        return stats.norm.logpdf(x).sum()
    design = np.concatenate([F[n] for _, n in pairs])
    covariance = design @ design.T + np.eye(len(x)) / PRECISION
    return stats.multivariate_normal(cov=covariance).logpdf(x)


NAMES = (*PRIORS, *OWNERS)
