"""Reliability: how often do events that are given probability p happen?"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from inference.diagnostics.readout import is_averaged
from inference.result import Result
from models.errors import InputError


class Reliability(NamedTuple):
    """For each bin: the mean predicted probability, the observed frequency, the event count."""

    said: Float[np.ndarray, " bins"]
    happened: Float[np.ndarray, " bins"]
    events: Int[np.ndarray, " bins"]

    @property
    def error(self) -> float:
        """The expected calibration error: |said - happened| averaged over all events."""
        return float(np.sum(np.abs(self.said - self.happened) * self.events) / np.sum(self.events))


def reliability(
    probs: Float[np.ndarray, " events"], happened: Bool[np.ndarray, " events"], bins: int = 10
) -> Reliability:
    """Bin events by their probability, in bins of equal width; empty bins are left out."""
    place = np.minimum((probs * bins).astype(int), bins - 1)
    count = np.bincount(place, minlength=bins)
    sums = (np.bincount(place, weights=x, minlength=bins) for x in (probs, happened))
    said, right = (total[count > 0] / count[count > 0] for total in sums)
    return Reliability(said, right, count[count > 0])


def pairs_together(
    result: Result,
) -> tuple[Float[np.ndarray, " pairs"], Bool[np.ndarray, " pairs"]]:
    """For each pair of points: the probability that they share an object, and whether they do.

    Neither depends on the names of identical objects or on which corner of a square is the first.
    Points are independent under q, so results that average over matches are refused.
    """
    if is_averaged(result):
        raise InputError(
            f"the match probabilities of {result.method!r} are averages over many matches, which "
            "do not say which points go together; use a variational result (ds, gmm, svi), or "
            "count how often draws (draws_of) put two points into one object"
        )
    if result.scene.object is None:
        raise InputError("the scenes have no `object`, so there is no truth to compare with")
    match_probs = result.match_probs if result.is_batch else result.match_probs[None]
    mass = match_probs @ np.eye(result.owner.max() + 1)[result.owner]
    truth, present = (np.atleast_2d(x) for x in (result.scene.object, result.scene.present))
    first, second = np.triu_indices(present.shape[1], 1)
    both = present[:, first] & present[:, second]
    probs = np.einsum("spk,spk->sp", mass[:, first], mass[:, second])
    return np.clip(probs[both], 0.0, 1.0), (truth[:, first] == truth[:, second])[both]
