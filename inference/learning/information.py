"""Standard errors of learnt parameters, from the observed information.

The observed information is minus the derivative of the score, and the score is the gradient of the
summed log evidence (or bound). By Fisher's identity a score takes only an E-step, so the
information is found by central differences of scores, for every kind of E-step.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from inference.learning.params import Params, Values

STEP = 0.3
"""Step of the differences, in standard errors of a parameter if all others were known."""

MAX_STEP = 3e-3
"""Largest step of an unconstrained parameter. If a posterior averages over symmetric matches, as of
a square, the scores of single scenes are small and do not give the scale of a parameter."""

_UNINFORMED = 1e-4  # directions with less than this share of the largest information have none

Scores = Callable[[Float[np.ndarray, " n"]], Float[np.ndarray, "scenes n"]]
"""The gradient of each scene's log evidence, or bound, at some parameters."""


def standard_errors(params: Params, flat: Float[np.ndarray, " n"], scores_at: Scores) -> Values:
    """Standard errors of the values of all parameters (the delta method).

    The error is zero for a parameter at its bound, and in a direction that no scene informs, such
    as the size of vertices that the program normalises. It is NaN where the log evidence does not
    curve down, which can happen before learning has converged.
    """
    scale = 1 / np.sqrt((scores_at(flat) ** 2).sum(axis=0))
    free = np.flatnonzero((flat < params.highest() - 1e-9) & np.isfinite(scale))
    information = observed_information(flat, scores_at, scale, free)
    curved = np.diag(information) > 0
    kept, flattened = free[curved], free[~curved]
    information = information[np.ix_(curved, curved)]
    # Scale each parameter by its own error, so that uninformed directions can be recognised.
    size = 1 / np.sqrt(np.diag(information))
    known = information * np.outer(size, size)
    inverse = np.linalg.pinv(known, rcond=_UNINFORMED, hermitian=True)
    covariance = np.zeros((len(flat), len(flat)))
    covariance[np.ix_(kept, kept)] = inverse * np.outer(size, size)

    def error(slope: Float[np.ndarray, "*shape n"]) -> Float[np.ndarray, "*shape"]:
        variance = np.einsum("...i,ij,...j->...", slope, covariance, slope)
        depends = np.any(slope[..., flattened] != 0, axis=-1)
        return np.sqrt(np.where(depends | (variance < 0), np.nan, variance))

    slopes = jax.jacfwd(params.values)(jnp.asarray(flat))
    return {name: error(np.asarray(slope)) for name, slope in slopes.items()}


def observed_information(
    flat: Float[np.ndarray, " n"],
    scores_at: Scores,
    scale: Float[np.ndarray, " n"],
    free: np.ndarray,
) -> Float[np.ndarray, "free free"]:
    """Minus the second derivatives of the summed log evidence in some of the parameters.

    Args:
        scale: standard error of each parameter if all others were known, which sets the step.
        free: indices of the parameters.
    """
    rows = []
    for i in free:
        step = np.zeros_like(flat)
        step[i] = min(STEP * scale[i], MAX_STEP)
        apart = scores_at(flat + step).sum(axis=0) - scores_at(flat - step).sum(axis=0)
        rows.append(-apart[free] / (2 * step[i]))
    information = np.array(rows)
    return (information + information.T) / 2
