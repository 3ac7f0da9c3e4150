"""Read a result: the part of each point, the place of each object, and names of objects.

Identical objects can be renamed to agree with the truth or with another result.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.optimize import linear_sum_assignment

from inference.diagnostics.posterior_draws import precision_factor
from inference.exact.parses import poses_given
from inference.result import Result
from models.numerics.devices import compiled
from models.numerics.linalg import covariance_of
from models.program.reading import LinearGaussianModel, read
from models.program.sites import Program
from models.templates import Parts, template_kinds

_ANY_ANGLE = np.pi / np.sqrt(3)
"""Standard deviation of an angle that is uniform on the circle."""


class Similarity(NamedTuple):
    """Translation, scale and angle of an object, with standard deviations."""

    translation: Float[np.ndarray, " 2"]
    scale: float
    angle: float
    """In radians, clockwise when the y axis points up (see `models.geometry`)."""
    translation_sd: Float[np.ndarray, " 2"]
    scale_sd: float
    angle_sd: float


def is_averaged(result: Result) -> bool:
    """Whether match probabilities and pose moments are averages over many matches.

    This is true of exact inference and of samplers. A variational result settles on one match or a
    few similar ones, even if it has draws.
    """
    return result.best_match is not None or (result.draws is not None and result.elbo is None)


def most_probable_match(result: Result) -> Int[np.ndarray, " N"]:
    """The part of each row of a single scene, -1 for dummy rows and points without an object."""
    present = np.asarray(result.scene.present)
    if result.best_match is not None:
        match = result.best_match
    elif is_averaged(result):
        match = _most_frequent_match(result)
    elif np.allclose(result.match_probs.sum(axis=0), 1.0, atol=1e-3):
        log_probs = np.log(np.maximum(result.match_probs, 1e-300))
        match = linear_sum_assignment(log_probs, maximize=True)[1]
    else:  # a mixture, in which points may share a part
        match = result.match_probs.argmax(axis=1)
    return np.where(present if result.explained is None else result.explained, match, -1)


def _most_frequent_match(result: Result) -> Int[np.ndarray, " N"]:
    """The most frequent match among the draws that have the result's partition.

    Match probabilities average over the turns of a square, so they do not say which parts go
    together; single draws do.
    """
    assert result.draws is not None
    match = result.draws["match"].reshape(-1, result.draws["match"].shape[-1])
    labels = np.where(result.scene.present, result.owner[match], -1)
    together = result.labels[:, None] == result.labels
    alike = (labels[:, :, None] == labels[:, None, :]) == together
    distinct, counts = np.unique(match[alike.all(axis=(1, 2))], axis=0, return_counts=True)
    return distinct[counts.argmax()]


@compiled
def _poses_given(
    model: LinearGaussianModel, owner: Int[np.ndarray, " N"], match: Int[np.ndarray, " N"]
) -> tuple[Float[Array, "K p"], Float[Array, "K p p"]]:
    mean, factor = poses_given(model, owner, match[None])
    return mean[..., 0].T, jnp.moveaxis(covariance_of(factor)[..., 0], 2, 0)


def poses_given_match(
    program: Program, result: Result, match: Int[np.ndarray, " N"]
) -> tuple[Float[np.ndarray, "K p"], Float[np.ndarray, "K p p"]]:
    """Mean and covariance of the pose of each object given a match.

    Methods that average over matches also average over the turns of a square, so their mean pose
    has scale zero. Given the match the pose has the Normal of eqs. Lambda_k and mu_k. Further sites
    (the kind of each object, the noise precision) have the values that go with the match.
    """
    given = conditions_at(result, match)
    model = read(program, result.scene, given)
    if model.precision_prior is not None:  # use the mean of its factor
        concentration, rate = precision_factor(model, result)
        model = read(program, result.scene, given | {"precision": concentration / rate})
    mean, covariance = _poses_given(model, np.asarray(result.owner), np.asarray(match))
    return np.asarray(mean), np.asarray(covariance)


def conditions_at(result: Result, match: Int[np.ndarray, " N"]) -> dict[str, Any]:
    """Values of a program's further sites that go with a match of the result.

    For a sampler they summarise its draws with this match: the most frequent value of a discrete
    site, the median of a continuous one. Otherwise they are those of the condition of the largest
    weight.
    """
    if not is_averaged(result) or result.draws is None:
        return dict(result.conditions)
    drawn = {name: x.reshape(-1, *x.shape[2:]) for name, x in result.draws.items()}
    own = (drawn.pop("match") == match).all(axis=-1)
    drawn.pop("pose")
    return {name: _typical(x[own] if own.any() else x) for name, x in drawn.items()}


def _typical(draws: np.ndarray) -> np.ndarray:
    if np.issubdtype(draws.dtype, np.floating):
        return np.median(draws, axis=0)
    values, counts = np.unique(draws, axis=0, return_counts=True)
    return values[counts.argmax()]


def similarity_of(
    mean: Float[np.ndarray, " 4"], covariance: Float[np.ndarray, "4 4"]
) -> Similarity:
    """Translation, scale and angle of a pose (t_x, t_y, s cos a, s sin a).

    The standard deviations come from the linearised map (the delta method). That of the angle is at
    most that of a uniform angle.
    """
    cosine, sine = mean[2:]
    scale = float(np.hypot(cosine, sine))
    sd = np.sqrt(np.diag(covariance))
    along = np.array([cosine, sine]) / scale if scale > 0 else np.array([1.0, 0.0])
    across = np.array([-along[1], along[0]])
    block = covariance[2:, 2:]
    return Similarity(
        translation=mean[:2],
        scale=scale,
        angle=float(np.arctan2(sine, cosine)),
        translation_sd=sd[:2],
        scale_sd=float(np.sqrt(along @ block @ along)),
        angle_sd=min(float(np.sqrt(across @ block @ across)) / max(scale, 1e-300), _ANY_ANGLE),
    )


def renaming(
    labels: Int[np.ndarray, " N"], parts: Parts, reference: Int[np.ndarray, " N"]
) -> Int[np.ndarray, " K"]:
    """New names of the objects, chosen to agree with a reference labelling of the points.

    Objects with the same template can be swapped without changing the posterior. Of all such swaps
    this returns the one under which most points have the object of the reference.
    """
    num_objects = parts.num_objects
    kinds = template_kinds(parts)
    both = is_object(reference, num_objects) & is_object(labels, num_objects)
    agree = np.zeros((num_objects, num_objects))
    np.add.at(agree, (labels[both], reference[both]), 1.0)
    agree += 0.5 * np.eye(num_objects)  # break ties in favour of no swap
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
    """Which rows belong to an object: not dummy rows and, if K is given, not clutter."""
    return (labels >= 0) & (labels < (np.inf if num_objects is None else num_objects))
