"""Inference in plain numpy: exact by listing all matches, variational as one would write it first.

Nothing of the project is imported, so agreement with it means something. The second half is the
paper's Algorithm 1 for one scene, and the reference that the benchmarks measure against.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from tests import oracle


class Problem(NamedTuple):
    """One scene and everything that is assumed about it."""

    points: np.ndarray  # (N, d), padded
    seen: np.ndarray  # (N, d), which features of which rows were observed; all false for a dummy
    F: np.ndarray  # (N, d, p)
    offset: np.ndarray  # (N, d)
    variance: np.ndarray  # (N, d)
    feature_mask: np.ndarray  # (N, d), which features each part has
    owner: np.ndarray  # (N,)
    prior_mean: np.ndarray  # (K, p)
    prior_covariance: np.ndarray  # (K, p, p)
    match_logits: np.ndarray  # (N, N), -inf forbids a pair

    @property
    def present(self) -> np.ndarray:
        return self.seen.any(axis=1)

    @property
    def num_objects(self) -> int:
        return len(self.prior_mean)


# --- exact, by listing --------------------------------------------------------------------------


class Posterior(NamedTuple):
    """The exact posterior of a scene."""

    log_evidence: float
    match_probs: np.ndarray
    pose_mean: np.ndarray
    pose_covariance: np.ndarray
    partitions: dict[tuple[int, ...], float]
    """The probability of each grouping of the rows, written as `canonical` labels."""
    best_match: np.ndarray
    """The column of each row in the most probable match, -1 for dummies."""
    best_log_weight: float


def posterior(problem: Problem) -> Posterior:
    """Sum over every permutation."""
    columns = oracle.permutations(len(problem.points))
    return posterior_over(problem, columns, oracle.scores(problem.match_logits, columns))


def posterior_over(problem: Problem, columns: np.ndarray, log_prior: np.ndarray) -> Posterior:
    """Sum over the listed matches, with the poses integrated out as explicit Gaussian marginals.

    A match is the column of each row; `log_prior` is normalised here.
    """
    columns, log_prior = columns[log_prior > -np.inf], log_prior[log_prior > -np.inf]
    known: dict[tuple, tuple[float, np.ndarray, np.ndarray]] = {}
    objects_of = []
    log_weight = np.array(log_prior)
    for i, match in enumerate(columns):
        keys = []
        for k in range(problem.num_objects):
            pairs = tuple(
                (m, n) for m, n in enumerate(match) if problem.present[m] and problem.owner[n] == k
            )
            if (k, pairs) not in known:
                known[k, pairs] = object_posterior(problem, k, pairs)
            keys.append((k, pairs))
            log_weight[i] += known[k, pairs][0]
        objects_of.append(keys)
    log_evidence = oracle.log_sum(log_weight) - oracle.log_sum(log_prior)
    probs = np.exp(log_weight - oracle.log_sum(log_weight))

    means, covariances = [], []
    for k in range(problem.num_objects):
        mean_of = np.array([known[keys[k]][1] for keys in objects_of])
        covariance_of = np.array([known[keys[k]][2] for keys in objects_of])
        mean = probs @ mean_of
        second = np.einsum("c,cp,cq->pq", probs, mean_of, mean_of)
        means.append(mean)
        covariances.append(
            np.einsum("c,cpq->pq", probs, covariance_of) + second - np.outer(mean, mean)
        )
    partitions: dict[tuple[int, ...], float] = {}
    labels = np.where(problem.present, problem.owner[columns], -1)
    for label, prob in zip(labels, probs, strict=True):
        partitions[canonical(label)] = partitions.get(canonical(label), 0.0) + prob
    best = int(log_weight.argmax())
    return Posterior(
        log_evidence,
        np.einsum("c,cmn->mn", probs, oracle.as_matrices(columns, len(problem.owner))),
        np.array(means),
        np.array(covariances),
        partitions,
        np.where(problem.present, columns[best], -1),
        float(log_weight[best]),
    )


def object_posterior(
    problem: Problem, k: int, pairs: tuple[tuple[int, int], ...]
) -> tuple[float, np.ndarray, np.ndarray]:
    """Log marginal density of the points that object k has, and its pose given them."""
    mean, covariance = problem.prior_mean[k], problem.prior_covariance[k]
    counted = [
        (m, n, j)
        for m, n in pairs
        for j in range(problem.points.shape[1])
        if problem.seen[m, j] and problem.feature_mask[n, j]
    ]
    if not counted:
        return 0.0, mean, covariance
    x = np.array([problem.points[m, j] for m, _, j in counted])
    F = np.array([problem.F[n, j] for _, n, j in counted])
    expected = F @ mean + np.array([problem.offset[n, j] for _, n, j in counted])
    noise = np.diag([problem.variance[n, j] for _, n, j in counted])
    marginal = F @ covariance @ F.T + noise
    gain = np.linalg.solve(marginal, F @ covariance).T
    residual = x - expected
    _, log_det = np.linalg.slogdet(2 * np.pi * marginal)
    log_density = -0.5 * (residual @ np.linalg.solve(marginal, residual) + log_det)
    return log_density, mean + gain @ residual, covariance - gain @ F @ covariance


def canonical(labels: np.ndarray) -> tuple[int, ...]:
    """Labels renamed in order of appearance: equal for equal groupings. -1 stays as it is."""
    names: dict[int, int] = {-1: -1}
    return tuple(names.setdefault(int(label), len(names) - 1) for label in labels)


# --- the paper's Algorithm 1, for one scene -----------------------------------------------------


class Elbo(NamedTuple):
    """The three terms of the paper's ELBO."""

    log_likelihood: float
    pose: float
    match: float

    @property
    def total(self) -> float:
        return self.log_likelihood + self.pose + self.match


class Step(NamedTuple):
    """The factors after a round of updates, and the ELBO there."""

    match_probs: np.ndarray
    pose_mean: np.ndarray
    pose_covariance: np.ndarray
    elbo: Elbo


class Fit(NamedTuple):
    """Where coordinate ascent ended."""

    last: Step
    beta: float
    steps: int
    converged: bool


def fit(
    problem: Problem,
    match_probs: np.ndarray,
    *,
    beta_start: float = 0.05,
    beta_factor: float = 2.0,
    beta_max: float = 1.0,
    tolerance: float = 1e-3,
    max_steps: int = 1000,
    log_normaliser: float = 0.0,
) -> Fit:
    """Coordinate ascent from a given R; beta grows whenever the ELBO has converged."""
    beta, elbo = beta_start, -np.inf
    for count in range(1, max_steps + 1):
        step = coordinate_step(problem, match_probs, beta, log_normaliser=log_normaliser)
        match_probs = step.match_probs
        settled = abs(step.elbo.total - elbo) < tolerance
        elbo = step.elbo.total
        if settled and beta >= beta_max:
            return Fit(step, beta, count, True)
        if settled:
            beta = min(beta * beta_factor, beta_max)
    return Fit(step, beta, max_steps, False)


def coordinate_step(
    problem: Problem,
    match_probs: np.ndarray,
    beta: float,
    *,
    log_normaliser: float = 0.0,
    tolerance: float = 1e-9,
    projection: str = "sinkhorn",
) -> Step:
    """Poses given R, then R given the poses."""
    mean, covariance = update_pose(problem, match_probs, beta)
    log_likelihood = expected_log_likelihood(problem, mean, covariance, beta)
    log_rho = problem.match_logits + log_likelihood
    project = {"sinkhorn": sinkhorn, "softmax": softmax}[projection]
    match_probs = project(log_rho, tolerance)
    terms = elbo_terms(problem, match_probs, mean, covariance, log_likelihood, log_normaliser)
    return Step(match_probs, mean, covariance, terms)


def update_pose(
    problem: Problem, match_probs: np.ndarray, beta: float
) -> tuple[np.ndarray, np.ndarray]:
    """eqs. Lambda_k and mu_k."""
    means, covariances = [], []
    for k in range(problem.num_objects):
        precision = np.linalg.inv(problem.prior_covariance[k])
        information = precision @ problem.prior_mean[k]
        for m, n in itertools.product(*map(range, match_probs.shape)):
            if problem.owner[n] == k:
                counted = problem.seen[m] & problem.feature_mask[n]
                F = problem.F[n][counted]
                weights = np.diag(beta / problem.variance[n][counted])
                residual = problem.points[m][counted] - problem.offset[n][counted]
                precision = precision + match_probs[m, n] * F.T @ weights @ F
                information = information + match_probs[m, n] * F.T @ weights @ residual
        covariance = np.linalg.inv(precision)
        means.append(covariance @ information)
        covariances.append(covariance)
    return np.array(means), np.array(covariances)


def expected_log_likelihood(
    problem: Problem, mean: np.ndarray, covariance: np.ndarray, beta: float
) -> np.ndarray:
    """E_q(Y) log N(x_m | F_n y + m_n, D_n / beta), zero in dummy rows (eqs. E_q_X, log_rho)."""
    rows = len(problem.points)
    table = np.zeros((rows, rows))
    for m, n in itertools.product(range(rows), range(rows)):
        counted = problem.seen[m] & problem.feature_mask[n]
        k = problem.owner[n]
        F, variance = problem.F[n][counted], problem.variance[n][counted] / beta
        residual = problem.points[m][counted] - F @ mean[k] - problem.offset[n][counted]
        inverse = np.diag(1 / variance)
        energy = residual @ inverse @ residual + np.trace(F.T @ inverse @ F @ covariance[k])
        table[m, n] = -0.5 * (np.sum(np.log(2 * np.pi * variance)) + energy)
    return table


def sinkhorn(log_rho: np.ndarray, tolerance: float = 1e-9, max_sweeps: int = 20_000) -> np.ndarray:
    """Alternate normalisation of columns and rows, in the log domain, until both sum to one."""
    with np.errstate(divide="ignore"):
        for _ in range(max_sweeps):
            log_rho = log_rho - np.logaddexp.reduce(log_rho, axis=0, keepdims=True)
            log_rho = log_rho - np.logaddexp.reduce(log_rho, axis=1, keepdims=True)
            if np.abs(np.exp(log_rho).sum(axis=0) - 1).max() < tolerance:
                break
    return np.exp(log_rho)


def softmax(log_rho: np.ndarray, tolerance: float = 0.0) -> np.ndarray:
    """Rows by themselves: the mixture."""
    return np.exp(log_rho - np.logaddexp.reduce(log_rho, axis=1, keepdims=True))


def elbo_terms(
    problem: Problem,
    match_probs: np.ndarray,
    mean: np.ndarray,
    covariance: np.ndarray,
    log_likelihood: np.ndarray,
    log_normaliser: float = 0.0,
) -> Elbo:
    """E log p(X | Y, Z) - KL(q(Y) || p(Y)) - KL(q(Z) || p(Z))."""
    pose_kl = sum(
        gaussian_kl(mean[k], covariance[k], problem.prior_mean[k], problem.prior_covariance[k])
        for k in range(problem.num_objects)
    )
    positive = match_probs > 0
    r = match_probs[positive]
    match = np.sum(r * (problem.match_logits[positive] - np.log(r))) - log_normaliser
    return Elbo(float(np.sum(match_probs * log_likelihood)), -float(pose_kl), float(match))


def gaussian_kl(
    mean: np.ndarray, covariance: np.ndarray, other_mean: np.ndarray, other_covariance: np.ndarray
) -> float:
    """KL(N(mean, covariance) || N(other))."""
    precision = np.linalg.inv(other_covariance)
    shift = mean - other_mean
    log_dets = np.linalg.slogdet(other_covariance)[1] - np.linalg.slogdet(covariance)[1]
    trace = np.trace(precision @ covariance)
    return 0.5 * float(trace + shift @ precision @ shift - len(mean) + log_dets)


def uniform_start(rng: np.random.Generator, size: int) -> np.ndarray:
    """The paper's start: uniform entries, scaled to a doubly stochastic matrix."""
    return sinkhorn(np.log(rng.uniform(1e-6, 1, (size, size))))


# --- the factors of unknown noise and unknown part probabilities ---------------------------------


def gamma_kl(a: float, b: float, prior_a: float, prior_b: float) -> float:
    """KL(Gamma(a, b) || Gamma(prior_a, prior_b)), rates, by numerical integration."""
    centre, spread = a / b, math.sqrt(a) / b
    grid = np.geomspace(max(centre - 14 * spread, 1e-12 * centre), centre + 14 * spread, 400_001)
    if a < 200:
        grid = np.geomspace(1e-9 * centre, 60 * centre + 60 * spread, 400_001)
    log_q = a * np.log(b) - math.lgamma(a) + (a - 1) * np.log(grid) - b * grid
    log_p = (
        prior_a * np.log(prior_b)
        - math.lgamma(prior_a)
        + (prior_a - 1) * np.log(grid)
        - prior_b * grid
    )
    return float(np.trapezoid(np.exp(log_q) * (log_q - log_p), grid))


def precision_factor(
    problem: Problem,
    match_probs: np.ndarray,
    mean: np.ndarray,
    covariance: np.ndarray,
    prior: tuple[float, float],
    beta: float,
) -> tuple[float, float]:
    """Concentration and rate of q(tau): half a count and half the square of each feature."""
    concentration, rate = prior
    for m, n in itertools.product(*map(range, match_probs.shape)):
        k = problem.owner[n]
        for j in range(problem.points.shape[1]):
            if problem.seen[m, j] and problem.feature_mask[n, j]:
                F = problem.F[n, j]
                residual = problem.points[m, j] - F @ mean[k] - problem.offset[n, j]
                square = (residual**2 + F @ covariance[k] @ F) / problem.variance[n, j]
                concentration += 0.5 * match_probs[m, n]
                rate += 0.5 * beta * match_probs[m, n] * square
    return concentration, rate
