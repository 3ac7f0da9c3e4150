"""CCAE, the constellation capsule autoencoder (Kosiorek et al. 2019), from its description.

A set transformer encodes a scene. Each of K capsules has a feature, which its own decoder turns
into a pose, a presence, and n votes for the places of points. The points are a mixture of Normals
around all votes. The network is given neither labels nor templates.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int
from scipy.optimize import linear_sum_assignment

from guides.set_transformer import SetTransformer, may_look
from guides.simulation import Draws
from guides.training import Plan
from models.numerics.arrays import AnyArray
from models.scenes import Scene

NUM_CAPSULES, NUM_VOTES = 3, 4
FEATURE, HIDDEN = 32, 128
"""Sizes of a capsule's feature, and of a decoder's hidden layer."""

DUMMY = -2.0 * np.log(10.0)
"""Mixing logit and log density of a point that no vote explains."""

PRESENCE_NOISE = 2.0
SPARSITY_WEIGHT = DYNAMIC_WEIGHT = 10.0


class Variant(NamedTuple):
    """The size of the network and how it is trained."""

    width: int
    num_layers: int
    batch_size: int
    narrowest: float
    """The smallest scale of a vote."""
    is_published: bool

    def network(self, key: Array) -> "Ccae":
        """An untrained network."""
        return Ccae(self.width, self.num_layers, self.narrowest, key)

    def plan(self, num_steps: int) -> Plan:
        """The training plan: number of steps and batch size."""
        return Plan(num_steps, self.batch_size)

    def optimizer(self, num_steps: int) -> optax.GradientTransformation:
        """RMSProp with the published settings, or Adam with a rate that decays."""
        if not self.is_published:
            return optax.adam(optax.cosine_decay_schedule(1e-3, num_steps))
        epsilon = 1e-2 / self.batch_size**2
        return optax.rmsprop(1e-4, decay=0.9, eps=epsilon, initial_scale=1.0, momentum=0.9)


VARIANTS = {
    "published": Variant(128, 4, 32, narrowest=0.01, is_published=True),
    "small": Variant(64, 3, 64, narrowest=0.05, is_published=False),
}
"""With the published smallest scale, the small variant prefers wrong parses the longer it is
trained: `python -m benchmarks ccae-objective`."""


class Votes(NamedTuple):
    """The output of the decoders for one scene."""

    place: Float[Array, "K n 2"]
    scale: Float[Array, "K n"]
    capsule_logit: Float[Array, " K"]
    vote_logit: Float[Array, "K n"]
    dynamic: Float[Array, "K n 6"]
    """The part of the object-part relation that depends on the scene."""
    pose: Float[Array, "K 6"]

    def noisy(self, rng_key: Array) -> "Votes":
        """Add noise to the presences, as in training."""
        capsule_key, vote_key = jax.random.split(rng_key)

        def noise(key: Array, like: Array) -> Array:
            return like + PRESENCE_NOISE * jax.random.uniform(
                key, like.shape, like.dtype, -1.0, 1.0
            )

        return self._replace(
            capsule_logit=noise(capsule_key, self.capsule_logit),
            vote_logit=noise(vote_key, self.vote_logit),
        )


class Ccae(eqx.Module):
    """The network: encoder, one query for each capsule, and a decoder for each."""

    encoder: SetTransformer
    narrow: eqx.nn.Linear
    queries: Float[Array, "K feature"]
    attention: eqx.nn.MultiheadAttention
    first: eqx.nn.MLP
    second: eqx.nn.MLP
    bias: Float[Array, "K numbers"]
    static: Float[Array, "K n 6"]
    narrowest: float = eqx.field(static=True)

    def __init__(self, width: int, num_layers: int, narrowest: float, key: Array) -> None:
        keys = jax.random.split(key, 7)
        single = {"dtype": jnp.float32}
        self.encoder = SetTransformer(2, width, 4, num_layers, keys[0])
        self.narrow = eqx.nn.Linear(width, FEATURE, key=keys[1], **single)
        self.queries = jax.random.normal(keys[2], (NUM_CAPSULES, FEATURE), jnp.float32)
        biases = {f"use_{which}_bias": True for which in ("query", "key", "value", "output")}
        self.attention = eqx.nn.MultiheadAttention(4, FEATURE, **biases, key=keys[3], **single)
        outputs = 8 * NUM_VOTES + 7

        def decoder(inputs: int, outputs: int, key: Array, bias: bool) -> eqx.nn.MLP:
            return eqx.filter_vmap(
                lambda key: eqx.nn.MLP(
                    inputs, outputs, HIDDEN, 1, use_final_bias=bias, key=key, **single
                )
            )(jax.random.split(key, NUM_CAPSULES))

        self.first = decoder(FEATURE, FEATURE, keys[4], True)
        self.second = decoder(FEATURE + 1, outputs, keys[5], False)
        self.bias = jnp.zeros((NUM_CAPSULES, outputs - 6 * NUM_VOTES), jnp.float32)
        shape = (NUM_CAPSULES, NUM_VOTES, 6)
        self.narrowest = narrowest
        self.static = 0.3 * jax.random.normal(keys[6], shape, jnp.float32)

    def __call__(self, points: Float[AnyArray, "N 2"], present: Bool[AnyArray, " N"]) -> Votes:
        encoded = jax.vmap(self.narrow)(self.encoder(points, present))
        mask = may_look(present, NUM_CAPSULES)
        feature = self.attention(self.queries, encoded, encoded, mask)
        apply = eqx.filter_vmap(lambda decoder, x: decoder(x))
        feature = apply(self.first, feature)
        one = jnp.ones((NUM_CAPSULES, 1), feature.dtype)
        numbers = apply(self.second, jnp.concatenate([feature, one], axis=1))
        dynamic, rest = numbers[:, : 6 * NUM_VOTES], numbers[:, 6 * NUM_VOTES :] + self.bias
        dynamic = dynamic.reshape(NUM_CAPSULES, NUM_VOTES, 6)
        pose, capsule_logit, vote_logit, scale = jnp.split(rest, [6, 7, 7 + NUM_VOTES], axis=1)
        turned, moved = similarity(pose)
        _, relative = similarity(self.static + dynamic)
        place = jnp.einsum("kde,kne->knd", turned, relative) + moved[:, None]
        scale = jax.nn.softplus(scale + 0.5) + self.narrowest
        return Votes(place, scale, capsule_logit[:, 0], vote_logit, dynamic, pose)


def similarity(theta: Float[Array, "*batch 6"]) -> tuple[Array, Array]:
    """Matrix and translation from six numbers, of which four are used."""
    scale, angle = jax.nn.sigmoid(theta[..., 0]) + 0.01, 2 * jnp.pi * theta[..., 2]
    cosine, sine = scale * jnp.cos(angle), scale * jnp.sin(angle)
    rows = [jnp.stack(row, axis=-1) for row in ([cosine, -sine], [sine, cosine])]
    return jnp.stack(rows, axis=-2), jnp.tanh(5 * theta[..., 4:6])


def log_weights(votes: Votes, points: Float[AnyArray, "N 2"]) -> Float[Array, "N votes"]:
    """Log of mixing weight times density, of each point under each vote and, last, the dummy."""
    logits = jax.nn.log_sigmoid(votes.capsule_logit)[:, None] + jax.nn.log_sigmoid(votes.vote_logit)
    mixing = jax.nn.log_softmax(jnp.append(logits.ravel(), DUMMY))
    scale = votes.scale.ravel()
    apart = (points[:, None] - votes.place.reshape(-1, 2)) / scale[:, None]
    density = -0.5 * jnp.sum(apart**2, axis=-1) - 2 * jnp.log(scale) - jnp.log(2 * jnp.pi)
    dummy = jnp.full((len(points), 1), DUMMY, density.dtype)
    return mixing + jnp.concatenate([density, dummy], axis=1)


def log_likelihood(
    votes: Votes, points: Float[AnyArray, "N 2"], present: Bool[AnyArray, " N"]
) -> Float[Array, ""]:
    """Log likelihood of all present points."""
    of_point = jax.nn.logsumexp(log_weights(votes, points), axis=1)
    return jnp.where(present, of_point, 0.0).sum()


def winners(votes: Votes, points: Float[AnyArray, "N 2"]) -> Int[Array, " N"]:
    """The capsule of the vote that explains each point best."""
    return log_weights(votes, points)[:, :-1].argmax(axis=1) // NUM_VOTES


def sparsity(
    votes: Votes, points: Float[AnyArray, "N 2"], present: Bool[AnyArray, " N"]
) -> Float[Array, ""]:
    """Cross entropy of presence against "wins more than one point", for capsules that win any."""
    won = jnp.zeros(NUM_CAPSULES).at[winners(votes, points)].add(present)
    sign = jnp.where(won > 1, 1.0, -1.0)
    return jnp.where(won > 0, -jax.nn.log_sigmoid(sign * votes.capsule_logit), 0.0).sum()


def loss(network: Ccae, draws: Draws, rng_key: Array) -> Float[Array, ""]:
    """Mean over scenes of the published objective."""

    def of_scene(points: AnyArray, present: AnyArray, key: Array) -> Float[Array, ""]:
        votes = network(points, present).noisy(key)
        penalty = SPARSITY_WEIGHT * sparsity(votes, points, present)
        dynamic = DYNAMIC_WEIGHT * 0.5 * jnp.sum(votes.dynamic**2)
        return penalty + dynamic - log_likelihood(votes, points, present)

    keys = jax.random.split(rng_key, len(draws.points))
    return jax.vmap(of_scene)(draws.points, draws.present, keys).mean().astype(jnp.float32)


def objects_of_capsules(
    network: Ccae, draws: Draws, owner: Int[np.ndarray, " N"]
) -> Int[np.ndarray, " K"]:
    """The object of each capsule, decided by the points that it wins in labelled scenes."""
    mass, _ = read_out(network, Scene(draws.points, draws.present))
    table = np.zeros((NUM_CAPSULES, NUM_CAPSULES))
    np.add.at(table, (mass.argmax(axis=-1)[draws.present], owner[draws.part][draws.present]), 1)
    return linear_sum_assignment(table, maximize=True)[1]


def read_out(
    network: Ccae, scenes: Scene
) -> tuple[Float[np.ndarray, "scenes N K"], Float[np.ndarray, "scenes K 4"]]:
    """The winning capsule of each point, one-hot, and the poses of all capsules.

    Poses are (t_x, t_y, s cos a, s sin a) as in `models.geometry`, of learned templates.
    """
    points = np.where(scenes.present[..., None], scenes.points, 0.0).astype(np.float32)
    won, turned, moved = (np.asarray(x) for x in _read(network, points, scenes.present))
    pose = np.stack([moved[..., 0], moved[..., 1], turned[..., 0, 0], turned[..., 0, 1]], axis=-1)
    return np.eye(NUM_CAPSULES)[won], pose.astype(float)


@eqx.filter_jit
def _read(network: Ccae, points: AnyArray, present: AnyArray) -> tuple[Array, Array, Array]:
    def one(points: Array, present: Array) -> tuple[Array, Array, Array]:
        votes = network(points, present)
        return winners(votes, points), *similarity(votes.pose)

    return jax.vmap(one)(points, present)
