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

START_ANEW = 4
"""Runs that end in a sparse solution are made anew, at most as often as there are restarts, times
this."""


class Pool(NamedTuple):
    """The runs that are being stepped together; the axis of slots is last."""

    model: Conjugate
    state: State


class Engine(NamedTuple):
    """The compiled parts of coordinate ascent for one program and one choice of settings."""

    structure: Structure
    start: Callable[[Conjugate, Array], Pool]
    """New runs from the pieces of scenes and random keys."""
    advance: Callable[[Pool], Pool]
    """Some steps of every run that is not done."""
    advance_one: Callable[[Pool], Pool]
    insert: Callable[[Pool, Pool, AnyArray], Pool]
    """New runs into the given slots; slots beyond the pool are dropped."""
    read: Callable[[Scene], Conjugate]

    def launch(self, scenes: Scene, keys: Array) -> Pool:
        """New runs from scenes and random keys."""
        return self.start(self.read(Scene(**scenes.observed)), keys)


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
    def launch(model: Conjugate, keys: Array) -> Pool:
        def make_start(model: Conjugate, key: Array) -> Start:
            limits = (schedule.beta_start, schedule.beta_max)
            return STARTS[start](key, model, structure, *limits)

        state = begin(model, projection, map_scenes(make_start, model, keys, axis=-1))
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


class Best(NamedTuple):
    """The best run of each scene so far."""

    match_probs: Float[np.ndarray, "scenes N N"]
    pose_mean: Float[np.ndarray, "scenes K p"]
    pose_covariance: Float[np.ndarray, "scenes K p p"]
    elbo: Float[np.ndarray, " scenes"]
    sparse: Bool[np.ndarray, " scenes"]
    converged: Bool[np.ndarray, " scenes"]
    steps: Int[np.ndarray, " scenes"]
    attempt: Int[np.ndarray, " scenes"]


@jax.jit
def run_keys(base: Array, runs: Int[Array, "runs 2"]) -> Array:
    """A key for each run that depends on its scene and attempt alone, not on the pool."""
    fold = jax.vmap(lambda run: jax.random.fold_in(jax.random.fold_in(base, run[0]), run[1]))
    return fold(runs)


def best_of_restarts(
    engine: Engine,
    scenes: Scene,
    base_key: Array,
    restarts: int,
    fewest_points: float,
    progress: Callable[[int, int], None] | None,
) -> Best:
    """Work off all runs through one pool of slots and keep the best of each scene."""
    num_scenes = len(scenes.points)
    width = min(POOL, 1 << (num_scenes * restarts - 1).bit_length())
    block = max(1, width // 8)
    best = _nothing_yet(scenes, engine)
    queue = _Queue(num_scenes, restarts)
    slots = np.full((width, 2), -1)  # scene and attempt of the run in each slot; -1 if it is free
    pool: Any = None
    while len(queue) or (slots >= 0).any():
        free = np.flatnonzero(slots[:, 0] < 0)
        while len(queue) and len(free) >= min(block, len(queue)):
            runs = queue.take(block)
            taken, free = free[: len(runs)], free[len(runs) :]
            slots[taken] = runs
            padded = np.resize(runs, (block, 2))
            new = engine.launch(scenes.take(padded[:, 0]), run_keys(base_key, padded))
            places = np.r_[taken, np.full(block - len(runs), width)]  # the padding is dropped
            pool = engine.insert(_empty(new, width) if pool is None else pool, new, places)
        if not len(queue) and (slots[:, 0] >= 0).sum() <= block < width == POOL:
            pool, slots, width = *_narrow(pool, slots, block), block
        pool = engine.advance(pool)
        done = np.flatnonzero(np.asarray(pool.state.done) & (slots[:, 0] >= 0))
        if len(done):
            finished = (pool.state, done, slots[done], scenes, engine.structure)
            sparse = _keep_best(best, *finished, fewest_points)
            queue.start_anew(slots[done][sparse])
            slots[done] = -1
            if progress is not None:
                running = int((slots[:, 0] >= 0).sum())
                progress(queue.total - len(queue) - running, queue.total)
    return best


class _Queue:
    """Runs that are still to be made: every scene, every attempt, and what has to start anew."""

    def __init__(self, num_scenes: int, restarts: int) -> None:
        self.num_scenes, self.restarts = num_scenes, restarts
        self.total = num_scenes * restarts
        self.next = 0
        self.again: list[tuple[int, int]] = []
        self.extra = np.zeros(num_scenes, int)

    def __len__(self) -> int:
        return self.num_scenes * self.restarts - self.next + len(self.again)

    def take(self, count: int) -> Int[np.ndarray, "runs 2"]:
        """The scene and the attempt of the next runs."""
        repeated = [self.again.pop() for _ in range(min(count, len(self.again)))]
        end = min(self.next + count - len(repeated), self.num_scenes * self.restarts)
        attempt, scene = np.divmod(np.arange(self.next, end), self.num_scenes)
        self.next = end
        return np.concatenate([np.array(repeated, int).reshape(-1, 2), np.c_[scene, attempt]])

    def start_anew(self, runs: Int[np.ndarray, "runs 2"]) -> None:
        """Give these scenes another attempt, but not for ever."""
        for scene in runs[:, 0]:
            if self.extra[scene] < START_ANEW * self.restarts:
                self.again.append((int(scene), self.restarts + int(self.extra[scene])))
                self.extra[scene] += 1
                self.total += 1


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


def _nothing_yet(scenes: Scene, engine: Engine) -> Best:
    num_scenes, rows = scenes.present.shape
    num_objects = len(engine.structure.members)
    pose_dim = engine.structure.pose_dim
    return Best(
        match_probs=np.zeros((num_scenes, rows, rows)),
        pose_mean=np.zeros((num_scenes, num_objects, pose_dim)),
        pose_covariance=np.zeros((num_scenes, num_objects, pose_dim, pose_dim)),
        elbo=np.full(num_scenes, -np.inf),
        sparse=np.ones(num_scenes, bool),
        converged=np.zeros(num_scenes, bool),
        steps=np.zeros(num_scenes, int),
        attempt=np.zeros(num_scenes, int),
    )


def _keep_best(
    best: Best,
    state: State,
    slots: Int[np.ndarray, " done"],
    jobs: Int[np.ndarray, "done 2"],
    scenes: Scene,
    structure: Structure,
    fewest_points: float,
) -> Bool[np.ndarray, " done"]:
    """Compare finished runs with the best of their scenes; says which ended in a sparse solution.

    Chosen by the ELBO alone, among runs that are not sparse if there are any.
    """
    match_probs = np.moveaxis(np.asarray(state.match_probs)[..., slots], -1, 0)
    elbo = np.asarray(state.terms.elbo)[slots]
    sparse = _is_sparse(match_probs, scenes.present[jobs[:, 0]], structure.owner, fewest_points)
    mean = np.moveaxis(np.asarray(state.pose.mean)[..., slots], (0, 1, 2), (2, 1, 0))
    covariance = np.moveaxis(np.asarray(state.pose.covariance)[..., slots], (2, 3), (1, 0))
    converged, steps = np.asarray(state.converged)[slots], np.asarray(state.steps)[slots]
    for i in np.lexsort((jobs[:, 1],)):
        s = jobs[i, 0]
        better = (not sparse[i], elbo[i]) > (not best.sparse[s], best.elbo[s])
        if better:
            best.match_probs[s], best.pose_mean[s] = match_probs[i], mean[i]
            best.pose_covariance[s], best.elbo[s] = covariance[i], elbo[i]
            best.sparse[s], best.converged[s] = sparse[i], converged[i]
            best.steps[s], best.attempt[s] = steps[i], jobs[i, 1]
    return sparse


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
