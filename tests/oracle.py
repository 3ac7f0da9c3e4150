"""Brute force in plain numpy: every match is listed, nothing is clever.

A match is written here as the column that each row has; a list of matches is an integer array
(count, rows). Nothing of the project is imported, so agreement with it means something.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np

# --- lists of matches ---------------------------------------------------------------------------


def permutations(size: int) -> np.ndarray:
    """Every permutation of `size` columns, (size!, size), in lexicographic order."""
    return injections(size, size)


def injections(num_rows: int, num_columns: int) -> np.ndarray:
    """Every way to give each row a column of its own."""
    listed = list(itertools.permutations(range(num_columns), num_rows))
    return np.array(listed, int).reshape(-1, num_rows)


def assignments(num_rows: int, num_columns: int) -> np.ndarray:
    """Every way to give each row a column, shared or not."""
    return np.array(list(itertools.product(range(num_columns), repeat=num_rows)))


def as_matrices(columns: np.ndarray, num_columns: int) -> np.ndarray:
    """Matches as matrices of zeros and ones, (count, rows, columns)."""
    return np.eye(num_columns)[columns]


def permutation_matrices(size: int) -> np.ndarray:
    """Every permutation matrix, (size!, size, size)."""
    return as_matrices(permutations(size), size)


# --- distributions over a list of matches -------------------------------------------------------


def log_sum(values: np.ndarray) -> float:
    """log sum exp, -inf for a sum of zeros."""
    highest = np.max(values)
    if highest == -np.inf:
        return -np.inf
    return float(highest + np.log(np.sum(np.exp(values - highest))))


def scores(log_weights: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The log weight of each match: the sum of its entries."""
    return log_weights[np.arange(len(log_weights)), columns].sum(axis=-1)


def log_normaliser(log_weights: np.ndarray, columns: np.ndarray) -> float:
    """Log of the total weight of the matches."""
    return log_sum(scores(log_weights, columns))


def probabilities(log_weights: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The probability of each match, in proportion to its weight."""
    return np.exp(scores(log_weights, columns) - log_normaliser(log_weights, columns))


def marginals(log_weights: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The probability of each row having each column."""
    matrices = as_matrices(columns, log_weights.shape[1])
    return np.einsum("c,cmn->mn", probabilities(log_weights, columns), matrices)


def entropy(probs: np.ndarray) -> float:
    """-sum p log p over a list of probabilities."""
    positive = probs[probs > 0]
    return float(-np.sum(positive * np.log(positive)))


def kl(probs: np.ndarray, other: np.ndarray) -> float:
    """sum p log(p / q) over two lists of probabilities of the same matches."""
    positive = probs > 0
    return float(np.sum(probs[positive] * np.log(probs[positive] / other[positive])))


# --- permanents ---------------------------------------------------------------------------------


def log_permanent(log_weights: np.ndarray) -> float:
    """Log of the sum over all injections of rows into columns."""
    return log_normaliser(log_weights, injections(*log_weights.shape))


def ryser(matrix: np.ndarray) -> float:
    """The permanent of a square matrix by Ryser's formula; for entries of about one size."""
    size = len(matrix)
    total = 0.0
    for chosen in itertools.product([False, True], repeat=size):
        sign = (-1) ** (size - sum(chosen))
        total += sign * np.prod(matrix[:, list(chosen)].sum(axis=1))
    return float(total)


def log_van_der_waerden(size: int) -> float:
    """log(N!/N^N), the smallest log permanent of a doubly stochastic matrix."""
    return math.lgamma(size + 1) - size * math.log(size)


# --- doubly stochastic matrices -----------------------------------------------------------------


def sinkhorn(logits: np.ndarray, sweeps: int = 2_000) -> np.ndarray:
    """Plain alternating normalisation of rows and columns; for mild matrices, batched."""
    matrix = np.exp(logits - np.max(logits, axis=(-2, -1), keepdims=True))
    for _ in range(sweeps):
        matrix = matrix / matrix.sum(axis=-1, keepdims=True)
        matrix = matrix / matrix.sum(axis=-2, keepdims=True)
    return matrix


# --- points -------------------------------------------------------------------------------------


def predicted_parts(
    F: np.ndarray, offset: np.ndarray, owner: np.ndarray, pose: np.ndarray
) -> np.ndarray:
    """Where each part is expected, F y + offset with the pose of its owner."""
    return np.array([F[n] @ pose[owner[n]] + offset[n] for n in range(len(F))])


def log_likelihood(
    points: np.ndarray, predicted: np.ndarray, variance: np.ndarray, counted: np.ndarray
) -> np.ndarray:
    """Log density of each point as each part, over the features that count, (rows, parts)."""
    table = np.zeros((len(points), len(predicted)))
    for m, n, feature in itertools.product(*map(range, (*table.shape, points.shape[1]))):
        if counted[m, n, feature]:
            square = (points[m, feature] - predicted[n, feature]) ** 2 / variance[n, feature]
            table[m, n] -= 0.5 * (square + math.log(2 * math.pi * variance[n, feature]))
    return table


def log_density_given_match(likelihood: np.ndarray, columns: np.ndarray) -> float:
    """Log density of the points of a scene when row m is part columns[m]."""
    return float(sum(likelihood[m, n] for m, n in enumerate(columns)))


def log_marginal(log_prior: np.ndarray, likelihood: np.ndarray, columns: np.ndarray) -> float:
    """Log density of the points, summed over the matches under a prior proportional to weights."""
    prior = probabilities(log_prior, columns)
    densities = [log_density_given_match(likelihood, match) for match in columns]
    with np.errstate(divide="ignore"):
        return log_sum(np.log(prior) + densities)


# --- derivatives --------------------------------------------------------------------------------


def finite_difference(
    function: Callable[[np.ndarray], np.ndarray | float], at: np.ndarray, step: float = 1e-5
) -> np.ndarray:
    """The Jacobian by central differences: the shape of the value, then that of the argument."""
    columns = []
    for index in np.ndindex(at.shape):
        change = np.zeros(at.shape)
        change[index] = step
        ahead, behind = np.asarray(function(at + change)), np.asarray(function(at - change))
        columns.append((ahead - behind) / (2 * step))
    return np.stack(columns, axis=-1).reshape(*np.shape(columns[0]), *at.shape)
