"""Whether draws agree with exact values, judged by the Monte Carlo standard error."""

import numpy as np
from numpyro.diagnostics import effective_sample_size


def effective_size(draws: np.ndarray) -> np.ndarray:
    """How many independent draws (chains, draws, ...) are worth; one where all are the same."""
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.asarray(effective_sample_size(draws))
    size = np.where(np.isfinite(size) & (size > 0), size, 1.0)
    return np.minimum(size, draws[..., 0].size)


def standard_error(draws: np.ndarray) -> np.ndarray:
    """Of the mean of draws (chains, draws, ...); zero where they are all the same."""
    return draws.std(axis=(0, 1)) / np.sqrt(effective_size(draws))


def assert_shares(events: np.ndarray, exact: np.ndarray) -> None:
    """Each event turns up, and its share is within five standard errors of its probability.

    The spread is that of the probability and not that of the draws: a rare event that turned up too
    seldom has draws of too little spread, and a sampler that is right would fail.
    """
    assert events.any(axis=(0, 1)).all()
    error = np.sqrt(exact * (1 - exact) / effective_size(events.astype(float)))
    score = (events.mean(axis=(0, 1)) - exact) / error
    assert (np.abs(score) < 5).all(), score


def assert_means(draws: np.ndarray, exact: np.ndarray, floor: float = 0.0) -> None:
    """The mean of the draws is within five standard errors of the exact one."""
    error = standard_error(draws)
    assert np.isfinite(error).all()
    excess = np.abs(draws.mean(axis=(0, 1)) - exact) - 5 * error - floor
    assert (excess <= 0).all(), excess.max()


def assert_posterior(draws: dict[str, np.ndarray], exact, present: np.ndarray) -> None:
    """Pose means, variances and match marginals are those of `tests.oracle_inference`."""
    pose = draws["pose"]
    assert_means(pose, exact.pose_mean)
    variance = np.diagonal(exact.pose_covariance, axis1=1, axis2=2)
    assert_means((pose - exact.pose_mean) ** 2, variance)
    match = draws["match"][..., present]
    rows = len(exact.match_probs)
    indicators = (match[..., None] == np.arange(rows)).astype(float)
    # A match of small probability need not turn up at all: three draws' worth is let pass.
    assert_means(indicators, exact.match_probs[present], floor=3 / match[..., 0].size)
