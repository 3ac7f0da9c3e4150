"""The mean-field family as a NumPyro guide, for `SVI` on the same program and the same ELBO.

Its parameters are those of the coordinate updates: match probabilities R, a Normal for each pose
and, if the program has these sites, a Gamma for the precision and a Dirichlet for the part
probabilities.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from models.distributions.match import DoublyStochasticMatch, MixtureMatch, doubly_stochastic
from models.errors import InputError
from models.program.reading import read
from models.program.sites import Program
from models.scenes import Scene

Guide = Callable[..., None]


class MeanMatch(DoublyStochasticMatch):
    """A doubly stochastic match whose "draw" is its mean.

    The likelihood is linear in the match, so at the mean it is the exact expectation over matches,
    and `TraceMeanField_ELBO` takes the rest of the match from the registered KL.
    """

    def sample(self, key: Array | None, sample_shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        return jnp.broadcast_to(self.probs, self.shape(sample_shape))


class MeanMixture(MixtureMatch):
    """A mixture match whose "draw" is its mean."""

    def sample(self, key: Array | None, sample_shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        return jnp.broadcast_to(self.mean, self.shape(sample_shape))


def mean_field_guide(program: Program, scene: Scene, init: dict[str, Any] | None = None) -> Guide:
    """A guide for one scene, to be used as `SVI(program, guide, optimizer, TraceMeanField_ELBO())`.

    Args:
        init: starting values by name: `match_probs` (N, N), `pose_mean` (K, p), `pose_scale_tril`
            (K, p, p), `precision` (concentration, rate), `part_concentration` (N,). All others
            start from the prior.
    """
    model = read(program, scene)
    if not bool(jnp.isfinite(model.match_logits).all()):
        raise InputError(
            "the guide's match probabilities are positive, but the match prior of this program "
            "forbids some pairs; use coordinate ascent (ds), which keeps them at zero"
        )
    num_parts = model.parts.num_parts
    is_mixture = model.match_family is MixtureMatch
    start = {
        "match_probs": jnp.full((num_parts, num_parts), 1.0 / num_parts),
        "pose_mean": model.pose_mean,
        "pose_scale_tril": jnp.linalg.cholesky(model.pose_covariance),
        "precision": model.precision_prior,
        "part_concentration": model.part_prior,
    } | (init or {})

    def guide(*args: Any, **kwargs: Any) -> None:
        mean = numpyro.param("pose_mean", start["pose_mean"])
        scale_tril = numpyro.param(
            "pose_scale_tril",
            start["pose_scale_tril"],
            constraint=constraints.scaled_unit_lower_cholesky,  # steps are independent of scale
        )
        with numpyro.plate("object", model.num_objects):
            numpyro.sample("pose", dist.MultivariateNormal(mean, scale_tril=scale_tril))
        if model.precision_prior is not None:
            shape = numpyro.param(
                "precision_posterior", start["precision"], constraint=constraints.positive
            )
            numpyro.sample("precision", dist.Gamma(shape[0], shape[1]))
        if model.part_prior is not None:
            concentration = numpyro.param(
                "part_concentration", start["part_concentration"], constraint=constraints.positive
            )
            numpyro.sample("part_probs", dist.Dirichlet(concentration))
        if is_mixture:
            logits = numpyro.param("match_logits", jnp.log(start["match_probs"]))
            numpyro.sample("match", MeanMixture(logits))
        else:
            probs = numpyro.param("match_probs", start["match_probs"], constraint=doubly_stochastic)
            numpyro.sample("match", MeanMatch(probs))

    return guide
