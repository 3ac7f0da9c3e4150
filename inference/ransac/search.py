"""RANSAC: a few points fix the pose of an object, and the pose predicts its other parts.

Every small tuple of points is put on a basis of every template, and the points near the predicted
parts are matched to them (`inference.ransac.hypotheses`). Then a set of hypotheses that explains
the scene is chosen (`inference.ransac.covers`).
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from inference.proposals import starts
from inference.proposals.starts import Structure
from inference.ransac.covers import Candidates, best_cover, promises, sequential_cover
from inference.ransac.hypotheses import (
    Hypotheses,
    Settings,
    Template,
    best_of_each_set,
    distances,
    fit,
    hypotheses,
    lack_cost,
    stray_cost,
    tuples_of_points,
)
from inference.result import Report, Result, method, partition, reporter
from models.errors import InputError
from models.numerics.arrays import AnyArray
from models.numerics.devices import mesh_of, sharded
from models.program.batches import Reading, Skeleton, map_scenes, read_conjugate
from models.program.reading import LinearGaussianModel
from models.program.sites import Program
from models.scenes import Scene

_CHUNK = 64  # scenes per batch and device

PAPER: dict[str, Any] = {"bases": "first", "tolerance": 0.1, "refit": False, "cost": "total"}
"""Settings of `run` that follow the paper's text: one basis for each template, a *distance* of less
than 0.1, and a hypothesis costs the sum of its squared distances."""

PUBLISHED: dict[str, Any] = PAPER | {"tolerance": math.sqrt(0.1), "cost": "others"}
"""Settings of `run` that follow the code published with the paper: it compares the *squared*
distance with 0.1, and a hypothesis costs the mean squared distance of its parts other than the
basis, the first two vertices."""


class Plan(NamedTuple):
    """The templates and bases of a program: plain numpy, never traced."""

    structure: Structure
    kind: Int[np.ndarray, " K"]
    """The template of each object; identical objects share their hypotheses."""
    first: Int[np.ndarray, " kinds"]
    """An object of each kind."""
    basis: Int[np.ndarray, "kinds bases size"]
    """Bases, as indices into an object's parts; padded with the first basis."""
    basis_valid: Bool[np.ndarray, "kinds bases"]


class Found(NamedTuple):
    """The explanation of a scene."""

    match: Int[AnyArray, " N"]
    """The point of each part, -1 for none."""
    pose_mean: Float[AnyArray, "K p"]
    pose_covariance: Float[AnyArray, "K p p"]
    cost: Float[AnyArray, " K"]


@method
def run(
    program: Program,
    scene: Scene,
    rng_key: Array,
    *,
    bases: Literal["all", "first"] = "all",
    tolerance: float = 0.3,
    refit: bool = True,
    cost: Literal["total", "others"] = "total",
    cover: Literal["exact", "partial", "sequential"] = "exact",
    features: int | None = None,
    fewest_points: int | None = None,
    devices: int = 1,
    progress_bar: bool | Report = False,
) -> Result:
    """Explain one scene or each scene of a batch by RANSAC.

    Points that no object explains are clutter if the program has slots for all of them. Otherwise
    they are spread evenly over the remaining parts, and `explained` is false for these rows.
    `details` has the `cost` (misfit) of each object, NaN for objects that were not found.
    `converged` is true if every point is explained. With clutter, use a tolerance of a few standard
    deviations of the noise: at the default, three points of clutter easily fit a triangle.

    Args:
        program: a NumPyro program as for coordinate ascent; its match prior only says which pairs
            are possible.
        rng_key: matters only if tuples of points are drawn at random.
        bases: use all sets of parts that fix a pose, or only the first one of each template.
        tolerance: largest distance, in the units of the points, of a point from its predicted part.
        refit: fit the pose again to all matched points before its cost is computed.
        cost: the "total" of squared distances, or the mean over "others" than the basis.
        cover: "exact" minimises the number of missing parts and unexplained points first, then the
            cost; "partial" counts each of these like a point at the tolerance; "sequential" takes
            one object after another. An unexplained point always counts like a point at the
            tolerance if the program has clutter.
        features: number of leading features that are coordinates and count in distances; by default
            all. For oriented parts with an appearance, 4.
        fewest_points: smallest number of points of an object; by default one more than fix its pose
            and, with "sequential", more than half of its parts.
        devices: number of local devices for the scenes.
        progress_bar: show one, or call a function with (scenes finished, scenes in total).
    """
    if not tolerance > 0:
        raise InputError(f"the tolerance must be a positive distance, got {tolerance}; try 0.3")
    scenes = scene.batch()
    reading = _read(program, scenes)
    limits = (features, fewest_points, reading.skeleton.has_clutter)
    settings = Settings(bases, float(tolerance), refit, cost, cover, *limits)
    solve, owner = _solver(reading.skeleton, settings, devices)
    count, report, outputs = len(scenes.points), reporter(progress_bar), []
    keys = jax.vmap(lambda i: jax.random.fold_in(rng_key, i))(jnp.arange(count))
    at_a_time = _CHUNK * devices
    for start in range(0, count, at_a_time):
        some = np.arange(start, min(start + at_a_time, count))
        padded = np.resize(some, at_a_time if count > 1 else devices)
        found = solve(reading.take(padded), keys[padded])
        outputs.append(jax.tree.map(np.asarray, found))
        report(start + len(some), count)
    found = jax.tree.map(lambda *chunks: np.concatenate(chunks)[:count], *outputs)  # no padding
    return _result(found, scenes, owner)


def _read(program: Program, scenes: Scene) -> Reading:
    """Read the program at each scene, with an unknown precision fixed at its prior mean."""
    reading = read_conjugate(program, scenes)
    seen = reading.model.seen
    if not (seen == seen[:, :1]).all():
        raise InputError(
            "ransac requires points that are seen whole or not at all, but a point has missing "
            "features; use the method ds"
        )
    return reading.at_prior_mean()


@functools.lru_cache(maxsize=32)
def _solver(
    skeleton: Skeleton, settings: Settings, devices: int
) -> tuple[Callable[[LinearGaussianModel, Array], Found], Int[np.ndarray, " N"]]:
    """The search, compiled once for each skeleton of a program and choice of settings."""
    plan = make_plan(skeleton, settings.bases)

    def explain_one(model: LinearGaussianModel, key: Array) -> Found:
        return explain(key, model, plan, settings)

    @functools.partial(sharded, mesh=mesh_of(devices), out_axis=0)
    def solve(model: LinearGaussianModel, keys: Array) -> Found:
        return map_scenes(explain_one, model, keys)

    return solve, plan.structure.owner


def make_plan(skeleton: Skeleton, bases: str) -> Plan:
    """The kinds of templates of a program and their bases."""
    structure = starts.structure(skeleton)
    first, kind = np.unique(skeleton.alike, return_inverse=True)
    sizes = structure.valid[first].sum(axis=1)
    listed = [list(itertools.combinations(range(size), structure.basis_size)) for size in sizes]
    listed = [some[:1] for some in listed] if bases == "first" else listed
    most = max(len(some) for some in listed)
    basis = np.array([some + some[:1] * (most - len(some)) for some in listed])
    valid = np.arange(most) < np.array([len(some) for some in listed])[:, None]
    return Plan(structure, kind, first, basis, valid)


def explain(key: Array, model: LinearGaussianModel, plan: Plan, settings: Settings) -> Found:
    """Explain a scene: make hypotheses of every kind, choose the best cover, and fit its poses."""
    structure = plan.structure
    tuples = tuples_of_points(key, model.seen.any(axis=1), structure.basis_size)
    members, valid = structure.members[plan.first], structure.valid[plan.first]

    def of_kind(
        first: Any, members: Any, valid: Any, basis: Any, basis_valid: Any
    ) -> tuple[Candidates, Hypotheses]:
        pieces = Template.of(model, first, members, valid, settings)
        every = hypotheses(model, pieces, tuples, basis, basis_valid, settings)
        return best_of_each_set(every, len(model.points))

    candidates, found = jax.vmap(of_kind)(plan.first, members, valid, plan.basis, plan.basis_valid)
    if settings.cover == "sequential":
        limit = 0.0 if settings.fewest_points is None else np.inf
        choice = sequential_cover(candidates, plan.kind, limit)
    else:
        sizes = structure.valid.sum(axis=1)
        fewest = settings.fewest_points or structure.basis_size + 1
        rows = len(model.points)
        lack = lack_cost(settings, rows)
        promise = promises(sizes, fewest, lack, rows, stray_cost(settings, lack))
        choice = best_cover(candidates, plan.kind, model.seen.any(axis=1), promise)
    chosen = jax.tree.map(lambda x: x[plan.kind, ..., jnp.maximum(choice, 0)], found)  # (K, most)
    used = (choice >= 0)[:, None]
    match_of_object = jnp.where(used, chosen.match, -1)

    def pose_of(k: Any, members: Any, valid: Any, match: Array, fitted: Array) -> Any:
        pieces = Template.of(model, k, members, valid, settings)
        found = fit(pieces, model.points, match[:, None], fitted[:, None])
        distance = distances(pieces, found.predicted, model.points[match][..., None])
        cost = jnp.sum(jnp.where(match[:, None] >= 0, distance, 0.0), axis=0)
        return found.mean[:, 0], found.covariance[..., 0], cost[0]

    objects = np.arange(len(plan.kind))
    mean, covariance, cost = jax.vmap(pose_of)(
        objects, structure.members, structure.valid, match_of_object, chosen.fitted & used
    )
    match = jnp.full(len(structure.owner), -1)
    for k, (parts, real) in enumerate(zip(structure.members, structure.valid, strict=True)):
        match = match.at[parts[real]].set(match_of_object[k, real])
    return Found(match, mean, covariance, jnp.where(choice >= 0, cost, jnp.nan))


def _result(found: Found, scenes: Scene, owner: Int[np.ndarray, " N"]) -> Result:
    """Make a result; unexplained rows are spread evenly over the remaining parts or slots."""
    num_scenes, rows = scenes.present.shape
    match_probs = np.zeros((num_scenes, rows, rows))
    scene, part = np.nonzero(found.match >= 0)
    match_probs[scene, found.match[scene, part], part] = 1.0
    free_rows, free_parts = (match_probs.sum(axis=axis) == 0 for axis in (2, 1))
    is_slot = owner == found.pose_mean.shape[1]
    stray = scenes.present & free_rows
    enough = stray.sum(axis=1, keepdims=True) <= is_slot.sum()  # slots for all stray points
    clutter = stray & enough
    match_probs += clutter[:, :, None] * is_slot / max(is_slot.sum(), 1)
    left = free_parts - match_probs.sum(axis=1) * free_parts
    free_rows = free_rows & ~clutter
    count = np.maximum(free_rows.sum(axis=1), 1)[:, None, None]
    match_probs += free_rows[:, :, None] * left[:, None] / count
    explained = scenes.present & ~free_rows
    return Result(
        method="ransac",
        scene=scenes,
        match_probs=match_probs,
        pose_mean=found.pose_mean,
        pose_covariance=found.pose_covariance,
        labels=partition(match_probs, owner, scenes.present),
        owner=owner,
        converged=(explained == scenes.present).all(axis=1),
        steps=np.ones(num_scenes, int),
        explained=explained,
        details={"cost": found.cost},
    )
