"""Starts of coordinate ascent: a random R, a parse of the scene, or match logits.

Functions treat one scene and are mapped over a batch, scene axes first.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from models.program.batches import Skeleton
from models.program.reading import LinearGaussianModel

_SURE = 40.0  # log weight of the pairs of a parse above other pairs of their points and parts


class Start(NamedTuple):
    """The start of a run: log weights that are projected to R, and the annealing parameter."""

    weights: Float[Array, "N N"]
    beta: Float[Array, ""]


class Structure(NamedTuple):
    """The parts of each object and the size of a basis. Plain numpy, never traced."""

    owner: Int[np.ndarray, " N"]
    members: Int[np.ndarray, "K most"]
    """Parts of each object, padded with its first part; the background is not an object."""
    valid: Bool[np.ndarray, "K most"]
    basis_size: int
    """Points that fix a pose: ceil(pose dimensions / features), at most the parts of an object."""
    pose_dim: int


def structure(skeleton: Skeleton) -> Structure:
    """The parts of each object of a program."""
    groups = skeleton.parts
    most = max(len(group) for group in groups)
    members = np.array([np.r_[g, np.repeat(g[0], most - len(g))] for g in groups])
    valid = np.arange(most) < np.array([len(g) for g in groups])[:, None]
    enough = -(-skeleton.pose_dim // skeleton.num_features)
    basis_size = min(enough, min(len(g) for g in groups))
    return Structure(np.array(skeleton.owner), members, valid, basis_size, skeleton.pose_dim)


def uniform(key: Array, model: LinearGaussianModel, beta_start: float) -> Start:
    """The paper's start: entries of R are uniform in [0, 1] for pairs that the prior allows."""
    entries = jax.random.uniform(key, model.match_logits.shape, minval=1e-6)
    return Start(_where_allowed(model, jnp.log(entries)), jnp.asarray(beta_start, float))


def parse(
    key: Array, model: LinearGaussianModel, match: Int[Array, " N"], beta_max: float
) -> Start:
    """Start from a parse: match each part to its point; the remaining entries are random.

    Args:
        match: the point of each part, -1 for none.
    """
    points = jnp.arange(len(model.points))
    pairs = points[:, None] == match
    taken = pairs.any(axis=1)[:, None] | pairs.any(axis=0)
    # Random, because identical objects with the same start would stay the same.
    rest = jnp.log(jax.random.uniform(key, pairs.shape, minval=1e-6))
    rest = jnp.where(model.seen.any(axis=1)[:, None], rest, 0.0)
    weights = jnp.where(pairs, _SURE, jnp.where(taken, 0.0, _SURE + rest))
    return Start(_where_allowed(model, weights), jnp.asarray(beta_max, float))


def logits(
    model: LinearGaussianModel, match_logits: Float[Array, "N N"], beta_start: float
) -> Start:
    """Start from given match logits, such as a network's; annealing corrects their errors."""
    return Start(_where_allowed(model, match_logits), jnp.asarray(beta_start, float))


def _where_allowed(model: LinearGaussianModel, weights: Float[Array, "N N"]) -> Float[Array, "N N"]:
    return jnp.where(jnp.isfinite(model.match_logits), weights, -jnp.inf)
