"""Match distributions: which point is which part.

A match is a matrix of zeros and ones, row m a point (or a dummy row for a missing one), column n a
part. Three families, all with batch shapes:

- `DoublyStochasticMatch(probs)`, the paper's relaxation p_DS (eq. p_Z_approx),
- `PermutationMatch(logits)`, the Gibbs distribution over permutation matrices, or over injections
  of fewer rows; exact up to 20 rows,
- `MixtureMatch(logits)`, each point independent of the others (eq. p_Z).

None of them sets `has_enumerate_support`: NumPyro's automatic enumeration replaces values by their
*indices*, which would be silently wrong for matrices. `enumerate_support` lists the matches.

All three are exponential families in the match, so a log likelihood sum_mn z_mn C_mn keeps the
posterior of the match in the family: `tilt(C)` is that posterior, and

    log p(points | pose) = tilt(C).log_normalizer - log_normalizer.

Their supports and parameters are the constraints at the beginning.
"""

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.distribution import ExpandedDistribution
from numpyro.distributions.util import validate_sample

from models.errors import InputError
from models.numerics.arrays import AnyArray
from models.numerics.assignment import best_assignment, birkhoff_draws
from models.numerics.bethe import bethe_marginals, fill, log_bethe_permanent
from models.numerics.enumeration import all_assignment_matrices, all_injection_matrices
from models.numerics.permanent import injection_marginals, log_permanent, sample_injection

_SUM_TOLERANCE = 1e-6


class _Assignment(constraints._SingletonConstraint):
    """Entries 0 or 1, and a single 1 in every row."""

    is_discrete = True
    event_dim = 2

    def __call__(self, x: Float[Array, "*batch M N"]) -> Bool[Array, "*batch"]:
        x = _concrete(x)
        return _binary(x) & _sums_to_one(x, axis=-1)

    def feasible_like(self, prototype: Float[Array, "*batch M N"]) -> Float[Array, "*batch M N"]:
        return jnp.broadcast_to(jnp.eye(prototype.shape[-2], prototype.shape[-1]), prototype.shape)


class _PermutationMatrix(_Assignment):
    """Entries 0 or 1, a single 1 in every row and at most one in every column.

    With as many rows as columns that is a permutation matrix.
    """

    def __call__(self, x: Float[Array, "*batch M N"]) -> Bool[Array, "*batch"]:
        columns = _concrete(x).sum(axis=-2)
        return super().__call__(x) & (columns < 1.0 + _SUM_TOLERANCE).all(axis=-1)


class _DoublyStochastic(constraints._SingletonConstraint):
    """Entries of at least 0; every row and every column sums to one."""

    event_dim = 2

    def __call__(self, x: Float[AnyArray, "*batch N N"]) -> Bool[Array, "*batch"]:
        x = _concrete(x)
        nonnegative = (x >= 0).all(axis=(-2, -1))
        return nonnegative & _sums_to_one(x, axis=-1) & _sums_to_one(x, axis=-2)

    def feasible_like(self, prototype: Float[Array, "*batch N N"]) -> Float[Array, "*batch N N"]:
        return jnp.full(prototype.shape, 1.0 / prototype.shape[-1])


class _LogWeights(constraints._SingletonConstraint):
    """Matrices of log weights: any numbers except NaN and +inf; -inf is a weight of zero."""

    event_dim = 2

    def __call__(self, x: Float[Array, "*batch M N"]) -> Bool[Array, "*batch"]:
        return (_concrete(x) < float("inf")).all(axis=(-2, -1))  # NaN compares false

    def feasible_like(self, prototype: Float[Array, "*batch M N"]) -> Float[Array, "*batch M N"]:
        return jnp.zeros(prototype.shape)


assignment_matrix = _Assignment()
log_weight_matrix = _LogWeights()
permutation_matrix = _PermutationMatrix()
doubly_stochastic = _DoublyStochastic()


class _Match(Distribution):
    """What the three families share: p(Z) proportional to exp(sum_mn z_mn log_weights_mn)."""

    def __init__(self, parameter: Float[Array, "*batch M N"], validate_args: bool | None) -> None:
        *batch, rows, columns = jnp.shape(parameter)
        super().__init__(tuple(batch), (rows, columns), validate_args=validate_args)

    @property
    def log_weights(self) -> Float[Array, "*batch M N"]:
        """The natural parameters."""
        return self.logits

    @property
    def log_normalizer(self) -> Float[Array, "*batch"]:
        """Log of the sum of exp(sum_mn z_mn log_weights_mn) over the support."""
        raise InputError(f"{type(self).__name__} has no normaliser; use one of the three families")

    @validate_sample
    def log_prob(self, value: Float[Array, "*batch M N"]) -> Float[Array, "*batch"]:
        return weighted_sum(value, self.log_weights) - self.log_normalizer

    @property
    def mode(self) -> Float[Array, "*batch M N"]:
        """The most probable match, by the assignment algorithm."""
        return _one_hot(best_assignment(self.log_weights), self.event_shape[-1])

    @property
    def variance(self) -> Float[Array, "*batch M N"]:
        """Each entry is zero or one, so its variance follows from its mean."""
        return self.mean * (1.0 - self.mean)

    def entropy(self) -> Float[Array, "*batch"]:
        return self.log_normalizer - weighted_sum(self.mean, self.log_weights)

    def enumerate_support(self, expand: bool = True) -> Float[Array, "count *batch M N"]:
        values = jnp.asarray(self._all_matches()).reshape(
            -1, *(1,) * len(self.batch_shape), *self.event_shape
        )
        if expand:
            values = jnp.broadcast_to(values, (len(values), *self.batch_shape, *self.event_shape))
        return values

    def expand(self, batch_shape: tuple[int, ...]) -> Distribution:
        shape = tuple(batch_shape)
        return self if shape == self.batch_shape else _ExpandedMatch(self, shape)

    def _all_matches(self) -> Float[np.ndarray, "count M N"]:
        return all_injection_matrices(*self.event_shape)


class _ExpandedMatch(ExpandedDistribution):
    """An expanded match distribution; NumPyro's own enumerates only scalars."""

    def expand(self, batch_shape: tuple[int, ...]) -> Distribution:
        return _ExpandedMatch(self, tuple(batch_shape))

    def enumerate_support(self, expand: bool = True) -> Float[Array, "count *batch M N"]:
        values = self.base_dist.enumerate_support(expand=False)
        values = values.reshape(-1, *(1,) * len(self.batch_shape), *self.event_shape)
        if expand:
            values = jnp.broadcast_to(values, (len(values), *self.batch_shape, *self.event_shape))
        return values


class DoublyStochasticMatch(_Match):
    """The paper's relaxed distribution over matches with mean A (eq. p_Z_approx).

        p_DS(Z) = prod_mn a_mn^z_mn,    E[Z] = A

    The paper gives this product and this mean, which agree only for independent rows. `log_prob`,
    `entropy` and the KL to another one use the product as printed: with independent rows it is
    normalised and has mean A, but over permutation matrices it sums to perm(A), not one (N!/N^N for
    the uniform A). Where the match is summed out (`log_normalizer`, `tilt`), the support is the
    permutation matrices and the product is divided by perm(A). `sample` returns permutation
    matrices with mean exactly A, by a randomised Birkhoff-von Neumann decomposition; for the
    uniform A every permutation is equally likely.

    Args:
        probs: A, doubly stochastic, (..., N, N).
    """

    arg_constraints: ClassVar = {"probs": doubly_stochastic}
    support = permutation_matrix

    def __init__(
        self, probs: Float[Array, "*batch N N"], *, validate_args: bool | None = None
    ) -> None:
        _check_square(probs, "probs")
        if (
            not isinstance(probs, jax.core.Tracer)
            and not doubly_stochastic(np.asarray(probs)).all()
        ):
            sums = (np.asarray(probs).sum(axis=axis) for axis in (-1, -2))
            rows, columns = (f"{s.min():.6g} to {s.max():.6g}" for s in sums)
            raise InputError(
                "match probabilities must be doubly stochastic, entries of at least 0 and every "
                f"row and column summing to 1, but the rows sum to {rows} and the columns to "
                f"{columns}; scale them with models.log_sinkhorn first"
            )
        self.probs = probs
        super().__init__(probs, validate_args)

    @property
    def log_weights(self) -> Float[Array, "*batch N N"]:
        """log A, -inf where an entry is zero."""
        return _safe_log(self.probs)

    @property
    def log_normalizer(self) -> Float[Array, "*batch"]:
        """log perm(A): the sum of the printed product over permutation matrices."""
        return log_permanent(self.log_weights)

    @validate_sample
    def log_prob(self, value: Float[Array, "*batch N N"]) -> Float[Array, "*batch"]:
        return weighted_sum(value, self.log_weights)  # eq. p_Z_approx

    @property
    def mean(self) -> Float[Array, "*batch N N"]:
        return self.probs

    def entropy(self) -> Float[Array, "*batch"]:
        """-sum a log a, the entropy of independent rows."""
        return -weighted_sum(self.probs, self.log_weights)

    def tilt(self, log_likelihood: Float[Array, "*batch N N"]) -> "PermutationMatch":
        """The posterior of the match under a log likelihood sum_mn z_mn C_mn."""
        return PermutationMatch(self.log_weights + log_likelihood)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*shape N N"]:
        columns = birkhoff_draws(key, self.probs, sample_shape)
        return _one_hot(columns, self.event_shape[-1])


class PermutationMatch(_Match):
    """The Gibbs distribution over permutation matrices, or over injections of fewer rows.

        p(Z) = exp(sum_mn z_mn theta_mn) / perm(exp(theta))

    Every row has a column of its own; if there are more columns than rows, some stay free. The
    normaliser is a permanent, computed by dynamic programming over the 2^M subsets of rows. The
    mean is the gradient of its log, and draws walk back through the same tables. All of this is
    exact, for up to 20 rows.

    With `normalizer="bethe"` there may be any number of rows. The normaliser is then the Bethe
    permanent, a lower bound, so `log_prob` is an upper bound on the true one. The mean has the
    marginals of belief propagation, and draws are matches with that mean, but not from the joint
    distribution. The mode is exact with either.

    Args:
        logits: theta, (..., M, N) with M <= N; -inf forbids a pair.
        normalizer: "exact" or "bethe".
    """

    arg_constraints: ClassVar = {"logits": log_weight_matrix}
    support = permutation_matrix
    pytree_aux_fields = ("normalizer",)

    def __init__(
        self,
        logits: Float[Array, "*batch M N"],
        *,
        normalizer: Literal["exact", "bethe"] = "exact",
        validate_args: bool | None = None,
    ) -> None:
        shape = jnp.shape(logits)
        if len(shape) < 2 or shape[-2] > shape[-1]:
            raise InputError(
                "match logits must be a matrix with at most as many rows as columns, got shape "
                f"{shape}; put the smaller side in rows, or add a column for each row that may "
                "stay without a match"
            )
        if normalizer not in ("exact", "bethe"):
            raise InputError(f"the normalizer must be 'exact' or 'bethe', got {normalizer!r}")
        self.logits = logits
        self.normalizer = normalizer
        super().__init__(logits, validate_args)

    @property
    def log_normalizer(self) -> Float[Array, "*batch"]:
        """The log permanent of exp(theta), or its Bethe approximation."""
        log_sum = log_permanent if self.normalizer == "exact" else log_bethe_permanent
        return log_sum(jnp.asarray(self.logits))

    @property
    def mean(self) -> Float[Array, "*batch M N"]:
        marginals = injection_marginals if self.normalizer == "exact" else bethe_marginals
        return marginals(jnp.asarray(self.logits))

    def tilt(self, log_likelihood: Float[Array, "*batch M N"]) -> "PermutationMatch":
        """The posterior of the match under a log likelihood sum_mn z_mn C_mn."""
        return PermutationMatch(self.logits + log_likelihood, normalizer=self.normalizer)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*shape M N"]:
        if self.normalizer == "exact":
            columns = sample_injection(key, self.logits, sample_shape)
            return _one_hot(columns, self.event_shape[-1])
        square = jnp.moveaxis(fill(jnp.moveaxis(self.mean, (-2, -1), (0, 1))), (0, 1), (-2, -1))
        columns = birkhoff_draws(key, square, sample_shape)[..., : self.event_shape[0]]
        return _one_hot(columns, self.event_shape[-1])


class MixtureMatch(_Match):
    """A mixture, in which every point has its part independently of the others (eq. p_Z).

        p(Z) = prod_m Categorical(z_m | softmax(theta_m))

    Two points may share a part. Dummy rows stay at the prior and have no meaning.

    Args:
        logits: theta, (..., points, parts), normalised or not.
    """

    arg_constraints: ClassVar = {"logits": log_weight_matrix}
    support = assignment_matrix

    def __init__(
        self, logits: Float[Array, "*batch M N"], *, validate_args: bool | None = None
    ) -> None:
        if jnp.ndim(logits) < 2:
            raise InputError(
                f"match logits must be a matrix (points, parts), got shape {jnp.shape(logits)}; "
                "repeat the log probabilities of the parts for each point"
            )
        self.logits = logits
        super().__init__(logits, validate_args)

    @property
    def log_normalizer(self) -> Float[Array, "*batch"]:
        """Log of the product over rows of the sum of a row's weights."""
        return logsumexp(self.logits, axis=-1).sum(axis=-1)

    @property
    def mean(self) -> Float[Array, "*batch M N"]:
        return jax.nn.softmax(self.logits, axis=-1)

    @property
    def mode(self) -> Float[Array, "*batch M N"]:
        """The most probable part of each point."""
        return _one_hot(jnp.argmax(self.logits, axis=-1), self.event_shape[-1])

    def tilt(self, log_likelihood: Float[Array, "*batch M N"]) -> "MixtureMatch":
        """The posterior of the match under a log likelihood sum_mn z_mn C_mn."""
        return MixtureMatch(self.logits + log_likelihood)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*shape M N"]:
        shape = self.shape(sample_shape)[:-1]
        return _one_hot(jax.random.categorical(key, self.logits, shape=shape), self.event_shape[-1])

    def _all_matches(self) -> Float[np.ndarray, "count M N"]:
        return all_assignment_matrices(*self.event_shape)


@jax.jit
def weighted_sum(
    match: Float[Array, "*batch M N"], weights: Float[Array, "*batch M N"]
) -> Float[Array, "*batch"]:
    """sum_mn z_mn w_mn, where 0 times -inf is 0."""
    return jnp.where(match == 0, 0.0, match * jnp.where(match == 0, 0.0, weights)).sum(
        axis=(-2, -1)
    )


@jax.jit
def _safe_log(probs: Float[Array, "*batch M N"]) -> Float[Array, "*batch M N"]:
    """The log, -inf at zero, with a gradient of zero and not NaN there."""
    possible = jnp.asarray(probs) > 0
    return jnp.where(possible, jnp.log(jnp.where(possible, probs, 1.0)), -jnp.inf)


def _one_hot(columns: Int[Array, "*batch M"], size: int) -> Float[Array, "*batch M N"]:
    return jax.nn.one_hot(columns, size, dtype=float)


def _check_square(parameter: Float[Array, "*batch N N"], name: str) -> None:
    shape = jnp.shape(parameter)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise InputError(
            f"match {name} must be square in their last two axes, got {shape}; pad missing points "
            "with dummy rows first"
        )


def _concrete(x: Float[AnyArray, "*batch M N"]) -> Float[AnyArray, "*batch M N"]:
    """Convert a concrete array to numpy, so that checking it compiles nothing."""
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _binary(x: Float[Array, "*batch M N"]) -> Bool[Array, "*batch"]:
    return ((x == 0) | (x == 1)).all(axis=(-2, -1))


def _sums_to_one(x: Float[Array, "*batch M N"], axis: int) -> Bool[Array, "*batch"]:
    return (abs(x.sum(axis=axis) - 1.0) < _SUM_TOLERANCE).all(axis=-1)
