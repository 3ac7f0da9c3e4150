"""Coordinate ascent on the mean-field ELBO (the paper's Algorithm 1), for many scenes at once.

Every run (a scene and a restart) goes its own way: its own annealing parameter, its own end. A
fixed pool of slots steps them all together, finished runs leave and waiting ones take their slots,
so nothing is computed after convergence, nothing is recompiled when the number of points or scenes
changes, and memory depends on the pool and not on the batch.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from guides import meanfield
from guides.meanfield import ElboTerms, PartProbs, PoseFactor, Precision
from guides.projections import PROJECTIONS, Projection
from inference import starts
from inference.result import Result, partition
from inference.starts import Start, Structure
from models import AnyArray
from models.errors import InputError
from models.match import MixtureMatch
from models.reading import (
    Conjugate,
    Program,
    check_conjugate,
    check_program,
    read,
    read_batch,
    what_varies,
)
from models.scenes import Scene, check_scene

STARTS = {"uniform": starts.uniform, "poses": starts.poses}

_POOL = 512  # slots; their state stays within the processor's cache
_SEGMENT = 8  # steps between two looks at which slots are done


class Schedule(NamedTuple):
    """When a run gets hotter, and when it ends."""

    beta_start: float = 0.05
    beta_factor: float = 2.0
    beta_max: float = 1.0
    tolerance: float = 1e-3
    """Change of the ELBO in a step, in nats, below which it has converged."""
    max_steps: int = 1000
    min_steps: int = 0
    overshoot: bool = False
    """Let the last factor carry beta beyond beta_max, as the published code does."""


_DEFAULT = Schedule()

PUBLISHED_DS: dict[str, Any] = {
    "start": "uniform",
    "projection": "two_sweeps",
    "restarts": 5,
    "schedule": Schedule(min_steps=500, max_steps=500, overshoot=True),
}
"""Settings of `run` that follow the code published with the paper, on the program `constellation`:
the precision doubles beyond its maximum (from 500 to 16000), Sinkhorn stops after two sweeps, and
there are always 500 steps."""

PUBLISHED_GMM: dict[str, Any] = {
    "start": "uniform",
    "projection": "softmax",
    "restarts": 5,
    "schedule": Schedule(beta_max=0.05, min_steps=500, max_steps=500),
}
"""Likewise for GCM-GMM, on the program `published_mixture`: no annealing at all."""


class State(NamedTuple):
    """Where a run stands; scene axes last."""

    match_probs: Float[Array, "N N *runs"]
    carry: Float[Array, "..."]
    precision: Precision
    part_probs: PartProbs | None
    pose: PoseFactor
    beta: Float[Array, "*runs"]
    terms: ElboTerms
    steps: Int[Array, "*runs"]
    converged: Bool[Array, "*runs"]
    done: Bool[Array, "*runs"]


def step(
    model: Conjugate,
    structure: Structure,
    projection: Projection,
    log_normalizer: Float[Array, "*runs"],
    state: State,
    schedule: Schedule,
    tolerance: float = 1e-9,
) -> State:
    """One round of coordinate updates, and annealing where the ELBO has converged."""
    pose = meanfield.update_pose(model, structure.owner, state.match_probs, state.precision)
    energy = meanfield.expected_energy(model, structure.owner, pose)
    precision, part_probs = state.precision, state.part_probs
    if model.precision_prior is not None:
        precision = meanfield.update_precision(model, state.match_probs, energy, state.beta)
    if model.part_prior is not None:
        part_probs = meanfield.update_part_probs(model, state.match_probs)
    log_likelihood = meanfield.expected_log_likelihood(model, energy, precision)
    log_rho = meanfield.match_log_weights(model, log_likelihood, part_probs)
    projected = projection.project(log_rho, state.carry, tolerance)
    terms = meanfield.elbo_terms(
        model,
        projected.match_probs,
        projected.entropy,
        log_normalizer,
        pose,
        log_likelihood,
        precision,
        part_probs,
    )
    steps = state.steps + 1
    settled = jnp.abs(terms.elbo - state.terms.elbo) < schedule.tolerance
    at_end = state.beta >= schedule.beta_max
    converged = settled & at_end & (steps >= schedule.min_steps)
    hotter = state.beta * schedule.beta_factor
    if not schedule.overshoot:
        hotter = jnp.minimum(hotter, schedule.beta_max)
    beta = jnp.where(settled & ~at_end, hotter, state.beta)
    new = State(
        match_probs=projected.match_probs,
        carry=projected.carry,
        precision=_at_beta(model, precision, state.beta, beta),
        part_probs=part_probs,
        pose=pose,
        beta=beta,
        terms=terms,
        steps=steps,
        converged=converged,
        done=converged | (steps >= schedule.max_steps),
    )
    return jax.tree.map(lambda old, new: jnp.where(state.done, old, new), state, new)


def _at_beta(model: Conjugate, precision: Precision, old: Array, new: Array) -> Precision:
    if model.precision_prior is None:
        return meanfield.fixed_precision(model, new)
    ratio = new / old
    return Precision(precision.mean * ratio, precision.log_mean + jnp.log(ratio), precision.kl)


def begin(model: Conjugate, projection: Projection, start: Start) -> State:
    """The state before the first step."""
    runs = start.beta.shape
    carry = projection.start(start.weights)
    projected = projection.project(start.weights, carry, 1e-9)
    num_objects, pose_dim = model.pose_mean.shape[:2]
    nothing = jnp.full(runs, -jnp.inf, float)
    part_probs = None
    if model.part_prior is not None:
        part_probs = meanfield.update_part_probs(model, projected.match_probs)
    return State(
        match_probs=projected.match_probs,
        carry=carry,
        precision=jax.tree.map(
            lambda x: jnp.broadcast_to(x, runs), meanfield.fixed_precision(model, start.beta)
        ),
        part_probs=part_probs,
        pose=PoseFactor(
            jnp.zeros((pose_dim, num_objects, *runs)),
            jnp.zeros((pose_dim, pose_dim, num_objects, *runs)),
            jnp.zeros((num_objects, *runs)),
        ),
        beta=start.beta,
        terms=ElboTerms(nothing, jnp.zeros(runs), jnp.zeros(runs), jnp.zeros(runs)),
        steps=jnp.zeros(runs, int),
        converged=jnp.zeros(runs, bool),
        done=jnp.zeros(runs, bool),
    )


class _Pool(NamedTuple):
    """The runs that are being stepped together; the axis of slots is last."""

    model: Conjugate
    log_normalizer: Float[Array, "*runs"]
    state: State


class _Engine(NamedTuple):
    """The compiled parts of coordinate ascent for one program and one choice of settings."""

    structure: Structure
    launch: Callable[[Scene, Array], _Pool]
    """New runs from scenes and random keys."""
    advance: Callable[[_Pool], _Pool]
    """Some steps of every run that is not done."""
    advance_one: Callable[[_Pool], _Pool]
    insert: Callable[[_Pool, _Pool, AnyArray], _Pool]
    """New runs into the given slots; slots beyond the pool are dropped."""


@functools.lru_cache(maxsize=32)
def _engine(
    program: Program,
    projection_name: str,
    start: str,
    schedule: Schedule,
    shape: tuple[int, int],
    has_types: bool,
) -> _Engine:
    """Built once; JAX compiles each part once for each width of the pool."""
    rows = shape[0]
    types = np.zeros(rows, int) if has_types else None
    blank = Scene(np.zeros(shape), np.ones(rows, bool), point_type=types)
    example = read(program, blank)
    structure = starts.structure(example)
    varies = what_varies(program, blank)
    projection = PROJECTIONS[projection_name]

    @jax.jit
    def launch(scenes: Scene, keys: Array) -> _Pool:
        def make_start(scene: Scene, key: Array) -> Start:
            limits = (schedule.beta_start, schedule.beta_max)
            return STARTS[start](key, read(program, scene), structure, *limits)

        model = read_batch(program, scenes, varies)
        state = begin(model, projection, jax.vmap(make_start, out_axes=-1)(scenes, keys))
        return _Pool(model, projection.log_normalizer(model.match_logits), state)

    @jax.jit
    def advance(pool: _Pool) -> _Pool:
        def one(_: int, state: State) -> State:
            return step(pool.model, structure, projection, pool.log_normalizer, state, schedule)

        return pool._replace(state=jax.lax.fori_loop(0, _SEGMENT, one, pool.state))

    @jax.jit
    def advance_one(pool: _Pool) -> _Pool:
        new = step(pool.model, structure, projection, pool.log_normalizer, pool.state, schedule)
        return pool._replace(state=new)

    @jax.jit
    def insert(pool: _Pool, new: _Pool, slots: Int[Array, " new"]) -> _Pool:
        def put(old: Array, x: Array) -> Array:
            shared = old.shape[-1:] != pool.state.done.shape
            return old if shared else old.at[..., slots].set(x, mode="drop")

        return jax.tree.map(put, pool, new)

    return _Engine(structure, launch, advance, advance_one, insert)


class _Best(NamedTuple):
    """The best run of each scene so far."""

    match_probs: Float[np.ndarray, "scenes N N"]
    pose_mean: Float[np.ndarray, "scenes K p"]
    pose_covariance: Float[np.ndarray, "scenes K p p"]
    elbo: Float[np.ndarray, " scenes"]
    sparse: Bool[np.ndarray, " scenes"]
    converged: Bool[np.ndarray, " scenes"]
    steps: Int[np.ndarray, " scenes"]
    attempt: Int[np.ndarray, " scenes"]


def run(
    program: Program,
    scene: Scene,
    key: Array | int = 0,
    *,
    restarts: int = 16,
    start: Literal["poses", "uniform"] = "poses",
    projection: Literal["auto", "sinkhorn", "bethe", "softmax", "two_sweeps"] = "auto",
    schedule: Schedule = _DEFAULT,
    history: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Fit q(Z) q(Y) to one scene or to each of a batch, and keep the best of several restarts.

    Args:
        program: a NumPyro program with a Normal pose prior, one of the three match priors, and
            `MatchedParts`; optionally a Gamma `precision`, for a mixture Dirichlet `part_probs`.
        key: seed or JAX key. A scene's result depends on it and on the scene's place in the batch.
        restarts: runs for each scene. A run that ends in a sparse solution, an object that surely
            has a point but not two, is started anew, at most as often again.
        start: "poses" that tuples of points suggest, or the paper's "uniform" random R.
        projection: what R is: "sinkhorn" (GCM-DS), "softmax" (GCM-GMM), "bethe"; "auto" takes the
            one that the match prior of the program asks for.
        history: keep the ELBO's terms, beta, R and poses of each step of the best run.
        progress: called with (runs finished, runs in all) now and then.
    """
    began = time.perf_counter()
    if restarts < 1:
        raise InputError(f"wanted at least one restart, got {restarts}; try 16")
    check_program(program, scene.batch().take(0))
    check_conjugate(program, scene.batch().take(0))
    example = read(program, scene.batch().take(0))
    scenes = check_scene(scene, example.parts.num_parts, example.parts.num_features).batch()
    is_mixture = example.match_family is MixtureMatch
    if projection == "auto":
        projection = "softmax" if is_mixture else "sinkhorn"
    if (projection == "softmax") != is_mixture:
        raise InputError(
            f"the projection {projection!r} does not fit the match prior "
            f"{example.match_family.__name__}; a MixtureMatch wants 'softmax', the other priors "
            "'sinkhorn' or 'bethe'"
        )
    engine = _engine(
        program,
        projection,
        start,
        schedule,
        scenes.points.shape[1:],
        scenes.point_type is not None,
    )
    base_key = jax.random.key(key) if isinstance(key, int) else key
    best = _best_of_restarts(engine, scenes, base_key, restarts, progress)
    result = Result(
        method={"softmax": "gmm", "bethe": "bethe"}.get(projection, "ds"),
        scene=scenes,
        match_probs=best.match_probs,
        pose_mean=best.pose_mean,
        pose_covariance=best.pose_covariance,
        object=partition(best.match_probs, engine.structure.owner, scenes.present),
        owner=engine.structure.owner,
        converged=best.converged,
        steps=best.steps,
        elbo=best.elbo,
        details={"sparse": best.sparse, "attempt": best.attempt},
    )
    if history:
        trace = _history(engine, scenes, base_key, best.attempt)
        result = replace(result, history=trace)
    result = result if scene.is_batch else result.take(0)
    return replace(result, seconds=time.perf_counter() - began)


def _run_keys(base: Array, scene: Int[np.ndarray, " n"], attempt: Int[np.ndarray, " n"]) -> Array:
    """A key for each run that depends on its scene and attempt alone, not on the pool."""
    fold = jax.vmap(lambda s, a: jax.random.fold_in(jax.random.fold_in(base, s), a))
    return fold(jnp.asarray(scene), jnp.asarray(attempt))


def _best_of_restarts(
    engine: _Engine,
    scenes: Scene,
    base_key: Array,
    restarts: int,
    progress: Callable[[int, int], None] | None,
) -> _Best:
    """Work off all runs through one pool of slots and keep the best of each scene."""
    num_scenes, num_runs = len(scenes.points), len(scenes.points) * restarts
    width = min(_POOL, 1 << (num_runs - 1).bit_length())
    block = max(1, width // 8)
    best = _nothing_yet(scenes, engine)
    tried = np.zeros(num_scenes, int)
    queue = [(s, a) for a in range(restarts) for s in range(num_scenes)][::-1]
    waiting = np.full((width, 2), -1)  # scene and attempt in each slot; -1 for an empty slot
    total_runs, finished = num_runs, 0

    def launch(jobs: list[tuple[int, int]]) -> _Pool:
        padded = np.array((jobs + jobs[:1] * block)[:block])
        chosen = Scene(**scenes.take(padded[:, 0]).observed)
        return engine.launch(chosen, _run_keys(base_key, padded[:, 0], padded[:, 1]))

    pool: Any = None
    while queue or (waiting >= 0).any():
        free = np.flatnonzero(waiting[:, 0] < 0)
        while queue and len(free) >= min(block, len(queue)):
            jobs = [queue.pop() for _ in range(min(block, len(queue)))]
            slots = np.full(block, width)
            slots[: len(jobs)] = free[: len(jobs)]
            waiting[free[: len(jobs)]] = jobs
            new = launch(jobs)
            pool = engine.insert(_empty(new, width) if pool is None else pool, new, slots)
            free = free[len(jobs) :]
        if not queue and (waiting[:, 0] >= 0).sum() <= block < width:
            pool, waiting, width = *_narrow(pool, waiting, block), block
        pool = engine.advance(pool)
        done = np.asarray(pool.state.done) & (waiting[:, 0] >= 0)
        if done.any():
            slots = np.flatnonzero(done)
            again = _keep_best(best, pool.state, slots, waiting[slots], scenes, engine.structure)
            for s, _ in waiting[slots][again]:
                if tried[s] < restarts:
                    queue.append((int(s), restarts + int(tried[s])))
                    tried[s] += 1
                    total_runs += 1
            waiting[slots] = -1
            finished += len(slots)
            if progress is not None:
                progress(finished, total_runs)
    return best


def _empty(like: _Pool, width: int) -> _Pool:
    """A pool of finished runs, to be filled."""

    def widen(x: Array) -> Array:
        shared = x.shape[-1:] != like.state.done.shape
        return x if shared else jnp.zeros((*x.shape[:-1], width), x.dtype)

    pool = jax.tree.map(widen, like)
    return pool._replace(state=pool.state._replace(done=jnp.ones(width, bool)))


def _narrow(
    pool: _Pool, waiting: Int[np.ndarray, "wide 2"], width: int
) -> tuple[_Pool, Int[np.ndarray, "width 2"]]:
    """Move the last runs into a pool with fewer slots."""
    active = np.flatnonzero(waiting[:, 0] >= 0)
    slots = np.resize(active, width)
    wide = pool.state.done.shape
    pool = jax.tree.map(lambda x: x[..., slots] if x.shape[-1:] == wide else x, pool)
    empty = np.arange(width) >= len(active)
    done = pool.state.done | empty
    narrow = np.where(empty[:, None], -1, waiting[slots])
    return pool._replace(state=pool.state._replace(done=done)), narrow


def _nothing_yet(scenes: Scene, engine: _Engine) -> _Best:
    num_scenes, rows = scenes.present.shape
    num_objects = len(engine.structure.members)
    pose_dim = engine.structure.pose_dim
    return _Best(
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
    best: _Best,
    state: State,
    slots: Int[np.ndarray, " done"],
    jobs: Int[np.ndarray, "done 2"],
    scenes: Scene,
    structure: Structure,
) -> Bool[np.ndarray, " done"]:
    """Compare finished runs with the best of their scenes; says which ended in a sparse solution.

    Chosen by the ELBO alone, among runs that are not sparse if there are any.
    """
    match_probs = np.moveaxis(np.asarray(state.match_probs)[..., slots], -1, 0)
    elbo = np.asarray(state.terms.elbo)[slots]
    sparse = _is_sparse(match_probs, scenes.present[jobs[:, 0]], structure.owner)
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
) -> Bool[np.ndarray, " runs"]:
    """The paper's rule: some r above 0.9 for an object that has less than two points in all."""
    of_points = np.where(present[..., None], match_probs, 0.0)
    groups = np.eye(owner.max() + 1)[owner].T.astype(bool)
    surely = np.stack([(of_points[..., g] > 0.9).any(axis=(-2, -1)) for g in groups], axis=-1)
    mass = np.stack([of_points[..., g].sum(axis=(-2, -1)) for g in groups], axis=-1)
    return np.any(surely & (mass < 2 - 1e-6), axis=-1)


def _history(
    engine: _Engine, scenes: Scene, base_key: Array, attempt: Int[np.ndarray, " scenes"]
) -> dict[str, np.ndarray]:
    """Do the best runs again, one step at a time, and write down what happens."""
    keys = _run_keys(base_key, np.arange(len(attempt)), attempt)
    pool = engine.launch(Scene(**scenes.observed), keys)
    steps = []
    while not np.asarray(pool.state.done).all():
        pool = engine.advance_one(pool)
        state = pool.state
        steps.append(
            {
                "elbo": state.terms.elbo,
                "log_likelihood": state.terms.log_likelihood,
                "pose": state.terms.pose,
                "match": state.terms.match,
                "beta": state.beta,
                "match_probs": jnp.moveaxis(state.match_probs, -1, 0),
                "pose_mean": jnp.moveaxis(state.pose.mean, (0, 1, 2), (2, 1, 0)),
            }
        )
    return {name: np.stack([np.asarray(s[name]) for s in steps]) for name in steps[0]}
