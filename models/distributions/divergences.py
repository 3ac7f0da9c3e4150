"""KL divergences between match distributions, registered with NumPyro."""

import math

import jax
from jax.scipy.special import gammaln
from jaxtyping import Array, Float
from numpyro.distributions.kl import kl_divergence

from models.distributions.match import (
    DoublyStochasticMatch,
    MixtureMatch,
    PermutationMatch,
    weighted_sum,
)
from models.errors import InputError

AnyMatch = DoublyStochasticMatch | PermutationMatch | MixtureMatch


def _kl_to_rows(q: AnyMatch, p: DoublyStochasticMatch | MixtureMatch) -> Float[Array, "*batch"]:
    """KL to independent rows: sum r log(r / a) if both have independent rows (eq. KL_Z)."""
    log_p = p.log_weights if isinstance(p, DoublyStochasticMatch) else jax.nn.log_softmax(p.logits)
    return -q.entropy() - weighted_sum(q.mean, log_p)


def _kl_bound(q: DoublyStochasticMatch, p: PermutationMatch) -> Float[Array, "*batch"]:
    """The term that makes the paper's ELBO a lower bound under any prior over permutations.

    It is not a KL divergence: R alone does not determine a distribution over permutations. Van der
    Waerden's inequality gives log perm(B) >= log(N!/N^N) + max_R sum r log b - sum r log r over
    doubly stochastic R, so this term subtracts log(N!/N^N). For a uniform prior it is exactly
    eq. KL_Z.
    """
    size = q.event_shape[-1]
    van_der_waerden = gammaln(size + 1) - size * math.log(size)
    cross = p.log_normalizer - weighted_sum(q.probs, p.logits)
    return cross - van_der_waerden - q.entropy()


def _kl_same_family(q: AnyMatch, p: AnyMatch) -> Float[Array, "*batch"]:
    difference = weighted_sum(q.mean, q.log_weights) - weighted_sum(q.mean, p.log_weights)
    return difference - q.log_normalizer + p.log_normalizer


def _no_kl(q: MixtureMatch, p: PermutationMatch) -> Float[Array, "*batch"]:
    raise InputError(
        "the KL divergence of a MixtureMatch from a PermutationMatch is infinite: under a mixture "
        "two rows may share a column, which a permutation forbids; use a MixtureMatch for both, "
        "or a DoublyStochasticMatch for the first"
    )


for _first, _second, _divergence in (
    (DoublyStochasticMatch, DoublyStochasticMatch, _kl_to_rows),
    (DoublyStochasticMatch, MixtureMatch, _kl_to_rows),
    (DoublyStochasticMatch, PermutationMatch, _kl_bound),
    (PermutationMatch, DoublyStochasticMatch, _kl_to_rows),
    (PermutationMatch, MixtureMatch, _kl_to_rows),
    (PermutationMatch, PermutationMatch, _kl_same_family),
    (MixtureMatch, DoublyStochasticMatch, _kl_to_rows),
    (MixtureMatch, MixtureMatch, _kl_same_family),
    (MixtureMatch, PermutationMatch, _no_kl),
):
    kl_divergence.add((_first, _second), _divergence)
