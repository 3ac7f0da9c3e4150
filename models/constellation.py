"""The constellations experiment: its program, and variants of it with other priors."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int
from numpyro.distributions import Distribution

from models.errors import InputError
from models.likelihood import MatchedParts
from models.match import (
    DoublyStochasticMatch,
    MixtureMatch,
    PermutationMatch,
    presence_logits,
    uniform_probs,
)
from models.templates import Parts, shapes, stack

PARTS: Parts = stack(shapes("square", "triangle", "square"))
"""Two squares and a triangle under similarities: K = 3 objects, N = 11 parts, p = 4."""


def constellation(
    points: Float[Array, "N d"] | None = None,
    present: Bool[Array, " N"] | None = None,
    *,
    match_prior: Literal["doubly_stochastic", "permutation", "mixture"] = "doubly_stochastic",
    precision: ArrayLike = 1e4,
    beta: ArrayLike = 1.0,
    parts: Parts = PARTS,
) -> Float[Array, "N d"]:
    """A scene of points that are the parts of geometric objects, in unknown order.

        pose_k  ~ Normal(mu_0, D_0)               for each object k
        match   ~ a prior with mean a = 1/N       which point is which part
        point_m ~ Normal(F_n pose_k, 1/(precision beta))   if point m is part n of object k

    Edit the priors here: every method reads them from this program. The closed-form methods (ds,
    gmm, exact, gibbs, and svi with the mean-field guide) need the pose prior to be Normal and the
    points to be `MatchedParts`; nuts, and svi with an automatic guide, take any prior.

    Args:
        points: the observed points, padded to N rows; None to draw them.
        present: which rows are points; all of them by default.
        match_prior: the paper's p_DS, permutation matrices, or a mixture (GCM-GMM).
        precision: of the noise, the paper's lambda.
        beta: annealing, multiplies the precision.
        parts: the templates.
    """
    pose_mean = jnp.zeros(parts.pose_dim)
    pose_covariance = jnp.eye(parts.pose_dim)

    with numpyro.plate("object", parts.num_objects):
        pose = numpyro.sample("pose", dist.MultivariateNormal(pose_mean, pose_covariance))  # p_Y
    match = numpyro.sample("match", uniform_match(match_prior, parts.num_parts))  # eq. p_Z_approx
    likelihood = MatchedParts(match, pose, parts, precision=precision, beta=beta, present=present)
    return numpyro.sample("points", likelihood, obs=points)  # eq. p_X


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
        match      ~ each point its part, by part_probs
        point_m    ~ Normal(F_n pose_k, 1/(precision beta))    if point m is part n of object k

    The paper's text has pose mean 0 and fixed part probabilities: `mixture_constellation`.
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
    precision: ArrayLike = 3e3,
    beta: ArrayLike = 1.0,
    parts: Parts = PARTS,
) -> Float[Array, "N d"]:
    """A scene of some of the objects: which of them are there is unknown too.

        presence_k ~ Bernoulli(presence_prob)            for each object k
        pose_k     ~ Normal(mu_0, D_0)
        count      ~ Binomial(parts of present objects, visibility)
        match      ~ uniform over matches of the points with parts of present objects
        point_m    ~ Normal(F_n pose_k, 1/(precision beta))   if point m is part n of object k

    Args:
        presence: which objects are there, where that is known.
        presence_prob: of each object.
        visibility: probability that a part of a present object is seen.
    """
    num_parts = parts.num_parts
    with numpyro.plate("object", parts.num_objects):
        pose = numpyro.sample(
            "pose", dist.MultivariateNormal(jnp.zeros(parts.pose_dim), jnp.eye(parts.pose_dim))
        )
        presence = numpyro.sample("presence", dist.Bernoulli(presence_prob), obs=presence)
    there = jnp.asarray(presence)[parts.owner].sum()
    seen = None if present is None else present.sum()
    count = numpyro.sample("count", dist.Binomial(there, visibility), obs=seen)
    present = jnp.arange(num_parts) < count if present is None else present
    logits = presence_logits(presence, visibility, present, parts.owner)
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
    sizes: tuple[float, ...] = (0.13, 0.27),
    noise: ArrayLike = 0.16,
    precision: ArrayLike = 1.0,
    parts: Parts = PARTS,
) -> Float[Array, "N d"]:
    """A scene of objects whose noise grows with their size, as if their templates were noisy.

        presence_k ~ Categorical(absent, or one of the sizes)     for each object k
        pose_k     ~ Normal, of the scale size_k, turned by less than a quarter of a turn
        count      ~ Binomial(parts of present objects, visibility)
        match      ~ uniform over matches of the points with parts of present objects
        point_m    ~ Normal(F_n pose_k, (noise size_k)^2 / precision)  if it is part n of object k

    Noise in proportion to the scale of the pose itself would not be conjugate. Given one of a few
    sizes it is, and two do as well as six on scenes of our generator.

    Args:
        presence: 0 for an absent object and 1, 2, ... for the first, second, ... size, where known.
        presence_prob: of each object.
        visibility: probability that a part of a present object is seen.
        sizes: typical scales of an object.
        noise: standard deviation of a part, for an object of scale 1.
    """
    if parts.pose_dim != 4:
        raise InputError(
            f"objects of some size want similarity poses of 4 numbers, got {parts.pose_dim}; give "
            "templates under similarities, or take `presence_constellation`"
        )
    scale = jnp.asarray((1.0, *sizes))
    spread = jnp.stack([jnp.full_like(scale, 0.3)] * 2 + [0.35 * scale, 0.75 * scale], axis=-1)
    mean = jnp.zeros_like(spread).at[:, 2].set(0.64 * scale)  # a cosine is 2 / pi on average
    prob = jnp.full(len(sizes), 1 / len(sizes)) * presence_prob
    with numpyro.plate("object", parts.num_objects):
        state = dist.Categorical(jnp.append(1 - jnp.asarray(presence_prob), prob))
        presence = numpyro.sample("presence", state, obs=presence)
        state = jnp.asarray(presence, int)
        pose_prior = dist.MultivariateNormal(mean[state], jax.vmap(jnp.diag)(spread[state] ** 2))
        pose = numpyro.sample("pose", pose_prior)
    there = (state > 0)[parts.owner].sum()
    seen = None if present is None else present.sum()
    count = numpyro.sample("count", dist.Binomial(there, visibility), obs=seen)
    present = jnp.arange(parts.num_parts) < count if present is None else present
    logits = presence_logits(state, visibility, present, parts.owner)
    match = numpyro.sample("match", PermutationMatch(logits))
    variance = parts.variance * ((noise * scale[state]) ** 2)[parts.owner, None]
    sized = parts._replace(variance=variance)
    likelihood = MatchedParts(match, pose, sized, precision=precision, present=present)
    return numpyro.sample("points", likelihood, obs=points)


permutation_constellation = partial(constellation, match_prior="permutation")
mixture_constellation = partial(constellation, match_prior="mixture")


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
