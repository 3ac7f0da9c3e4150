"""One round of coordinate updates with annealing: the inner loop of the paper's Algorithm 1."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from guides import meanfield
from guides.meanfield import ElboTerms, PartProbs, PoseFactor, Precision
from guides.projections import Projection
from inference.proposals.starts import Start, Structure
from models.program.reading import LinearGaussianModel

LARGEST_ERROR = 1e-6
"""Largest deviation of a row or column sum of R from one at which a run counts as converged: what
is further from doubly stochastic has an ELBO that need not be a bound."""


class Schedule(NamedTuple):
    """Annealing schedule and stopping rule."""

    beta_start: float = 0.05
    beta_factor: float = 2.0
    beta_max: float = 1.0
    tolerance: float = 1e-3
    """The ELBO has converged if it changes by less than this in a step, in nats."""
    max_steps: int = 1000


class State(NamedTuple):
    """The state of a run; scene axes last."""

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
    model: LinearGaussianModel,
    structure: Structure,
    projection: Projection,
    state: State,
    schedule: Schedule,
    tolerance: float = 1e-9,
) -> State:
    """One round of coordinate updates; beta is raised if the ELBO has converged."""
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
        jnp.zeros(()),  # the prior's normaliser is a constant of the scene, see inference.cavi
        pose,
        log_likelihood,
        precision,
        part_probs,
    )
    steps = state.steps + 1
    settled = jnp.abs(terms.elbo - state.terms.elbo) < schedule.tolerance
    at_end = state.beta >= schedule.beta_max
    converged = settled & at_end & (projected.error <= LARGEST_ERROR)
    colder = jnp.minimum(state.beta * schedule.beta_factor, schedule.beta_max)
    beta = jnp.where(settled & ~at_end, colder, state.beta)
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


def _at_beta(model: LinearGaussianModel, precision: Precision, old: Array, new: Array) -> Precision:
    if model.precision_prior is None:
        return meanfield.fixed_precision(model, new)
    ratio = new / old
    return Precision(precision.mean * ratio, precision.log_mean + jnp.log(ratio), precision.kl)


def begin(model: LinearGaussianModel, projection: Projection, start: Start) -> State:
    """The state before the first step."""
    runs = start.beta.shape
    projected = projection.cold(start.weights, 1e-9)
    num_objects, pose_dim = model.pose_mean.shape[:2]
    nothing = jnp.full(runs, -jnp.inf, float)
    part_probs = None
    if model.part_prior is not None:
        part_probs = meanfield.update_part_probs(model, projected.match_probs)
    return State(
        match_probs=projected.match_probs,
        carry=projected.carry,
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
