"""Outlines of objects, as plain arrays; `inference.plots` draws them."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

from inference.diagnostics.readout import is_averaged, is_object, most_probable_match
from inference.result import Result
from models.scenes import Scene
from models.templates import Parts, template_kinds

Outlines = Mapping[int, Float[np.ndarray, "vertices 2"]]
"""Outlines by object, for the objects that have one."""


def result_outlines(result: Result, parts: Parts) -> dict[int, Float[np.ndarray, "vertices 2"]]:
    """The outline of each object that has points, at the mean of its pose.

    If a method averages over matches (exact inference and the samplers), the pose is fitted to the
    most probable match instead. The posterior mean cannot be drawn: averaged over the four turns of
    a square, its scale is zero. An object is then left out if it has too few points to fix a pose,
    or if the match divides them between objects.
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
    """The least-squares pose of object k given the match; None if the match does not fix it."""
    rows = np.flatnonzero(result.labels == k)
    met = match[rows]
    kinds = template_kinds(parts)
    # The match may name an identical object instead, since it breaks ties by itself.
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
    """Outlines through the points themselves; clutter, which has label K, has none."""
    points = np.asarray(scene.points)[:, :2]
    objects = np.unique(labels[is_object(labels, num_objects)])
    return {int(k): in_angular_order(points[labels == k]) for k in objects}


def in_angular_order(vertices: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "n 2"]:
    """Sort vertices by angle around their centroid, so that edges of the outline do not cross."""
    x, y = (vertices - vertices.mean(axis=0)).T
    return vertices[np.argsort(np.arctan2(y, x), kind="stable")]
