"""Whether the closed forms hold for a program, and if not, which site is in the way.

The program is probed with different values of its latent sites: whatever changes with them is not
conjugate.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array
from numpyro.distributions import Distribution
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from models import AnyArray
from models.errors import ConjugacyError, InputError
from models.likelihood import MatchedParts
from models.match import DoublyStochasticMatch, MixtureMatch, PermutationMatch
from models.reading import (
    Program,
    likelihood_of,
    normal_moments,
    part_prior_of,
    placeholder,
    precision_prior_of,
    trace_sites,
    without_shape,
)
from models.scenes import Scene, check_scene

MATCH_FAMILIES = (DoublyStochasticMatch, PermutationMatch, MixtureMatch)

LARGEST = 1e12
"""The largest number of a program's distributions, precisions included: beyond it the digits of a
float no longer tell points apart."""


def check_program(program: Program, scene: Scene) -> None:
    """Say in a sentence if a program cannot be run on a scene at all."""
    try:
        sites = trace_sites(program, scene, lambda site: placeholder(site, {}))
    except InputError:
        raise
    except TypeError as error:
        raise InputError(
            f"the program does not take the scene's {', '.join(scene.observed)} ({error}); a "
            "program is a function of `points` and `present`"
        ) from error
    except ValueError as error:  # NumPyro on numbers that a distribution cannot have
        raise InputError(
            f"the program cannot be run ({error}); look for NaN, or a number out of range, in it"
        ) from error
    for name, site in sites.items():
        if site["type"] == "sample":
            _check_numbers(name, site["fn"])
    is_given = "match" in sites and "presence" not in sites  # else it goes by who is present
    if is_given and not _is_possible(sites["match"]["fn"]):
        raise InputError(
            "site 'match': its prior forbids every match, wanted at least one without a pair of "
            "log weight minus infinity; look at which rows and columns it leaves without a partner"
        )
    likelihood = sites["points"]["fn"] if "points" in sites else None
    if isinstance(likelihood, MatchedParts):
        check_scene(scene, *likelihood.event_shape)


def check_conjugate(
    program: Program, scene: Scene, given: Mapping[str, Array] | None = None
) -> None:
    """Raise a ConjugacyError if the closed forms do not hold for this program at this scene."""
    given = dict(given or {})
    probes = []
    for probe in (1, 2):
        sites = trace_sites(program, scene, functools.partial(_probe, probe=probe, given=given))
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
        likelihood = likelihood_of(sites)
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
        if not _same(*(getattr(likelihood_of(sites), name) for sites in probes)):
            raise ConjugacyError(
                "points",
                f"MatchedParts whose {name} changes with a latent site",
                f"a fixed {name}"
                + (", or a site 'precision' with a Gamma prior" if name == "precision" else ""),
            )


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
    likelihood_of(sites)
    match_prior = sites["match"]["fn"]
    if not isinstance(match_prior, MATCH_FAMILIES):
        raise ConjugacyError(
            "match",
            type(match_prior).__name__,
            " or ".join(family.__name__ for family in MATCH_FAMILIES),
        )
    normal_moments(sites["pose"]["fn"])
    precision_prior_of(sites)
    part_prior_of(sites)
    known = {"pose", "match", "points", "precision", "part_probs", *given}
    for name, site in sites.items():
        if name not in known and not site["is_observed"]:
            raise ConjugacyError(
                name,
                f"a further latent site, of type {type(without_shape(site['fn'])).__name__}",
                "no latent sites but pose, match, precision, part_probs and presence",
            )


def _is_mixture_of(prior: Distribution, part_probs: dict[str, Any]) -> bool:
    if not isinstance(prior, MixtureMatch):
        return False
    logits, wanted = np.asarray(prior.logits), np.log(np.asarray(part_probs["value"]))
    return bool(np.allclose(logits, np.broadcast_to(wanted, logits.shape), atol=1e-9))


def _check_numbers(name: str, distribution: Distribution) -> None:
    """Say in a sentence if a site has numbers that nothing can be computed with.

    Only a match prior may have an infinity, minus infinity, for pairs that it forbids; of other
    sites than those of every program only NaN is known to be wrong.
    """
    leaves = (np.asarray(leaf) for leaf in jax.tree.leaves(distribution))
    numbers = np.concatenate([x.ravel() for x in leaves if x.dtype.kind == "f"] or [np.zeros(0)])
    if np.isnan(numbers).any():
        raise InputError(
            f"site {name!r}: NaN among the numbers of its distribution, wanted "
            "numbers; look for a division by zero or a root of a negative number in it"
        )
    if name not in ("pose", "match", "points"):
        return
    if name == "match":
        numbers = numbers[numbers > -np.inf]
    too_large = numbers[np.abs(numbers) > LARGEST]
    if len(too_large):
        raise InputError(
            f"site {name!r}: {too_large[0]:g} among the numbers of its distribution, wanted at "
            f"most {LARGEST:g} in size, or digits are lost; choose units in which points are small"
        )


def _is_possible(prior: Distribution) -> bool:
    """Whether some match of all rows has a weight above zero."""
    if not isinstance(prior, MATCH_FAMILIES):
        return True
    allowed = np.isfinite(np.asarray(prior.log_weights))
    if isinstance(prior, MixtureMatch):
        return bool(allowed.any(axis=-1).all())
    partner = maximum_bipartite_matching(csr_array(allowed), perm_type="column")
    return bool((partner >= 0).all())


def _same(first: Any, second: Any) -> bool:
    """Whether two pytrees of concrete arrays are equal."""
    a, b = jax.tree.leaves(first), jax.tree.leaves(second)
    return len(a) == len(b) and all(
        np.shape(x) == np.shape(y) and bool(np.all(np.asarray(x) == np.asarray(y)))
        for x, y in zip(a, b, strict=True)
    )
