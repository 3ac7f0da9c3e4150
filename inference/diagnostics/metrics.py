"""Metrics of how well the objects found agree with the truth, with standard errors.

The paper's four metrics are values for each scene: `sa`, segmentation accuracy; `ari`, the adjusted
Rand index; `vi`, the variation of information in nats; `scene_accuracy`, 1 where the scene is
right. Two protocols say what is compared, and their numbers are never mixed:

- `partition`: the groups of points by object, with missing points as one more group. It is that of
  the paper's tables with the ground-truth mask, and the one to judge by. Clutter, points that
  belong to no object, is a group labelled K; a right scene has the clutter of the truth.
- `slots`: that of the paper's main table. The scenes of its test sets have one row for each part of
  each template, so a row is also a slot. A slot is found if its part has any point. So a lone
  square in the other square's slots counts as wrong, although the scene is parsed correctly.
"""

from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment

from inference.result import Result, certain, grouping_of
from models.errors import InputError

METRICS = ("sa", "ari", "vi", "scene_accuracy")
PROTOCOLS = ("partition", "slots")
SLOT_MASS = 1e-3
"""A slot counts as found if the probability that it has a point exceeds this."""

MANY = 20_000
"""With more scenes than this, an interval comes from the standard error, not a bootstrap."""

Scores = dict[str, Float[np.ndarray, " scenes"]]
"""The value of each metric for each scene."""


class Summary(NamedTuple):
    """A mean over scenes, its standard error, and a 95 % bootstrap interval."""

    mean: float
    standard_error: float
    low: float
    high: float

    def text(self, unit: float = 1, digits: int = 3) -> str:
        """The mean ± one standard error, or the mean alone for a single scene."""
        error = (
            "" if np.isnan(self.standard_error) else f" ± {unit * self.standard_error:.{digits}f}"
        )
        return f"{unit * self.mean:.{digits}f}{error}"


class PairedTest(NamedTuple):
    """A paired t-test of two methods on the same scenes."""

    difference: float
    """Mean of the first minus the second."""
    t: float
    p: float


def score(result: Result) -> dict[str, Scores]:
    """Every metric of every scene under both protocols; the scenes must have a truth."""
    if result.scene.object is None:
        raise InputError(
            "the scenes have no `object`, so there is no truth to compare with; use a file that "
            "has it, as `capsules sample` writes it"
        )
    present = np.atleast_2d(result.scene.present)
    truth = np.where(present, np.atleast_2d(result.scene.object), -1)
    num_objects = result.pose_mean.shape[-2]
    slots = int(np.sum(result.owner == num_objects))
    most = int((truth == num_objects).sum(axis=1).max())
    if most > slots or truth.max() > num_objects:
        raise InputError(
            f"the truth has an object {truth.max()}, but the program's parts belong to objects "
            f"0 to {num_objects - 1}, and the label {num_objects} is that of clutter, of which it "
            f"has {slots} slots where a scene has {most} such points; infer with the shapes, and "
            "the clutter, that the scenes have"
        )
    return {
        "partition": partition_metrics(truth, np.atleast_2d(result.labels), num_objects),
        "slots": partition_metrics(truth, slot_labels(result), num_objects),
    }


def partition_metrics(
    truth: Int[np.ndarray, "scenes N"],
    predicted: Int[np.ndarray, "scenes N"],
    num_objects: int | None = None,
) -> Scores:
    """The paper's four metrics for each scene, over the points and the missing ones together.

    Labels are compared as partitions, so swapping two identical objects changes nothing. Missing
    rows are labelled -1 in both.

    Args:
        num_objects: K, the label of clutter, if scenes may have clutter.
    """
    # Many scenes have the same truth and prediction, so score each distinct pair once.
    both, place = np.unique(np.stack([truth, predicted], axis=1), axis=0, return_inverse=True)
    rows = np.array([_one_scene(t, p, num_objects) for t, p in both]).reshape(-1, len(METRICS))
    return dict(zip(METRICS, rows[place.reshape(-1)].T, strict=True))


def slot_labels(result: Result) -> Int[np.ndarray, "scenes N"]:
    """The object of each row under the protocol `slots`, -1 where its slot is not found.

    If a result has a most probable match, this decides the slots: marginal probabilities average
    over the names of identical objects, so they fill the slots of all of them.
    """
    present = np.atleast_2d(result.scene.present)
    if result.best_match is not None:
        match_probs = certain(np.atleast_2d(result.best_match), present)
    else:
        match_probs = result.match_probs if result.is_batch else result.match_probs[None]
    mass = match_probs @ np.eye(result.owner.max() + 1)[result.owner]
    points = np.einsum("smn,sm->sn", match_probs, present.astype(float))
    return mask_slots(mass.argmax(axis=-1), points > SLOT_MASS)


def mask_slots(
    labels: Int[np.ndarray, "scenes N"], found: Bool[np.ndarray, "scenes N"]
) -> Int[np.ndarray, "scenes N"]:
    """Labels of all rows, including missing ones, with -1 where the slot of the row is empty."""
    return np.where(found, labels, -1)


def ccae_scores(
    truth: Int[np.ndarray, "scenes N"],
    ccae_object: Int[np.ndarray, "scenes N"],
    ccae_present: Bool[np.ndarray, "scenes K"],
    owner: Int[np.ndarray, " N"],
) -> dict[str, Scores]:
    """Both protocols for CCAE, which predicts an object for each row and the present objects."""
    predicted = ccae_object.astype(int)
    slots = mask_slots(predicted, ccae_present[:, owner])
    return {
        "partition": partition_metrics(truth, np.where(truth >= 0, predicted, -1)),
        "slots": partition_metrics(truth, slots),
    }


def summarise(values: Float[np.ndarray, " scenes"], seed: int = 0) -> Summary:
    """The mean with its standard error and a bootstrap interval over scenes.

    With very many scenes the mean is Normal, and a bootstrap would take gigabytes.
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return Summary(mean, np.nan, np.nan, np.nan)
    error = float(np.std(values, ddof=1) / np.sqrt(len(values)))
    if len(values) > MANY:
        return Summary(mean, error, mean - 1.96 * error, mean + 1.96 * error)
    interval = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=2000, method="percentile", rng=seed
    ).confidence_interval
    return Summary(mean, error, float(interval.low), float(interval.high))


def paired_test(
    first: Float[np.ndarray, " scenes"], second: Float[np.ndarray, " scenes"]
) -> PairedTest:
    """The paper's paired t-test between two methods, over scenes."""
    difference = first - second
    if len(difference) < 2 or np.ptp(difference) == 0:  # nothing to divide by
        mean = float(np.mean(difference))
        told_apart = len(difference) > 1 and mean != 0
        return PairedTest(mean, *((np.copysign(np.inf, mean), 0.0) if told_apart else (0.0, 1.0)))
    test = scipy.stats.ttest_rel(first, second)
    return PairedTest(float(np.mean(difference)), float(test.statistic), float(test.pvalue))


def same_partition(
    first: Int[np.ndarray, "scenes N"],
    second: Int[np.ndarray, "scenes N"],
    num_objects: int | None = None,
) -> Bool[np.ndarray, " scenes"]:
    """Whether two labellings give the same partition of the rows, whatever the labels are.

    Args:
        num_objects: K, the label of clutter, if scenes may have clutter. Clutter is not an object.
    """
    groupings = (grouping_of(labels, num_objects) for labels in (first, second))
    return np.equal(*groupings).all(axis=(-2, -1))


def _one_scene(
    truth: Int[np.ndarray, " N"], predicted: Int[np.ndarray, " N"], num_objects: int | None
) -> tuple[float, float, float, float]:
    from sklearn.metrics import adjusted_rand_score  # slow to import, like ArviZ

    table = scipy.stats.contingency.crosstab(truth, predicted).count
    size = table.sum()
    matched = table[linear_sum_assignment(table, maximize=True)].sum()
    joint = table[table > 0] / size
    rows, columns = table.sum(axis=1) / size, table.sum(axis=0) / size
    entropies = (-np.sum(p * np.log(p)) for p in (rows, columns, joint))
    row_entropy, column_entropy, joint_entropy = entropies
    return (
        matched / size,  # the paper's sum over scenes lacks 1/I: here it is a value per scene
        adjusted_rand_score(truth, predicted),
        2 * joint_entropy - row_entropy - column_entropy,
        float(same_partition(truth, predicted, num_objects)),
    )
