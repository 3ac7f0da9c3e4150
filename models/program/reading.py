"""Reading the linear-Gaussian pieces of a program off its sites.

The NumPyro program is the single source of truth. `read` traces it once and takes the pose prior,
the match prior and the linear-Gaussian parts from its sites. What else the program has is either a
*condition*, a latent site that the closed forms need a value of, or a constant factor of its
density. `models.program.witness` holds what was read against the density of the program itself, and
`models.program.batches` reads many scenes at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float
from numpyro.distributions import Distribution
from numpyro.distributions.util import is_identically_one

from models.distributions.likelihood import MatchedParts
from models.distributions.match import MixtureMatch, PermutationMatch
from models.errors import ConjugacyError, InputError
from models.numerics.arrays import AnyArray
from models.program.sites import (
    MATCH_FAMILIES,
    Program,
    Site,
    Unknown,
    Values,
    described,
    log_prob_of,
    placeholder,
    trace_sites,
    without_shape,
)
from models.scenes import Scene, check_layout
from models.templates import Parts

SITES = ("pose", "match", "points")
"""Sites that every program has, by these names."""

FACTORS = frozenset({"precision", "part_probs"})
"""Sites that the mean-field family has a factor for: a Gamma and a Dirichlet."""


@dataclass(frozen=True)
class LinearGaussianModel:
    """What the closed-form methods need of a program, at one scene; JAX or numpy arrays."""

    points: Float[AnyArray, "N d"]
    """The value of the site `points`, which need not be the array that the scene has."""
    seen: Bool[AnyArray, "N d"]
    pose_mean: Float[AnyArray, "K p"]
    pose_covariance: Float[AnyArray, "K p p"]
    match_logits: Float[AnyArray, "N N"]
    parts: Parts
    """With the noise variance that holds at the program's precision and beta (or, where the
    precision has a factor of its own, at a precision of one)."""
    log_constant: Float[AnyArray, ""]
    """Log density of all other sites: conditions at their values, further data, factors."""
    precision_prior: Float[AnyArray, " 2"] | None
    """Concentration and rate of a Gamma prior on the precision, or None where it is known."""
    part_prior: Float[AnyArray, " N"] | None
    """Concentration of a Dirichlet prior on the part probabilities of a mixture, or None."""
    match_family: type[Distribution]
    """Which of the three match families the prior belongs to (static)."""

    @property
    def num_objects(self) -> int:
        """How many objects there are, K."""
        return self.pose_mean.shape[-2]


jax.tree_util.register_dataclass(
    LinearGaussianModel,
    data_fields=[
        "points",
        "seen",
        "pose_mean",
        "pose_covariance",
        "match_logits",
        "parts",
        "log_constant",
        "precision_prior",
        "part_prior",
    ],
    meta_fields=["match_family"],
)


def read(
    program: Program,
    scene: Scene,
    given: Values | None = None,
    factors: frozenset[str] = FACTORS,
) -> LinearGaussianModel:
    """Read the linear-Gaussian pieces of a program at one scene.

    Only the kinds of the sites are checked. Methods read by `inference.conditions.problem`, which
    also checks what was read against the program's own density.

    Works on traced values too, so that priors that depend on the scene (say, on the mean of its
    points) can be read for each scene of a batch.

    Args:
        given: values of the program's conditions.
        factors: sites that may keep their priors; others than these are conditions.
    """
    found = look(program, scene, given, factors)
    if not isinstance(found, LinearGaussianModel):
        name, prior = next(iter(found.items()))
        raise ConjugacyError(name, f"a further latent site, {described(prior)}", "a value of it")
    return found


def look(
    program: Program,
    scene: Scene,
    given: Values | None = None,
    factors: frozenset[str] = FACTORS,
) -> LinearGaussianModel | dict[str, Distribution]:
    """The same, or the conditions that a program leaves open."""
    sites = trace_sites(program, scene, given)
    if left_open := conditions(sites, given, factors):
        return left_open
    found = pieces(sites, given, factors)
    if sites["points"]["fn"].pose is sites["pose"]["value"]:
        return found
    return at_moved_pose(program, scene, given, found)


def conditions(
    sites: Mapping[str, Site], given: Values | None = None, factors: frozenset[str] = FACTORS
) -> dict[str, Distribution]:
    """Latent sites that the closed forms need a value of and that are not `given` one."""
    known = {"pose", "match", "points", *(given or {})}
    known |= {name for name in factors if _is_factor(sites, name)}
    return {
        name: site["fn"]
        for name, site in sites.items()
        if name not in known and not site["is_observed"]
    }


def pieces(
    sites: Mapping[str, Site], given: Values | None = None, factors: frozenset[str] = FACTORS
) -> LinearGaussianModel:
    """The linear-Gaussian pieces of traced sites, or a sentence about the site in the way."""
    likelihood = likelihood_of(sites)
    for name in ("pose", "match"):
        _check_latent(sites, name)
    match_prior = sites["match"]["fn"]
    if type(match_prior) not in MATCH_FAMILIES:
        raise ConjugacyError(
            "match",
            described(match_prior),
            " or ".join(family.__name__ for family in MATCH_FAMILIES) + " itself",
        )
    if isinstance(match_prior, PermutationMatch):
        _check_exact_and_square(match_prior)
    pose_mean, pose_covariance = normal_moments(sites["pose"]["fn"])
    if len(pose_mean) != likelihood.parts.num_objects:
        raise ConjugacyError(
            "pose",
            f"{len(pose_mean)} poses for the {likelihood.parts.num_objects} objects of its parts",
            "one pose for each object",
        )
    own = {name for name in factors - set(given or {}) if _is_factor(sites, name)}
    precision_prior = part_prior = None
    variance = likelihood.noise_variance
    if "precision" in own:
        gamma = sites["precision"]["fn"]
        precision_prior = jnp.stack(
            [jnp.asarray(gamma.concentration, float), jnp.asarray(gamma.rate, float)]
        )
        variance = likelihood.parts.variance_at(jnp.asarray(likelihood.beta))
    if "part_probs" in own:
        part_prior = jnp.asarray(sites["part_probs"]["fn"].concentration, float)
    constant = [log_prob_of(s) for n, s in sites.items() if n not in {*SITES, *own}]
    return LinearGaussianModel(
        points=jnp.asarray(sites["points"]["value"], float),
        seen=likelihood.seen,
        pose_mean=pose_mean,
        pose_covariance=pose_covariance,
        match_logits=match_prior.log_weights,
        parts=jax.tree.map(jnp.asarray, likelihood.parts._replace(variance=variance)),
        log_constant=sum(constant, jnp.zeros(())),
        precision_prior=precision_prior,
        part_prior=part_prior,
        match_family=type(match_prior),
    )


def at_moved_pose(
    program: Program,
    scene: Scene,
    given: Values | None,
    found: LinearGaussianModel,
    unknown: Unknown | None = None,
) -> LinearGaussianModel:
    """Pieces of a program whose likelihood gets a linear function of each pose, J y + b.

    Then x = F (J y + b) + m is again linear in y. `models.program.dependence` checks that the
    function is linear, and the witness that it takes the object's own pose alone.
    """
    start = jnp.full(found.pose_mean.shape, 0.5)
    slope, moved = moved_pose(program, scene, given, start, unknown)
    shift = moved - jnp.einsum("kpq,kq->kp", slope, start)
    parts, owner = found.parts, found.parts.owner
    F = jnp.einsum("ndp,npq->ndq", parts.F, slope[owner])
    offset = parts.offset + jnp.einsum("ndp,np->nd", parts.F, shift[owner])
    return replace(found, parts=parts._replace(F=F, offset=offset))


def moved_pose(
    program: Program, scene: Scene, given: Values | None, pose: Array, unknown: Unknown | None
) -> tuple[Float[Array, "K p q"], Float[Array, "K p"]]:
    """The slope J of what the likelihood gets for each pose, and what it gets."""

    def moved(pose: Float[Array, "K q"]) -> Float[Array, "K p"]:
        sites = trace_sites(program, scene, {**(given or {}), "pose": pose}, unknown)
        return jnp.asarray(sites["points"]["fn"].pose)

    return jnp.einsum("kpkq->kpq", jax.jacfwd(moved)(pose)), moved(pose)


def likelihood_of(sites: Mapping[str, Site]) -> MatchedParts:
    """The likelihood of the points, if it is the linear-Gaussian one."""
    for name in SITES:
        if name not in sites:
            raise ConjugacyError(
                name, f"no such sample site, only {', '.join(sites) or 'none'}", "one of that name"
            )
    site = sites["points"]
    likelihood = site["fn"]
    if type(likelihood) is not MatchedParts:
        raise ConjugacyError("points", described(likelihood), "MatchedParts itself")
    check_one_scene(likelihood)
    if likelihood.noise is not dist.Normal:
        noise = getattr(likelihood.noise, "func", likelihood.noise)  # of a partial
        name = getattr(noise, "__name__", repr(noise))
        raise ConjugacyError("points", f"MatchedParts with the noise {name}", "Normal noise")
    if not site["is_observed"]:
        raise ConjugacyError("points", "points that are drawn", "obs=points")
    check_layout(jnp.shape(site["value"]), *likelihood.event_shape)
    _refuse_scale(site)
    return likelihood


def check_one_scene(likelihood: MatchedParts) -> None:
    """Refuse an object without parts or pose, and a precision or beta of each part.

    JAX takes the nearest pose for one that is missing, and NumPyro takes a precision of each part
    for a batch of scenes.
    """
    parts = likelihood.parts
    owners = set(np.asarray(parts.owner)[~np.asarray(parts.is_clutter)].tolist())
    if min(owners) < 0:
        raise InputError(
            f"site 'points': a part has the owner {min(owners)}; number the owners of the parts "
            "from 0 without a gap, as `stack` does"
        )
    if (shape := jnp.shape(likelihood.pose))[-2:-1] != (parts.num_objects,):
        raise InputError(
            f"site 'pose': a pose of shape {shape} for the {parts.num_objects} objects that own "
            "the parts of MatchedParts; give one pose for each object, (K, p), and each a part"
        )
    if without := set(range(parts.num_objects)) - owners:
        raise InputError(
            f"site 'points': object {min(without)} has no part; number the owners of the parts "
            "from 0 without a gap, as `stack` does"
        )
    for name in ("precision", "beta"):
        if shape := jnp.shape(getattr(likelihood, name)):
            raise InputError(
                f"site 'points': the {name} of MatchedParts must be one number, got shape {shape}; "
                "for noise of each part or feature give parts._replace(variance=...), of shape "
                f"{likelihood.event_shape}"
            )


def normal_moments(prior: Distribution) -> tuple[Float[Array, "K p"], Float[Array, "K p p"]]:
    """Mean and covariance of a Normal prior over the pose of each object."""
    core = without_shape(prior)
    shape = prior.shape()
    if len(shape) != 2:
        raise ConjugacyError("pose", f"values of shape {shape}", "one pose for each object, (K, p)")
    if isinstance(core, dist.MultivariateNormal | dist.LowRankMultivariateNormal):
        covariance = core.covariance_matrix
    elif isinstance(core, dist.Normal):
        variance = jnp.broadcast_to(core.scale, shape) ** 2
        covariance = variance[..., None] * jnp.eye(shape[-1])
    else:
        return _moments_by_curvature(prior)
    mean = jnp.broadcast_to(prior.mean, shape)
    return mean, jnp.broadcast_to(covariance, (*shape, shape[-1]))


def _is_factor(sites: Mapping[str, Site], name: str) -> bool:
    """Whether a site is latent and of the kind that the mean-field family has a factor for."""
    if name not in sites or sites[name]["is_observed"] or sites[name]["scale"] is not None:
        return False
    prior, value = sites[name]["fn"], sites[name]["value"]
    if name == "precision":
        used = getattr(sites["points"]["fn"], "precision", None) if "points" in sites else None
        return type(prior) is dist.Gamma and prior.shape() == () and used is value
    # Under a prior over permutations they have another normaliser, and no Dirichlet posterior.
    is_mixture = "match" in sites and type(sites["match"]["fn"]) is MixtureMatch
    return type(prior) is dist.Dirichlet and len(prior.shape()) == 1 and is_mixture


def _check_exact_and_square(prior: PermutationMatch) -> None:
    """The closed forms have a column for each row and the exact normaliser."""
    rows, columns = prior.event_shape
    if rows != columns or prior.normalizer != "exact":
        raise ConjugacyError(
            "match",
            f"a PermutationMatch of {rows} rows and {columns} columns with the normalizer "
            f"{prior.normalizer!r}",
            "a row for each part, dummy rows for missing points, and the normalizer 'exact'",
        )


def _check_latent(sites: Mapping[str, Site], name: str) -> None:
    site = sites[name]
    if site["is_observed"]:
        raise ConjugacyError(
            name, "a value that is observed (handlers.condition, or obs=)", "a latent site"
        )
    _refuse_scale(site)


def _refuse_scale(site: Site) -> None:
    scale = site["scale"]
    if scale is not None and not is_identically_one(scale):
        raise ConjugacyError(
            site["name"],
            f"a log density that is multiplied by {scale} (handlers.scale, or a plate with "
            "subsampling)",
            "a scale of one",
        )


def _moments_by_curvature(prior: Distribution) -> tuple[Float[Array, "K p"], Array]:
    """Moments of a prior that is Normal, objects apart, whatever it is written as.

    Its log density is quadratic then: minus its second derivative is the precision, and one Newton
    step from anywhere leads to the mean. That it *is* quadratic is checked at another point, or by
    the witness where the prior depends on the scene.
    """
    shape = prior.shape()
    num_objects, size = shape
    refused = ConjugacyError(
        "pose",
        f"a {type(without_shape(prior)).__name__} prior",
        "a Normal or MultivariateNormal prior, objects independent",
    )
    if not jnp.issubdtype(jnp.result_type(placeholder(prior)), jnp.floating):
        raise refused

    def log_density(pose: Float[Array, " n"]) -> Float[Array, ""]:
        return prior.log_prob(pose.reshape(shape)).sum()

    @jax.jit  # operation by operation it would be a hundred compilations
    def moments(start: Float[Array, " n"]) -> tuple[Array, Array, Array, Array]:
        hessian = jax.hessian(log_density)(start).reshape(num_objects, size, num_objects, size)
        precision = -jnp.einsum("kpkq->kpq", hessian)
        apart = jnp.abs(hessian).sum() <= (1 + 1e-9) * jnp.abs(precision).sum()
        covariance = jnp.linalg.inv(precision)
        slope = jax.grad(log_density)(start).reshape(shape)
        mean = start.reshape(shape) + jnp.einsum("kpq,kq->kp", covariance, slope)
        return mean, covariance, precision, apart

    mean, covariance, precision, apart = moments(np.full(num_objects * size, 0.5))
    if not isinstance(covariance, jax.core.Tracer):
        if not (np.linalg.eigvalsh(np.nan_to_num(precision)) > 0).all():
            raise refused
        away = np.linspace(-1.7, 1.3, num_objects * size).reshape(shape)
        expected = 0.5 * (
            np.linalg.slogdet(precision)[1].sum()
            - np.einsum("kp,kpq,kq->", away, precision, away)
            - away.size * np.log(2 * np.pi)
        )
        found = jax.jit(log_density)(np.ravel(mean + away))
        if not (apart and np.allclose(expected, found, rtol=1e-9, atol=1e-9)):
            raise refused
    return mean, covariance
