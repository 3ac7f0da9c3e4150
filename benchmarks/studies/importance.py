"""The evidence by importance weights, with and without a search for other modes, beside the exact.

Scenes have two triangles with some points missing, at the precision of the program, so that the
posterior has modes that are not copies of each other. q is the best of the restarts of `ds`.
"""

import functools
from collections.abc import Iterator

import jax
import numpy as np

from benchmarks.report import Pieces, Table, number
from inference import cavi, exact
from inference.diagnostics.importance import GOOD_K, importance
from models.constellation import constellation
from models.scenes import Scene
from models.templates import shapes, stack

PARTS = stack(shapes("triangle", "triangle"))
PRECISION, RESTARTS = 1e3, 16
SEEN, SCENES, SEED = (6, 5, 4), 6, 20_263
HEADINGS = (
    "points seen",
    "error by q alone, in nats",
    "its Pareto k",
    f"k below {GOOD_K}",
    "error with the search",
    "its standard error",
)


def pieces() -> Pieces:
    """Errors of the log evidence, from the least to the greatest, by the number of points."""
    yield Table("importance", HEADINGS, rows())


def rows() -> Iterator[list[str]]:
    """A row for each number of points."""
    program = functools.partial(constellation, parts=PARTS, precision=PRECISION)
    for num_points in SEEN:
        scenes = scenes_of(num_points)
        evidence = exact.run(program, scenes).log_evidence
        assert evidence is not None
        result = cavi.run(program, scenes, jax.random.key(SEED), num_restarts=RESTARTS)
        alone, whole = (
            [
                importance(program, result.take(i), jax.random.key(i), search=search)
                for i in range(SCENES)
            ]
            for search in (False, True)
        )
        k = np.array([trust.pareto_k for trust in alone])
        yield [
            f"{num_points} of {PARTS.num_parts}",
            span([trust.log_evidence for trust in alone] - evidence, 1),
            span(k, 2),
            f"{(k < GOOD_K).sum()} of {SCENES}",
            span([trust.log_evidence for trust in whole] - evidence, 3),
            span(np.array([trust.standard_error for trust in whole]), 3),
        ]


def scenes_of(num_points: int) -> Scene:
    """Two triangles at random poses, without some of their points."""
    rng = np.random.default_rng([SEED, num_points])
    points = np.asarray(PARTS.predict(0.5 * rng.normal(size=(SCENES, 2, PARTS.pose_dim))))
    points = points + rng.normal(size=points.shape) / np.sqrt(PRECISION)
    seen = rng.permuted(np.tile(np.arange(PARTS.num_parts) < num_points, (SCENES, 1)), axis=1)
    order = np.argsort(~seen, axis=1, kind="stable")  # missing points come last
    points = np.take_along_axis(points, order[..., None], axis=1)
    present = np.arange(PARTS.num_parts) < num_points
    return Scene(points * present[:, None], np.tile(present, (SCENES, 1)))


def span(values: np.ndarray, digits: int) -> str:
    """The least and the greatest value."""
    return f"{number(values.min(), digits)} to {number(values.max(), digits)}"
