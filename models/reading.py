"""Reading the conjugate pieces of a program off its sites.

The NumPyro program is the single source of truth. `read` traces it once and takes the pose prior,
the match prior and the linear-Gaussian parts from its sites. `models.conjugacy` makes sure that
they are what the closed forms need, `models.batches` reads many scenes at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float
from numpyro.distributions import Distribution
from numpyro.handlers import seed, substitute, trace

from models import AnyArray
from models.errors import ConjugacyError
from models.likelihood import MatchedParts
from models.scenes import Scene
from models.templates import Parts

Program = Callable[..., Any]
"""A NumPyro program of a scene's `points` and `present`, with sites `pose`, `match`, `points`."""


@dataclass(frozen=True)
class Conjugate:
    """What the closed-form methods need of a program, at one scene; arrays throughout."""

    points: Float[Array, "N d"]
    seen: Bool[Array, "N d"]
    pose_mean: Float[Array, "K p"]
    pose_covariance: Float[Array, "K p p"]
    match_logits: Float[Array, "N N"]
    parts: Parts
    """With the noise variance that holds at the program's precision and beta (or, where the
    precision is unknown, at a precision of one)."""
    precision_prior: Float[Array, " 2"] | None
    """Concentration and rate of a Gamma prior on the precision, or None where it is fixed."""
    part_prior: Float[Array, " N"] | None
    """Concentration of a Dirichlet prior on the part probabilities of a mixture, or None."""
    match_family: type[Distribution]
    """Which of the three match families the prior belongs to (static)."""

    @property
    def num_objects(self) -> int:
        return self.pose_mean.shape[-2]


jax.tree_util.register_dataclass(
    Conjugate,
    data_fields=[
        "points",
        "seen",
        "pose_mean",
        "pose_covariance",
        "match_logits",
        "parts",
        "precision_prior",
        "part_prior",
    ],
    meta_fields=["match_family"],
)


def read(program: Program, scene: Scene, given: Mapping[str, Array] | None = None) -> Conjugate:
    """Read the conjugate pieces of a program at one scene.

    Works on traced values too, so a batch is `jax.vmap(lambda scene: read(program, scene))(batch)`:
    priors that depend on the scene (say, on the mean of its points) are read for each scene.

    Args:
        given: values of other sites, for programs whose pieces are conjugate given them.
    """
    sites = trace_sites(program, scene, lambda site: placeholder(site, dict(given or {})))
    likelihood = likelihood_of(sites)
    pose_mean, pose_covariance = normal_moments(sites["pose"]["fn"])
    precision_prior = precision_prior_of(sites)
    parts = likelihood.parts
    if precision_prior is None:
        parts = parts._replace(variance=likelihood.noise_variance)
    else:
        parts = parts._replace(variance=parts.variance / likelihood.beta)
    match_prior = sites["match"]["fn"]
    return Conjugate(
        points=jnp.asarray(scene.points, float),
        seen=likelihood.seen,
        pose_mean=pose_mean,
        pose_covariance=pose_covariance,
        match_logits=match_prior.log_weights,
        parts=jax.tree.map(jnp.asarray, parts),
        precision_prior=precision_prior,
        part_prior=part_prior_of(sites),
        match_family=type(match_prior),
    )


def is_latent(program: Program, scene: Scene, name: str) -> bool:
    """Whether a program has a latent site of this name at this scene."""
    site = trace_sites(program, scene, lambda site: placeholder(site, {})).get(name)
    return site is not None and not site["is_observed"]


def log_prob_of_data(program: Program, scene: Scene) -> Float[Array, ""]:
    """Log density of what a program observes besides the points, a constant of the scene.

    `check_conjugate` makes sure that it does not depend on a latent site.
    """
    sites = trace_sites(program, scene, lambda site: placeholder(site, {}))
    others = [s for name, s in sites.items() if s["is_observed"] and name != "points"]
    return sum((jnp.sum(s["fn"].log_prob(s["value"])) for s in others), jnp.zeros(()))


def trace_sites(
    program: Program, scene: Scene, values: Callable[[dict[str, Any]], Array | None]
) -> dict[str, dict[str, Any]]:
    """Trace the program at a scene, with values for its latent sites where `values` has one."""
    substituted = substitute(program, substitute_fn=values)
    sites = trace(seed(substituted, jax.random.key(0))).get_trace(**scene.observed)
    return {name: site for name, site in sites.items() if site["type"] == "sample"}


def placeholder(site: dict[str, Any], given: dict[str, Array]) -> AnyArray | None:
    """Some value for a latent site, at no cost: drawing a match would be work for nothing."""
    if site["name"] in given:
        return given[site["name"]]
    latent = site["type"] == "sample" and not site["is_observed"]
    return np.ones(site["fn"].shape()) if latent else None


def likelihood_of(sites: dict[str, dict[str, Any]]) -> MatchedParts:
    likelihood = sites["points"]["fn"]
    if not isinstance(likelihood, MatchedParts):
        raise ConjugacyError("points", type(likelihood).__name__, "MatchedParts")
    return likelihood


def without_shape(prior: Distribution) -> Distribution:
    """What a prior is before `expand`, `to_event` and plates."""
    while isinstance(prior, dist.ExpandedDistribution | dist.Independent):
        prior = prior.base_dist
    return prior


def normal_moments(prior: Distribution) -> tuple[Float[Array, "K p"], Float[Array, "K p p"]]:
    """Mean and covariance of a Normal prior over the pose of each object."""
    core = without_shape(prior)
    shape = prior.shape()
    if len(shape) != 2:
        raise ConjugacyError("pose", f"values of shape {shape}", "one pose for each object, (K, p)")
    mean = jnp.broadcast_to(prior.mean, shape)
    if isinstance(core, dist.MultivariateNormal | dist.LowRankMultivariateNormal):
        covariance = core.covariance_matrix
    elif isinstance(core, dist.Normal):
        variance = jnp.broadcast_to(core.scale, shape) ** 2
        covariance = variance[..., None] * jnp.eye(shape[-1])
    else:
        raise ConjugacyError(
            "pose", f"a {type(core).__name__} prior", "a Normal or MultivariateNormal prior"
        )
    return mean, jnp.broadcast_to(covariance, (*shape, shape[-1]))


def precision_prior_of(sites: dict[str, dict[str, Any]]) -> Float[Array, " 2"] | None:
    if "precision" not in sites or sites["precision"]["is_observed"]:
        return None
    prior = sites["precision"]["fn"]
    if not isinstance(prior, dist.Gamma) or prior.shape() != ():
        raise ConjugacyError(
            "precision", f"a {type(prior).__name__} of shape {prior.shape()}", "one Gamma"
        )
    return jnp.stack([jnp.asarray(prior.concentration, float), jnp.asarray(prior.rate, float)])


def part_prior_of(sites: dict[str, dict[str, Any]]) -> Float[Array, " N"] | None:
    if "part_probs" not in sites or sites["part_probs"]["is_observed"]:
        return None
    prior = sites["part_probs"]["fn"]
    if not isinstance(prior, dist.Dirichlet) or len(prior.shape()) != 1:
        raise ConjugacyError(
            "part_probs", f"a {type(prior).__name__} of shape {prior.shape()}", "one Dirichlet"
        )
    return jnp.asarray(prior.concentration, float)
