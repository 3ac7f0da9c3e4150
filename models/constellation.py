"""The constellations experiment: its program, in three variants of the match prior."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float
from numpyro.distributions import Distribution

from models.errors import InputError
from models.likelihood import MatchedParts
from models.match import (
    DoublyStochasticMatch,
    MixtureMatch,
    PermutationMatch,
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
