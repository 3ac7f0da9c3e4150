"""The witness: what was read of a program, held against the density of the program itself.

A list of what a reader must refuse is never complete. So the program testifies: at random values of
its latent sites every site's log density, as NumPyro counts it with all handlers, masks and scales,
must be that of the pieces that were read. Whatever the reader overlooked shows as a difference, and
the program is refused by the name of the site.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpyro.distributions as dist
import scipy
from jaxtyping import Array, Float
from numpyro.distributions import Distribution
from scipy.optimize import linear_sum_assignment
from scipy.special import logsumexp

from models.distributions.likelihood import MatchedParts, check_one_scene
from models.distributions.match import MixtureMatch, PermutationMatch, weighted_sum
from models.errors import ConjugacyError, InputError
from models.numerics.permanent import log_permanent
from models.program.reading import LinearGaussianModel
from models.program.sites import (
    MATCH_FAMILIES,
    Program,
    Site,
    Values,
    log_prob_of,
    trace_all,
    trace_sites,
    without_shape,
)
from models.scenes import Scene, check_layout
from models.templates import pose_of_part

LARGEST = 1e12
"""The largest number of a program's distributions, precisions included: beyond it the digits of a
float no longer tell points apart."""

_ROUNDING = 1e-8
_MAX_NORMALISED = 12  # rows of a match prior whose permanent is checked too


def testify(
    program: Program,
    scenes: Sequence[Scene],
    given: Sequence[Values],
    models: Sequence[LinearGaussianModel],
) -> None:
    """Raise an error if what was read is not what the program says.

    Args:
        scenes: one for each probe.
        given: the values of the program's conditions there.
        models: what was read there.
    """
    for number, (scene, conditions, model) in enumerate(zip(scenes, given, models, strict=True)):
        model = jax.tree.map(np.asarray, model)
        # A permutation has few entries, and a program may look at others: the first is dense.
        match = _random_match(np.random.default_rng(number), model, dense=number == 0)
        if match is None:
            if conditions:
                continue  # impossible under these conditions, and so of no weight
            raise InputError(
                "site 'match': its prior forbids every match, and must allow at least one without "
                "a pair of log weight minus infinity; look at which rows and columns it leaves "
                "without a partner"
            )
        values = {"match": match} | _random_values(np.random.default_rng(number), model)
        sites = trace_sites(program, scene, {**conditions, **values})
        check_numbers(sites)
        expected = log_densities(model, values)
        found = {name: _log_prob(sites[name]) for name in expected}
        others = [name for name in sites if name not in expected]
        found[""] = sum(_log_prob(sites[name]) for name in others)
        expected[""] = float(model.log_constant)
        for name in found:
            if not _agree(found[name], expected[name], model if name == "pose" else None):
                blank = trace_sites(program, scene, conditions)
                raise _explained(name, sites, blank, others, found[name], expected[name])


def log_densities(model: LinearGaussianModel, values: Mapping[str, Any]) -> dict[str, float]:
    """Log density of each site under the pieces, at a match, poses and factors, in plain numpy."""
    match, pose, parts = values["match"], values["pose"], model.parts
    shift = pose - model.pose_mean
    precise = np.linalg.solve(model.pose_covariance, shift[..., None])[..., 0]
    log_det = np.linalg.slogdet(2 * np.pi * model.pose_covariance)[1]
    precision = np.where(parts.is_clutter, 1.0, values.get("precision", 1.0))
    variance = parts.variance / precision[:, None]
    owner = pose_of_part(parts.owner, model.num_objects)
    predicted = np.einsum("ndp,np->nd", parts.F, pose[owner]) + parts.offset
    residual = model.points[:, None] - predicted
    log_normal = -0.5 * (residual**2 / variance + np.log(2 * np.pi * variance))
    counted = model.seen[:, None] & parts.feature_mask
    density = {
        "pose": float(-0.5 * np.sum(shift * precise) - 0.5 * np.sum(log_det)),
        "match": _log_match(model, match, values),
        "points": float(np.sum(match * np.where(counted, log_normal, 0.0).sum(axis=-1))),
    }
    if model.precision_prior is not None:
        concentration, rate = model.precision_prior
        density["precision"] = float(
            scipy.stats.gamma(concentration, scale=1 / rate).logpdf(values["precision"])
        )
    if model.part_prior is not None:
        probs = values["part_probs"]
        density["part_probs"] = float(scipy.stats.dirichlet(model.part_prior).logpdf(probs))
    return density


def check_numbers(sites: Mapping[str, Site]) -> None:
    """Say in a sentence if a site has numbers that nothing can be computed with.

    Only a match prior may have an infinity, minus infinity, for pairs that it forbids; of other
    sites than those of every program only NaN is known to be wrong.
    """
    for name, site in sites.items():
        found = site["fn"]
        if isinstance(found, MatchedParts):  # its match and pose are other sites
            found = (found.parts, found.precision, found.beta)
        leaves = (np.asarray(leaf) for leaf in jax.tree.leaves(found))
        floats = [x.ravel() for x in leaves if x.dtype.kind == "f"]
        numbers = np.concatenate(floats or [np.zeros(0)])
        if np.isnan(numbers).any():
            raise InputError(
                f"site {name!r}: NaN among the numbers of its distribution; look for a division "
                "by zero or a root of a negative number in it"
            )
        if name not in ("pose", "match", "points"):
            continue
        if name == "match":
            numbers = numbers[numbers > -np.inf]
        too_large = numbers[np.abs(numbers) > LARGEST]
        if len(too_large):
            raise InputError(
                f"site {name!r}: {too_large[0]:g} among the numbers of its distribution, at most "
                f"{LARGEST:g} in size is possible, or digits are lost; choose units in which "
                "points are small"
            )


def check_program(program: Program, scene: Scene) -> None:
    """Say in a sentence if a method that works on a program's density cannot take it."""
    sites = trace_all(program, scene)
    samples = {name: site for name, site in sites.items() if site["type"] == "sample"}
    for site in samples.values():
        if isinstance(site["fn"], MatchedParts):
            check_one_scene(site["fn"])
            check_layout(np.shape(site["value"]), *site["fn"].event_shape)
    check_numbers(samples)
    if "points_unobserved" in samples:
        raise InputError(
            "site 'points': obs_mask makes a latent site of what was not observed, and no match is "
            "summed out of it; leave it out, and give `present` to MatchedParts"
        )
    for name, site in sites.items():
        if site["type"] == "plate" and site["args"][1] not in (None, site["args"][0]):
            inside = [n for n, s in samples.items() if name in _plates(s)]
            raise InputError(
                f"site {', '.join(map(repr, inside))}: inside the plate {name!r}, which takes "
                f"{site['args'][1]} of {site['args'][0]} at random; all of them are required, so "
                "leave out subsample_size"
            )
    latent = {n: s["fn"] for n, s in samples.items() if not s["is_observed"]}
    for name, prior in latent.items():
        if isinstance(without_shape(prior), dist.Delta):
            raise InputError(
                f"site {name!r}: a Delta has no density; write the value itself, or "
                "numpyro.deterministic"
            )
    real = [n for n, prior in latent.items() if not prior.support.is_discrete]
    if not real:
        raise InputError(
            "site 'pose': it has a fixed value, and no other continuous site is latent, so there "
            "is nothing to infer but the match; leave the poses latent"
        )


def _plates(site: Site) -> list[str]:
    return [frame.name for frame in site["cond_indep_stack"]]


def _random_values(rng: np.random.Generator, model: LinearGaussianModel) -> dict[str, np.ndarray]:
    """Values of the sites that the closed forms integrate over: poses, and factors."""
    spread = np.sqrt(np.nan_to_num(np.diagonal(model.pose_covariance, axis1=1, axis2=2)))
    pose = np.nan_to_num(model.pose_mean) + spread * rng.normal(size=spread.shape)
    values = {"pose": pose}
    if model.precision_prior is not None:
        concentration, rate = model.precision_prior
        values["precision"] = np.asarray(concentration / rate * rng.uniform(0.5, 2.0))
    if model.part_prior is not None:
        values["part_probs"] = rng.dirichlet(np.ones(len(model.part_prior)))
    return values


def _random_match(
    rng: np.random.Generator, model: LinearGaussianModel, dense: bool
) -> Float[np.ndarray, "N N"] | None:
    """A match that the prior allows, if there is one; or weights on all pairs that it allows."""
    scores = rng.uniform(size=model.match_logits.shape)
    allowed = model.match_logits > -np.inf
    if model.match_family is MixtureMatch:
        columns = np.where(allowed, scores, -1.0).argmax(axis=1)
    else:
        columns = linear_sum_assignment(np.where(allowed, scores, -1e6), maximize=True)[1]
    possible = allowed[np.arange(len(columns)), columns].all()
    if not possible:
        return None
    return np.where(allowed, scores, 0.0) if dense else np.eye(scores.shape[1])[columns]


def _log_match(model: LinearGaussianModel, match: np.ndarray, values: Mapping[str, Any]) -> float:
    logits = model.match_logits
    if model.part_prior is not None:
        logits = np.broadcast_to(np.log(values["part_probs"]), logits.shape)
    weight = float(np.sum(match[match > 0] * logits[match > 0]))
    if model.match_family is MixtureMatch:
        return weight - float(logsumexp(logits, axis=-1).sum())
    if model.match_family is PermutationMatch and len(logits) <= _MAX_NORMALISED:
        return weight - float(log_permanent(logits))
    return weight


def _log_prob(site: Site) -> float:
    """What a site adds to the program's log density, but for a normaliser that is out of reach."""
    prior = site["fn"]
    if type(prior) is PermutationMatch and prior.event_shape[0] > _MAX_NORMALISED:
        return float(weighted_sum(site["value"], prior.log_weights))
    if type(prior) in MATCH_FAMILIES:
        return float(_unchecked_log_prob(prior, site["value"]))
    return float(log_prob_of(site))


@jax.jit
def _unchecked_log_prob(prior: Distribution, match: Float[Array, "N N"]) -> Float[Array, ""]:
    """The log density of a match, without NumPyro's check that it is one."""
    return type(prior).log_prob.__wrapped__(prior, match)


def _agree(found: float, expected: float, model: LinearGaussianModel | None) -> bool:
    tolerance = _ROUNDING
    if model is not None:  # an ill-conditioned covariance costs digits, however it is inverted
        tolerance += 1e-14 * float(np.linalg.cond(model.pose_covariance).max())
    return bool(abs(found - expected) <= tolerance * max(1.0, abs(found), abs(expected)))


def _explained(
    name: str,
    sites: Mapping[str, Site],
    blank: Mapping[str, Site],
    others: Sequence[str],
    found: float,
    expected: float,
) -> ConjugacyError:
    """Why a site's density is not what was read, as well as can be told.

    Args:
        name: of the site; nothing for all that are neither summed over nor the points.
        sites, blank: the program at the probe, and at the values where it was read.
    """
    numbers = f", and its log density is {found:.6g} where what was read has {expected:.6g}"
    if not name:
        changed = (n for n in others if not _same(log_prob_of(sites[n]), log_prob_of(blank[n])))
        name = next(changed, others[0] if others else "points")
        return ConjugacyError(
            name,
            f"further data, or a factor, that depends on a latent site{numbers}",
            "the points as the only data that do",
        )
    if name == "match" and "part_probs" in sites:
        return ConjugacyError(
            name,
            f"a prior that does not take the site 'part_probs' as it is{numbers}",
            "MixtureMatch with the log of 'part_probs' as the logits of every point",
        )
    if name != "points":
        changes = not _same(sites[name]["fn"], blank[name]["fn"])
        why = "a prior that changes with another site" if changes else "a density of its own"
        return ConjugacyError(name, why + numbers, "a prior that is fixed given the conditions")
    likelihood, other = sites["points"]["fn"], blank["points"]["fn"]
    for part in ("pose", "match"):
        if not _same(getattr(likelihood, part), sites[part]["value"]):
            return ConjugacyError(
                "points",
                f"MatchedParts whose {part} is not the value of the site {part!r} itself{numbers}",
                f"MatchedParts that takes the site {part!r} as it is",
            )
    for part in ("precision", "beta", "parts", "present"):
        if not _same(getattr(likelihood, part), getattr(other, part)):
            also = ", or a site 'precision' with a Gamma prior" if part == "precision" else ""
            return ConjugacyError(
                "points",
                f"MatchedParts whose {part} depends on a latent site{numbers}",
                f"{part} that depends on none{also}",
            )
    return ConjugacyError("points", f"a density of its own{numbers}", "that of MatchedParts")


def _same(first: Any, second: Any) -> bool:
    """Whether two pytrees of concrete arrays are equal."""
    a, b = jax.tree.leaves(first), jax.tree.leaves(second)
    return len(a) == len(b) and all(
        np.shape(x) == np.shape(y) and bool(np.all(np.asarray(x) == np.asarray(y)))
        for x, y in zip(a, b, strict=True)
    )
