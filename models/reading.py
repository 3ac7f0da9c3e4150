"""Reading a program: its conjugate pieces, and the same program with its match summed out.

The NumPyro program is the single source of truth. `read` traces it once and takes the pose prior,
the match prior and the linear-Gaussian parts from its sites; `check_conjugate` first makes sure
that they are what the closed forms need, by probing the program with different values of its latent
sites: whatever changes with them is not conjugate. `marginal` needs no conjugacy at all.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float
from numpyro.distributions import Distribution
from numpyro.handlers import seed, substitute, trace
from numpyro.primitives import Messenger

from models import AnyArray
from models.errors import ConjugacyError, InputError
from models.likelihood import MarginalParts, MatchedParts
from models.match import DoublyStochasticMatch, MixtureMatch, PermutationMatch
from models.scenes import Layout, Scene, check_scene
from models.templates import Parts

Program = Callable[..., Any]
"""A NumPyro program of a scene's `points` and `present`, with sites `pose`, `match`, `points`."""

Seen = TypeVar("Seen")

MATCH_FAMILIES = (DoublyStochasticMatch, PermutationMatch, MixtureMatch)


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
    sites = _sites(program, scene, lambda site: _placeholder(site, dict(given or {})))
    likelihood = _likelihood(sites)
    pose_mean, pose_covariance = _normal_moments(sites["pose"]["fn"])
    precision_prior = _precision_prior(sites)
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
        part_prior=_part_prior(sites),
        match_family=type(match_prior),
    )


def read_batch(program: Program, scenes: Scene, varies: Conjugate) -> Conjugate:
    """Read a batch of scenes, with the scene axis last: of length one where nothing `varies`."""
    axes = jax.tree.map(lambda flag: -1 if flag else None, varies)
    pieces = jax.vmap(lambda scene: read(program, scene), out_axes=axes)(scenes)
    pieces = jax.tree.map(jnp.asarray, pieces)
    return jax.tree.map(lambda flag, x: x if flag else x[..., None], varies, pieces)


def trace_pieces(program: Program, layout: Layout, look: Callable[[Conjugate], Seen]) -> Seen:
    """Look at the pieces of a program as they are traced for a batch of scenes of this layout.

    What depends on the scene is abstract there, and all the rest is concrete: templates and priors
    seldom depend on it, and to repeat them for each scene of a batch costs more memory traffic than
    all the rest.
    """
    seen = []

    def trace_one(scene: Scene) -> int:
        seen.append(look(read(program, scene)))
        return 0

    jax.vmap(trace_one)(layout.blank().batch())
    return seen[0]


def what_varies(program: Program, layout: Layout) -> Conjugate:
    """For each piece whether it depends on the scene: found out by tracing, not by trying."""
    return trace_pieces(
        program,
        layout,
        lambda pieces: jax.tree.map(lambda x: isinstance(x, jax.core.Tracer), pieces),
    )


def templates_alike(pieces: Conjugate) -> tuple[int, ...]:
    """For each object the first one that has the same template and the same pose prior.

    What depends on the scene, and is abstract in `trace_pieces`, counts as different.
    """
    owner = np.asarray(pieces.parts.owner)
    parts = [np.flatnonzero(owner == k) for k in range(pieces.num_objects)]
    of_parts = [x for x in pieces.parts if x is not pieces.parts.owner]

    def alike(j: int, k: int) -> bool:
        if len(parts[j]) != len(parts[k]):
            return False
        pairs = [(x[parts[j]], x[parts[k]]) for x in of_parts]
        pairs += [(x[j], x[k]) for x in (pieces.pose_mean, pieces.pose_covariance)]
        return all(not isinstance(a, jax.core.Tracer) and np.array_equal(a, b) for a, b in pairs)

    objects = range(len(parts))
    return tuple(next(j for j in objects if j == k or alike(j, k)) for k in objects)


def is_latent(program: Program, scene: Scene, name: str) -> bool:
    """Whether a program has a latent site of this name at this scene."""
    site = _sites(program, scene, lambda site: _placeholder(site, {})).get(name)
    return site is not None and not site["is_observed"]


def log_prob_of_data(program: Program, scene: Scene) -> Float[Array, ""]:
    """Log density of what a program observes besides the points, a constant of the scene.

    `check_conjugate` makes sure that it does not depend on a latent site.
    """
    sites = _sites(program, scene, lambda site: _placeholder(site, {}))
    others = [s for name, s in sites.items() if s["is_observed"] and name != "points"]
    return sum((jnp.sum(s["fn"].log_prob(s["value"])) for s in others), jnp.zeros(()))


def check_conjugate(
    program: Program, scene: Scene, given: Mapping[str, Array] | None = None
) -> None:
    """Raise a ConjugacyError if the closed forms do not hold for this program at this scene."""
    given = dict(given or {})
    probes = []
    for probe in (1, 2):
        sites = _sites(program, scene, functools.partial(_probe, probe=probe, given=given))
        _check_sites(sites, given)
        probes.append(sites)
    first, second = probes
    for name in ("pose", "match") if "part_probs" not in first else ("pose",):
        if not _same(first[name]["fn"], second[name]["fn"]):
            raise ConjugacyError(
                name, "a prior that changes with another site", "a prior that does not"
            )
    for name, site in first.items():
        if name != "points" and site["is_observed"] and not _same(site["fn"], second[name]["fn"]):
            raise ConjugacyError(
                name,
                "further data, or a factor, that depends on a latent site",
                "the points as the only data",
            )
    for sites in probes:
        likelihood = _likelihood(sites)
        if "part_probs" in sites and not _is_mixture_of(sites["match"]["fn"], sites["part_probs"]):
            raise ConjugacyError(
                "match",
                "a prior that does not take the site 'part_probs' as it is",
                "MixtureMatch with the log of 'part_probs' as the logits of every point",
            )
        for name in ("pose", "match", "precision"):
            if name in sites and not _same(getattr(likelihood, name), sites[name]["value"]):
                raise ConjugacyError(
                    "points",
                    f"MatchedParts whose {name} is not the value of the site {name!r} itself",
                    f"MatchedParts that takes the site {name!r} as it is",
                )
    fixed = ["parts", "beta", "present"] + ([] if "precision" in first else ["precision"])
    for name in fixed:
        if not _same(*(getattr(_likelihood(sites), name) for sites in probes)):
            raise ConjugacyError(
                "points",
                f"MatchedParts whose {name} changes with a latent site",
                f"a fixed {name}"
                + (", or a site 'precision' with a Gamma prior" if name == "precision" else ""),
            )


class marginal(Messenger):  # lower case, as NumPyro's handlers are
    """Effect handler: the same program with its match summed out.

    `marginal(program)` is a program in which the site `match` is gone and `points` has the marginal
    likelihood `MarginalParts`. It has continuous latent sites only, whatever their priors, so NUTS
    and automatic guides take it as it is. Recover matches with `match_posterior`.
    """

    def __init__(self, fn: Program | None = None) -> None:
        self.match_prior: Distribution | None = None
        self.placeholder: Array | None = None
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample":
            return
        if msg["name"] == "match":
            self.match_prior = msg["fn"]
            # Whatever uses the match other than through MatchedParts becomes NaN, and is noticed.
            self.placeholder = msg["value"] = jnp.full(msg["fn"].shape(), jnp.nan)
            msg["stop"] = True
        elif isinstance(msg["fn"], MatchedParts) and self.match_prior is not None:
            given = msg["fn"]
            if given.match is not self.placeholder:
                raise InputError(
                    f"site {msg['name']!r}: the match cannot be summed out, because MatchedParts "
                    "does not take the site 'match' as it is; pass it on unchanged"
                )
            msg["fn"] = MarginalParts(
                self.match_prior,
                given.pose,
                given.parts,
                precision=given.precision,
                beta=given.beta,
                present=given.present,
            )


def match_posterior(
    program: Program, scene: Scene, values: Mapping[str, Array]
) -> PermutationMatch | MixtureMatch:
    """The exact distribution of the match given values of the other latent sites."""
    sites = _sites(marginal(program), scene, lambda site: values.get(site["name"]))
    likelihood: MarginalParts = sites["points"]["fn"]
    return likelihood.match_posterior(jnp.asarray(scene.points, float))


def _sites(
    program: Program, scene: Scene, values: Callable[[dict[str, Any]], Array | None]
) -> dict[str, dict[str, Any]]:
    """Trace the program at a scene, with values for its latent sites where `values` has one."""
    substituted = substitute(program, substitute_fn=values)
    sites = trace(seed(substituted, jax.random.key(0))).get_trace(**scene.observed)
    return {name: site for name, site in sites.items() if site["type"] == "sample"}


def _placeholder(site: dict[str, Any], given: dict[str, Array]) -> AnyArray | None:
    """Some value for a latent site, at no cost: drawing a match would be work for nothing."""
    if site["name"] in given:
        return given[site["name"]]
    latent = site["type"] == "sample" and not site["is_observed"]
    return np.ones(site["fn"].shape()) if latent else None


def _probe(site: dict[str, Any], probe: int, given: dict[str, Array]) -> AnyArray | None:
    """Two different values for each latent site, both within its support."""
    if site["type"] != "sample" or site["is_observed"]:
        return None
    if site["name"] in given:
        return given[site["name"]]
    shape = site["fn"].shape()
    if site["name"] == "match":
        return np.roll(np.eye(*shape[-2:]), probe, axis=-1)
    spread = probe * np.linspace(0.1, 0.2, math.prod(shape)).reshape(shape) + 0.5
    if site["name"] == "part_probs":
        return spread / spread.sum()
    if site["name"] == "pose":  # of both signs, or |pose| would pass for the pose
        return spread * (-1.0) ** np.arange(math.prod(shape)).reshape(shape)
    return spread


def _check_sites(sites: dict[str, dict[str, Any]], given: dict[str, Array]) -> None:
    for name in ("pose", "match", "points"):
        if name not in sites:
            raise ConjugacyError(
                name, f"no such site, only {', '.join(sites) or 'none'}", "the site of a program"
            )
    _likelihood(sites)
    match_prior = sites["match"]["fn"]
    if not isinstance(match_prior, MATCH_FAMILIES):
        raise ConjugacyError(
            "match",
            type(match_prior).__name__,
            " or ".join(family.__name__ for family in MATCH_FAMILIES),
        )
    _normal_moments(sites["pose"]["fn"])
    _precision_prior(sites)
    _part_prior(sites)
    known = {"pose", "match", "points", "precision", "part_probs", *given}
    for name, site in sites.items():
        if name not in known and not site["is_observed"]:
            raise ConjugacyError(
                name,
                f"a further latent site with a {type(site['fn']).__name__} prior",
                "no latent sites but pose, match, precision and part_probs",
            )


def _likelihood(sites: dict[str, dict[str, Any]]) -> MatchedParts:
    likelihood = sites["points"]["fn"]
    if not isinstance(likelihood, MatchedParts):
        raise ConjugacyError("points", type(likelihood).__name__, "MatchedParts")
    return likelihood


def _normal_moments(prior: Distribution) -> tuple[Float[Array, "K p"], Float[Array, "K p p"]]:
    """Mean and covariance of a Normal prior over the pose of each object."""
    core = prior
    while isinstance(core, dist.ExpandedDistribution | dist.Independent):
        core = core.base_dist
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


def _precision_prior(sites: dict[str, dict[str, Any]]) -> Float[Array, " 2"] | None:
    if "precision" not in sites or sites["precision"]["is_observed"]:
        return None
    prior = sites["precision"]["fn"]
    if not isinstance(prior, dist.Gamma) or prior.shape() != ():
        raise ConjugacyError(
            "precision", f"a {type(prior).__name__} of shape {prior.shape()}", "one Gamma"
        )
    return jnp.stack([jnp.asarray(prior.concentration, float), jnp.asarray(prior.rate, float)])


def _part_prior(sites: dict[str, dict[str, Any]]) -> Float[Array, " N"] | None:
    if "part_probs" not in sites or sites["part_probs"]["is_observed"]:
        return None
    prior = sites["part_probs"]["fn"]
    if not isinstance(prior, dist.Dirichlet) or len(prior.shape()) != 1:
        raise ConjugacyError(
            "part_probs", f"a {type(prior).__name__} of shape {prior.shape()}", "one Dirichlet"
        )
    return jnp.asarray(prior.concentration, float)


def _is_mixture_of(prior: Distribution, part_probs: dict[str, Any]) -> bool:
    if not isinstance(prior, MixtureMatch):
        return False
    logits, wanted = np.asarray(prior.logits), np.log(np.asarray(part_probs["value"]))
    return bool(np.allclose(logits, np.broadcast_to(wanted, logits.shape), atol=1e-9))


def _same(first: Any, second: Any) -> bool:
    """Whether two pytrees of concrete arrays are equal."""
    a, b = jax.tree.leaves(first), jax.tree.leaves(second)
    return len(a) == len(b) and all(
        np.shape(x) == np.shape(y) and bool(np.all(np.asarray(x) == np.asarray(y)))
        for x, y in zip(a, b, strict=True)
    )


def check_program(program: Program, scene: Scene) -> None:
    """Say in a sentence if a program cannot be run on a scene at all."""
    try:
        sites = _sites(program, scene, lambda site: _placeholder(site, {}))
    except InputError:
        raise
    except TypeError as error:
        raise InputError(
            f"the program does not take the scene's {', '.join(scene.observed)} ({error}); a "
            "program is a function of `points` and `present`"
        ) from error
    likelihood = sites["points"]["fn"] if "points" in sites else None
    if isinstance(likelihood, MatchedParts):
        check_scene(scene, *likelihood.event_shape)
