"""Which pieces of a program depend on its latent sites, whatever the values of these are.

The closed forms require that none does. Some dependences show at few values only, such as a factor
that asks whether a pose is beyond a threshold. So latent sites are abstract here: what is abstract
afterwards depends on them.
"""

from collections.abc import Mapping

from jaxtyping import Array
from numpyro.distributions import Distribution

from models.errors import ConjugacyError, InputError
from models.program.reading import (
    FACTORS,
    SITES,
    LinearGaussianModel,
    at_moved_pose,
    conditions,
    moved_pose,
    pieces,
)
from models.program.sites import (
    Program,
    Site,
    Unknown,
    Values,
    is_traced,
    log_prob_of,
    trace_sites,
    with_unknown,
    without_shape,
)
from models.scenes import Scene


def look_closely(
    program: Program,
    scene: Scene,
    given: Values | None = None,
    factors: frozenset[str] = FACTORS,
) -> LinearGaussianModel | None:
    """Read the pieces if nothing is left open; refuse any that depend on a latent site."""
    kept: list[LinearGaussianModel] = []

    def read_abstractly(zero: Array) -> None:
        unknown = Unknown(zero)
        sites = trace_sites(program, scene, given, unknown)
        if left_open := conditions(sites, given, factors):
            refuse_moving_supports(left_open)
            return
        found = pieces(sites, given, factors)
        likelihood, pose = sites["points"]["fn"], sites["pose"]["value"]
        if likelihood.match is not sites["match"]["value"]:
            raise ConjugacyError(
                "points",
                "MatchedParts whose match is not the value of the site 'match' itself",
                "MatchedParts that takes the site 'match' as it is",
            )
        if likelihood.pose is not pose:
            slope, _ = moved_pose(program, scene, given, pose, unknown)
            if is_traced(slope):
                raise ConjugacyError(
                    "points",
                    "MatchedParts whose pose is no linear function of the site 'pose'",
                    "the site 'pose' as it is, or a linear function of each object's own pose",
                )
            found = at_moved_pose(program, scene, given, found, unknown)
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
