"""The faces experiment: its program, and its parts built from an appearance model."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from models.distributions.likelihood import MatchedParts
from models.distributions.match import DoublyStochasticMatch
from models.distributions.match_priors import typed_probs
from models.errors import InputError
from models.geometry import oriented_similarity
from models.program.sites import Program
from models.templates import Parts

GEOMETRIC = 4
"""Number of geometric features of a part, and of geometric dimensions of a pose."""


class FactorAnalyser(NamedTuple):
    """A factor analyser with k factors of D stacked scores."""

    loadings: Float[np.ndarray, "D k"]
    mean: Float[np.ndarray, " D"]
    noise_variance: Float[np.ndarray, " D"]
    part_dims: tuple[int, ...]
    """How many scores each part type has."""

    @property
    def num_factors(self) -> int:
        """Factors that all parts of a face share."""
        return self.loadings.shape[1]

    @property
    def slices(self) -> list[slice]:
        """The slice of the stacked scores for each part type."""
        ends = np.cumsum(self.part_dims)
        return [slice(int(end - d), int(end)) for d, end in zip(self.part_dims, ends, strict=True)]


def faces(
    points: Float[Array, "N d"] | None = None,
    present: Bool[Array, " N"] | None = None,
    point_type: Int[Array, " N"] | None = None,
    *,
    parts: Parts,
    beta: ArrayLike = 1.0,
) -> Float[Array, "N d"]:
    """A scene of parts of faces, each of a known type, in unknown order.

        pose_k  ~ Normal(0, I)                 for each face k: 4 geometric dimensions, k factors
        match   ~ a prior with mean a = 1/K    between a point and the parts of its type, else 0
        point_m ~ Normal(F_n pose_k + m_n, D_n / beta)     if point m is part n of face k

    F_n has two blocks: an oriented similarity for the place, size and direction of the part, and
    the loadings of a factor analyser for its appearance. D_n has the variances of both.

    Edit the priors here: every method reads them from this program. The closed-form methods (ds,
    exact, ...) need the pose prior to be Normal and the points to be `MatchedParts`; nuts, and svi
    with an automatic guide, take any prior.

    Args:
        points: the observed parts, padded to N rows and to the longest part; None to draw them.
        present: which rows are points; all of them by default.
        point_type: the part type of each point; by default one of each part.
        parts: the templates, of `face_parts`.
        beta: annealing parameter; divides the variances.
    """
    pose_mean = jnp.zeros(parts.pose_dim)
    pose_covariance = jnp.eye(parts.pose_dim)
    present = jnp.ones(parts.num_parts, bool) if present is None else present
    point_type = jnp.asarray(parts.type) if point_type is None else point_type

    with numpyro.plate("object", parts.num_objects):
        pose = numpyro.sample("pose", dist.MultivariateNormal(pose_mean, pose_covariance))  # p_Y
    same_type = typed_probs(point_type, present, jnp.asarray(parts.type))
    match = numpyro.sample("match", DoublyStochasticMatch(same_type))  # eq. p_Z_approx
    likelihood = MatchedParts(match, pose, parts, beta=beta, present=present)
    return numpyro.sample("points", likelihood, obs=points)  # eq. p_X


def faces_program(
    factors: FactorAnalyser, centres: Float[np.ndarray, "5 2"], num_faces: int
) -> Program:
    """The program for scenes of `num_faces` faces. Keep it: methods compile once per program."""
    return partial(faces, parts=face_parts(factors, centres, num_faces))


def face_parts(
    factors: FactorAnalyser,
    centres: Float[np.ndarray, "types 2"],
    num_faces: int,
    precision: float = 1e4,
) -> Parts:
    """Build the parts of some faces; all faces have the same parts and differ only in their poses.

    Args:
        factors: appearance model; its factors are the last dimensions of the pose.
        centres: where each part type sits in the upright face of size 1 (`FaceImages.centres`).
        precision: noise precision of the geometric features, the paper's lambda.
    """
    if num_faces < 1:
        raise InputError(f"the number of faces must be at least 1, got {num_faces}; try 3")
    upright = np.broadcast_to([1.0, 0.0], centres.shape)
    geometry, _ = oriented_similarity(jnp.asarray(np.concatenate([centres, upright], axis=1)))
    types, longest = len(centres), max(factors.part_dims)
    F = np.zeros((types, GEOMETRIC + longest, GEOMETRIC + factors.num_factors))
    offset = np.zeros(F.shape[:2])
    variance = np.ones(F.shape[:2])
    feature_mask = np.zeros(F.shape[:2], bool)
    F[:, :GEOMETRIC, :GEOMETRIC] = geometry  # eq. nxycs
    variance[:, :GEOMETRIC] = 1.0 / precision
    feature_mask[:, :GEOMETRIC] = True
    for t, scores in enumerate(factors.slices):
        own = slice(GEOMETRIC, GEOMETRIC + factors.part_dims[t])
        F[t, own, GEOMETRIC:] = factors.loadings[scores]  # eq. pxa_supp
        offset[t, own] = factors.mean[scores]
        variance[t, own] = factors.noise_variance[scores]
        feature_mask[t, own] = True
    return Parts(
        F=jnp.asarray(np.tile(F, (num_faces, 1, 1))),
        offset=jnp.asarray(np.tile(offset, (num_faces, 1))),
        variance=jnp.asarray(np.tile(variance, (num_faces, 1))),
        owner=np.repeat(np.arange(num_faces), types),
        type=np.tile(np.arange(types), num_faces),
        feature_mask=np.tile(feature_mask, (num_faces, 1)),
    )
