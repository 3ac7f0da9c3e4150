"""Random programs for the tests of the methods, one by one or many to a batch.

In a batch, those of one structure are stacked, and one NumPyro program looks up which of them it is
by the scene's `point_type`, which all rows of a scene share here.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from models.distributions.likelihood import MatchedParts
from models.distributions.match import DoublyStochasticMatch, MixtureMatch, PermutationMatch
from models.program.batches import read_scenes
from models.program.reading import LinearGaussianModel
from models.scenes import Scene
from models.templates import Parts
from tests import oracle
from tests.oracle_inference import Problem


class Design(NamedTuple):
    """What a random program does not vary in: shapes, and which part belongs to whom."""

    owner: tuple[int, ...]
    pose_dim: int
    num_features: int
    make: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    """F and offset of some random parts."""


def _similarity(rng: np.random.Generator, parts: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = rng.normal(size=(2, parts))
    one, zero = np.ones(parts), np.zeros(parts)
    F = np.stack([np.stack([one, zero, x, y], -1), np.stack([zero, one, y, -x], -1)], axis=1)
    return F, np.zeros((parts, 2))


def translation(rng: np.random.Generator, parts: int) -> tuple[np.ndarray, np.ndarray]:
    return np.tile(np.eye(2), (parts, 1, 1)), rng.normal(size=(parts, 2))


def _general(rng: np.random.Generator, parts: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.normal(size=(parts, 3, 2)), rng.normal(size=(parts, 3))


DESIGNS = {
    "similarity": Design((0, 0, 0, 1, 1), 4, 2, _similarity),
    "translation": Design((0, 0, 1, 2, 2), 2, 2, translation),
    "interleaved": Design((0, 1, 1, 0, 1), 2, 3, _general),
    "one_object": Design((0, 0, 0), 4, 2, _similarity),
    "six_parts": Design((0, 0, 0, 1, 1, 1), 4, 2, _similarity),
    "seven_parts": Design((0, 0, 1, 1, 1, 2, 2), 2, 2, translation),
}


def make_problem(
    rng: np.random.Generator,
    design: Design,
    num_points: int,
    *,
    logits: str = "random",
    precision: float = 10.0,
    pose_scale: float = 1.0,
    missing_features: bool = False,
    identical: bool = False,
) -> Problem:
    """A random scene under random templates and priors.

    `logits` is "uniform", "random" (a prior with a preference of its own for every pair, alike for
    all dummies) or "typed" (half of the pairs forbidden).
    """
    owner = np.array(design.owner)
    rows, d, p = len(owner), design.num_features, design.pose_dim
    K = owner.max() + 1
    F, offset = design.make(rng, rows)
    variance = rng.uniform(0.3, 3.0, size=(rows, d)) / precision
    feature_mask = rng.uniform(size=(rows, d)) < 0.8 if d > 2 else np.ones((rows, d), bool)
    feature_mask[:, 0] = True
    factor = rng.normal(size=(K, p, p))
    covariance = (factor @ factor.swapaxes(1, 2) / p + 0.2 * np.eye(p)) * pose_scale**2
    mean = rng.normal(size=(K, p)) * pose_scale
    if identical:  # the second object is the first one over again
        first, second = np.flatnonzero(owner == 0), np.flatnonzero(owner == 1)
        for array in (F, offset, variance, feature_mask):
            array[second] = array[first[: len(second)]]
        mean[1], covariance[1] = mean[0], covariance[0]
    poses = np.array([rng.multivariate_normal(mean[k], covariance[k]) for k in range(K)])
    predicted = oracle.predicted_parts(F, offset, owner, poses)
    parts = rng.permutation(rows)[:num_points]
    points = np.zeros((rows, d))
    points[:num_points] = predicted[parts] + np.sqrt(variance[parts]) * rng.normal(
        size=(num_points, d)
    )
    seen = np.repeat((np.arange(rows) < num_points)[:, None], d, axis=1)
    if missing_features:
        seen &= rng.uniform(size=seen.shape) < 0.7
        seen[0] = True
    points = np.where(seen, points, 0.0)
    return Problem(
        points,
        seen,
        F,
        offset,
        variance,
        feature_mask,
        owner,
        mean,
        covariance,
        _logits(rng, logits, parts, rows),
    )


def _logits(rng: np.random.Generator, kind: str, parts: np.ndarray, rows: int) -> np.ndarray:
    num_points = len(parts)
    if kind == "uniform":
        return np.full((rows, rows), -np.log(rows))
    if kind == "typed":  # a point may only be a part of its own kind; dummies take what is left
        types = np.arange(rows) % 2
        points = (types[parts][:, None] == types) / (types[:, None] == types).sum(axis=0)
        probs = np.empty((rows, rows))
        probs[:num_points] = points
        probs[num_points:] = np.maximum(1 - points.sum(axis=0), 0) / max(rows - num_points, 1)
        probs[probs < 1e-12] = 0.0
    else:
        logits = rng.normal(size=(rows, rows))
        logits[num_points:] = logits[-1]
        probs = oracle.sinkhorn(logits, sweeps=500)
    with np.errstate(divide="ignore"):
        return np.log(probs)


class Stacked(NamedTuple):
    """Problems of one design as one program and one batch of scenes."""

    program: Callable[..., jax.Array]
    scenes: Scene
    problems: list[Problem]

    def conjugate(self) -> LinearGaussianModel:
        """Read all of them, scene axis last."""
        return jax.tree.map(jnp.asarray, read_scenes(self.program, self.scenes).model)


def stack_problems(problems: Sequence[Problem], family: str = "permutation") -> Stacked:
    """One program for all of them; its match prior is of the given family."""
    # Plain numpy, so that nothing of them is a constant of an enclosing trace.
    fields = {
        name: np.stack([getattr(problem, name) for problem in problems])
        for name in Problem._fields
        if name != "owner"
    }
    owner = problems[0].owner
    with np.errstate(divide="ignore"):
        probs = np.exp(fields["match_logits"])
    features_missing = (fields["seen"] != fields["seen"][..., :1]).any()

    def program(points=None, present=None, point_type=None):
        piece = {name: jnp.asarray(array)[point_type[0]] for name, array in fields.items()}
        piece["match_probs"] = jnp.asarray(probs)[point_type[0]]
        mask = piece["seen"] if features_missing else present
        return _program(piece, owner, family, points, mask)

    count, rows = len(problems), len(owner)
    index = np.repeat(np.arange(count)[:, None], rows, axis=1)
    present = fields["seen"].any(axis=-1)
    return Stacked(program, Scene(fields["points"], present, point_type=index), list(problems))


def single(problem: Problem, family: str = "permutation") -> tuple[Callable[..., Any], Scene]:
    """A program of one problem alone, its numbers written into it, and the scene."""
    with np.errstate(divide="ignore"):
        piece = problem._asdict() | {"match_probs": np.exp(problem.match_logits)}

    def program(points=None, present=None):
        return _program(piece, problem.owner, family, points, present)

    return program, Scene(problem.points, problem.present)


def _program(
    piece: dict[str, Any], owner: np.ndarray, family: str, points: Any, present: Any
) -> jax.Array:
    parts = Parts(
        jnp.asarray(piece["F"]),
        jnp.asarray(piece["offset"]),
        jnp.asarray(piece["variance"]),
        owner,
        np.zeros(len(owner), int),
        piece["feature_mask"],
    )
    with numpyro.plate("object", piece["prior_mean"].shape[0]):
        pose = numpyro.sample(
            "pose", dist.MultivariateNormal(piece["prior_mean"], piece["prior_covariance"])
        )
    if family == "doubly_stochastic":
        prior = DoublyStochasticMatch(piece["match_probs"])
    else:
        families = {"permutation": PermutationMatch, "mixture": MixtureMatch}
        prior = families[family](jnp.asarray(piece["match_logits"]))
    match = numpyro.sample("match", prior)
    likelihood = MatchedParts(match, pose, parts, present=present)
    return numpyro.sample("points", likelihood, obs=points)


def random_match(rng: np.random.Generator, size: int, count: int) -> np.ndarray:
    """Doubly stochastic matrices, (N, N, count)."""
    return np.moveaxis(oracle.sinkhorn(rng.normal(size=(count, size, size))), 0, -1)
