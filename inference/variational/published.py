"""GCM-DS as the code published with the paper runs it, for comparisons.

That code (github.com/anazabal/GenerativeCapsules, commit 913e132, `sinkhorn_model_annealing_stop`)
differs from the paper's text, and from `inference.cavi`, in ways that matter for its numbers:

- The entries of the first R are uniform; its rows, but not its columns, are scaled to sum to one.
- log rho leaves out the constant of the Normal density, and Sinkhorn stops after two sweeps,
  columns first. With converged Sinkhorn the constant of a row would not matter; here it decides how
  much of a column the dummy rows take.
- The precision doubles whenever the ELBO settles below the full precision: from 500 to 16,000.
- Whenever the ELBO has settled in a sparse solution the run restarts, *within* its 500 steps. All
  steps are made, and the run ends wherever it is then.
- The restart with the highest ELBO is taken. (The published script also stops at the first restart
  that agrees with the truth, which a method cannot know; this is left out here.)

After two sweeps columns do not sum to one, so this ELBO is not a lower bound.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp, xlogy
from jaxtyping import Array, Bool, Float, Int

from guides import meanfield
from guides.meanfield import PoseFactor
from guides.projections import sinkhorn
from inference.conditions.problem import Problem, read_problem
from inference.result import Report, Result, method, partition, reporter
from models.distributions.match import MixtureMatch
from models.errors import InputError
from models.numerics.linalg import total
from models.program.reading import LinearGaussianModel
from models.program.sites import Program
from models.scenes import Scene

STEPS = 500
SWEEPS = 2
SETTLED = 1e-3
"""A smaller change of the ELBO in a step, in nats, ends a stage of the annealing."""
SUMS_TO_ONE = 1e-3
"""Sinkhorn stops before its two sweeps if all rows sum to one within this."""


class Walk(NamedTuple):
    """The state of all runs; the axis of runs is last."""

    match_probs: Float[Array, "N N runs"]
    pose: PoseFactor
    beta: Float[Array, " runs"]
    elbo: Float[Array, " runs"]
    settled: Bool[Array, " runs"]


@method
def run(
    program: Program,
    scene: Scene,
    rng_key: Array,
    *,
    num_restarts: int = 5,
    beta_start: float = 0.05,
    progress_bar: bool | Report = False,
) -> Result:
    """Fit q(Z) q(Y) to one scene or each scene of a batch as the published code does.

    Args:
        program: a program as for `inference.cavi.run`, with a match prior over permutations.
        num_restarts: number of runs for each scene, from random R.
        beta_start: the initial precision, as a share of the full one.
        progress_bar: show one, or call a function with (runs finished, runs in total).
    """
    if num_restarts < 1:
        raise InputError(f"num_restarts must be at least 1, got {num_restarts}")
    scenes = scene.batch()
    problem = read_problem(program, scenes, factors=frozenset(), or_bound=True)
    if (
        not isinstance(problem, Problem)
        or problem.skeleton.match_family is MixtureMatch
        or problem.skeleton.has_clutter
    ):
        raise InputError(
            "the published GCM-DS requires a program with no further latent sites, a known "
            "precision, no clutter and a match prior over permutations; use inference.cavi for "
            "this program"
        )
    which = np.repeat(np.arange(len(scenes.points)), num_restarts)
    model, owner = problem.reading.take(which), problem.owner
    walk = _walk(model, jax.random.split(rng_key, STEPS), beta_start, tuple(owner.tolist()))
    elbo = np.asarray(walk.elbo).reshape(-1, num_restarts)
    best = np.arange(len(elbo)) * num_restarts + elbo.argmax(axis=1)
    match_probs, mean, covariance, settled = (
        np.moveaxis(np.asarray(x)[..., best], -1, 0)
        for x in (walk.match_probs, walk.pose.mean, walk.pose.covariance, walk.settled)
    )
    reporter(progress_bar)(len(which), len(which))
    return Result(
        method="ds",
        scene=scenes,
        match_probs=match_probs,
        pose_mean=np.swapaxes(mean, 1, 2),
        pose_covariance=np.moveaxis(covariance, 3, 1),
        labels=partition(match_probs, owner, scenes.present),
        owner=owner,
        converged=settled,
        steps=np.full(len(best), STEPS),
        elbo=elbo.max(axis=1) + problem.log_constant + sinkhorn.log_bound(len(owner)),
    )


@functools.partial(jax.jit, static_argnames="owner")
def _walk(
    model: LinearGaussianModel, keys: Array, beta_start: float, owner: tuple[int, ...]
) -> Walk:
    """Make all steps of all runs."""
    runs = model.points.shape[-1]
    first = random_rows(keys[0], model)
    walk = step(model, np.array(owner), first, jnp.full(runs, beta_start), jnp.full(runs, -jnp.inf))

    def again(walk: Walk, key: Array) -> tuple[Walk, None]:
        sparse = walk.settled & is_sparse(model, np.array(owner), walk.match_probs)
        colder = walk.settled & (walk.beta < 1.0)
        beta = jnp.where(sparse, beta_start, jnp.where(colder, 2.0 * walk.beta, walk.beta))
        match_probs = jax.lax.cond(
            sparse.any(),
            lambda: jnp.where(sparse, random_rows(key, model), walk.match_probs),
            lambda: walk.match_probs,
        )
        return step(model, np.array(owner), match_probs, beta, walk.elbo), None

    return jax.lax.scan(again, walk, keys[1:])[0]


def step(
    model: LinearGaussianModel,
    owner: Int[np.ndarray, " N"],
    match_probs: Float[Array, "N N runs"],
    beta: Float[Array, " runs"],
    before: Float[Array, " runs"],
) -> Walk:
    """One round of updates; `before` is the ELBO of the last step."""
    precision = meanfield.fixed_precision(model, beta)
    pose = meanfield.update_pose(model, owner, match_probs, precision)
    energy = meanfield.expected_energy(model, owner, pose)
    log_rho = meanfield.log_prior(model, None) - 0.5 * precision.mean * energy
    match_probs = jnp.exp(sweep(jnp.broadcast_to(log_rho, match_probs.shape)))
    terms = meanfield.elbo_terms(
        model,
        match_probs,
        -meanfield.matrix_sum(xlogy(match_probs, match_probs)),
        jnp.zeros(()),
        pose,
        meanfield.expected_log_likelihood(model, energy, precision),
        precision,
        None,
    )
    return Walk(match_probs, pose, beta, terms.elbo, jnp.abs(terms.elbo - before) < SETTLED)


def sweep(log_rho: Float[Array, "N N runs"]) -> Float[Array, "N N runs"]:
    """At most two sweeps of Sinkhorn, columns then rows."""
    rows = logsumexp(log_rho, axis=1)
    for _ in range(SWEEPS):
        done = (jnp.abs(jnp.exp(rows) - 1.0) < SUMS_TO_ONE).all(axis=0)
        columns_done = log_rho - logsumexp(log_rho, axis=0)
        sums = logsumexp(columns_done, axis=1)
        log_rho = jnp.where(done, log_rho, columns_done - sums[:, None])
        rows = jnp.where(done, rows, sums)
    return log_rho


def is_sparse(
    model: LinearGaussianModel, owner: Int[np.ndarray, " N"], match_probs: Float[Array, "N N runs"]
) -> Bool[Array, " runs"]:
    """Whether an object surely has a point, but fewer than two in total."""
    of_points = match_probs * model.seen.any(axis=1)[:, None]
    found = jnp.zeros(match_probs.shape[-1], bool)
    for k in range(len(model.pose_mean)):
        own = of_points[:, owner == k]
        found |= (own.max(axis=(0, 1)) > 0.9) & (meanfield.matrix_sum(own) < 2.0)
    return found


def random_rows(key: Array, model: LinearGaussianModel) -> Float[Array, "N N runs"]:
    """R with uniform entries and rows that sum to one; dummy rows are zero."""
    num_parts, runs = model.match_logits.shape[0], model.points.shape[-1]
    entries = jax.random.uniform(key, (num_parts, num_parts, runs))
    present = model.seen.any(axis=1)[:, None]
    return present * entries / total(entries, axis=1)[:, None]
