"""Effect handlers that sum the match out of a program, without conjugacy, and that temper it."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import Distribution
from numpyro.handlers import seed
from numpyro.infer.util import compute_log_probs
from numpyro.primitives import Messenger

from models.distributions.likelihood import MarginalParts, MatchedParts
from models.distributions.match import (
    DoublyStochasticMatch,
    MixtureMatch,
    PermutationMatch,
    weighted_sum,
)
from models.errors import InputError
from models.program.sites import (
    MATCH_FAMILIES,
    Program,
    Unknown,
    is_traced,
    log_prob_of,
    trace_sites,
    with_unknown,
    without_shape,
)
from models.scenes import Scene

_WITNESSES, _MATCHES = 2, 16  # random values, and matches at each, at which a program is checked


class marginal(Messenger):  # lower case, as NumPyro's handlers are
    """Effect handler: sum the match out of a program.

    `marginal(program)` is a program in which the site `match` is gone and `points` has the marginal
    likelihood `MarginalParts`. If all other latent sites are continuous, NUTS and automatic guides
    take it as it is, whatever the priors. Recover matches with `match_posterior`.

    It raises an InputError if the match is given, scaled or masked or has a prior of another
    family, or if the points are scaled, masked or not `MatchedParts`. A scale around
    `marginal(program)`, such as `tempered`, is applied after the sum and is allowed.
    """

    def __init__(self, fn: Program | None = None) -> None:
        self.match_prior: Distribution | None = None
        self.placeholder: Array | None = None
        self.summed_at: str | None = None
        super().__init__(fn)

    def __enter__(self) -> "marginal":
        self.match_prior = self.placeholder = self.summed_at = None
        return super().__enter__()

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample":
            return
        if msg["name"] == "match":
            _check_match(msg)
            self.match_prior = msg["fn"]
            # Any use of the match other than through MatchedParts becomes NaN and is detected.
            self.placeholder = msg["value"] = jnp.full(msg["fn"].shape(), jnp.nan)
            msg["stop"] = True
        elif msg["name"] == "points" or isinstance(msg["fn"], MatchedParts):
            self._check_points(msg)
            self.summed_at = msg["name"]
            msg["fn"] = MarginalParts(self.match_prior, msg["fn"])

    def _check_points(self, msg: dict[str, Any]) -> None:
        name, matched = msg["name"], msg["fn"]
        if not isinstance(matched, MatchedParts):
            raise InputError(
                f"site {name!r}: found {_kind(matched)}, but only MatchedParts can have its match "
                "summed out; write MatchedParts(match, pose, parts, noise=...) without masks "
                "around it, where noise is dist.Normal, functools.partial(dist.StudentT, 3.0) or "
                "any other distribution of location and scale"
            )
        if type(matched).log_prob is not MatchedParts.log_prob:
            raise InputError(
                f"site {name!r}: {type(matched).__name__} has a log_prob of its own, but the sum "
                "over matches requires the one built from the table of pairs; override "
                "pair_log_likelihood instead"
            )
        if self.match_prior is None:
            raise InputError(
                f"site {name!r}: the match cannot be summed out, because there is no site 'match' "
                "before it; draw the match with numpyro.sample('match', ...)"
            )
        if matched.match is not self.placeholder:
            raise InputError(
                f"site {name!r}: the match cannot be summed out, because MatchedParts "
                "does not take the site 'match' as it is; pass it on unchanged"
            )
        if self.summed_at is not None:
            raise InputError(
                f"site {name!r}: the match was already summed out at the site "
                f"{self.summed_at!r}, and one match cannot be summed out of two sites separately; "
                "put all points into one site"
            )
        _check_scale(msg)


def _check_match(msg: dict[str, Any]) -> None:
    if type(msg["fn"]) not in MATCH_FAMILIES:
        raise InputError(
            f"site 'match': found {_kind(msg['fn'])}, but the sum over matches is known for "
            f"{', '.join(family.__name__ for family in MATCH_FAMILIES)} themselves; use one "
            "of them, without masks or plates around it"
        )
    if msg["is_observed"] or msg["value"] is not None:
        raise InputError(
            "site 'match': it has a value, so there is nothing to sum over; leave it latent, or "
            "fix the match by the logits of its prior, minus infinity for impossible pairs"
        )
    _check_scale(msg)


def _check_scale(msg: dict[str, Any]) -> None:
    if msg["scale"] is not None:
        raise InputError(
            f"site {msg['name']!r}: found a scale of {msg['scale']} inside the sum over matches, "
            "which cannot be computed; remove it, or put handlers.scale around marginal(program)"
        )


def _kind(found: Distribution) -> str:
    return type(without_shape(found)).__name__


class tempered(Messenger):  # lower case, as NumPyro's handlers are
    """Effect handler: raise the density of all observed sites to the power beta.

    Around `marginal(program)` this goes from the prior, beta = 0, to the posterior, beta = 1:

        p(sites) (sum_match p(match) p(points | sites, match))^beta.

    Gibbs sampling, which keeps the match, has beta inside the sum. If one match explains the points
    much better than all others, the two differ only by a constant.
    """

    def __init__(self, fn: Program | None = None, beta: Float[Array, ""] | float = 1.0) -> None:
        self.beta = beta
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["is_observed"]:
            msg["scale"] = self.beta if msg["scale"] is None else self.beta * msg["scale"]


def match_posterior(
    program: Program, scene: Scene, values: Mapping[str, Array]
) -> PermutationMatch | MixtureMatch:
    """The exact distribution of the match given values of the other latent sites."""
    site = _points_at(program, scene, values)
    return site["fn"].match_posterior(jnp.asarray(site["value"]))


def pose_of(program: Program, scene: Scene, values: Mapping[str, Array]) -> Float[Array, "K p"]:
    """The pose that the likelihood receives at values of the latent sites, computed or sampled."""
    return _points_at(program, scene, values)["fn"].matched.pose


def _points_at(program: Program, scene: Scene, values: Mapping[str, Array]) -> dict[str, Any]:
    """The site of the points; entries of `values` that are not latent sites are ignored."""
    return trace_sites(marginal(program), scene, values)["points"]


def check_table(program: Program, scene: Scene, given: Mapping[str, Any] | None = None) -> None:
    """Raise an InputError unless the sum over matches is that of the program's own density.

    At random values of the latent sites and at random matches, the log density of each site, with
    all handlers, masks, scales and factors, must be what the sum assumes. That of `points` is the
    sum of the table's entries, that of `match` follows from its log weights, and that of any other
    site does not depend on the match.

    Args:
        given: values of discrete sites under which the program can explain the scene.
    """
    for key in jax.random.split(jax.random.key(0), _WITNESSES):
        testimony = jax.tree.map(
            np.asarray, _testimony(program)(scene.observed, key, dict(given or {}))
        )
        for name, (own, summed) in testimony.items():
            if np.isnan(own).any() or np.isnan(summed).any():
                raise InputError(
                    f"site 'match': the density of the site {name!r} depends on it other than "
                    "through MatchedParts, so the match cannot be summed out; let it enter the "
                    "program through MatchedParts only"
                )
            differs = ~np.isclose(own, summed, rtol=1e-8, atol=1e-8)
            if differs.any():
                raise InputError(
                    f"site {name!r}: at a random match its log density is {own[differs][0]:.6f}, "
                    f"but the sum over matches assumes {summed[differs][0]:.6f}; let the "
                    "match enter the program through MatchedParts only, and the points through "
                    "its pair_log_likelihood"
                )
    with_unknown(functools.partial(_refuse_other_uses, program, scene, dict(given or {})))


def _refuse_other_uses(
    program: Program, scene: Scene, given: Mapping[str, Any], zero: Array
) -> None:
    """Refuse a use of the match that shows at a few matches only, as one of some of its entries."""
    sites = trace_sites(program, scene, given, Unknown(zero, {"match"}))
    matched = {n: x for n, x in vars(sites["points"]["fn"]).items() if n != "match"}
    for name, site in sites.items():
        others = (matched, site["value"]) if name == "points" else log_prob_of(site)
        if name != "match" and is_traced(others):
            raise InputError(
                f"site 'match': the site {name!r} depends on it other than through the match of "
                "MatchedParts, so the match cannot be summed out; let it enter the program "
                "through MatchedParts only"
            )


@functools.lru_cache(maxsize=32)
def _testimony(program: Program) -> Callable[..., dict[str, tuple[Array, Array]]]:
    """A function that returns each site's log density at random matches: own, and of the sum.

    Compiled once for each program and shape of its scenes.
    """

    @jax.jit
    def testimony(
        observed: dict[str, Array], key: Array, given: dict[str, Array]
    ) -> dict[str, tuple[Array, Array]]:
        values_key, match_key = jax.random.split(key)
        seeded = seed(marginal(program), values_key)
        log_probs, sites = compute_log_probs(seeded, (), observed, given)
        likelihood: MarginalParts = sites["points"]["fn"]
        prior, points = likelihood.match_prior, jnp.asarray(sites["points"]["value"])
        # The best match under random weights is cheaper than a draw, and tests as much.
        weights = jax.random.gumbel(match_key, (_MATCHES, *prior.event_shape))
        matches = prior.tilt(weights).mode
        latent = {
            name: site["value"]
            for name, site in sites.items()
            if site["type"] == "sample" and not site["is_observed"]
        }

        def of_program(match: Float[Array, "N N"]) -> dict[str, Float[Array, ""]]:
            return compute_log_probs(program, (), observed, latent | {"match": match})[0]

        summed = log_probs | {
            "points": weighted_sum(matches, likelihood.matched.pair_log_likelihood(points)),
            "match": weighted_sum(matches, prior.log_weights),
        }
        if not isinstance(prior, DoublyStochasticMatch):  # its product is not normalised
            summed["match"] -= prior.log_normalizer
        return {
            name: (own, jnp.broadcast_to(summed[name], own.shape))
            for name, own in jax.vmap(of_program)(matches).items()
        }

    return testimony
