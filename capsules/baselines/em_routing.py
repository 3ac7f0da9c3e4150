"""EM routing (Hinton, Sabour and Frosst 2018) with known geometry.

Capsules are the objects of a program, and pairs of points vote for their poses
(`capsules.baselines.votes`). The M step fits a Normal to the votes that a capsule gets and sets
its activation by how closely they agree. The E step divides each pair among all ways to explain it
and a background for votes that agree with no object.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from capsules.baselines.votes import Route, Routed, Votes, Ways, best_of, router


class Settings(NamedTuple):
    """Constants, which the authors learn, and the scale of a first guess."""

    num_iterations: int = 12
    final_slope: float = 0.2
    """Limit of the lambda of the activation, multiplied by 1 - .95^(iteration + 1)."""
    vote_cost: float = 1.5
    """beta_u, for each vote and dimension."""
    capsule_cost: float = 0.0
    """beta_a."""
    background: float = 100.0
    """Density of a vote that belongs to no object."""
    first_scale: float = 0.1
    """Initial standard deviation around the vote at which a run starts."""
    floor: float = 0.01
    """Smallest standard deviation."""


class Capsules(NamedTuple):
    """Pose, its variance, and activation of each object."""

    mean: Float[Array, "K p"]
    variance: Float[Array, "K p"]
    activation: Float[Array, " K"]


def e_step(
    votes: Votes, object: Int[Array, " ways"], capsules: Capsules, background: float
) -> tuple[Float[Array, "pairs ways"], Float[Array, ""]]:
    """R_il proportional to a_k Normal(V_il; mu_k, sigma2_k), normalised with the background.

    The second value is the log density of all votes, sum_i log(background + sum of these terms).
    """
    mean, variance = capsules.mean[object], capsules.variance[object]
    energy = (votes.pose - mean) ** 2 / variance + jnp.log(2 * jnp.pi * variance)
    log_weight = jnp.log(capsules.activation)[object] - 0.5 * energy.sum(axis=-1)
    nowhere = jnp.full((len(log_weight), 1), jnp.log(background))
    log_total = jax.nn.logsumexp(jnp.concatenate([log_weight, nowhere], axis=1), axis=1)
    routing = jnp.where(votes.valid[:, None], jnp.exp(log_weight - log_total[:, None]), 0.0)
    return routing, jnp.where(votes.valid, log_total, 0.0).sum()


def m_step(
    votes: Votes,
    object: Int[Array, " ways"],
    num_objects: int,
    routing: Float[Array, "pairs ways"],
    slope: Float[Array, ""] | float,
    settings: Settings,
) -> Capsules:
    """The Normal of each capsule, and a = logistic(lambda (beta_a - sum_h cost_h)).

    cost_h = (beta_u + log sigma_h) sum R.
    """
    member = object[:, None] == jnp.arange(num_objects)
    mass = jnp.einsum("il,lk->k", routing, member)
    safe = jnp.maximum(mass, 1e-12)[:, None]
    mean = jnp.einsum("il,ilp,lk->kp", routing, votes.pose, member) / safe
    apart = (votes.pose - mean[object]) ** 2
    variance = jnp.einsum("il,ilp,lk->kp", routing, apart, member) / safe + settings.floor**2
    cost = (settings.vote_cost + 0.5 * jnp.log(variance)) * mass[:, None]
    activation = jax.nn.sigmoid(slope * (settings.capsule_cost - cost.sum(axis=1)))
    return Capsules(mean, variance, jnp.maximum(activation, 1e-12))


def settle(
    votes: Votes, ways: Ways, begin: Capsules, settings: Settings
) -> tuple[Float[Array, ""], Routed]:
    """Alternate both steps; also returns the log density of all votes, to compare runs by."""
    object, num_objects = jnp.asarray(ways.object), ways.num_objects

    def iterate(i: Array, capsules: Capsules) -> Capsules:
        routing, _ = e_step(votes, object, capsules, settings.background)
        slope = settings.final_slope * (1.0 - 0.95 ** (i + 1))
        return m_step(votes, object, num_objects, routing, slope, settings)

    end = jax.lax.fori_loop(0, settings.num_iterations, iterate, begin)
    routing, log_density = e_step(votes, object, end, settings.background)
    return log_density, Routed(routing, end.mean, end.variance, end.activation)


def begin_at(mean: Float[Array, "K p"], settings: Settings) -> Capsules:
    """Initial capsules at given poses."""
    variance = jnp.full(mean.shape, settings.first_scale**2)
    return Capsules(mean, variance, jnp.full(len(mean), 0.5))


def make_route(ways: Ways, num_restarts: int, settings: Settings) -> Route:
    """The best of several runs by the density of the votes, each started at random votes."""

    def one_run(votes: Votes, key: Array) -> tuple[Float[Array, ""], Routed]:
        mean = random_votes(key, votes, jnp.asarray(ways.object), ways.num_objects)
        return settle(votes, ways, begin_at(mean, settings), settings)

    return best_of(one_run, num_restarts)


def random_votes(
    key: Array, votes: Votes, object: Int[Array, " ways"], num_objects: int
) -> Float[Array, "K p"]:
    """For each object a random one of its votes."""

    def of_object(key: Array, k: Array) -> Float[Array, " p"]:
        possible: Bool[Array, "pairs ways"] = votes.valid[:, None] & (object == k)
        chosen = jax.random.categorical(key, jnp.log(possible).ravel())
        return votes.pose.reshape(-1, votes.pose.shape[-1])[chosen]

    drawn = jax.vmap(of_object)(jax.random.split(key, num_objects), jnp.arange(num_objects))
    return jnp.where(votes.valid.any(), drawn, 0.0)


run = router("em_routing", make_route, Settings())
"""The method; restarts begin at random votes, and the one with the highest density is kept."""
