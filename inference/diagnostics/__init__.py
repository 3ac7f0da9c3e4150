"""Check and read results: ArviZ, importance weights, calibration, metrics."""

from inference.diagnostics.calibration import Calibration, calibrate
from inference.diagnostics.importance import GOOD_K, Trust, importance, local_optima
from inference.diagnostics.metrics import (
    METRICS,
    partition_metrics,
    same_partition,
    score,
    summarise,
)
from inference.diagnostics.posterior_draws import draws_of
from inference.diagnostics.readout import most_probable_match, poses_given_match, similarity_of
from inference.diagnostics.to_arviz import to_arviz
from inference.posterior.arviz_api import summary

__all__ = [
    "GOOD_K",
    "METRICS",
    "Calibration",
    "Trust",
    "calibrate",
    "draws_of",
    "importance",
    "local_optima",
    "most_probable_match",
    "partition_metrics",
    "poses_given_match",
    "same_partition",
    "score",
    "similarity_of",
    "summarise",
    "summary",
    "to_arviz",
]
