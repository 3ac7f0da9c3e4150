"""Amortised inference: q(Z) from a trained network in one pass, and the best q(Y) given it.

The match probabilities of a network are a q(Z). With the optimal q(Y) in closed form (eqs. Lambda_k
and mu_k) it has an ELBO, and importance weights show how good it is.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import linear_sum_assignment
from scipy.special import softmax

from guides import meanfield
from guides.projections import PROJECTIONS
from inference.conditions.problem import Problem, solve_scenes
from inference.result import Report, Result, method, partition, reporter
from models.distributions.match import MixtureMatch
from models.numerics.sinkhorn import swept
from models.program.batches import Skeleton
from models.program.reading import LinearGaussianModel
from models.program.sites import Program
from models.scenes import Scene

Logits = Callable[[Scene], Float[np.ndarray, "scenes N N"]]
"""From a batch of scenes to match logits, like `guides.amortised.AmortisedGuide.match_logits`."""

ROUNDS = 3
"""Number of updates of the poses and an unknown precision, which depend on each other."""


@method
def run(
    program: Program,
    scene: Scene,
    rng_key: Array,
    *,
    match_logits: Logits,
    progress_bar: bool | Report = False,
) -> Result:
    """Infer one scene or each scene of a batch from the match logits of a network.

    Args:
        program: as for coordinate ascent; pairs that its match prior forbids have probability zero.
        rng_key: not used; nothing is random here.
        match_logits: from a guide trained for this program (`guides.amortised.amortise`).
    """
    result = solve_scenes(
        program,
        scene.batch(),
        lambda problem: at_logits(problem, logits_of(problem, match_logits)),
        or_bound=True,
    )
    reporter(progress_bar)(len(result), len(result))
    return result


def logits_of(problem: Problem, match_logits: Logits) -> Float[np.ndarray, "scenes N N"]:
    """The logits of a network, in the names that a problem has for identical objects.

    A network may take the only square of a scene for the second one. If a condition says that this
    is the one that is absent, the network's match is impossible, and only the names are wrong.
    """
    logits = match_logits(problem.scenes)
    if not problem.is_conditional:
        return logits
    groups, kinds = problem.skeleton.parts, np.array(problem.skeleton.alike)
    probs = softmax(logits, axis=-1) * problem.scenes.present[..., None]
    allowed = np.isfinite(np.moveaxis(problem.reading.model.match_logits, -1, 0))
    named = logits.copy()
    for kind in np.unique(kinds):
        objects = [groups[k] for k in np.flatnonzero(kinds == kind)]
        pairs = [
            [np.sum(probs[..., j] * allowed[..., k], axis=(1, 2)) for j in objects] for k in objects
        ]
        for s, possible in enumerate(np.moveaxis(np.array(pairs), -1, 0)):
            for k, j in zip(*linear_sum_assignment(possible, maximize=True), strict=True):
                named[s][:, objects[k]] = logits[s][:, objects[j]]
    return named


def at_logits(problem: Problem, logits: Float[np.ndarray, "scenes N N"]) -> Result:
    """The result whose match probabilities are the projection of the given logits."""
    name = "softmax" if problem.skeleton.match_family is MixtureMatch else "sinkhorn"
    fit = _fitter(problem.skeleton, name)
    fitted = fit(problem.reading.model, jnp.moveaxis(jnp.asarray(logits), 0, -1))
    match_probs, mean, covariance, elbo, error = (np.asarray(x) for x in fitted)
    match_probs = np.moveaxis(match_probs, -1, 0)
    constant = problem.log_constant + PROJECTIONS[name].log_bound(len(problem.owner))
    return Result(
        method="amortised",
        scene=problem.scenes,
        match_probs=match_probs,
        pose_mean=np.moveaxis(mean, (0, 1, 2), (2, 1, 0)),
        pose_covariance=np.moveaxis(covariance, (2, 3), (1, 0)),
        labels=partition(match_probs, problem.owner, problem.scenes.present),
        owner=problem.owner,
        converged=error < 1e-6,
        steps=np.ones(len(elbo), int),
        elbo=elbo + constant,
    )


@functools.lru_cache(maxsize=32)
def _fitter(skeleton: Skeleton, projection_name: str) -> Callable[..., Any]:
    """The closed-form fit, compiled once for each skeleton of a program."""
    owner, projection = np.array(skeleton.owner), PROJECTIONS[projection_name]

    @jax.jit
    def fit(model: LinearGaussianModel, logits: Float[Array, "N N scenes"]) -> tuple[Array, ...]:
        allowed = jnp.isfinite(model.match_logits)
        logits = jnp.where(allowed, logits, -jnp.inf)
        if projection_name == "sinkhorn":
            projected = projection.project(logits, swept(logits), 1e-9)
        else:
            projected = projection.cold(logits, 1e-9)
        match_probs, beta = projected.match_probs, jnp.ones(logits.shape[-1])
        precision, part_probs = meanfield.fixed_precision(model, beta), None
        if model.part_prior is not None:
            part_probs = meanfield.update_part_probs(model, match_probs)
        for _ in range(1 if model.precision_prior is None else ROUNDS):
            pose = meanfield.update_pose(model, owner, match_probs, precision)
            energy = meanfield.expected_energy(model, owner, pose)
            if model.precision_prior is not None:
                precision = meanfield.update_precision(model, match_probs, energy, beta)
        log_likelihood = meanfield.expected_log_likelihood(model, energy, precision)
        terms = meanfield.elbo_terms(
            model,
            match_probs,
            projected.entropy,
            jnp.zeros(()),
            pose,
            log_likelihood,
            precision,
            part_probs,
        )
        return match_probs, pose.mean, pose.covariance, terms.elbo, projected.error

    return fit
