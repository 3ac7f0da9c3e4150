"""Poses that a program states in another way than the closed forms do.

A pose prior may be Normal without being written as one, and a program may compute from the pose
what its likelihood takes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import Distribution

from models.errors import ConjugacyError
from models.program.sites import (
    Program,
    Unknown,
    Values,
    is_traced,
    placeholder,
    trace_sites,
    without_shape,
)
from models.scenes import Scene
from models.templates import Parts


def parts_at_moved_pose(
    program: Program,
    scene: Scene,
    given: Values | None,
    parts: Parts,
    pose: Float[Array, "K q"],
    unknown: Unknown | None = None,
) -> Parts:
    """Parts of a program whose likelihood gets a linear function of each pose, J y + b.

    Then x = F (J y + b) + m is again linear in y. The witness checks that the function takes the
    object's own pose alone.

    Args:
        pose: the value of the site `pose`; if it is abstract, the function is checked to be linear.
    """

    def moved(pose: Float[Array, "K q"]) -> Float[Array, "K p"]:
        sites = trace_sites(program, scene, {**(given or {}), "pose": pose}, unknown)
        return jnp.asarray(sites["points"]["fn"].pose)

    def slope_at(pose: Float[Array, "K q"]) -> Float[Array, "K p q"]:
        return jnp.einsum("kpkq->kpq", jax.jacfwd(moved)(pose))

    if unknown is not None and is_traced(slope_at(pose)):
        raise ConjugacyError(
            "points",
            "MatchedParts whose pose is no linear function of the site 'pose'",
            "the site 'pose' as it is, or a linear function of each object's own pose",
        )
    start = jnp.full(pose.shape, 0.5)
    slope = slope_at(start)
    shift = moved(start) - jnp.einsum("kpq,kq->kp", slope, start)
    F = jnp.einsum("ndp,npq->ndq", parts.F, slope[parts.owner])
    offset = parts.offset + jnp.einsum("ndp,np->nd", parts.F, shift[parts.owner])
    return parts._replace(F=F, offset=offset)


def moments_by_curvature(prior: Distribution) -> tuple[Float[Array, "K p"], Array]:
    """Moments of a prior that is Normal, objects apart, whatever it is written as.

    Its log density is quadratic then: minus its second derivative is the precision, and one Newton
    step from anywhere leads to the mean. That it *is* quadratic is checked at another point, or by
    the witness where the prior depends on the scene.
    """
    shape = prior.shape()
    num_objects, size = shape
    refused = ConjugacyError(
        "pose",
        f"a {type(without_shape(prior)).__name__} prior",
        "a Normal or MultivariateNormal prior, objects independent",
    )
    if not jnp.issubdtype(jnp.result_type(placeholder(prior)), jnp.floating):
        raise refused

    def log_density(pose: Float[Array, " n"]) -> Float[Array, ""]:
        return prior.log_prob(pose.reshape(shape)).sum()

    @jax.jit  # operation by operation it would be a hundred compilations
    def moments(start: Float[Array, " n"]) -> tuple[Array, Array, Array, Array]:
        hessian = jax.hessian(log_density)(start).reshape(num_objects, size, num_objects, size)
        precision = -jnp.einsum("kpkq->kpq", hessian)
        apart = jnp.abs(hessian).sum() <= (1 + 1e-9) * jnp.abs(precision).sum()
        covariance = jnp.linalg.inv(precision)
        slope = jax.grad(log_density)(start).reshape(shape)
        mean = start.reshape(shape) + jnp.einsum("kpq,kq->kp", covariance, slope)
        return mean, covariance, precision, apart

    mean, covariance, precision, apart = moments(np.full(num_objects * size, 0.5))
    if not isinstance(covariance, jax.core.Tracer):
        if not (np.linalg.eigvalsh(np.nan_to_num(precision)) > 0).all():
            raise refused
        away = np.linspace(-1.7, 1.3, num_objects * size).reshape(shape)
        expected = 0.5 * (
            np.linalg.slogdet(precision)[1].sum()
            - np.einsum("kp,kpq,kq->", away, precision, away)
            - away.size * np.log(2 * np.pi)
        )
        found = jax.jit(log_density)(np.ravel(mean + away))
        if not (apart and np.allclose(expected, found, rtol=1e-9, atol=1e-9)):
            raise refused
    return mean, covariance
