"""Projections: from the unnormalised weights rho to the match probabilities R.

Three choices of q(Z), each maximising sum r log rho + H(R) over its own set with its own entropy:

- `sinkhorn`, the paper's: doubly stochastic R, entropy -sum r log r. By van der Waerden's
  inequality (`docs/bound.md`) the ELBO less log perm(A) - log(N!/N^N) is a lower bound on the log
  evidence.
- `bethe`: doubly stochastic R, entropy -sum r log r + sum (1 - r) log(1 - r). Gurvits' inequality
  makes the ELBO less log perm(A) a lower bound too, tighter where R is near a permutation.
- `softmax`: every row by itself, the mixture model.

Scene axes last. Each projection takes and returns a `carry`, its warm start for the next step; the
first step has none and starts `cold`.
"""

import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln, logsumexp, xlog1py, xlogy
from jaxtyping import Array, Bool, Float

from guides.meanfield import matrix_sum
from models.linalg import total
from models.permanent import log_permanent
from models.sinkhorn import Scaling, refine, scale

EXACT_NORMALIZER = 16
"""Largest N for which the normaliser of a prior over permutations is computed exactly."""


class Projected(NamedTuple):
    """R, the entropy that the projection gives it, its warm start, and how far it is from exact."""

    match_probs: Float[Array, "N N *scenes"]
    entropy: Float[Array, "*scenes"]
    carry: Float[Array, "..."]
    error: Float[Array, "*scenes"]


class Projection(Protocol):
    """The three functions that make a projection."""

    def project(self, log_rho: Array, carry: Array, tolerance: float) -> Projected: ...

    def cold(self, log_rho: Array, tolerance: float) -> Projected: ...

    def log_normalizer(self, match_logits: Array) -> Array: ...


class sinkhorn:
    """Converged Sinkhorn scaling, warm-started from the last step's potentials."""

    @staticmethod
    def cold(log_rho: Float[Array, "N N *scenes"], tolerance: float) -> Projected:
        return sinkhorn._projected(scale(log_rho, tolerance))

    @staticmethod
    def project(
        log_rho: Float[Array, "N N *scenes"], carry: Float[Array, "N *scenes"], tolerance: float
    ) -> Projected:
        return sinkhorn._projected(refine(log_rho, carry, tolerance))

    @staticmethod
    def _projected(scaled: Scaling) -> Projected:
        entropy = -matrix_sum(xlogy(scaled.matrix, scaled.matrix))
        return Projected(scaled.matrix, entropy, scaled.potentials, scaled.error)

    @staticmethod
    def log_normalizer(match_logits: Float[Array, "N N *scenes"]) -> Float[Array, "*scenes"]:
        """log perm(A) - log(N!/N^N): what makes the ELBO a bound; zero for the uniform A = 1/N."""
        size = match_logits.shape[0]
        van_der_waerden = gammaln(size + 1.0) - size * math.log(size)
        return _log_permanent(match_logits) - van_der_waerden


class bethe:
    """Belief propagation on the matching: the marginals of the Bethe permanent."""

    @staticmethod
    def cold(log_rho: Float[Array, "N N *scenes"], tolerance: float) -> Projected:
        return bethe.project(log_rho, jnp.zeros(log_rho.shape), tolerance)

    @staticmethod
    def project(
        log_rho: Float[Array, "N N *scenes"], carry: Float[Array, "N N *scenes"], tolerance: float
    ) -> Projected:
        log_rho = jnp.maximum(log_rho, -1e30)

        def beliefs(to_rows: Array) -> tuple[Array, Array, Array]:
            to_columns = -_log_sum_of_others(log_rho + to_rows, axis=1)
            to_rows = -_log_sum_of_others(log_rho + to_columns, axis=0)
            return to_rows, jax.nn.sigmoid(log_rho + to_columns + to_rows), to_columns

        def unfinished(loop: tuple[Array, Array, Array, Array]) -> Bool[Array, ""]:
            return jnp.any(loop[2] > tolerance) & (loop[3] < 2000)

        def pass_messages(
            loop: tuple[Array, Array, Array, Array],
        ) -> tuple[Array, Array, Array, Array]:
            old, _, _, count = loop
            new, match_probs, _ = beliefs(old)
            rows = jnp.abs(total(match_probs, axis=1) - 1.0).max(axis=0)
            columns = jnp.abs(total(match_probs, axis=0) - 1.0).max(axis=0)
            error = jnp.maximum(rows, columns)
            return (
                jnp.where(error <= tolerance, old, 0.5 * (old + new)),
                match_probs,
                error,
                count + 1,
            )

        far = jnp.full(log_rho.shape[2:], jnp.inf)
        loop = (carry, jnp.zeros_like(log_rho), far, jnp.zeros((), int))
        carry, match_probs, error, _ = jax.lax.while_loop(unfinished, pass_messages, loop)
        return Projected(match_probs, bethe.entropy(match_probs), carry, error)

    @staticmethod
    def entropy(match_probs: Float[Array, "N N *scenes"]) -> Float[Array, "*scenes"]:
        return matrix_sum(
            xlog1py(1.0 - match_probs, -match_probs) - xlogy(match_probs, match_probs)
        )

    @staticmethod
    def log_normalizer(match_logits: Float[Array, "N N *scenes"]) -> Float[Array, "*scenes"]:
        return _log_permanent(match_logits)


class softmax:
    """Rows by themselves, the mixture model (GCM-GMM)."""

    @staticmethod
    def cold(log_rho: Float[Array, "N N *scenes"], tolerance: float) -> Projected:
        return softmax.project(log_rho, jnp.zeros((0, *log_rho.shape[2:])), tolerance)

    @staticmethod
    def project(
        log_rho: Float[Array, "N N *scenes"], carry: Float[Array, "0 *scenes"], tolerance: float
    ) -> Projected:
        match_probs = jax.nn.softmax(log_rho, axis=1)
        entropy = -matrix_sum(xlogy(match_probs, match_probs))
        return Projected(match_probs, entropy, carry, jnp.zeros(log_rho.shape[2:]))

    @staticmethod
    def log_normalizer(match_logits: Float[Array, "N N *scenes"]) -> Float[Array, "*scenes"]:
        return total(logsumexp(match_logits, axis=1), axis=0)


class two_sweeps:
    """Sinkhorn stopped after two sweeps, columns then rows, as the published code does."""

    log_normalizer = sinkhorn.log_normalizer

    @staticmethod
    def cold(log_rho: Float[Array, "N N *scenes"], tolerance: float) -> Projected:
        return two_sweeps.project(log_rho, jnp.zeros((0, *log_rho.shape[2:])), tolerance)

    @staticmethod
    def project(
        log_rho: Float[Array, "N N *scenes"], carry: Float[Array, "0 *scenes"], tolerance: float
    ) -> Projected:
        for _ in range(2):
            log_rho = log_rho - logsumexp(log_rho, axis=0, keepdims=True)
            log_rho = log_rho - logsumexp(log_rho, axis=1, keepdims=True)
        match_probs = jnp.exp(log_rho)
        entropy = -matrix_sum(xlogy(match_probs, match_probs))
        error = jnp.abs(total(match_probs, axis=0) - 1.0).max(axis=0)
        return Projected(match_probs, entropy, carry, error)


PROJECTIONS: dict[str, Projection] = {
    "sinkhorn": sinkhorn,
    "bethe": bethe,
    "softmax": softmax,
    "two_sweeps": two_sweeps,
}


def _log_sum_of_others(values: Float[Array, "N N *scenes"], axis: int) -> Array:
    """For each entry the log of the sum of exp of all *others* along the axis.

    Taking an entry off the total cancels only for the largest, which is therefore left out of a sum
    of its own.
    """
    largest = values == values.max(axis=axis, keepdims=True)
    first = jnp.cumsum(largest, axis=axis) == 1
    largest = largest & first
    without = logsumexp(jnp.where(largest, -1e30, values), axis=axis, keepdims=True)
    highest = values.max(axis=axis, keepdims=True)
    relative = jnp.exp(values - highest)
    others = jnp.maximum(relative.sum(axis=axis, keepdims=True) - relative, 1e-300)
    return jnp.where(largest, without, highest + jnp.log(others))


def _log_permanent(match_logits: Float[Array, "N N *scenes"]) -> Float[Array, "*scenes"]:
    """log perm(A); for a large A that is not uniform an upper bound, the product of row sums."""
    size = match_logits.shape[0]
    if size <= EXACT_NORMALIZER:
        return log_permanent(jnp.moveaxis(match_logits, (0, 1), (-2, -1)))
    uniform = size * match_logits[0, 0] + gammaln(size + 1.0)
    bound = total(logsumexp(match_logits, axis=1), axis=0)
    is_uniform = jnp.all(match_logits == match_logits[0, 0], axis=(0, 1))
    return jnp.where(is_uniform, uniform, bound)
