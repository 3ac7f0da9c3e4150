"""Constraints on match matrices, and the bijection onto doubly stochastic ones."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpyro.distributions import constraints
from numpyro.distributions.transforms import ParameterFreeTransform, biject_to

from models.numerics.arrays import AnyArray
from models.numerics.sinkhorn import log_sinkhorn

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


class DoublyStochasticTransform(ParameterFreeTransform):
    """Real (N-1) x (N-1) matrices to the interior of the doubly stochastic N x N matrices.

    The matrix is padded with a zero row and column and Sinkhorn-scaled. It is a bijection: scaling
    keeps the contrasts log r_ij - log r_iN - log r_Nj + log r_NN, and they are the matrix itself.
    """

    domain = constraints.real_matrix
    codomain = doubly_stochastic

    def __call__(self, x: Float[Array, "*batch n n"]) -> Float[Array, "*batch N N"]:
        padding = [(0, 0)] * (jnp.ndim(x) - 2) + [(0, 1), (0, 1)]
        return jnp.exp(log_sinkhorn(jnp.pad(x, padding)))

    def _inverse(self, y: Float[Array, "*batch N N"]) -> Float[Array, "*batch n n"]:
        log_y = jnp.log(y)
        rows = log_y - log_y[..., -1:]
        return (rows - rows[..., -1:, :])[..., :-1, :-1]

    def log_abs_det_jacobian(
        self,
        x: Float[Array, "*batch n n"],
        y: Float[Array, "*batch N N"],
        intermediates: None = None,
    ) -> Float[Array, "*batch"]:
        """Sum of all log r_ij minus log det(I - C'C), where C is y without its last column.

        The Jacobian is that of the free (N-1) x (N-1) block of y. With E the map from a change of
        that block to the change of y, x = E' log y, so the inverse has the Jacobian
        E' diag(1/y) E. Its determinant is that of the complementary form on the 2N - 1 sum
        constraints, a bipartite Laplacian, divided by the product of all entries.
        """
        columns = y[..., :, :-1]
        size = columns.shape[-1]
        gram = jnp.swapaxes(columns, -2, -1) @ columns
        _, log_det = jnp.linalg.slogdet(jnp.eye(size) - gram)
        return jnp.log(y).sum(axis=(-2, -1)) - log_det

    def forward_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-2], shape[-2] + 1, shape[-1] + 1)

    def inverse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-2], shape[-2] - 1, shape[-1] - 1)


@biject_to.register(type(doubly_stochastic))
def _biject_to_doubly_stochastic(
    constraint: constraints.Constraint,
) -> DoublyStochasticTransform:
    return DoublyStochasticTransform()


def all_injection_matrices(rows: int, columns: int) -> Float[np.ndarray, "count rows columns"]:
    """Every way to give each row a column of its own, in lexicographic order of those columns."""
    listed = list(itertools.permutations(range(columns), rows))
    return np.eye(columns)[np.array(listed, int).reshape(-1, rows)]


def _concrete(x: Float[AnyArray, "*batch M N"]) -> Float[AnyArray, "*batch M N"]:
    """Convert a concrete array to numpy, so that checking it compiles nothing."""
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _binary(x: Float[Array, "*batch M N"]) -> Bool[Array, "*batch"]:
    return ((x == 0) | (x == 1)).all(axis=(-2, -1))


def _sums_to_one(x: Float[Array, "*batch M N"], axis: int) -> Bool[Array, "*batch"]:
    return (abs(x.sum(axis=axis) - 1.0) < _SUM_TOLERANCE).all(axis=-1)
