"""The blocks of Gibbs sampling: draw every site given the others, for all replicas at once.

The replicas of a chain, one for each beta, take the place of scenes in `guides.meanfield`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int
from numpyro.distributions import biject_to
from numpyro.distributions.constraints import Constraint

from guides import meanfield
from guides.meanfield import PoseFactor, Precision
from inference.conditions.sets import Table
from inference.mcmc.slices import slice_draw
from inference.posterior.draws import one_hot
from models.distributions.match import MixtureMatch
from models.numerics.linalg import cholesky, inverse_and_log_det, total
from models.numerics.permanent import log_permanent, sample_injection
from models.program.reading import LinearGaussianModel

Sites = dict[str, Array]
"""Values by site; `match` is the part of each row."""

Pieces = Callable[[Sites], LinearGaussianModel]
"""Reads a program at values of its conditions; arrays have the replicas last."""


def _precision(replicas: Sites, betas: Float[Array, " rungs"]) -> Precision:
    """The noise precision of each replica; 1 if it is fixed, as the variances then contain it."""
    value = replicas.get("precision", jnp.ones_like(betas))
    return Precision(value, jnp.log(value), jnp.zeros_like(betas))


def _log_likelihood(
    model: LinearGaussianModel,
    owner: Int[np.ndarray, " N"],
    replicas: Sites,
    betas: Float[Array, " rungs"],
) -> Float[Array, "N N rungs"]:
    """Log density of each point as each part at the poses of each replica."""
    energy = _energy(model, owner, replicas["pose"])
    return meanfield.expected_log_likelihood(model, energy, _precision(replicas, betas))


def _energy(
    model: LinearGaussianModel, owner: Int[np.ndarray, " N"], pose: Float[Array, "rungs K p"]
) -> Float[Array, "N N rungs"]:
    mean = jnp.moveaxis(pose, 0, 2).swapaxes(0, 1)
    certain = jnp.zeros((mean.shape[0], *mean.shape))
    return meanfield.expected_energy(model, owner, PoseFactor(mean, certain, jnp.zeros(())))


def draw_match(
    key: Array,
    model: LinearGaussianModel,
    owner: Int[np.ndarray, " N"],
    replicas: Sites,
    betas: Float[Array, " rungs"],
) -> Int[Array, "rungs N"]:
    """Draw the match given the poses, exactly."""
    weights = _match_weights(model, owner, replicas, betas)
    if model.match_family is MixtureMatch:
        return jax.random.categorical(key, weights)
    return sample_injection(key, weights)


def draw_discrete(
    key: Array,
    pieces: Pieces,
    owner: Int[np.ndarray, " N"],
    replicas: Sites,
    betas: Float[Array, " rungs"],
    scalars: Sites,
    table: Table,
) -> Sites:
    """Draw all discrete conditions given only the poses, with the match summed out.

    An object that has points cannot become absent while the match is fixed. So the match is drawn
    afterwards, and both together are one draw of p(value, match | pose). A value s has the weight

        p(s, data) p(pose | s) perm(A_s exp(beta L_s)) / perm(A_s),

    where A_s are the weights of the match prior and L_s the log likelihoods of points as parts. At
    beta = 0 the poses are drawn again from p(pose | s), so the weight is p(s, data) and the draw is
    independent of the last one. If values differ in their pose priors, as in `sized_constellation`,
    this replica finds the other values.

    Args:
        scalars: the continuous conditions of each replica.
        table: joint values of the discrete conditions.
    """
    width = len(betas) if scalars else 1  # without scalars all replicas have the same pieces

    def log_weight(values: Sites) -> Float[Array, " rungs"]:
        own = {name: jnp.broadcast_to(x, (width, *x.shape)) for name, x in values.items()}
        model = pieces(scalars | own)
        log_sum = _log_sum(model, _match_weights(model, owner, replicas, betas))
        log_prior = _log_sum(model, _match_logits(model, replicas))
        log_sum = jnp.where(jnp.isneginf(log_prior), -jnp.inf, log_sum - log_prior)
        log_sum = log_sum + model.log_constant
        return log_sum + jnp.where(betas > 0, _pose_log_prior(model, replicas["pose"]), 0.0)

    chosen = jax.random.categorical(key, jax.lax.map(log_weight, table), axis=0)
    return {name: x[chosen] for name, x in table.items()}


def draw_scalars(
    key: Array,
    pieces: Pieces,
    owner: Int[np.ndarray, " N"],
    replicas: Sites,
    betas: Float[Array, " rungs"],
    supports: Mapping[str, Constraint],
    others: Sites,
) -> Sites:
    """Draw the continuous conditions one by one given the match, with the poses integrated out.

    Each is drawn by slice sampling of its unconstrained value. A value c has the density

        p(c, data) p(match | c) (integral of p(pose | c) p(points | pose, match, c)^beta).

    Args:
        supports: the support of each of the sites.
        others: the discrete conditions of each replica.
    """
    rows = jnp.arange(replicas["match"].shape[1])
    drawn = {name: replicas[name] for name in supports}
    for name, support in supports.items():
        key, own_key = jax.random.split(key)
        transform = biject_to(support)

        def log_density(
            u: Float[Array, " rungs"], name: str = name, transform: Any = transform
        ) -> Float[Array, " rungs"]:
            values = drawn | {name: transform(u)}
            model = pieces(others | values)
            logits = _match_logits(model, replicas)
            log_match = jax.vmap(lambda x, match: x[rows, match].sum())(
                jnp.broadcast_to(logits, (len(betas), *logits.shape[1:])), replicas["match"]
            )
            log_match = log_match - _log_sum(model, logits)
            log_integral, _ = integrated(model, owner, replicas, betas)
            jacobian = transform.log_abs_det_jacobian(u, values[name])
            return model.log_constant + log_match + log_integral + jacobian

        drawn[name] = transform(slice_draw(own_key, log_density, transform.inv(drawn[name])))
    return drawn


def _log_sum(
    model: LinearGaussianModel, weights: Float[Array, "rungs N N"]
) -> Float[Array, " rungs"]:
    """Log of the sum over all matches of the product of their weights."""
    if model.match_family is MixtureMatch:
        return logsumexp(weights, axis=-1).sum(axis=-1)
    return log_permanent(weights)


def _match_logits(model: LinearGaussianModel, replicas: Sites) -> Float[Array, "rungs N N"]:
    """Log weights of the match prior, with an axis of length one if all replicas have the same."""
    if "part_probs" in replicas:
        rows = replicas["match"].shape[1]
        return jnp.repeat(jnp.log(replicas["part_probs"])[:, None, :], rows, axis=1)
    return jnp.moveaxis(model.match_logits, 2, 0)


def _match_weights(
    model: LinearGaussianModel,
    owner: Int[np.ndarray, " N"],
    replicas: Sites,
    betas: Float[Array, " rungs"],
) -> Float[Array, "rungs N N"]:
    """Log weights of the match given the poses."""
    log_likelihood = _log_likelihood(model, owner, replicas, betas)
    return _match_logits(model, replicas) + jnp.moveaxis(log_likelihood * betas, 2, 0)


def _pose_log_prior(
    model: LinearGaussianModel, pose: Float[Array, "rungs K p"]
) -> Float[Array, " rungs"]:
    """Log density of the poses, up to a constant."""
    precision, log_det = inverse_and_log_det(jnp.moveaxis(model.pose_covariance, 0, 2))
    shift = jnp.moveaxis(pose, (0, 1, 2), (2, 1, 0)) - jnp.moveaxis(model.pose_mean, 1, 0)
    distance = total(total(precision * shift[:, None] * shift[None], axis=0), axis=0)
    return -0.5 * total(distance + log_det, axis=0)


def _matched(match: Int[Array, "rungs N"]) -> Float[Array, "N N rungs"]:
    return jnp.moveaxis(one_hot(match, match.shape[-1]), 0, 2)


def integrated(
    model: LinearGaussianModel,
    owner: Int[np.ndarray, " N"],
    replicas: Sites,
    betas: Float[Array, " rungs"],
) -> tuple[Float[Array, " rungs"], PoseFactor]:
    """Log of the integral of p(pose) p(points | pose, match)^beta, and the poses given the match.

    The log integral is the ELBO at the posterior of the poses.
    """
    match, noise = _matched(replicas["match"]), _precision(replicas, betas)
    scaled = Precision(betas * noise.mean, noise.log_mean, noise.kl)
    pose = meanfield.update_pose(model, owner, match, scaled)  # eqs. Lambda_k and mu_k
    energy = meanfield.expected_energy(model, owner, pose)
    log_likelihood = meanfield.expected_log_likelihood(model, energy, noise)
    expected = betas * meanfield.matrix_sum(match * log_likelihood)
    return expected - meanfield.pose_kl(model, pose), pose


def draw_pose(key: Array, pose: PoseFactor) -> Float[Array, "rungs K p"]:
    """Draw the poses given the match."""
    noise = jax.random.normal(key, pose.mean.shape)
    drawn = pose.mean + total(cholesky(pose.covariance) * noise, axis=1)
    return jnp.moveaxis(drawn, (0, 1, 2), (2, 1, 0))


def draw_precision(
    key: Array,
    model: LinearGaussianModel,
    owner: Int[np.ndarray, " N"],
    replicas: Sites,
    betas: Float[Array, " rungs"],
) -> Float[Array, " rungs"]:
    """Draw the precision given match and poses: a Gamma with half a count per matched feature."""
    assert model.precision_prior is not None
    match = jnp.where(model.parts.is_clutter, 0.0, _matched(replicas["match"]))
    counted = model.seen[:, None] & model.parts.feature_mask[None]
    features = meanfield.matrix_sum(match * counted.sum(axis=2))
    energy = meanfield.matrix_sum(match * _energy(model, owner, replicas["pose"]))
    concentration, rate = model.precision_prior
    drawn = jax.random.gamma(key, concentration + 0.5 * betas * features)
    return drawn / (rate + 0.5 * betas * energy)


def draw_part_probs(
    key: Array, model: LinearGaussianModel, match: Int[Array, "rungs N"]
) -> Float[Array, "rungs N"]:
    """Draw the part probabilities given the match: each point adds a count to its part."""
    assert model.part_prior is not None
    met = one_hot(match, match.shape[-1]) * model.seen.any(axis=1).T[..., None]
    return jax.random.dirichlet(key, model.part_prior.T + met.sum(axis=1))
