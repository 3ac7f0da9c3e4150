"""Reading the linear-Gaussian pieces of a program off its sites.

The NumPyro program is the single source of truth. `read` traces it once and takes the pose prior,
the match prior and the linear-Gaussian parts from its sites. What else the program has is either a
*condition*, a latent site that the closed forms need a value of, or a constant factor of its
density. `look_closely` refuses pieces that depend on a latent site, whatever its value is.
`models.program.witness` holds what was read against the density of the program itself, and
`models.program.batches` reads many scenes at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float
from numpyro.distributions import Distribution
from numpyro.distributions.util import is_identically_one

from models.distributions.likelihood import MatchedParts, check_one_scene
from models.distributions.match import MixtureMatch, PermutationMatch
from models.errors import ConjugacyError, InputError
from models.numerics.arrays import AnyArray
from models.program.poses import moments_by_curvature, parts_at_moved_pose
from models.program.sites import (
    MATCH_FAMILIES,
    Program,
    Site,
    Unknown,
    Values,
    described,
    is_traced,
    log_prob_of,
    trace_sites,
    with_unknown,
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
    return _at_pose(program, scene, given, sites, pieces(sites, given, factors))


def _at_pose(
    program: Program,
    scene: Scene,
    given: Values | None,
    sites: Mapping[str, Site],
    found: LinearGaussianModel,
    unknown: Unknown | None = None,
) -> LinearGaussianModel:
    """The pieces with the parts as a function of the site `pose` itself."""
    pose = sites["pose"]["value"]
    if sites["points"]["fn"].pose is pose:
        return found
    parts = parts_at_moved_pose(program, scene, given, found.parts, pose, unknown)
    return replace(found, parts=parts)


def look_closely(
    program: Program,
    scene: Scene,
    given: Values | None = None,
    factors: frozenset[str] = FACTORS,
) -> LinearGaussianModel | None:
    """Read the pieces if nothing is left open; refuse any that depend on a latent site.

    The closed forms require that none does. Some dependences show at few values only, such as a
    factor that asks whether a pose is beyond a threshold. So latent sites are abstract here: what
    is abstract afterwards depends on them.
    """
    kept: list[LinearGaussianModel] = []

    def read_abstractly(zero: Array) -> None:
        unknown = Unknown(zero)
        sites = trace_sites(program, scene, given, unknown)
        if left_open := conditions(sites, given, factors):
            refuse_moving_supports(left_open)
            return
        found = pieces(sites, given, factors)
        if sites["points"]["fn"].match is not sites["match"]["value"]:
            raise ConjugacyError(
                "points",
                "MatchedParts whose match is not the value of the site 'match' itself",
                "MatchedParts that takes the site 'match' as it is",
            )
        found = _at_pose(program, scene, given, sites, found, unknown)
        _refuse_dependence(sites, found)
        kept.append(found)

    with_unknown(read_abstractly)
    return kept[0] if kept else None


def refuse_moving_supports(left_open: Mapping[str, Distribution]) -> None:
    """Refuse a latent site whose values are not the same ones whatever another site is.

    They are listed, or integrated over, before the other site has a value.
    """
    for name, prior in left_open.items():
        if is_traced(prior.support):
            raise InputError(
                f"site {name!r}: the support of its {type(without_shape(prior)).__name__} prior "
                "changes with another site, a parameter or the scene, and a fixed one is required; "
                "draw from a fixed support and compute from that, such as upper * share with a "
                "share that is uniform between 0 and 1"
            )


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
        return moments_by_curvature(prior)
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


def _refuse_dependence(sites: Mapping[str, Site], found: LinearGaussianModel) -> None:
    """Refuse pieces that are abstract because latent sites are."""
    poses = found.pose_mean, found.pose_covariance
    logits = found.match_logits if found.part_prior is None else None
    for name, read_of in (("pose", poses), ("match", logits)):
        if is_traced(read_of):
            raise ConjugacyError(
                name, "a prior that changes with another site", "a prior that is fixed"
            )
    for what, read_of in (
        ("whose value depends", found.points),
        ("whose present depends", found.seen),
        ("whose noise or parts depend", found.parts),
    ):
        if is_traced(read_of):
            raise ConjugacyError(
                "points", f"MatchedParts {what} on a latent site", "MatchedParts that do not"
            )
    for name, site in sites.items():
        if is_traced(found.log_constant) and name not in SITES and is_traced(log_prob_of(site)):
            raise ConjugacyError(
                name,
                "further data, or a factor, that depends on a latent site",
                "the points as the only data that do",
            )
    if is_traced((found.precision_prior, found.part_prior)):
        name = "precision" if is_traced(found.precision_prior) else "part_probs"
        raise ConjugacyError(name, "a prior that changes with another site", "a fixed prior")
