"""The constellations experiment: its program, and variants of it with other priors."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int
from numpyro.distributions import Distribution

from models.distributions.likelihood import MatchedParts
from models.distributions.match import DoublyStochasticMatch, MixtureMatch, PermutationMatch
from models.distributions.match_priors import point_count, presence_logits
from models.errors import InputError
from models.templates import Parts, shapes, stack

PARTS: Parts = stack(shapes("square", "triangle", "square"))
"""Two squares and a triangle under similarities: K = 3 objects, N = 11 parts, p = 4."""

CLUTTERED: Parts = stack(shapes("square", "triangle", "square"), clutter=3)
"""`PARTS` with slots for up to three points that belong to no object."""


def constellation(
    points: Float[Array, "N d"] | None = None,
    present: Bool[Array, " N"] | None = None,
    *,
    match_prior: Literal["doubly_stochastic", "permutation", "mixture"] = "doubly_stochastic",
    precision: ArrayLike = 1e4,
    beta: ArrayLike = 1.0,
    parts: Parts = PARTS,
    pose_prior: Distribution | None = None,
) -> Float[Array, "N d"]:
    """A scene of points that are the parts of geometric objects, in unknown order.

        pose_k  ~ Normal(mu_0, D_0)               for each object k
        match   ~ a prior with mean a = 1/N       which point is which part
        point_m ~ Normal(F_n pose_k, 1/(precision beta))   if point m is part n of object k

    Edit the priors here: every method reads them from this program. The closed-form methods (ds,
    gmm, map, ransac, exact, gibbs, and svi with the mean-field guide) need the pose prior to be
    Normal and the points to be `MatchedParts`; nuts, and svi with an automatic guide, take any
    prior.

    Args:
        points: the observed points, padded to N rows; None to draw them.
        present: which rows are points; all of them by default.
        match_prior: the paper's p_DS, permutation matrices, or a mixture (GCM-GMM).
        precision: noise precision, the paper's lambda.
        beta: annealing parameter; multiplies the precision.
        parts: the templates.
        pose_prior: prior of each pose; N(mu_0, D_0) by default.
    """
    pose_mean = np.zeros(parts.pose_dim)
    pose_covariance = np.eye(parts.pose_dim)

    with numpyro.plate("object", parts.num_objects):
        normal = dist.MultivariateNormal(pose_mean, pose_covariance)
        pose = numpyro.sample("pose", pose_prior or normal)  # eq. p_Y
    match = numpyro.sample("match", uniform_match(match_prior, parts.num_parts))  # eq. p_Z_approx
    likelihood = MatchedParts(match, pose, parts, precision=precision, beta=beta, present=present)
    return numpyro.sample("points", likelihood, obs=points)  # eq. p_X


def cluttered_constellation(
    points: Float[Array, "N d"] | None = None,
    present: Bool[Array, " N"] | None = None,
    *,
    match_prior: Literal["doubly_stochastic", "permutation", "mixture"] = "doubly_stochastic",
    precision: ArrayLike = 1e4,
    beta: ArrayLike = 1.0,
    parts: Parts = CLUTTERED,
) -> Float[Array, "N d"]:
    """A scene of parts of geometric objects and of clutter, points that belong to no object.

        pose_k  ~ Normal(mu_0, D_0)               for each object k
        match   ~ a prior with mean a = 1/(N + C)  which point is which part, or clutter
        point_m ~ Normal(F_n pose_k, 1/(precision beta))   if point m is part n of object k
        point_m ~ Normal(0, I)                             if it is clutter

    This is `constellation` with C slots for clutter among the parts, `stack(..., clutter=C)`. Under
    the uniform match prior each point is clutter at odds of C to N. The prior does not penalise
    objects of which only one or two parts are seen, and such objects explain stray points as well
    as clutter does. If you expect whole objects, use `presence_constellation` with the same parts:
    it tells clutter from objects much better.
    """
    return constellation(
        points, present, match_prior=match_prior, precision=precision, beta=beta, parts=parts
    )


def published_mixture(
    points: Float[Array, "N d"],
    present: Bool[Array, " N"],
    *,
    precision: ArrayLike = 1e4,
    beta: ArrayLike = 1.0,
    parts: Parts = PARTS,
) -> Float[Array, "N d"]:
    """GCM-GMM as the code published with the paper has it, for comparisons.

        pose_k     ~ Normal((mean of the points, 0, 0), I)     for each object k
        part_probs ~ Dirichlet(1)
        match      ~ Categorical(part_probs) for each point, independently
        point_m    ~ Normal(F_n pose_k, 1/(precision beta))    if point m is part n of object k

    The paper's text has pose mean 0 and fixed part probabilities, as `constellation` has with
    `match_prior="mixture"`.
    """
    centre = jnp.sum(points * present[:, None], axis=0) / present.sum()
    pose_mean = jnp.zeros(parts.pose_dim).at[: parts.num_features].set(centre)

    with numpyro.plate("object", parts.num_objects):
        pose = numpyro.sample("pose", dist.MultivariateNormal(pose_mean, jnp.eye(parts.pose_dim)))
    part_probs = numpyro.sample("part_probs", dist.Dirichlet(jnp.ones(parts.num_parts)))
    logits = jnp.broadcast_to(jnp.log(part_probs), (parts.num_parts, parts.num_parts))
    match = numpyro.sample("match", MixtureMatch(logits))
    likelihood = MatchedParts(match, pose, parts, precision=precision, beta=beta, present=present)
    return numpyro.sample("points", likelihood, obs=points)


def presence_constellation(
    points: Float[Array, "N d"] | None = None,
    present: Bool[Array, " N"] | None = None,
    presence: Bool[Array, " K"] | None = None,
    *,
    presence_prob: ArrayLike = 0.5,
    visibility: ArrayLike = 1.0,
    clutter_prob: ArrayLike = 0.5,
    precision: ArrayLike = 3e3,
    beta: ArrayLike = 1.0,
    parts: Parts = PARTS,
    pose_prior: Distribution | None = None,
) -> Float[Array, "N d"]:
    """A scene in which objects may be absent; which ones are present is unknown.

        presence_k ~ Bernoulli(presence_prob)            for each object k
        pose_k     ~ Normal(mu_0, D_0)
        count      ~ Binomial(parts of present objects, visibility), and Binomial(C, clutter_prob)
        match      ~ uniform over matches of the points with parts of present objects
        point_m    ~ Normal(F_n pose_k, 1/(precision beta))   if point m is part n of object k

    If the parts have C slots for clutter, points may be matched to these too: each part of a
    present object is seen with probability `visibility` and each slot is used with probability
    `clutter_prob`, all independently.

    Args:
        presence: which objects are present, if known.
        presence_prob: prior probability that an object is present.
        visibility: probability that a part of a present object is seen.
        clutter_prob: probability that a slot for clutter is used.
        pose_prior: prior of each pose; N(0, I) by default.
    """
    with numpyro.plate("object", parts.num_objects):
        normal = dist.MultivariateNormal(np.zeros(parts.pose_dim), np.eye(parts.pose_dim))
        pose = numpyro.sample("pose", pose_prior or normal)
        presence = numpyro.sample("presence", dist.Bernoulli(presence_prob), obs=presence)
    seen = None if present is None else present.sum()
    of_points = point_count(presence, visibility, parts.owner, clutter_prob)
    count = numpyro.sample("count", of_points, obs=seen)
    present = jnp.arange(parts.num_parts) < count if present is None else present
    logits = presence_logits(presence, visibility, present, parts.owner, clutter_prob)
    match = numpyro.sample("match", PermutationMatch(logits))
    likelihood = MatchedParts(match, pose, parts, precision=precision, beta=beta, present=present)
    return numpyro.sample("points", likelihood, obs=points)


def sized_constellation(
    points: Float[Array, "N d"] | None = None,
    present: Bool[Array, " N"] | None = None,
    presence: Int[Array, " K"] | None = None,
    *,
    presence_prob: ArrayLike = 0.5,
    visibility: ArrayLike = 1.0,
    sizes: tuple[float, ...] = (0.15, 0.28),
    turns: int = 2,
    noise: ArrayLike = 0.15,
    relative_precision: ArrayLike | None = None,
    parts: Parts = PARTS,
) -> Float[Array, "N d"]:
    """A scene of objects whose noise grows with their size, as if their templates were noisy.

        presence_k ~ Categorical over absent and the kinds        for each object k
        pose_k     ~ Normal with the moments of its kind (`pose_kinds`)
        count      ~ Binomial(parts of present objects, visibility)
        match      ~ uniform over matches of the points with parts of present objects
        precision  ~ Gamma(2, 1)                                  for the scene
        point_m    ~ Normal(F_n pose_k, (noise size_k)^2 / precision)  if it is part n of object k

    Noise proportional to the scale of the pose itself would not be conjugate, nor would a pose with
    uniform scale and angle. A kind is a size and a direction; given the kinds, the model is
    conjugate.

    Args:
        presence: 0 for an absent object, 1, 2, ... for the first, second, ... kind, if known. Kinds
            are ordered by size, then by direction.
        presence_prob: prior probability that an object is present.
        visibility: probability that a part of a present object is seen.
        sizes: typical scales of an object.
        turns: number of directions.
        noise: standard deviation of a part, for an object of scale 1 at a precision of 1.
        relative_precision: the site `precision`, if known: times that of an object's own noise.
    """
    if parts.pose_dim != 4:
        raise InputError(
            f"sized objects require similarity poses of 4 numbers, got {parts.pose_dim}; "
            "stack the templates with the design `similarity`, or use `presence_constellation`"
        )
    mean, covariance, scale = pose_kinds(jnp.asarray(sizes), turns)
    prob = jnp.full(len(scale), 1 / len(scale)) * presence_prob
    with numpyro.plate("object", parts.num_objects):
        state = dist.Categorical(jnp.append(1 - jnp.asarray(presence_prob), prob))
        presence = numpyro.sample("presence", state, obs=presence)
        kind = jnp.maximum(jnp.asarray(presence, int) - 1, 0)
        pose = numpyro.sample("pose", dist.MultivariateNormal(mean[kind], covariance[kind]))
    seen = None if present is None else present.sum()
    count = numpyro.sample("count", point_count(presence, visibility, parts.owner), obs=seen)
    present = jnp.arange(parts.num_parts) < count if present is None else present
    logits = presence_logits(presence, visibility, present, parts.owner)
    match = numpyro.sample("match", PermutationMatch(logits))
    precision = relative_precision
    if precision is None:
        precision = numpyro.sample("precision", dist.Gamma(2.0, 1.0))
    of_object = jnp.append(noise * scale[kind], 1.0)  # clutter keeps its own variance
    variance = parts.variance * (of_object**2)[parts.owner, None]
    sized = parts._replace(variance=variance)
    likelihood = MatchedParts(match, pose, sized, precision=precision, present=present)
    return numpyro.sample("points", likelihood, obs=points)


def pose_kinds(
    sizes: Float[Array, " sizes"], turns: int
) -> tuple[Float[Array, "kinds 4"], Float[Array, "kinds 4 4"], Float[Array, " kinds"]]:
    """Pose mean, pose covariance and size of each kind, matched to the experiment's generator.

    Half a turn is cut into `turns` sectors; an angle is uniform in the sector of its kind, and a
    size has standard deviation 0.037. The generator moves an object before it scales it, so larger
    objects stay nearer to one corner.
    """
    size, sector = (x.ravel() for x in jnp.meshgrid(sizes, jnp.arange(turns), indexing="ij"))
    angle = jnp.pi * ((sector + 0.5) / turns - 0.5)
    forward = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    sideways = jnp.stack([-jnp.sin(angle), jnp.cos(angle)], axis=-1)
    # Moments of the cosine and the sine of an angle that is uniform in a sector.
    length = size * jnp.sinc(0.5 / turns)
    square = 0.5 * (size**2 + 0.037**2)
    along = square * (1 + jnp.sinc(1 / turns)) - length**2
    across = square * (1 - jnp.sinc(1 / turns))
    reach = 0.064 / size
    place = jnp.stack([reach - 0.57] * 2, axis=-1)
    covariance = jnp.zeros((len(size), 4, 4))
    covariance = covariance.at[:, :2, :2].set((reach**2 / 3)[:, None, None] * jnp.eye(2))
    turned = along[:, None, None] * forward[:, :, None] * forward[:, None, :]
    turned += across[:, None, None] * sideways[:, :, None] * sideways[:, None, :]
    covariance = covariance.at[:, 2:, 2:].set(turned)
    return jnp.concatenate([place, length[:, None] * forward], axis=-1), covariance, size


mixture_constellation = partial(constellation, match_prior="mixture")


def uniform_probs(num_parts: int) -> Float[Array, "N N"]:
    """The uniform matrix, a = 1/N."""
    return jax.device_put(np.full((num_parts, num_parts), 1.0 / num_parts))


def uniform_match(family: str, num_parts: int) -> Distribution:
    """The uniform match prior, a = 1/N, in one of the three families."""
    probs = uniform_probs(num_parts)
    families: dict[str, Callable[[], Distribution]] = {
        "doubly_stochastic": lambda: DoublyStochasticMatch(probs),
        "permutation": lambda: PermutationMatch(jnp.log(probs)),
        "mixture": lambda: MixtureMatch(jnp.log(probs)),
    }
    if family not in families:
        raise InputError(f"there is no match prior {family!r}; choose from {', '.join(families)}")
    return families[family]()
