"""Dynamic routing (Sabour, Frosst and Hinton 2017) with known geometry.

Pairs of points vote for poses (`capsules.baselines.votes`); a vote goes where its scalar product
with the pose of a capsule is large. Such a product favours large poses over those that agree, so
votes are standardised first. The length of a capsule's pose, below one, is its activation.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from capsules.baselines.votes import Route, Routed, Votes, Ways, best_of, router


class Settings(NamedTuple):
    """Number of iterations, and spread of the first logits."""

    num_iterations: int = 3
    spread: float = 1.0
    """Standard deviation of the first logits."""


def squash(total: Float[Array, "K p"]) -> Float[Array, "K p"]:
    """|s|^2 / (1 + |s|^2) s / |s|: the same direction, a length below one."""
    square = jnp.sum(total**2, axis=-1, keepdims=True)
    return total * jnp.sqrt(square) / (1.0 + square)


def iterate(
    votes: Votes,
    object: Int[Array, " ways"],
    num_objects: int,
    logits: Float[Array, "pairs ways"],
) -> tuple[Float[Array, "pairs ways"], Float[Array, "pairs ways"], Float[Array, "K p"]]:
    """c = softmax(b), v = squash(sum c V), b + V . v: the new logits, c and v."""
    routing = jax.nn.softmax(logits, axis=1) * votes.valid[:, None]
    member = object[:, None] == jnp.arange(num_objects)
    capsules = squash(jnp.einsum("il,ilp,lk->kp", routing, votes.pose, member))
    agreement = jnp.einsum("ilp,lp->il", votes.pose, capsules[object])
    return logits + agreement, routing, capsules


def standardised(votes: Votes) -> Votes:
    """Votes scaled to mean zero and variance one in each dimension, over all valid pairs."""
    weight = jnp.broadcast_to(votes.valid[:, None, None], votes.pose.shape)
    mean = jnp.mean(votes.pose, axis=(0, 1), where=weight)
    scale = jnp.std(votes.pose, axis=(0, 1), where=weight)
    pose = (votes.pose - mean) / jnp.where(scale > 0, scale, 1.0)
    return votes._replace(pose=jnp.where(weight, pose, 0.0))


def settle(
    votes: Votes, ways: Ways, logits: Float[Array, "pairs ways"], settings: Settings
) -> tuple[Float[Array, ""], Routed]:
    """Iterate routing; also returns the sum of c V . v, by which runs are compared."""
    object, num_objects, unit = jnp.asarray(ways.object), ways.num_objects, standardised(votes)

    def once(_: Array, logits: Array) -> Array:
        return iterate(unit, object, num_objects, logits)[0]

    logits = jax.lax.fori_loop(0, settings.num_iterations, once, logits)
    ahead, routing, capsules = iterate(unit, object, num_objects, logits)
    agreement = jnp.sum(routing * (ahead - logits))

    def by_object(of_way: Float[Array, "ways p"]) -> Float[Array, "K p"]:
        return jnp.zeros((num_objects, of_way.shape[1])).at[object].add(of_way)

    mass = jnp.maximum(by_object(routing.sum(axis=0)[:, None]), 1e-12)
    mean = by_object(jnp.einsum("il,ilp->lp", routing, votes.pose)) / mass
    apart = jnp.einsum("il,ilp->lp", routing, (votes.pose - mean[object]) ** 2)
    length = jnp.linalg.norm(capsules, axis=-1)
    return agreement, Routed(routing, mean, by_object(apart) / mass, length)


def make_route(ways: Ways, num_restarts: int, settings: Settings) -> Route:
    """The best of several runs by agreement, each begun at random logits."""

    def one_run(votes: Votes, key: Array) -> tuple[Float[Array, ""], Routed]:
        logits = settings.spread * jax.random.normal(key, votes.pose.shape[:2])
        return settle(votes, ways, logits, settings)

    return best_of(one_run, num_restarts)


run = router("dynamic_routing", make_route, Settings())
"""The method; restarts begin at random logits, and the one whose votes agree most is kept."""
