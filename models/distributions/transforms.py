"""The bijection onto doubly stochastic matrices, registered with NumPyro."""

import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro.distributions import constraints
from numpyro.distributions.transforms import ParameterFreeTransform, biject_to

from models.distributions.match import doubly_stochastic
from models.numerics.sinkhorn import log_sinkhorn


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
