"""Outlines of objects, as plain arrays; `inference.plots` puts them into pictures."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

from inference.diagnostics.readout import is_averaged, is_object, most_probable_match
from inference.result import Result
from models.scenes import Scene
from models.templates import Parts, template_kinds

Outlines = Mapping[int, Float[np.ndarray, "vertices 2"]]
"""The outline of each object that has one."""


def result_outlines(result: Result, parts: Parts) -> dict[int, Float[np.ndarray, "vertices 2"]]:
    """The outline of each object that has points, at the mean of its pose.

    Where a method averages over matches (exact inference and the samplers), the mean is taken given
    the most probable match. The mean over all matches would be no pose to draw: a square turned by
    90 degrees is the same square, and over its four turns the posterior mean has no size at all. An
    object is then left out if its points are too few to fix a pose, or if the match does not keep
    them together.
    """
    match = most_probable_match(result) if is_averaged(result) else None
    outlines = {}
    for k in np.unique(result.labels[is_object(result.labels, parts.num_objects)]):
        pose = result.pose_mean[k] if match is None else _pose_at_match(result, parts, match, k)
        if pose is not None:
            outlines[int(k)] = outline_at(parts, k, pose)
    return outlines


def outline_at(
    parts: Parts, k: int, pose: Float[np.ndarray, " p"]
) -> Float[np.ndarray, "vertices 2"]:
    """The outline of object k at a pose."""
    own = np.asarray(parts.owner) == k
    vertices = np.asarray(parts.F)[own] @ pose + np.asarray(parts.offset)[own]
    return in_angular_order(vertices[:, :2])


def _pose_at_match(
    result: Result, parts: Parts, match: Int[np.ndarray, " N"], k: int
) -> Float[np.ndarray, " p"] | None:
    """The pose that fits the points of object k best when they are these parts."""
    rows = np.flatnonzero(result.labels == k)
    met = match[rows]
    kinds = template_kinds(parts)
    # The match may name an identical object: partition and match break that tie independently.
    owners = np.unique(np.asarray(parts.owner)[met])
    if len(owners) > 1 or owners[0] == len(kinds) or kinds[owners[0]] != kinds[k]:
        return None
    F, offset = np.asarray(parts.F)[met], np.asarray(parts.offset)[met]
    weight = np.sqrt(np.asarray(parts.feature_mask)[met] / np.asarray(parts.variance)[met])
    design = (weight[..., None] * F).reshape(-1, F.shape[-1])
    target = (weight * (np.asarray(result.scene.points)[rows] - offset)).ravel()
    pose, _, rank, _ = np.linalg.lstsq(design, target)
    return pose if rank == F.shape[-1] else None


def truth_outlines(
    scene: Scene, labels: Int[np.ndarray, " N"], num_objects: int | None = None
) -> dict[int, Float[np.ndarray, "vertices 2"]]:
    """Outlines through the points themselves; clutter, which is labelled K, has none."""
    points = np.asarray(scene.points)[:, :2]
    objects = np.unique(labels[is_object(labels, num_objects)])
    return {int(k): in_angular_order(points[labels == k]) for k in objects}


def in_angular_order(vertices: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "n 2"]:
    """Vertices by their angle around the centroid, so that no two edges of the outline cross."""
    x, y = (vertices - vertices.mean(axis=0)).T
    return vertices[np.argsort(np.arctan2(y, x), kind="stable")]
