"""Projections: from the unnormalised weights rho to the match probabilities R.

Three choices of q(Z), each maximising sum r log rho + H(R) over its own set with its own entropy:

- `sinkhorn`, the paper's: doubly stochastic R, entropy -sum r log r.
- `bethe`: doubly stochastic R, entropy -sum r log r + sum (1 - r) log(1 - r), tighter where R is
  near a permutation.
- `softmax`: independent rows, the mixture model.

The log of the sum over matches of prod rho^z is at least that maximum plus `log_bound`
(`docs/bound.md`), which makes the ELBO less the log normaliser of the match prior a lower bound on
the log evidence.

Scene axes last. Each projection takes and returns a `carry`, its warm start for the next step; the
first step has none and starts `cold`.
"""

import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, Float

from guides.meanfield import matrix_sum
from models.numerics.bethe import bethe_entropy, propagate
from models.numerics.linalg import total
from models.numerics.sinkhorn import Scaling, refine, scale


class Projected(NamedTuple):
    """R, its entropy as the projection defines it, a warm start, and the largest deviation from one
    of a row or column sum of R that the projection fixes."""

    match_probs: Float[Array, "N N *scenes"]
    entropy: Float[Array, "*scenes"]
    carry: Float[Array, "..."]
    error: Float[Array, "*scenes"]


class Projection(Protocol):
    """The three functions that make a projection."""

    def project(self, log_rho: Array, carry: Array, tolerance: float) -> Projected:
        """R and its entropy, started from the last step's `carry`."""

    def cold(self, log_rho: Array, tolerance: float) -> Projected:
        """R and its entropy at the first step, without a warm start."""

    def log_bound(self, size: int) -> float:
        """The constant that makes the maximum a lower bound on the log of the sum over matches."""


class sinkhorn:
    """Converged Sinkhorn scaling, warm-started from the last step's potentials."""

    @staticmethod
    def cold(log_rho: Float[Array, "N N *scenes"], tolerance: float) -> Projected:
        """Scale from a cold start."""
        return sinkhorn._projected(scale(log_rho, tolerance))

    @staticmethod
    def project(
        log_rho: Float[Array, "N N *scenes"], carry: Float[Array, "N *scenes"], tolerance: float
    ) -> Projected:
        """Scale from the last step's potentials."""
        return sinkhorn._projected(refine(log_rho, carry, tolerance))

    @staticmethod
    def _projected(scaled: Scaling) -> Projected:
        entropy = -matrix_sum(xlogy(scaled.matrix, scaled.matrix))
        return Projected(scaled.matrix, entropy, scaled.potentials, scaled.error)

    @staticmethod
    def log_bound(size: int) -> float:
        """log(N!/N^N), by van der Waerden's inequality."""
        return math.lgamma(size + 1) - size * math.log(size)


class bethe:
    """Belief propagation on the matching: the marginals of the Bethe permanent.

    Near ties messages converge slowly. If they have not converged, R is scaled to be doubly
    stochastic, which keeps the bound; the R of the step before is kept if it is better, so that no
    step lowers the bound. The carry is the messages and that R.
    """

    @staticmethod
    def cold(log_rho: Float[Array, "N N *scenes"], tolerance: float) -> Projected:
        """Propagate from messages of zero."""
        nothing = jnp.stack([jnp.zeros(log_rho.shape), jnp.full(log_rho.shape, jnp.nan)])
        return bethe.project(log_rho, nothing, tolerance)

    @staticmethod
    def project(
        log_rho: Float[Array, "N N *scenes"],
        carry: Float[Array, "2 N N *scenes"],
        tolerance: float,
    ) -> Projected:
        """Propagate from the last step's messages."""
        messages, last = carry
        log_rho = jnp.maximum(log_rho, -1e30)
        match_probs, messages, error = propagate(log_rho, messages, tolerance)
        settled = error <= tolerance

        def finish() -> tuple[Float[Array, "N N *scenes"], Float[Array, "*scenes"]]:
            scaled = scale(jnp.log(match_probs), tolerance).matrix
            better = bethe._objective(log_rho, scaled) >= bethe._objective(log_rho, last)
            kept = jnp.where(better | jnp.isnan(last), scaled, last)
            sums = jnp.stack([total(kept, axis=0), total(kept, axis=1)])
            off = jnp.abs(sums - 1.0).max(axis=(0, 1))
            return jnp.where(settled, match_probs, kept), jnp.where(settled, error, off)

        match_probs, error = jax.lax.cond(jnp.all(settled), lambda: (match_probs, error), finish)
        carry = jnp.stack([messages, match_probs])
        return Projected(match_probs, bethe_entropy(match_probs), carry, error)

    @staticmethod
    def _objective(
        log_rho: Float[Array, "N N *scenes"], match_probs: Float[Array, "N N *scenes"]
    ) -> Float[Array, "*scenes"]:
        weighed = jnp.where(match_probs > 0, match_probs * log_rho, 0.0)
        return matrix_sum(weighed) + bethe_entropy(match_probs)

    @staticmethod
    def log_bound(size: int) -> float:
        """Zero, by Gurvits' inequality."""
        return 0.0


class softmax:
    """Independent rows, the mixture model (GCM-GMM)."""

    @staticmethod
    def cold(log_rho: Float[Array, "N N *scenes"], tolerance: float) -> Projected:
        """Normalise each row; there is no warm start."""
        return softmax.project(log_rho, jnp.zeros((0, *log_rho.shape[2:])), tolerance)

    @staticmethod
    def project(
        log_rho: Float[Array, "N N *scenes"], carry: Float[Array, "0 *scenes"], tolerance: float
    ) -> Projected:
        """Normalise each row."""
        match_probs = jax.nn.softmax(log_rho, axis=1)
        entropy = -matrix_sum(xlogy(match_probs, match_probs))
        return Projected(match_probs, entropy, carry, jnp.zeros(log_rho.shape[2:]))

    @staticmethod
    def log_bound(size: int) -> float:
        """Zero: the maximum is the sum over assignments itself."""
        return 0.0


PROJECTIONS: dict[str, Projection] = {
    "sinkhorn": sinkhorn,
    "bethe": bethe,
    "softmax": softmax,
}
