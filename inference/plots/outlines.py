"""What to draw of a result: its outlines, and names for identical objects that agree with others.

Plain arrays; `inference.plots` puts them into pictures.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment

from inference.diagnostics.readout import is_averaged, most_probable_match
from inference.result import Result
from models.scenes import Scene
from models.templates import Parts, template_kinds

Outlines = Mapping[int, Float[np.ndarray, "vertices 2"]]
"""The outline of each object that has one."""


def renaming(
    labels: Int[np.ndarray, " N"], parts: Parts, reference: Int[np.ndarray, " N"]
) -> Int[np.ndarray, " K"]:
    """A name for each object, so that the labels of points agree with a reference.

    Objects whose templates are the same can be swapped without any change of the posterior. Of all
    such swaps this takes the one under which the most points have the object of the reference.
    """
    num_objects = parts.num_objects
    kinds = template_kinds(parts)
    both = is_object(reference, num_objects) & is_object(labels, num_objects)
    agree = np.zeros((num_objects, num_objects))
    np.add.at(agree, (labels[both], reference[both]), 1.0)
    agree += 0.5 * np.eye(num_objects)  # no swap without need
    swap = kinds[:, None] == kinds
    return linear_sum_assignment(np.where(swap, agree, -1e6), maximize=True)[1]


def relabel(result: Result, parts: Parts, reference: Int[np.ndarray, " N"]) -> Result:
    """Rename identical objects of a result for one scene so that they agree with a reference.

    Partition, poses and columns of the match change together.
    """
    num_objects = parts.num_objects
    new_name = renaming(result.labels, parts, reference)
    old_name = np.argsort(new_name)
    groups = [np.flatnonzero(result.owner == k) for k in range(num_objects)]
    columns = np.arange(len(result.owner))  # clutter keeps its slots
    for k, group in enumerate(groups):
        columns[group] = groups[old_name[k]]
    return replace(
        result,
        match_probs=result.match_probs[:, columns],
        pose_mean=result.pose_mean[old_name],
        pose_covariance=result.pose_covariance[old_name],
        labels=np.r_[new_name, num_objects, -1][result.labels],
    )


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


def is_object(labels: Int[np.ndarray, " N"], num_objects: int | None) -> Bool[np.ndarray, " N"]:
    """Which rows belong to an object: no dummies and, where K is given, no clutter."""
    return (labels >= 0) & (labels < (np.inf if num_objects is None else num_objects))


def in_angular_order(vertices: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "n 2"]:
    """Vertices by their angle around the centroid, so that no two edges of the outline cross."""
    x, y = (vertices - vertices.mean(axis=0)).T
    return vertices[np.argsort(np.arctan2(y, x), kind="stable")]
