"""A set transformer: attention between the points of a scene, in any order; dummy rows are masked.

It computes in 32 bits, which is twice as fast and enough for a network.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from models.numerics.arrays import AnyArray


class Block(eqx.Module):
    """Attention between points and a small network for each, both with a residual connection."""

    attention: eqx.nn.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    mlp_norm: eqx.nn.LayerNorm

    def __init__(self, width: int, num_heads: int, key: Array) -> None:
        attention_key, mlp_key = jax.random.split(key)
        biases = {f"use_{which}_bias": True for which in ("query", "key", "value", "output")}
        self.attention = eqx.nn.MultiheadAttention(
            num_heads, width, **biases, dtype=jnp.float32, key=attention_key
        )
        self.attention_norm = eqx.nn.LayerNorm(width, dtype=jnp.float32)
        self.mlp = eqx.nn.MLP(width, width, 2 * width, depth=1, dtype=jnp.float32, key=mlp_key)
        self.mlp_norm = eqx.nn.LayerNorm(width, dtype=jnp.float32)

    def __call__(
        self, points: Float[Array, "N width"], present: Bool[AnyArray, " N"]
    ) -> Float[Array, "N width"]:
        looked = self.attention(points, points, points, may_look(present, len(points)))
        points = jax.vmap(self.attention_norm)((points + looked) * present[:, None])
        return jax.vmap(self.mlp_norm)(points + jax.vmap(self.mlp)(points))


class SetTransformer(eqx.Module):
    """Features of each point that depend on all points, equivariant to permutations."""

    embed: eqx.nn.Linear
    blocks: list[Block]

    def __init__(
        self, num_features: int, width: int, num_heads: int, num_layers: int, key: Array
    ) -> None:
        embed_key, *keys = jax.random.split(key, num_layers + 1)
        self.embed = eqx.nn.Linear(num_features, width, dtype=jnp.float32, key=embed_key)
        self.blocks = [Block(width, num_heads, key) for key in keys]

    def __call__(
        self, points: Float[AnyArray, "N d"], present: Bool[AnyArray, " N"]
    ) -> Float[Array, "N width"]:
        features = jax.vmap(self.embed)(points.astype(jnp.float32))
        for block in self.blocks:
            features = block(features, present)
        return features


def may_look(present: Bool[AnyArray, " N"], num_queries: int) -> Bool[Array, "queries N"]:
    """The attention mask: every query attends to the rows that are present."""
    return jnp.broadcast_to(present, (num_queries, len(present)))
