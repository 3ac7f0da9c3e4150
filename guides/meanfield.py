"""The mean-field family q(Z) q(Y) of a generative capsule model: its updates and its ELBO.

q(Z) has the match probabilities R, q(Y) is a Normal for each object with mean mu_k and precision
Lambda_k. Each function below is one equation of the paper; `docs/derivation.md` derives them and
lists the misprints. All arrays have the scene axes last, after the axes of the model, so the same
lines serve one scene and a batch of thousands (see `models.numerics.linalg`).

If they are unknown, q also has a Gamma factor for the noise precision and a Dirichlet factor for
the part probabilities; otherwise their expectations are constants.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Float, Int

from models.numerics.linalg import inverse_and_log_det, loop_total, total
from models.program.reading import LinearGaussianModel
from models.templates import pose_of_part


class PoseFactor(NamedTuple):
    """q(Y): a Normal for each object."""

    mean: Float[Array, "p K *scenes"]
    covariance: Float[Array, "p p K *scenes"]
    log_det_precision: Float[Array, "K *scenes"]


class ElboTerms(NamedTuple):
    """The terms of the ELBO."""

    log_likelihood: Float[Array, "*scenes"]
    """E_q[log p(X | Y, Z)] (eq. E_q_X)."""
    pose: Float[Array, "*scenes"]
    """-KL(q(Y) || p(Y))."""
    match: Float[Array, "*scenes"]
    """-KL(q(Z) || p(Z)) (eq. KL_Z), with that of the part probabilities if they are unknown."""
    precision: Float[Array, "*scenes"]
    """-KL of the noise precision if it is unknown, else zero."""

    @property
    def elbo(self) -> Float[Array, "*scenes"]:
        """The sum of the terms."""
        return self.log_likelihood + self.pose + self.match + self.precision


class Precision(NamedTuple):
    """Moments of the noise precision for the other updates: E[tau] beta, E[log tau] + log beta."""

    mean: Float[Array, "*scenes"]
    log_mean: Float[Array, "*scenes"]
    kl: Float[Array, "*scenes"]


class PartProbs(NamedTuple):
    """Moments of unknown part probabilities for the other updates: E[log pi] for each part."""

    log_mean: Float[Array, "N *scenes"]
    kl: Float[Array, "*scenes"]


def update_pose(
    model: LinearGaussianModel,
    owner: Int[np.ndarray, " N"],
    match_probs: Float[Array, "N N *scenes"],
    precision: Precision,
) -> PoseFactor:
    """q(Y) given R (eqs. Lambda_k and mu_k).

    Lambda_k = D0^-1 + beta sum_mn r_mn F_n' D_n^-1 F_n
    mu_k     = Lambda_k^-1 (D0^-1 mu_0 + beta sum_mn r_mn F_n' D_n^-1 (x_m - m_n))

    The paper prints D0 mu_0 in the second line.
    """
    offset, F = model.parts.offset, _design(model)
    weight = precision.mean * _inverse_variance(model)
    seen = model.seen.astype(float)
    # For each feature of each part the expected number of points matched, and their sum.
    shared = match_probs[:, :, None]
    mass, matched = loop_total(
        lambda m: (shared[m] * seen[m], shared[m] * (seen[m] * model.points[m])), len(seen)
    )
    votes = total(weight * (matched - mass * offset) * F, axis=2)
    certainty = total(weight * mass * F[:, None] * F[None], axis=3)

    prior_precision, _ = _prior_precision(model)
    prior_mean = jnp.moveaxis(model.pose_mean, 1, 0)
    precision_k = prior_precision + _sum_by_object(certainty, owner, model, axis=2)  # eq. Lambda_k
    covariance, log_det = inverse_and_log_det(precision_k)
    information = total(prior_precision * prior_mean, axis=1)
    information = information + _sum_by_object(votes, owner, model, axis=1)
    mean = total(covariance * information, axis=1)  # eq. mu_k
    # One step of iterative refinement: for precise points the rounding error would be visible.
    rest = information - total(precision_k * mean, axis=1)
    mean = mean + total(covariance * rest, axis=1)
    return PoseFactor(mean, covariance, log_det)


def expected_energy(
    model: LinearGaussianModel, owner: Int[np.ndarray, " N"], pose: PoseFactor
) -> Float[Array, "N N *scenes"]:
    """E_q(Y) of the squared distance of each point from each part, in units of the noise variance.

    sum_j ((x_mj - F_nj mu - m_nj)^2 + F_nj Lambda^-1 F_nj') / v_nj over the seen features j: the
    residual at the mean, and the paper's trace term written by feature.
    """
    F, owner = _design(model), pose_of_part(owner, len(model.pose_mean))
    mean = total(F * pose.mean[:, owner, None], axis=0) + model.parts.offset
    pushed = total(F[:, None] * pose.covariance[:, :, owner, None], axis=0)
    spread = total(pushed * F, axis=0)
    weight = _inverse_variance(model)

    def of_feature(j: int) -> Float[Array, "N N *scenes"]:
        residual = model.points[:, None, j] - mean[None, :, j]
        return model.seen[:, None, j] * weight[:, j] * (residual**2 + spread[:, j])

    return loop_total(of_feature, mean.shape[1])


def expected_log_likelihood(
    model: LinearGaussianModel, energy: Float[Array, "N N *scenes"], precision: Precision
) -> Float[Array, "N N *scenes"]:
    """E_q of the log density of each point as each part; zero in dummy rows.

    -1/2 (sum_j log(2 pi v_nj / beta) + beta energy), with beta = 1 for clutter. The paper's
    expected log likelihood (eq. E_q_X) lacks the factor beta / 2 of the energy; its log rho
    (eq. log_rho) has it.
    """
    log_variance = jnp.log(2 * jnp.pi * model.parts.variance)
    is_clutter = model.parts.is_clutter
    result = -jnp.where(is_clutter, 1.0, precision.mean) * energy
    log_precision = jnp.where(is_clutter, 0.0, precision.log_mean)
    for j in range(model.points.shape[1]):
        counted = model.seen[:, None, j] & model.parts.feature_mask[None, :, j]
        result = result + counted * (log_precision - log_variance[:, j])
    return 0.5 * result


def match_log_weights(
    model: LinearGaussianModel,
    log_likelihood: Float[Array, "N N *scenes"],
    part_probs: PartProbs | None,
) -> Float[Array, "N N *scenes"]:
    """log rho (eqs. log_rho and log_rho_dummy): in dummy rows the likelihood is zero."""
    return log_prior(model, part_probs) + log_likelihood


def log_prior(
    model: LinearGaussianModel, part_probs: PartProbs | None
) -> Float[Array, "N N *scenes"]:
    """log a_mn, or its expectation if the part probabilities are unknown."""
    return model.match_logits if part_probs is None else part_probs.log_mean[None]


def precision_gamma(
    model: LinearGaussianModel,
    match_probs: Float[Array, "N N *scenes"],
    energy: Float[Array, "N N *scenes"],
    beta: Float[Array, "*scenes"],
) -> tuple[Float[Array, "*scenes"], Float[Array, "*scenes"]]:
    """Concentration and rate of q(tau), a Gamma, given R and the poses.

    concentration = a_0 + 1/2 (expected number of matched features),
    rate          = b_0 + beta/2 sum_mn r_mn energy_mn,

    both without clutter, whose density does not depend on tau.
    """
    assert model.precision_prior is not None
    prior_concentration, prior_rate = model.precision_prior
    features: Any = 0.0
    match_probs = jnp.where(model.parts.is_clutter, 0.0, match_probs)
    for j in range(model.points.shape[1]):
        counted = model.seen[:, None, j] & model.parts.feature_mask[None, :, j]
        features = features + matrix_sum(match_probs * counted)
    concentration = prior_concentration + 0.5 * features
    return concentration, prior_rate + 0.5 * beta * matrix_sum(match_probs * energy)


def update_precision(
    model: LinearGaussianModel,
    match_probs: Float[Array, "N N *scenes"],
    energy: Float[Array, "N N *scenes"],
    beta: Float[Array, "*scenes"],
) -> Precision:
    """q(tau) given R and the poses, at beta."""
    return gamma_precision(model, *precision_gamma(model, match_probs, energy, beta), beta)


def gamma_precision(
    model: LinearGaussianModel,
    concentration: Float[Array, "*scenes"],
    rate: Float[Array, "*scenes"],
    beta: Float[Array, "*scenes"],
) -> Precision:
    """Moments and KL of a Gamma q(tau)."""
    assert model.precision_prior is not None
    prior_concentration, prior_rate = model.precision_prior
    kl = (
        (concentration - prior_concentration) * digamma(concentration)
        - gammaln(concentration)
        + gammaln(prior_concentration)
        + prior_concentration * (jnp.log(rate) - jnp.log(prior_rate))
        + concentration * (prior_rate / rate - 1.0)
    )
    log_mean = digamma(concentration) - jnp.log(rate)
    return Precision(beta * concentration / rate, jnp.log(beta) + log_mean, kl)


def fixed_precision(model: LinearGaussianModel, beta: Float[Array, "*scenes"]) -> Precision:
    """A known precision at beta; if it is unknown, its prior mean as a starting value."""
    if model.precision_prior is None:
        return Precision(beta, jnp.log(beta), jnp.zeros_like(beta))
    concentration, rate = model.precision_prior
    mean = beta * concentration / rate
    return Precision(mean, jnp.log(mean), jnp.zeros_like(mean))


def part_dirichlet(
    model: LinearGaussianModel, match_probs: Float[Array, "N N *scenes"]
) -> Float[Array, "N *scenes"]:
    """Concentration of q(pi), a Dirichlet: that of the prior plus expected points of each part."""
    assert model.part_prior is not None
    present = model.seen.any(axis=1)
    return model.part_prior + total(match_probs * present[:, None], axis=0)


def update_part_probs(
    model: LinearGaussianModel, match_probs: Float[Array, "N N *scenes"]
) -> PartProbs:
    """q(pi) given R."""
    return dirichlet_part_probs(model, part_dirichlet(model, match_probs))


def dirichlet_part_probs(
    model: LinearGaussianModel, concentration: Float[Array, "N *scenes"]
) -> PartProbs:
    """Moments and KL of a Dirichlet q(pi)."""
    assert model.part_prior is not None
    prior = model.part_prior
    log_mean = digamma(concentration) - digamma(total(concentration, axis=0))
    kl = (
        gammaln(total(concentration, axis=0))
        - gammaln(total(prior, axis=0))
        + total(
            gammaln(prior) - gammaln(concentration) + (concentration - prior) * log_mean, axis=0
        )
    )
    return PartProbs(log_mean, kl)


def elbo_terms(
    model: LinearGaussianModel,
    match_probs: Float[Array, "N N *scenes"],
    entropy: Float[Array, "*scenes"],
    log_normalizer: Float[Array, "*scenes"],
    pose: PoseFactor,
    log_likelihood: Float[Array, "N N *scenes"],
    precision: Precision,
    part_probs: PartProbs | None,
) -> ElboTerms:
    """The ELBO at any factors of q, whether or not they have converged.

    Args:
        entropy, log_normalizer: entropy of q(Z) and log normaliser of p(Z), as defined by the
            projection (`guides.projections`).
        log_likelihood: `expected_log_likelihood` at these poses and this precision.
    """
    prior = log_prior(model, part_probs)
    if part_probs is not None:  # dummy rows do not depend on part probabilities
        prior = jnp.where(model.seen.any(axis=1)[:, None], prior, jnp.log(match_probs))
    prior = jnp.where(match_probs == 0, 0.0, prior)
    part_kl = 0.0 if part_probs is None else part_probs.kl
    return ElboTerms(
        log_likelihood=matrix_sum(match_probs * log_likelihood),
        pose=-pose_kl(model, pose),
        match=matrix_sum(match_probs * prior) - log_normalizer + entropy - part_kl,
        precision=-precision.kl,
    )


def pose_kl(model: LinearGaussianModel, pose: PoseFactor) -> Float[Array, "*scenes"]:
    """KL(q(Y) || p(Y)) of the Normals, summed over objects."""
    prior_precision, prior_log_det = _prior_precision(model)
    size = prior_precision.shape[0]
    shift = pose.mean - jnp.moveaxis(model.pose_mean, 1, 0)
    second_moment = pose.covariance + shift[:, None] * shift[None]
    distance = total(total(prior_precision * second_moment, axis=0), axis=0)
    return 0.5 * total(distance - size + prior_log_det + pose.log_det_precision, axis=0)


def _design(model: LinearGaussianModel) -> Float[Array, "p N d *scenes"]:
    """F with the pose axis first, so that sums over it run along contiguous memory."""
    return jnp.moveaxis(model.parts.F, 2, 0)


def _prior_precision(
    model: LinearGaussianModel,
) -> tuple[Float[Array, "p p K *scenes"], Float[Array, "K *scenes"]]:
    """D0^-1 and log |D0| of every object."""
    precision, log_det = inverse_and_log_det(jnp.moveaxis(model.pose_covariance, 0, 2))
    return precision, log_det


def _sum_by_object(
    values: Float[Array, "..."], owner: Int[np.ndarray, " N"], model: LinearGaussianModel, axis: int
) -> Float[Array, "..."]:
    """Sum over the parts of each object, so that the axis of parts becomes one of objects."""
    groups = (np.flatnonzero(owner == k) for k in range(len(model.pose_mean)))
    return jnp.stack([total(jnp.take(values, g, axis=axis), axis) for g in groups], axis=axis)


def _inverse_variance(model: LinearGaussianModel) -> Float[Array, "N d *scenes"]:
    """1 / v, and zero for features that a part does not have."""
    return model.parts.feature_mask / model.parts.variance


def matrix_sum(values: Float[Array, "N N *scenes"]) -> Float[Array, "*scenes"]:
    """The sum of all entries of each matrix."""
    return total(total(values, axis=0), axis=0)
