"""Votes for routing by agreement: the pose that a pair of points suggests as a pair of parts.

A point of the plane determines two of the four numbers of a pose, so single points cannot vote. Two
points x, x', taken as parts n, n' of one object, can: the pose y solves F_n y = x - m_n and
F_n' y = x' - m_n'.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from inference.result import Report, Result, method, partition, reporter
from models.errors import InputError
from models.program.batches import read_conjugate
from models.program.sites import Program
from models.scenes import Scene
from models.templates import Parts

CHUNK = 32
"""Scenes that are routed at a time."""


class Ways(NamedTuple):
    """The ordered pairs of parts that a pair of points may be, over all objects."""

    object: Int[np.ndarray, " ways"]
    parts: Int[np.ndarray, "ways 2"]
    inverse: Float[np.ndarray, "ways p p"]
    """Maps the four coordinates of two points to a pose."""
    offset: Float[np.ndarray, "ways p"]

    @property
    def num_objects(self) -> int:
        """K, the number of objects."""
        return int(self.object.max()) + 1


class Votes(NamedTuple):
    """The poses that all pairs of points suggest."""

    pose: Float[Array, "pairs ways p"]
    valid: Bool[Array, " pairs"]
    """Whether both points are present."""


class Routed(NamedTuple):
    """The result of routing for one scene."""

    routing: Float[Array, "pairs ways"]
    """The share of a pair's vote that goes each way; the rest goes to no object."""
    pose: Float[Array, "K p"]
    variance: Float[Array, "K p"]
    activation: Float[Array, " K"]


Route = Callable[[Votes, Array], Routed]
"""Takes the votes of a scene and a key, and returns the best of several runs."""


def ways_of(parts: Parts) -> Ways:
    """The ways of some templates; two points must determine a pose."""
    parts = jax.tree.map(np.asarray, parts)
    if parts.pose_dim != 2 * parts.num_features or not parts.feature_mask.all():
        raise InputError(
            "routing requires poses that two points determine, with "
            f"{2 * parts.num_features} numbers, got {parts.pose_dim}; take templates under "
            "similarities"
        )
    objects = range(parts.num_objects)
    groups = [np.flatnonzero(parts.owner == k) for k in objects]
    pairs = np.array([pair for group in groups for pair in itertools.permutations(group, 2)])
    F = np.asarray(parts.F)[pairs].reshape(len(pairs), parts.pose_dim, parts.pose_dim)
    offset = np.asarray(parts.offset)[pairs].reshape(len(pairs), parts.pose_dim)
    return Ways(np.asarray(parts.owner)[pairs[:, 0]], pairs, np.linalg.inv(F), offset)


@functools.cache
def pairs_of_points(num_rows: int) -> Int[np.ndarray, "pairs 2"]:
    """All pairs of rows."""
    return np.array(list(itertools.combinations(range(num_rows), 2)))


def votes_of(ways: Ways, points: Float[Array, "N d"], present: Bool[Array, " N"]) -> Votes:
    """The pose that each pair of points suggests, for each way to be two parts of an object."""
    pairs = pairs_of_points(len(points))
    places = points[pairs].reshape(len(pairs), 1, -1) - ways.offset
    return Votes(jnp.einsum("lpq,ilq->ilp", ways.inverse, places), present[pairs].all(axis=1))


def match_probs_of(
    ways: Ways, routing: Float[Array, "pairs ways"], present: Bool[Array, " N"]
) -> Float[Array, "N N"]:
    """The share of each point's votes that take it as each part.

    Dummy rows, and points whose pairs all went to no object, are uniform over parts.
    """
    pairs, num_rows = pairs_of_points(len(present)), len(present)
    mass = jnp.zeros((num_rows, num_rows))
    for end in range(2):
        mass = mass.at[pairs[:, end, None], ways.parts[None, :, end]].add(routing)
    total = mass.sum(axis=1, keepdims=True)
    known = present[:, None] & (total > 0)
    return jnp.where(known, mass / jnp.where(known, total, 1.0), 1.0 / num_rows)


def best_of(
    one_run: Callable[[Votes, Array], tuple[Float[Array, ""], Routed]], num_restarts: int
) -> Route:
    """A route that keeps the run with the highest value."""

    def route(votes: Votes, key: Array) -> Routed:
        one = functools.partial(one_run, votes)
        value, runs = jax.vmap(one)(jax.random.split(key, num_restarts))
        return jax.tree.map(lambda x: x[value.argmax()], runs)

    return route


def router(
    name: str, make_route: Callable[[Ways, int, Any], Route], default: Any
) -> Callable[..., Result]:
    """Make the `run` of a routing method; its result has no ELBO.

    Args:
        make_route: takes the ways, the number of restarts and the settings.
        default: the default settings, with `num_iterations`.
    """

    @method
    def run(
        program: Program,
        scene: Scene,
        rng_key: Array,
        *,
        num_restarts: int = 32,
        settings: Any = default,
        progress_bar: bool | Report = False,
    ) -> Result:
        """Route the pairs of points of one scene, or of each of a batch, to a program's objects.

        Only the templates of the program are used. `details` has the `activation` of each object.
        Of several restarts the best one is kept.
        """
        if num_restarts < 1:
            raise InputError(f"num_restarts must be at least 1, got {num_restarts}")
        scenes = scene.batch()
        reading = read_conjugate(program, scenes)
        if reading.skeleton.has_clutter:
            raise InputError(f"{name} does not model clutter; give a program without slots for it")
        ways = ways_of(reading.at(0).parts)
        route = make_route(ways, num_restarts, settings)

        @jax.jit
        @jax.vmap
        def solve(points: Array, present: Array, key: Array) -> tuple[Routed, Array]:
            routed = route(votes_of(ways, points, present), key)
            return routed, match_probs_of(ways, routed.routing, present)

        count, report, found = len(scenes.points), reporter(progress_bar), []
        keys = jax.vmap(lambda i: jax.random.fold_in(rng_key, i))(jnp.arange(count))
        size = min(CHUNK, count)
        for start in range(0, count, size):
            some = np.resize(np.arange(start, min(start + size, count)), size)
            chunk: Any = solve(scenes.points[some], scenes.present[some], keys[some])
            found.append(jax.tree.map(np.asarray, chunk))
            report(min(start + size, count), count)
        routed, match_probs = jax.tree.map(lambda *x: np.concatenate(x)[:count], *found)
        owner = np.array(reading.skeleton.owner)
        return Result(
            method=name,
            scene=scenes,
            match_probs=match_probs,
            pose_mean=routed.pose,
            pose_covariance=routed.variance[..., None] * np.eye(routed.pose.shape[-1]),
            labels=partition(match_probs, owner, scenes.present),
            owner=owner,
            converged=np.ones(count, bool),
            steps=np.full(count, settings.num_iterations),
            details={"activation": routed.activation},
        )

    return run
