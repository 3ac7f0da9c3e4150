"""Exact inference in batch against the plain numpy form of the same algorithm."""

import itertools
import math
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.measurements.timing import row
from capsules.experiments.generator import sample_scenes
from inference import exact
from models.constellation import PARTS, constellation


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Time for a scene of the paper with all its eleven points."""
    scenes = sample_scenes(4096, sigma=0.1, seed=3)
    full = scenes.take(scenes.present.all(axis=1))
    full = full.take(slice(256))
    exact.run(constellation, full)
    began = time.perf_counter()
    ours = exact.run(constellation, full)
    seconds = (time.perf_counter() - began) / len(full.points)

    began = time.perf_counter()
    plain = [log_evidence(full.points[i]) for i in range(8)]
    plain_seconds = (time.perf_counter() - began) / len(plain)
    assert ours.log_evidence is not None
    np.testing.assert_allclose(plain, ours.log_evidence[: len(plain)], atol=1e-8)
    yield row("exact inference, 11 points", plain_seconds, seconds)


def log_evidence(points: np.ndarray, precision: float = 1e4) -> float:
    """The log evidence alone of a full scene of the paper, all injections of a subset at once."""
    owner = np.asarray(PARTS.owner)
    num_points = len(points)
    tables = []
    for k in range(owner.max() + 1):
        parts = np.flatnonzero(owner == k)
        F = np.asarray(PARTS.F)[parts]
        covariance = np.linalg.inv(np.eye(4) + precision * np.einsum("ndp,ndq->pq", F, F))
        log_det = -np.linalg.slogdet(covariance)[1]
        orders = np.array(list(itertools.permutations(range(len(parts)))))
        table = {}
        for subset in itertools.combinations(range(num_points), len(parts)):
            x = points[list(subset)]
            information = precision * np.einsum("wsdp,sd->wp", F[orders], x)
            quadratic = np.einsum("wp,pq,wq->w", information, covariance, information)
            const = -0.5 * (precision * (x**2).sum() + 2 * len(x) * np.log(2 * np.pi / precision))
            log_weights = const + 0.5 * (quadratic - log_det)
            table[sum(1 << m for m in subset)] = np.logaddexp.reduce(log_weights)
        tables.append(table)
    sums = {0: 0.0}
    for table in tables:
        new: dict[int, float] = {}
        for mask, value in sums.items():
            for subset, weight in table.items():
                if not mask & subset:
                    total = new.get(mask | subset, -np.inf)
                    new[mask | subset] = np.logaddexp(total, value + weight)
        sums = new
    return sums[(1 << num_points) - 1] - math.lgamma(num_points + 1)
