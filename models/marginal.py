"""The same program with its match summed out, which needs no conjugacy at all, and tempered."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import Distribution
from numpyro.primitives import Messenger

from models.errors import InputError
from models.likelihood import MarginalParts, MatchedParts
from models.match import MixtureMatch, PermutationMatch
from models.reading import Program, trace_sites
from models.scenes import Scene


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


class tempered(Messenger):  # lower case, as NumPyro's handlers are
    """Effect handler around `marginal(program)`: what was observed counts by the power of beta.

    The points have the density

        sum_match p(match) p(points | sites, match)^beta,

    and further observed sites theirs to the power of beta. At beta = 0 what is left is the prior.
    Beta stands inside the sum, as Gibbs sampling has it. Outside of it the two would differ in
    this: where many matches explain the points about as well, as they do for poses between two
    modes, the sum of powers counts each of them, and so the valley is less deep.
    """

    def __init__(self, fn: Program | None = None, beta: Float[Array, ""] | float = 1.0) -> None:
        self.beta = beta
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or not msg["is_observed"]:
            return
        given = msg["fn"]
        if isinstance(given, MarginalParts):
            powers = given.match_prior.tilt(self.beta * given.log_likelihood(msg["value"]))
            log_sum = powers.log_normalizer - given.match_prior.log_normalizer
            msg["fn"], msg["value"] = dist.Unit(log_sum), jnp.empty((*log_sum.shape, 0))
        else:
            msg["scale"] = self.beta if msg["scale"] is None else self.beta * msg["scale"]


def match_posterior(
    program: Program, scene: Scene, values: Mapping[str, Array]
) -> PermutationMatch | MixtureMatch:
    """The exact distribution of the match given values of the other latent sites."""
    sites = trace_sites(marginal(program), scene, lambda site: values.get(site["name"]))
    likelihood: MarginalParts = sites["points"]["fn"]
    return likelihood.match_posterior(jnp.asarray(scene.points, float))
