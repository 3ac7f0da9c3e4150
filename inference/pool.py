"""Many runs of coordinate ascent at once, through a pool of slots.

Every run (a scene and a restart) goes its own way: its own annealing parameter, its own end. A
fixed number of slots is stepped together; finished runs leave and waiting ones take their slots. So
nothing is computed after convergence, nothing is recompiled when the number of points or scenes
changes, and memory depends on the pool and not on the batch.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from guides.projections import PROJECTIONS
from inference import starts
from inference.ascent import Schedule, State, begin, step
from inference.restarts import Restarts, Rounds
from inference.starts import Start, Structure
from models import AnyArray
from models.batches import Skeleton, map_scenes, reader, skeleton
from models.reading import Conjugate, Program
from models.scenes import Layout, Scene

STARTS = {"uniform": starts.uniform, "poses": starts.poses}

POOL = 512
"""Slots; their state stays within the processor's cache."""

SEGMENT = 8
"""Steps between two looks at which slots are done."""


class Pool(NamedTuple):
    """The runs that are being stepped together; the axis of slots is last."""

    model: Conjugate
    state: State


class Engine(NamedTuple):
    """The compiled parts of coordinate ascent for one program and one choice of settings."""

    structure: Structure
    start: Callable[[Conjugate, Array, Array], Pool]
    """New runs from the pieces of scenes, random keys and solutions to keep some objects of."""
    advance: Callable[[Pool], Pool]
    """Some steps of every run that is not done."""
    advance_one: Callable[[Pool], Pool]
    insert: Callable[[Pool, Pool, AnyArray], Pool]
    """New runs into the given slots; slots beyond the pool are dropped."""
    read: Callable[[Scene], Conjugate]

    def launch(
        self, scenes: Scene, keys: Array, known: Float[AnyArray, "runs N N"] | None = None
    ) -> Pool:
        """New runs from scenes and random keys.

        Args:
            known: solutions to keep some objects of, zero where nothing is to be kept.
        """
        if known is None:
            known = np.zeros((*scenes.present.shape, scenes.present.shape[1]))
        return self.start(self.read(Scene(**scenes.observed)), keys, jnp.asarray(known))


def engine(
    program: Program,
    projection_name: str,
    start: str,
    schedule: Schedule,
    layout: Layout,
) -> Engine:
    """For a program; of what is compiled, only its `read` is its own."""
    steps = _compiled(skeleton(program, layout), projection_name, start, schedule)
    return steps(reader(program, layout))


@functools.lru_cache(maxsize=32)
def _compiled(
    skeleton: Skeleton, projection_name: str, start: str, schedule: Schedule
) -> Callable[[Callable[[Scene], Conjugate]], Engine]:
    """An engine without its reader. Each part is compiled once for each width of the pool."""
    structure = starts.structure(skeleton)
    projection = PROJECTIONS[projection_name]

    @jax.jit
    def launch(model: Conjugate, keys: Array, known: Array) -> Pool:
        def make_start(model: Conjugate, key: Array, known: Array) -> Start:
            limits = (schedule.beta_start, schedule.beta_max)
            return STARTS[start](key, model, structure, *limits, known)

        state = begin(model, projection, map_scenes(make_start, model, keys, known, axis=-1))
        return Pool(model, state)

    @jax.jit
    def advance(pool: Pool) -> Pool:
        def one(_: int, state: State) -> State:
            return step(pool.model, structure, projection, state, schedule)

        return pool._replace(state=jax.lax.fori_loop(0, SEGMENT, one, pool.state))

    @jax.jit
    def advance_one(pool: Pool) -> Pool:
        new = step(pool.model, structure, projection, pool.state, schedule)
        return pool._replace(state=new)

    @jax.jit
    def insert(pool: Pool, new: Pool, slots: Int[Array, " new"]) -> Pool:
        def put(old: Array, x: Array) -> Array:
            shared = old.shape[-1:] != pool.state.done.shape
            return old if shared else old.at[..., slots].set(x, mode="drop")

        return jax.tree.map(put, pool, new)

    return functools.partial(Engine, structure, launch, advance, advance_one, insert)


class Ended(NamedTuple):
    """What runs ended in, a row for each: some that have finished, or the best of each scene."""

    match_probs: Float[np.ndarray, "runs N N"]
    pose_mean: Float[np.ndarray, "runs K p"]
    pose_covariance: Float[np.ndarray, "runs K p p"]
    elbo: Float[np.ndarray, " runs"]
    sparse: Bool[np.ndarray, " runs"]
    converged: Bool[np.ndarray, " runs"]
    steps: Int[np.ndarray, " runs"]
    attempt: Int[np.ndarray, " runs"]
    kept: Float[np.ndarray, "runs N N"]
    """The solution that some objects were kept of at the start; zero if none was."""


@jax.jit
def run_keys(base: Array, runs: Int[Array, "runs 2"]) -> Array:
    """A key for each run that depends on its scene and attempt alone, not on the pool."""
    fold = jax.vmap(lambda run: jax.random.fold_in(jax.random.fold_in(base, run[0]), run[1]))
    return fold(runs)


def best_of_restarts(
    engine: Engine,
    scenes: Scene,
    base_key: Array,
    restarts: Restarts,
    progress: Callable[[int, int], None] | None,
) -> Ended:
    """Work off all runs through one pool of slots and keep the best of each scene."""
    rounds = Rounds(len(scenes.points), restarts)
    width = min(POOL, 1 << (len(rounds.waiting) - 1).bit_length())
    block = max(1, width // 8)
    best = _nothing_yet(scenes, engine)
    known = best.match_probs.copy()  # the best solution of the rounds before
    slots = np.full((width, 2), -1)  # scene and attempt of the run in each slot; -1 if it is free
    pool: Any = None
    while rounds.waiting or (slots >= 0).any():
        free = np.flatnonzero(slots[:, 0] < 0)
        while rounds.waiting and len(free) >= min(block, len(rounds.waiting)):
            runs = rounds.take(block)
            taken, free = free[: len(runs)], free[len(runs) :]
            slots[taken] = runs
            padded = np.resize(runs, (block, 2))
            kept = known[padded[:, 0]] * rounds.keeps(padded)[:, None, None]
            new = engine.launch(scenes.take(padded[:, 0]), run_keys(base_key, padded), kept)
            places = np.r_[taken, np.full(block - len(runs), width)]  # the padding is dropped
            pool = engine.insert(_empty(new, width) if pool is None else pool, new, places)
        if not rounds.waiting and (slots[:, 0] >= 0).sum() <= block < width == POOL:
            pool, slots, width = *_narrow(pool, slots, block), block
        pool = engine.advance(pool)
        done = np.flatnonzero(np.asarray(pool.state.done) & (slots[:, 0] >= 0))
        if len(done):
            runs = slots[done]
            kept = known[runs[:, 0]] * rounds.keeps(runs)[:, None, None]
            present = scenes.present[runs[:, 0]]
            limits = (engine.structure, present, restarts.fewest_points)
            ended = _ended(pool.state, done, runs[:, 1], kept, *limits)
            _keep_best(best, ended, runs[:, 0])
            again = rounds.finish(runs, ended.elbo, ended.sparse)
            known[again] = best.match_probs[again]
            slots[done] = -1
            if progress is not None:
                progress(rounds.finished, int(rounds.foreseen.sum()))
    return best


def _empty(like: Pool, width: int) -> Pool:
    """A pool of finished runs, to be filled."""

    def widen(x: Array) -> Array:
        shared = x.shape[-1:] != like.state.done.shape
        return x if shared else jnp.zeros((*x.shape[:-1], width), x.dtype)

    pool = jax.tree.map(widen, like)
    return pool._replace(state=pool.state._replace(done=jnp.ones(width, bool)))


def _narrow(
    pool: Pool, slots: Int[np.ndarray, "wide 2"], width: int
) -> tuple[Pool, Int[np.ndarray, "width 2"]]:
    """Move the last runs into a pool with fewer slots."""
    active = np.flatnonzero(slots[:, 0] >= 0)
    kept = np.resize(active, width)
    wide = pool.state.done.shape
    pool = jax.tree.map(lambda x: x[..., kept] if x.shape[-1:] == wide else x, pool)
    free = np.arange(width) >= len(active)
    state = pool.state._replace(done=pool.state.done | free)
    return pool._replace(state=state), np.where(free[:, None], -1, slots[kept])


def _nothing_yet(scenes: Scene, engine: Engine) -> Ended:
    num_scenes, rows = scenes.present.shape
    num_objects = len(engine.structure.members)
    pose_dim = engine.structure.pose_dim
    return Ended(
        match_probs=np.zeros((num_scenes, rows, rows)),
        pose_mean=np.zeros((num_scenes, num_objects, pose_dim)),
        pose_covariance=np.zeros((num_scenes, num_objects, pose_dim, pose_dim)),
        elbo=np.full(num_scenes, -np.inf),
        sparse=np.ones(num_scenes, bool),
        converged=np.zeros(num_scenes, bool),
        steps=np.zeros(num_scenes, int),
        attempt=np.zeros(num_scenes, int),
        kept=np.zeros((num_scenes, rows, rows)),
    )


def _ended(
    state: State,
    slots: Int[np.ndarray, " runs"],
    attempt: Int[np.ndarray, " runs"],
    kept: Float[np.ndarray, "runs N N"],
    structure: Structure,
    present: Bool[np.ndarray, "runs N"],
    fewest_points: float,
) -> Ended:
    """What the runs in these slots have come to."""
    match_probs = np.moveaxis(np.asarray(state.match_probs)[..., slots], -1, 0)
    mean, covariance = (np.asarray(x)[..., slots] for x in state.pose[:2])
    return Ended(
        match_probs=match_probs,
        pose_mean=np.moveaxis(mean, (0, 1, 2), (2, 1, 0)),
        pose_covariance=np.moveaxis(covariance, (2, 3), (1, 0)),
        elbo=np.asarray(state.terms.elbo)[slots],
        sparse=_is_sparse(match_probs, present, structure.owner, fewest_points),
        converged=np.asarray(state.converged)[slots],
        steps=np.asarray(state.steps)[slots],
        attempt=attempt,
        kept=kept,
    )


def _keep_best(best: Ended, ended: Ended, scene: Int[np.ndarray, " runs"]) -> None:
    """Put runs in the place of the best of their scenes, where they are better.

    Chosen by the ELBO alone, among runs that are not sparse if there are any.
    """
    for i in np.argsort(ended.attempt, kind="stable"):
        s = scene[i]
        if (not ended.sparse[i], ended.elbo[i]) > (not best.sparse[s], best.elbo[s]):
            for known, new in zip(best, ended, strict=True):
                known[s] = new[i]


def _is_sparse(
    match_probs: Float[np.ndarray, "runs N N"],
    present: Bool[np.ndarray, "runs N"],
    owner: Int[np.ndarray, " N"],
    fewest_points: float = 2.0,
) -> Bool[np.ndarray, " runs"]:
    """The paper's rule: some r above 0.9 for an object that has less than two points in all."""
    of_points = np.where(present[..., None], match_probs, 0.0)
    groups = np.eye(owner.max() + 1)[owner].T.astype(bool)
    surely = np.stack([(of_points[..., g] > 0.9).any(axis=(-2, -1)) for g in groups], axis=-1)
    mass = np.stack([of_points[..., g].sum(axis=(-2, -1)) for g in groups], axis=-1)
    return np.any(surely & (mass < fewest_points - 1e-6), axis=-1)
