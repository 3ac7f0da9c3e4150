"""Names for identical objects, so that they agree with the truth or with another result."""

from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Int
from scipy.optimize import linear_sum_assignment

from inference.result import Result
from models.templates import Parts, template_kinds


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


def is_object(labels: Int[np.ndarray, " N"], num_objects: int | None) -> Bool[np.ndarray, " N"]:
    """Which rows belong to an object: no dummies and, where K is given, no clutter."""
    return (labels >= 0) & (labels < (np.inf if num_objects is None else num_objects))
