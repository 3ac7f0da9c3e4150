"""Many runs of coordinate ascent at once.

Runs (a scene and a restart) are stepped together in blocks of a few fixed widths, so nothing is
compiled again when the number of points or scenes changes, and memory does not depend on the batch.
Each run has its own annealing parameter and its own end. The last runs of a wide block continue in
a narrow one. With several devices, each steps its own share of a block.
"""

import functools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from guides.projections import PROJECTIONS
from inference.conditions.problem import Problem
from inference.proposals import starts
from inference.proposals.parses import Parses
from inference.proposals.propose import CLOSE
from inference.proposals.starts import Start, Structure
from inference.result import Report
from inference.variational.ascent import Schedule, State, begin, step
from models.numerics.arrays import AnyArray
from models.numerics.devices import mesh_of, sharded
from models.program.batches import Skeleton, map_scenes
from models.program.reading import LinearGaussianModel
from models.scenes import Scene


class Guess(NamedTuple):
    """A network's logits, where the first run of a scene begins, and parses for the others."""

    logits: Float[np.ndarray, "scenes N N"]
    parses: Parses | None
    """None if each scene has one run."""


Given = Parses | Guess | None
"""Starts of runs: parses, or a network's guess and parses; None for random starts."""

POOL = 512
"""Largest number of runs of a device in a block; their state fits the processor's cache."""

WIDTHS = (4, 64, POOL)
"""Possible widths of a block on a device: few, because each is compiled."""

ENTRIES = 1 << 23
"""Largest size of the match probabilities of a block: large scenes have narrower blocks."""

NARROWED = 1 << 16
"""A block with fewer entries is not narrowed for its last runs: that would not pay."""

RETRIES = 4
"""Retries of sparse random runs, per restart."""

TIE = 1e-6
"""ELBOs within this many nats count as equal; rounding that depends on the block is smaller."""


class Pool(NamedTuple):
    """Runs that are stepped together; the axis of runs is last."""

    model: LinearGaussianModel
    state: State


class Engine(NamedTuple):
    """The compiled parts of coordinate ascent for one program and one choice of settings."""

    structure: Structure
    start: Callable[..., Pool]
    """Makes new runs from the pieces of scenes, random keys and what `begins_of` returns."""
    advance: Callable[[Pool], Pool]
    """Takes one step of every run that is not done."""
    finish: Callable[[Pool], Pool]
    """Takes steps until at most `narrower(width, ...)` runs of each device are not done."""
    devices: int
    log_bound: float
    """Constant that makes the ELBO a lower bound under this projection (`guides.projections`)."""


def narrower(width: int, num_rows: int) -> int:
    """Width of the block in which the last runs of a wider block continue; zero if they stay."""
    if width < POOL and width * num_rows**2 < NARROWED:
        return 0
    return max((w for w in WIDTHS if w <= width // 8), default=0)


@functools.lru_cache(maxsize=32)
def engine(
    skeleton: Skeleton, projection_name: str, schedule: Schedule, devices: int = 1
) -> Engine:
    """The engine for programs of one skeleton; compiled once for each width of a block."""
    structure = starts.structure(skeleton)
    projection = PROJECTIONS[projection_name]
    on_devices = functools.partial(sharded, mesh=mesh_of(devices))

    @on_devices
    def at_random(model: LinearGaussianModel, keys: Array) -> Pool:
        def start(model: LinearGaussianModel, key: Array) -> Start:
            return starts.uniform(key, model, schedule.beta_start)

        return Pool(model, begin(model, projection, map_scenes(start, model, keys, axis=-1)))

    @on_devices
    def at_parses(model: LinearGaussianModel, keys: Array, match: Int[Array, "N runs"]) -> Pool:
        def start(model: LinearGaussianModel, key: Array, match: Int[Array, " N"]) -> Start:
            return starts.parse(key, model, match, schedule.beta_max)

        beginnings = map_scenes(start, model, keys, match.T, axis=-1)
        return Pool(model, begin(model, projection, beginnings))

    @on_devices
    def at_guesses(
        model: LinearGaussianModel,
        keys: Array,
        logits: Float[Array, "N N runs"],
        match: Int[Array, "N runs"],
        is_first: Bool[Array, " runs"],
    ) -> Pool:
        def start(
            model: LinearGaussianModel,
            key: Array,
            logits: Float[Array, "N N"],
            match: Int[Array, " N"],
            is_first: Bool[Array, ""],
        ) -> Start:
            first = starts.logits(model, logits, schedule.beta_start)
            later = starts.parse(key, model, match, schedule.beta_max)
            return jax.tree.map(functools.partial(jnp.where, is_first), first, later)

        runs = jnp.moveaxis(logits, -1, 0), match.T, is_first
        return Pool(model, begin(model, projection, map_scenes(start, model, keys, *runs, axis=-1)))

    def begin_runs(model: LinearGaussianModel, keys: Array, *given: AnyArray) -> Pool:
        start = {0: at_random, 1: at_parses, 3: at_guesses}[len(given)]
        return start(model, keys, *given)

    def advance(pool: Pool) -> Pool:
        state = step(pool.model, structure, projection, pool.state, schedule)
        return pool._replace(state=state)

    def finish(pool: Pool) -> Pool:
        left = narrower(len(pool.state.done), len(structure.owner))
        return jax.lax.while_loop(lambda pool: (~pool.state.done).sum() > left, advance, pool)

    log_bound = projection.log_bound(len(skeleton.owner))
    return Engine(
        structure, begin_runs, on_devices(advance), on_devices(finish), devices, log_bound
    )


class Restarts(NamedTuple):
    """Number of runs per scene."""

    most: int
    """Largest number of runs, not counting retries of sparse ones."""
    fewest_points: float
    """A run is sparse if an object surely has a point but fewer than this many in total."""


class Ended(NamedTuple):
    """Final states of runs, one row each: some finished runs, or the best run of each scene."""

    match_probs: Float[np.ndarray, "runs N N"]
    pose_mean: Float[np.ndarray, "runs K p"]
    pose_covariance: Float[np.ndarray, "runs K p p"]
    elbo: Float[np.ndarray, " runs"]
    sparse: Bool[np.ndarray, " runs"]
    converged: Bool[np.ndarray, " runs"]
    steps: Int[np.ndarray, " runs"]
    attempt: Int[np.ndarray, " runs"]


class Waiting:
    """The queue of waiting runs, and the retries left per scene.

    Retries of a scene depend only on its own runs, not on the rest of the batch.
    """

    def __init__(self, number: Int[np.ndarray, " scenes"], retries: int) -> None:
        """`number` runs per scene, and at most `retries` retries per scene."""
        self.runs = deque(
            (s, i) for i in range(number.max()) for s in np.flatnonzero(i < number).tolist()
        )
        self.begun = number.copy()
        self.retries = np.full(len(number), retries)
        self.finished = 0

    def take(self, count: int) -> Int[np.ndarray, "runs 2"]:
        """The scene and the attempt of the next runs."""
        runs = [self.runs.popleft() for _ in range(min(count, len(self.runs)))]
        return np.array(runs, int).reshape(-1, 2)

    def finish(self, scene: Int[np.ndarray, " runs"], sparse: Bool[np.ndarray, " runs"]) -> None:
        """Record finished runs, and queue retries of sparse ones."""
        self.finished += len(scene)
        for s in scene[sparse & (self.retries[scene] > 0)].tolist():
            if self.retries[s] > 0:
                self.runs.append((s, int(self.begun[s])))
                self.begun[s] += 1
                self.retries[s] -= 1


@jax.jit
def run_keys(base: Array, runs: Int[Array, "runs 2"]) -> Array:
    """A key for each run, which depends only on its scene and attempt, not on the pool."""
    fold = jax.vmap(lambda run: jax.random.fold_in(jax.random.fold_in(base, run[0]), run[1]))
    return fold(runs)


def best_of_restarts(
    engine: Engine,
    problem: Problem,
    base_key: Array,
    restarts: Restarts,
    report: Report,
    given: Given = None,
) -> Ended:
    """Make all runs, block by block, and keep the best run of each scene.

    Args:
        given: starts of the runs; by default they are random.
    """
    devices, scenes = engine.devices, problem.scenes
    num_rows = scenes.layout.num_rows
    number, retries = np.full(len(scenes.points), restarts.most), 0
    if given is None:
        retries = RETRIES * restarts.most
    elif isinstance(given, Parses):
        number = worth_running(given, restarts.most)
    elif given.parses is not None:
        number = 1 + worth_running(given.parses, restarts.most - 1)
    waiting = Waiting(number, retries)
    most = max(1, min(POOL, ENTRIES // num_rows**2))
    best = _nothing_yet(scenes, engine)
    while waiting.runs:
        needed = -(-len(waiting.runs) // devices)
        width = min(most, next((w for w in WIDTHS if w >= needed), POOL))
        runs = waiting.take(width * devices)
        padded = np.resize(runs, (width * devices, 2))
        keys = run_keys(base_key, padded)
        pool = engine.start(problem.reading.take(padded[:, 0]), keys, *begins_of(given, padded))
        while len(runs):
            pool = engine.finish(pool)
            done = np.asarray(pool.state.done)[: len(runs)]
            scene, attempt = runs[done].T
            limits = (engine.structure, scenes.present[scene], restarts.fewest_points)
            ended = _ended(pool.state, np.flatnonzero(done), attempt, *limits)
            _keep_best(best, ended, scene)
            waiting.finish(scene, ended.sparse)
            report(waiting.finished, int(waiting.begun.sum()))
            runs, width = runs[~done], narrower(width, num_rows)
            if len(runs):
                pool = _taken(pool, np.resize(np.flatnonzero(~done), width * devices))
    return best


def worth_running(parses: Parses, most: int) -> Int[np.ndarray, " scenes"]:
    """Number of parses of each scene that could still end in the best ELBO."""
    close = parses.value >= parses.value[:, :1] - CLOSE
    return np.clip(np.asarray(close).sum(axis=1), 1, most)


def begins_of(given: Given, runs: Int[np.ndarray, "runs 2"]) -> tuple[AnyArray, ...]:
    """Arguments of `Engine.start` for runs (scene, attempt): where each begins.

    With parses, attempts take the parses of their scene in turn.
    """
    scene, attempt = runs.T
    if given is None:
        return ()
    if isinstance(given, Parses):
        number = np.maximum(np.isfinite(given.value).sum(axis=1), 1)
        return (np.asarray(given.match)[scene, attempt % number[scene]].T,)
    logits, is_first = np.moveaxis(given.logits[scene], 0, -1), attempt == 0
    if given.parses is None:
        return logits, np.full(logits.shape[1:], -1), is_first
    return logits, *begins_of(given.parses, np.c_[scene, attempt - 1]), is_first


def _taken(pool: Pool, runs: Int[np.ndarray, " taken"]) -> Pool:
    """Some runs of a pool, which are few, taken through the host."""
    wide = pool.state.done.shape
    return jax.tree.map(lambda x: np.asarray(x)[..., runs] if x.shape[-1:] == wide else x, pool)


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
    )


def _ended(
    state: State,
    which: Int[np.ndarray, " runs"],
    attempt: Int[np.ndarray, " runs"],
    structure: Structure,
    present: Bool[np.ndarray, "runs N"],
    fewest_points: float,
) -> Ended:
    """The final states of some runs of a block."""
    match_probs = np.moveaxis(np.asarray(state.match_probs)[..., which], -1, 0)
    mean, covariance = (np.asarray(x)[..., which] for x in state.pose[:2])
    num_objects = len(structure.members)
    return Ended(
        match_probs=match_probs,
        pose_mean=np.moveaxis(mean, (0, 1, 2), (2, 1, 0)),
        pose_covariance=np.moveaxis(covariance, (2, 3), (1, 0)),
        elbo=np.sum(state.terms, axis=0)[which],
        sparse=_is_sparse(match_probs, present, structure.owner, num_objects, fewest_points),
        converged=np.asarray(state.converged)[which],
        steps=np.asarray(state.steps)[which],
        attempt=attempt,
    )


def _keep_best(best: Ended, ended: Ended, scene: Int[np.ndarray, " runs"]) -> None:
    """Replace the best run of a scene where a new one is better.

    Non-sparse runs are better than sparse ones; among these the ELBO decides. Of runs with equal
    ELBOs, such as those that name identical objects differently, the first attempt is best.
    """
    for i in np.argsort(ended.attempt, kind="stable"):
        s = scene[i]
        ahead = ended.elbo[i] - best.elbo[s]
        better = ahead > TIE or (ahead >= -TIE and ended.attempt[i] < best.attempt[s])
        if best.sparse[s] if ended.sparse[i] != best.sparse[s] else better:
            for known, new in zip(best, ended, strict=True):
                known[s] = new[i]


def _is_sparse(
    match_probs: Float[np.ndarray, "runs N N"],
    present: Bool[np.ndarray, "runs N"],
    owner: Int[np.ndarray, " N"],
    num_objects: int,
    fewest_points: float = 2.0,
) -> Bool[np.ndarray, " runs"]:
    """The paper's rule: some r is above 0.9 for an object with fewer than two expected points."""
    of_points = np.where(present[..., None], match_probs, 0.0)
    groups = np.arange(num_objects)[:, None] == owner
    surely = np.stack([(of_points[..., g] > 0.9).any(axis=(-2, -1)) for g in groups], axis=-1)
    mass = np.stack([of_points[..., g].sum(axis=(-2, -1)) for g in groups], axis=-1)
    return np.any(surely & (mass < fewest_points - 1e-6), axis=-1)
