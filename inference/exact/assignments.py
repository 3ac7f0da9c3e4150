"""The sum over all matches under a mixture prior, where points may share a part.

Each point can be any of the N parts, so there are N^M assignments. They are summed one object at a
time. An object with n parts has (n + 1)^M maps, which send each point to one of its parts or to no
part. There are K^M labellings, which give each point an object. Both are listed, so this is for
small scenes. Scene axes are last, as in `permutations`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int

from inference.exact.parses import Draws, draw_poses
from inference.exact.permutations import Moments, pair_terms, part_design
from inference.result import grouping_of
from models.errors import InputError
from models.numerics.linalg import (
    cholesky,
    condition,
    covariance_of,
    innovations,
    rounded_up,
    total,
)
from models.program.batches import Skeleton
from models.program.reading import LinearGaussianModel

MAX_TERMS = 500_000
"""Largest number of maps of one object, or of labellings; larger scenes are refused."""


class Maps(NamedTuple):
    """Every way to send points to the parts of one object."""

    part: Int[np.ndarray, "maps M"]
    """The part of each point, as an index into the parts of the object; their number for none."""
    mask: Int[np.ndarray, " maps"]
    """The points that the object takes, as a bit mask."""
    counts: Int[np.ndarray, "patterns n"]
    """Number of points on each part; the precision of the pose depends only on these."""
    pattern: Int[np.ndarray, " maps"]


class Listing(NamedTuple):
    """Maps and labellings for a program and a number of points."""

    num_objects: int
    parts: tuple[Int[np.ndarray, " n"], ...]
    """The parts of each object and, if there is clutter, the slots of the background."""
    owner: Int[np.ndarray, " N"]
    maps: tuple[Maps, ...]
    labels: Int[np.ndarray, "labellings M"]
    masks: Int[np.ndarray, "K labellings"]
    """The points that each labelling gives to each object."""
    grouping: Int[np.ndarray, " labellings"]
    """Index of the partition of the points, which does not depend on the names of objects."""
    num_points: int

    @property
    def num_cells(self) -> int:
        """Largest number of terms of a scene that are in memory at once."""
        return max(len(self.labels), *(len(maps.part) for maps in self.maps))


class Sums(NamedTuple):
    """Log weights of the maps of each object and of the labellings, with poses integrated out."""

    maps: tuple[Float[Array, "maps *scenes"], ...]
    mean: tuple[Float[Array, "maps p *scenes"], ...]
    covariance: tuple[Float[Array, "patterns p p *scenes"], ...]
    subsets: tuple[Float[Array, "masks *scenes"], ...]
    labellings: Float[Array, "labellings *scenes"]

    @property
    def evidence(self) -> Float[Array, "*scenes"]:
        """Log of the sum over all assignments of the points."""
        return logsumexp(self.labellings, axis=0)


def make_listing(skeleton: Skeleton, num_points: int) -> Listing:
    """List maps and labellings; raise an error with their number if there are too many."""
    owner, parts = np.array(skeleton.owner), tuple(skeleton.groups)
    _refuse_if_too_large(num_points, tuple(len(p) for p in parts), skeleton.pose_dim)
    labels = _products(len(parts), num_points)
    bits = 1 << np.arange(num_points)
    together = grouping_of(labels, skeleton.num_objects).reshape(len(labels), -1)
    return Listing(
        skeleton.num_objects,
        parts,
        owner,
        tuple(_list_maps(num_points, len(p)) for p in parts),
        labels,
        np.stack([(labels == k) @ bits for k in range(len(parts))]),
        np.unique(together, axis=0, return_inverse=True)[1].reshape(-1),
        num_points,
    )


def sum_over_assignments(model: LinearGaussianModel, listing: Listing) -> Sums:
    """Compute the log weights of maps and labellings; points are the first rows of the model."""
    objects = range(len(listing.parts))
    weights, means, covariances = zip(
        *(_object_terms(model, k, listing) for k in objects), strict=True
    )
    num_masks = 1 << listing.num_points
    subsets = []
    for maps, weight in zip(listing.maps, weights, strict=True):
        highest = jax.ops.segment_max(weight, maps.mask, num_masks)
        summed = jax.ops.segment_sum(jnp.exp(weight - highest[maps.mask]), maps.mask, num_masks)
        subsets.append(highest + jnp.log(summed))
    labellings = sum(subsets[k][listing.masks[k]] for k in objects)
    return Sums(weights, means, covariances, tuple(subsets), jnp.asarray(labellings))


def _object_terms(
    model: LinearGaussianModel, k: int, listing: Listing
) -> tuple[
    Float[Array, "maps *scenes"],
    Float[Array, "maps p *scenes"],
    Float[Array, "patterns p p *scenes"],
]:
    """The log weight of each map of an object, and mean and covariance of the pose given the map.

    This is `permutations.object_grid` for any number c of points on a part. Their residuals enter
    as one observation, sqrt(c) times their mean, which has the noise of a single residual. The rest
    of their density is the sum of squared distances from the mean.
    """
    parts, maps = listing.parts[k], listing.maps[k]
    score, residual = (x[:-1] for x in pair_terms(model, k, parts, listing.num_points))
    counts = maps.counts.astype(float)
    rows = part_design(model, parts)[:, :, :, None] * np.sqrt(counts).T[:, None, None, :, None]
    k = min(k, len(model.pose_mean) - 1)  # any pose will do for the background
    prior_factor = cholesky(model.pose_covariance[k])[:, :, None]
    given = condition(prior_factor, rows.reshape(-1, *rows.shape[2:]))
    log_scale = total(jnp.log(given.deviation), axis=0)

    observed, weight = [], -log_scale[maps.pattern]
    for n in range(len(parts)):
        taken = (maps.part == n).T[:, :, None].astype(float)
        count = np.maximum(counts[maps.pattern, n], 1.0)[:, None]
        weight = weight + total(taken * score[:, n, None], axis=0)
        for own in jnp.moveaxis(residual[:, n], 1, 0)[:, :, None]:  # a feature, (M, 1, scenes)
            mean = total(taken * own, axis=0) / count
            weight = weight - 0.5 * total(taken * (own - mean) ** 2, axis=0)
            observed.append(mean * np.sqrt(count))
    steps = jax.tree.map(lambda x: x[..., maps.pattern, :], given)
    start = jnp.zeros((model.pose_mean.shape[1], 1, 1))
    z, shift = innovations(steps, jnp.stack(observed), start)
    mean = model.pose_mean[k] + jnp.moveaxis(shift, 1, 0)
    covariance = jnp.moveaxis(covariance_of(given.factor), 2, 0)
    return weight - 0.5 * total(z**2, axis=0), mean, covariance


def moments(model: LinearGaussianModel, listing: Listing, sums: Sums) -> Moments:
    """Posterior marginals and moments; the match of a dummy row stays at its prior."""
    num_masks = 1 << listing.num_points
    labelling_probs = jnp.exp(sums.labellings - sums.evidence)
    columns, means, covariances = [], [], []
    for k, maps in enumerate(listing.maps):
        taken = jax.ops.segment_sum(labelling_probs, listing.masks[k], num_masks)
        probs = jnp.exp(sums.maps[k] - sums.subsets[k][maps.mask]) * taken[maps.mask]
        num_parts = len(listing.parts[k])
        columns.append(
            jnp.stack(
                [
                    jax.ops.segment_sum(probs, maps.part[:, m], num_parts + 1)[:num_parts]
                    for m in range(listing.num_points)
                ]
            )
        )
        mean = jnp.einsum("c...,cp...->p...", probs, sums.mean[k])
        shift = sums.mean[k] - mean
        between = jnp.einsum("c...,cp...,cq...->pq...", probs, shift, shift)
        by_pattern = jax.ops.segment_sum(probs, maps.pattern, len(maps.counts))
        within = jnp.einsum("c...,cpq...->pq...", by_pattern, sums.covariance[k])
        means.append(mean)
        covariances.append(rounded_up(within + between))
    order = np.argsort(np.concatenate(listing.parts))
    of_points = jnp.concatenate(columns, axis=1)[:, order]
    dummies = jax.nn.softmax(model.match_logits[listing.num_points :], axis=1)
    dummies = jnp.broadcast_to(dummies, (*dummies.shape[:2], of_points.shape[-1]))
    poses = (jnp.stack(x[: listing.num_objects]) for x in (means, covariances))
    return Moments(jnp.concatenate([of_points, dummies]), *poses)


def best_partitions(
    listing: Listing, sums: Sums, count: int
) -> tuple[Int[Array, "best scenes M"], Float[Array, "best scenes"]]:
    """The most probable partitions, each as its best labelling, and their probabilities."""
    probs = jnp.exp(sums.labellings - sums.evidence)
    num_groupings = int(listing.grouping.max()) + 1
    by_grouping = jax.ops.segment_sum(probs, listing.grouping, num_groupings)
    found, which = jax.lax.top_k(by_grouping.T, min(count, num_groupings))
    of_grouping = listing.grouping[:, None, None] == which.T
    best = jnp.where(of_grouping, sums.labellings[:, None], -jnp.inf).argmax(axis=0)
    return jnp.asarray(listing.labels)[best], found.T


def best_match(listing: Listing, sums: Sums) -> Int[Array, "M scenes"]:
    """The part of each point in the single most probable assignment."""
    num_masks = 1 << listing.num_points
    pairs = list(zip(listing.maps, sums.maps, strict=True))
    highest = [jax.ops.segment_max(weight, maps.mask, num_masks) for maps, weight in pairs]
    totals = sum(x[mask] for x, mask in zip(highest, listing.masks, strict=True))
    labelling = jnp.asarray(totals).argmax(axis=0)
    match = jnp.zeros((listing.num_points, *labelling.shape), int)
    for k, (maps, weight) in enumerate(pairs):
        wanted = jnp.asarray(listing.masks[k])[labelling]
        way = jnp.where(maps.mask[:, None] == wanted, weight, -jnp.inf).argmax(axis=0)
        match = _placed(listing, k, way, match)
    return match


def draw(key: Array, model: LinearGaussianModel, listing: Listing, sums: Sums, count: int) -> Draws:
    """Draw a labelling, a map for each object and the poses, for a single scene."""
    key, label_key = jax.random.split(key)
    labelling = jax.random.categorical(label_key, sums.labellings[:, 0], shape=(count,))
    match = jnp.zeros((listing.num_points, count), int)
    for k, maps in enumerate(listing.maps):
        key, map_key = jax.random.split(key)
        weight, mask = sums.maps[k][:, 0], jnp.asarray(maps.mask)

        def one(inputs: tuple[Array, Array], weight: Array = weight, mask: Array = mask) -> Array:
            own_key, wanted = inputs
            return jax.random.categorical(own_key, jnp.where(mask == wanted, weight, -jnp.inf))

        wanted = jnp.asarray(listing.masks[k])[labelling]
        way = jax.lax.map(one, (jax.random.split(map_key, count), wanted))
        match = _placed(listing, k, way, match)
    return Draws(match.T, draw_poses(key, model, listing.owner, match.T))


def _placed(
    listing: Listing, k: int, way: Int[Array, " n"], match: Int[Array, "M n"]
) -> Int[Array, "M n"]:
    """Fill in the parts of the points that object k takes under the chosen maps."""
    names = jnp.append(jnp.asarray(listing.parts[k]), -1)
    part = names[jnp.asarray(listing.maps[k].part)[way]].T
    return jnp.where(part >= 0, part, match)


def _list_maps(num_points: int, num_parts: int) -> Maps:
    part = _products(num_parts + 1, num_points)
    counts = (part[:, :, None] == np.arange(num_parts)).sum(axis=1)
    patterns, pattern = np.unique(counts, axis=0, return_inverse=True)
    mask = (part < num_parts) @ (1 << np.arange(num_points))
    return Maps(part, mask, patterns, pattern.reshape(-1))


def _products(size: int, repeat: int) -> Int[np.ndarray, "all repeat"]:
    return np.indices((size,) * repeat).reshape(repeat, -1).T


def _refuse_if_too_large(num_points: int, sizes: tuple[int, ...], pose_dim: int) -> None:
    """Raise an error with the cost of a scene before anything is allocated."""
    terms = max((max(sizes) + 1) ** num_points, len(sizes) ** num_points)
    if terms > MAX_TERMS:
        memory = 8 * 20 * pose_dim**2 * terms / 2**30  # as measured
        raise InputError(
            f"exact inference on {num_points} points under a mixture prior sums over "
            f"{sum(sizes)}^{num_points} assignments, for which it lists {terms:,} terms, about "
            f"{memory:,.1f} GiB, more than the limit of {MAX_TERMS:,}; use the variational method "
            "(gmm) instead"
        )
