"""Poses that a program computes from other sites, such as polar coordinates.

A program may draw its poses at the site `pose`, or compute them: as `numpyro.deterministic`, under
another name, by a reparameterisation. The likelihood needs only their value. To begin chains at a
known pose, such as one found by coordinate ascent, it has to be translated into values of the sites
from which poses are computed; `latents_at` does this by least squares.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import constrain_fn, unconstrain_fn
from scipy.optimize import least_squares

from inference.conditions.sets import conditioned, continuous, discrete
from models.errors import InputError
from models.program.marginal import marginal, pose_of
from models.program.sites import Program
from models.scenes import Scene

Observed = dict[str, Any]
Values = dict[str, Array]

_PROBES = 2  # prior draws at which the dependence of a pose on other sites is checked
_STARTS = 4  # starts of least squares for each chain


class Latents(NamedTuple):
    """Initial values of chains, for programs that compute their poses."""

    values: Values
    """Values of all latent sites, chains first."""
    covariance: Float[Array, "chains latents latents"]
    """Covariance of the unconstrained values of the sites of the pose, in the order of names."""


def pose_sites(program: Program, scene: Scene) -> tuple[str, ...]:
    """Names of the latent sites on which poses depend, in order.

    This is ("pose",) if the likelihood takes the value of the site `pose` as it is. It is an error
    if the program changes that value first, because draws and results have only one `pose`, that of
    the likelihood.
    """
    keys = jax.random.split(jax.random.key(0), _PROBES)
    same, depends = jax.tree.map(np.asarray, _dependence(program)(keys, scene.observed))
    if same is not None and not same.all():
        raise InputError(
            "site 'pose': the likelihood gets another pose than the value of this site; rename the "
            "site, because 'pose' stands for the pose of the likelihood"
        )
    return ("pose",) if same is not None else tuple(n for n in sorted(depends) if depends[n].any())


def is_site(program: Program, scene: Scene) -> bool:
    """Whether the pose is a latent site, so that densities can be evaluated at given poses."""
    return pose_sites(program, scene) == ("pose",)


def prior_draws(
    program: Program, observed: Observed, key: Array, count: int, given: Values | None = None
) -> Values:
    """Prior draws of all latent sites other than the match, with some sites fixed by `given`."""
    return _prior_draws(program)(jax.random.split(key, count), observed, given or {})


@functools.lru_cache(maxsize=32)
def _prior_draws(program: Program) -> Callable[[Array, Observed, Values], Values]:
    """A sampler, compiled once for each program and shape of scene."""
    draw = functools.partial(_prior_draw, program)
    return jax.jit(jax.vmap(draw, in_axes=(0, None, None)))


def _prior_draw(program: Program, key: Array, observed: Observed, given: Values) -> Values:
    drawn = seed(substitute(marginal(program), data=given), key)
    sites = trace(drawn).get_trace(**observed)
    return {
        name: site["value"]
        for name, site in sites.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


def latents_at(
    program: Program,
    observed: Observed,
    names: tuple[str, ...],
    values: Values,
    prior: Values,
    target: Float[Array, "chains K p"],
    covariance: Float[Array, "chains K p p"],
) -> Latents:
    """For each chain, find latent values whose poses are close to a target pose.

    Solves a least-squares problem in the unconstrained values of the sites on which poses depend.
    The cost is the squared distance to the target pose in units of its covariance, plus that to the
    prior mean in units of the prior standard deviations. Starts are the prior draws of least cost.
    Other sites keep their values, and so does a chain if no start ends in finite numbers.

    Args:
        names: the sites on which poses depend.
        values: values of all latent sites, one for each chain.
        prior: draws of all latent sites.
    """
    maps = _maps(program, names)
    draws = np.asarray(maps.flat(prior, observed))
    mean, scale = draws.mean(axis=0), np.maximum(draws.std(axis=0), 1e-6)
    factors = np.swapaxes(np.linalg.cholesky(np.linalg.inv(np.asarray(covariance))), -1, -2)
    begins, covariances = [], []
    for chain, (goal, factor) in enumerate(zip(np.asarray(target), factors, strict=True)):
        own = jax.tree.map(lambda x, chain=chain: x[chain], values)

        def residual(flat: Any, own: Any = own, goal: Any = goal, factor: Any = factor) -> Any:
            missed = np.asarray(maps.pose(flat, own, observed)) - goal
            return np.r_[np.einsum("kpq,kq->kp", factor, missed).ravel(), (flat - mean) / scale]

        def slope(flat: Any, own: Any = own, factor: Any = factor) -> Any:
            of_pose = np.asarray(maps.slope(flat, own, observed))
            of_pose = np.einsum("kpq,kqz->kpz", factor, of_pose).reshape(-1, len(mean))
            return np.r_[of_pose, np.diag(1 / scale)]

        cost = np.array([np.sum(residual(flat) ** 2) for flat in draws])
        nearest = np.argsort(np.nan_to_num(cost, nan=np.inf))[:_STARTS]
        ends = [least_squares(residual, draws[i], slope) for i in nearest if np.isfinite(cost[i])]
        ends = [end for end in ends if np.isfinite(end.jac).all()]
        if ends:
            best = min(ends, key=lambda end: end.cost)
            begins.append(maps.values(best.x, own, observed))
            covariances.append(np.linalg.inv(best.jac.T @ best.jac))
        else:
            begins.append(own)
            covariances.append(np.eye(len(mean)))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *begins)
    return Latents(stacked, jnp.asarray(np.stack(covariances)))


def num_latents(
    program: Program, observed: Observed, names: tuple[str, ...], values: Values
) -> int:
    """Number of unconstrained values of the named sites."""
    return _maps(program, names).flat(values, observed).shape[-1]


class _Maps(NamedTuple):
    """Maps between site values, flat unconstrained values of the sites of the pose, and poses."""

    flat: Callable[[Values, Observed], Float[Array, "draws latents"]]
    values: Callable[[Float[Array, " latents"], Values, Observed], Values]
    pose: Callable[[Float[Array, " latents"], Values, Observed], Float[Array, "K p"]]
    slope: Callable[[Float[Array, " latents"], Values, Observed], Float[Array, "K p latents"]]


@functools.lru_cache(maxsize=32)
def _maps(program: Program, names: tuple[str, ...]) -> _Maps:
    """The maps, compiled once for each program and shape of scene."""

    def unconstrained(values: Values, observed: Observed) -> Values:
        given = conditioned(marginal(program), discrete(values))
        return unconstrain_fn(given, (), observed, continuous(values))

    def flat(values: Values, observed: Observed) -> Float[Array, " latents"]:
        z = unconstrained(values, observed)
        return ravel_pytree({name: z[name] for name in names})[0]

    def values_at(latents: Float[Array, " latents"], own: Values, observed: Observed) -> Values:
        z = unconstrained(own, observed)
        _, unravel = ravel_pytree({name: z[name] for name in names})
        given = conditioned(marginal(program), discrete(own))
        return constrain_fn(given, (), observed, z | unravel(latents)) | discrete(own)

    def pose(
        latents: Float[Array, " latents"], own: Values, observed: Observed
    ) -> Float[Array, "K p"]:
        return pose_of(program, Scene(**observed), values_at(latents, own, observed))

    return _Maps(
        jax.jit(jax.vmap(flat, in_axes=(0, None))),
        jax.jit(values_at),
        jax.jit(pose),
        jax.jit(jax.jacfwd(pose)),
    )


@functools.lru_cache(maxsize=32)
def _dependence(
    program: Program,
) -> Callable[..., tuple[Bool[Array, " probes"] | None, Mapping[str, Bool[Array, " probes"]]]]:
    """Test whether poses are the site `pose` (None without one), and on which sites they depend."""

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def dependence(key: Array, observed: Observed) -> Any:
        values = _prior_draw(program, key, observed, {})

        def pose(real: Values) -> Float[Array, "K p"]:
            return pose_of(program, Scene(**observed), values | real)

        if "pose" in values:
            got = pose({})
            is_own = values["pose"].shape == got.shape and jnp.all(got == values["pose"])
            return jnp.asarray(is_own), {}
        return None, {
            name: jnp.any(x != 0) for name, x in jax.jacfwd(pose)(continuous(values)).items()
        }

    return dependence
