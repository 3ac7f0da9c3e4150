"""Match distributions: which point is which part.

A match is an N x N matrix of zeros and ones, row m a point (or a dummy row for a missing one),
column n a part. Three families, all with batch shapes:

- `DoublyStochasticMatch(probs)`, the paper's relaxation p_DS (eq. p_Z_approx),
- `PermutationMatch(logits)`, the Gibbs distribution over permutation matrices, exact up to N = 20,
- `MixtureMatch(logits)`, each point independent of the others (eq. p_Z).

All three are exponential families in the match, so a likelihood sum_mn z_mn C_mn keeps the
posterior of the match in the family: `tilt(C)` is that posterior, and

    log p(points | pose) = tilt(C).log_normalizer - log_normalizer.
"""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, logsumexp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int
from numpyro.distributions import Binomial, CategoricalLogits, Distribution
from numpyro.distributions.kl import kl_divergence
from numpyro.distributions.util import validate_sample

from models.distributions.constraints import (
    all_permutation_matrices,
    assignment_matrix,
    doubly_stochastic,
    log_weight_matrix,
    permutation_matrix,
)
from models.errors import InputError
from models.numerics.arrays import AnyArray
from models.numerics.assignment import best_assignment, birkhoff_draw
from models.numerics.permanent import injection_marginals, log_permanent, sample_injection

MAX_ENUMERATED = 50_000
"""Matches that `enumerate_support` lists at most."""


class _Match(Distribution):
    """What the three families share: p(Z) proportional to exp(sum_mn z_mn log_weights_mn)."""

    has_enumerate_support = True

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

    def _all_matches(self) -> Float[np.ndarray, "count N N"]:
        size = self.event_shape[-1]
        _refuse_long_list(math.factorial(size), f"{size}! permutation matrices")
        return all_permutation_matrices(size)


class DoublyStochasticMatch(_Match):
    r"""The paper's relaxed distribution over matches with mean A (eq. p_Z_approx).

    .. math:: p_{DS}(Z) = \prod_{mn} a_{mn}^{z_{mn}}, \qquad E[Z] = A

    The paper characterises it by its mean and this product, and the two need care. `log_prob`,
    `entropy` and the KL to another one read the product as it is printed: normalised if the rows
    are taken as independent, with mean A, but over permutation matrices it sums to perm(A), not one
    (N!/N^N for the uniform A). Where the match is summed out (`log_normalizer`, `tilt`) the support
    is the permutation matrices and the sum perm(A) is divided by. `sample` returns permutation
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
        """Of independent rows: -sum a log a."""
        return -weighted_sum(self.probs, self.log_weights)

    def tilt(self, log_likelihood: Float[Array, "*batch N N"]) -> "PermutationMatch":
        return PermutationMatch(self.log_weights + log_likelihood)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*shape N N"]:
        shape = self.shape(sample_shape)
        probs = jnp.broadcast_to(self.probs, shape).reshape(-1, *self.event_shape)
        columns = jax.vmap(birkhoff_draw)(jax.random.split(key, len(probs)), probs)
        return _one_hot(columns, shape[-1]).reshape(shape)


class PermutationMatch(_Match):
    r"""The Gibbs distribution over permutation matrices, with everything exact.

    .. math:: p(Z) = \exp(\textstyle\sum_{mn} z_{mn} \theta_{mn}) / \mathrm{perm}(e^\theta)

    The normaliser is a permanent, by dynamic programming over 2^N subsets; the mean is its
    gradient; draws walk the same tables back.

    Args:
        logits: theta, (..., N, N); -inf forbids a pair.
    """

    arg_constraints: ClassVar = {"logits": log_weight_matrix}
    support = permutation_matrix

    def __init__(
        self, logits: Float[Array, "*batch N N"], *, validate_args: bool | None = None
    ) -> None:
        _check_square(logits, "logits")
        self.logits = logits
        super().__init__(logits, validate_args)

    @property
    def log_normalizer(self) -> Float[Array, "*batch"]:
        return log_permanent(self.logits)

    @property
    def mean(self) -> Float[Array, "*batch N N"]:
        return injection_marginals(self.logits)

    def tilt(self, log_likelihood: Float[Array, "*batch N N"]) -> "PermutationMatch":
        return PermutationMatch(self.logits + log_likelihood)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*shape N N"]:
        columns = sample_injection(key, self.logits, sample_shape)
        return _one_hot(columns, self.event_shape[-1])


class MixtureMatch(_Match):
    r"""Every point has its part independently of the others (eq. p_Z).

    .. math:: p(Z) = \prod_m \mathrm{Cat}(z_m \mid \mathrm{softmax}(\theta_m))

    Two points may share a part; dummy rows stay at the prior and mean nothing.

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
        return logsumexp(self.logits, axis=-1).sum(axis=-1)

    @property
    def mean(self) -> Float[Array, "*batch M N"]:
        return jax.nn.softmax(self.logits, axis=-1)

    @property
    def mode(self) -> Float[Array, "*batch M N"]:
        return _one_hot(jnp.argmax(self.logits, axis=-1), self.event_shape[-1])

    def tilt(self, log_likelihood: Float[Array, "*batch M N"]) -> "MixtureMatch":
        return MixtureMatch(self.logits + log_likelihood)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*shape M N"]:
        shape = self.shape(sample_shape)[:-1]
        return _one_hot(jax.random.categorical(key, self.logits, shape=shape), self.event_shape[-1])

    def _all_matches(self) -> Float[np.ndarray, "count M N"]:
        rows, columns = self.event_shape
        _refuse_long_list(columns**rows, f"{columns}^{rows} assignments of points to parts")
        grid = np.indices((columns,) * rows).reshape(rows, -1).T
        return np.eye(columns)[grid]


def uniform_probs(num_parts: int) -> Float[Array, "N N"]:
    """a = 1/N: no point prefers any part."""
    return jnp.asarray(np.full((num_parts, num_parts), 1.0 / num_parts))


def typed_probs(
    point_type: Int[Array, " N"], present: Bool[Array, " N"], part_type: Int[Array, " N"]
) -> Float[Array, "N N"]:
    """A prior under which points only meet parts of their own type, all of them equally.

    A point of a type that has K parts meets each with 1/K. Dummy rows share out what the points
    leave: they are alike, so each takes the same share of a column.
    """
    same = (point_type[:, None] == part_type) & present[:, None]
    parts_of_type = (part_type[:, None] == part_type).sum(axis=0)
    points = same / parts_of_type
    num_dummies = jnp.maximum((~present).sum(), 1)
    # Counted in whole numbers: nothing is left of a full column, not even a rounding error.
    dummy = (parts_of_type - same.sum(axis=0)) / (parts_of_type * num_dummies)
    return jnp.where(present[:, None], points, dummy)


def presence_logits(
    presence: Bool[Array, " K"] | Int[Array, " K"],
    visibility: ArrayLike,
    present: Bool[Array, " N"],
    owner: Int[AnyArray, " N"],
    clutter_prob: ArrayLike = 0.5,
) -> Float[Array, "N N"]:
    """Log weights of a match prior under which points are parts of present objects, or clutter.

    A part of a present object is seen with probability `visibility`, and a slot for clutter is used
    with probability `clutter_prob`; the dummy rows have the parts that are not seen, all those of
    absent objects, and the slots that are not used.
    """
    here = jnp.append(jnp.asarray(presence, bool), True)[owner]  # the background always is
    prob = jnp.append(jnp.full(len(presence), visibility), clutter_prob)[owner]
    seen = jnp.where(here, jnp.log(prob), -jnp.inf)
    unseen = jnp.where(here, jnp.log1p(-prob), 0.0)
    return jnp.where(present[:, None], seen, unseen)


def point_count(
    presence: Bool[Array, " K"] | Int[Array, " K"],
    visibility: ArrayLike,
    owner: Int[AnyArray, " N"],
    clutter_prob: ArrayLike = 0.5,
) -> Distribution:
    """How many points a scene has: parts of present objects that are seen, and slots in use.

        Binomial(parts of present objects, visibility) + Binomial(slots, clutter_prob)

    With `presence_logits` it makes every part and every slot independent of the others.
    """
    num_objects = len(presence)
    there = jnp.append(jnp.asarray(presence) > 0, False)[owner].sum()
    seen = Binomial(there, visibility)
    slots = int(np.sum(np.asarray(owner) == num_objects))
    if not slots:
        return seen
    used = jnp.arange(slots + 1)
    rest = jnp.arange(len(owner) + 1)[:, None] - used
    possible = (rest >= 0) & (rest <= there)
    log_prob = seen.log_prob(jnp.where(possible, rest, there))
    log_prob = jnp.where(possible, log_prob, -jnp.inf) + Binomial(slots, clutter_prob).log_prob(
        used
    )
    # A count that is impossible has log probability -inf, of which there must be no slope.
    some = possible.any(axis=1)
    logits = logsumexp(jnp.where(some[:, None], log_prob, 0.0), axis=1)
    # NumPyro's check of logits refuses counts that are impossible.
    return CategoricalLogits(jnp.where(some, logits, -jnp.inf), validate_args=False)


@jax.jit
def weighted_sum(
    match: Float[Array, "*batch M N"], weights: Float[Array, "*batch M N"]
) -> Float[Array, "*batch"]:
    """sum_mn z_mn w_mn, where a zero of the match silences a weight of -inf."""
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


def _refuse_long_list(count: int, what: str) -> None:
    if count > MAX_ENUMERATED:
        raise InputError(
            f"enumerating the support would list {what}, {count:,} matrices, more than the limit "
            f"of {MAX_ENUMERATED:,}; use mean, mode, entropy, log_normalizer or sample, which do "
            "not list it"
        )


def _kl_of_rows(
    q: DoublyStochasticMatch, p: DoublyStochasticMatch | MixtureMatch
) -> Float[Array, "*batch"]:
    """sum r log(r / a) (eq. KL_Z): the KL of independent rows."""
    log_p = p.log_weights if isinstance(p, DoublyStochasticMatch) else jax.nn.log_softmax(p.logits)
    return -q.entropy() - weighted_sum(q.probs, log_p)


def _kl_bound(q: DoublyStochasticMatch, p: PermutationMatch) -> Float[Array, "*batch"]:
    """The term that makes the paper's ELBO a lower bound under any prior over permutations.

    Not a KL in the strict sense: R does not say how its permutations are drawn. Van der Waerden's
    inequality gives log perm(B) >= log(N!/N^N) + max_R sum r log b - sum r log r over doubly
    stochastic R, so this term takes log(N!/N^N) off. For a uniform prior it is eq. KL_Z exactly.
    """
    size = q.event_shape[-1]
    van_der_waerden = gammaln(size + 1) - size * math.log(size)
    cross = p.log_normalizer - weighted_sum(q.probs, p.logits)
    return cross - van_der_waerden - q.entropy()


def _kl_same_family(q: _Match, p: _Match) -> Float[Array, "*batch"]:
    difference = weighted_sum(q.mean, q.log_weights) - weighted_sum(q.mean, p.log_weights)
    return difference - q.log_normalizer + p.log_normalizer


kl_divergence.add((DoublyStochasticMatch, DoublyStochasticMatch), _kl_of_rows)
kl_divergence.add((DoublyStochasticMatch, MixtureMatch), _kl_of_rows)
kl_divergence.add((DoublyStochasticMatch, PermutationMatch), _kl_bound)
kl_divergence.add((PermutationMatch, PermutationMatch), _kl_same_family)
kl_divergence.add((MixtureMatch, MixtureMatch), _kl_same_family)
