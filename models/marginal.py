"""The same program with its match summed out, which needs no conjugacy at all, and tempered."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
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
    """Effect handler: the same program with the density of all that is observed raised to beta.

    Around `marginal(program)` it goes from the prior, beta = 0, to the posterior, beta = 1:

        p(sites) (sum_match p(match) p(points | sites, match))^beta.

    Gibbs sampling, which has a match, has beta inside the sum. Where one match explains the points
    much better than all others the two differ by a constant only.
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
    sites = trace_sites(marginal(program), scene, lambda site: values.get(site["name"]))
    likelihood: MarginalParts = sites["points"]["fn"]
    return likelihood.match_posterior(jnp.asarray(scene.points, float))
