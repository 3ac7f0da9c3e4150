"""How well a partition of points into objects agrees with the truth."""

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.cluster import contingency_matrix


def partition_metrics(
    truth: Int[np.ndarray, "scenes N"], predicted: Int[np.ndarray, "scenes N"]
) -> dict[str, Float[np.ndarray, " scenes"]]:
    """The paper's four metrics for each scene, over the points and the missing ones together.

    Labels are compared as partitions, so swapping two identical objects changes nothing. Missing
    rows are labelled -1 in both. `sa` is segmentation accuracy, `ari` the adjusted Rand index, `vi`
    the variation of information in nats, `scene_accuracy` 1 where the partitions are the same.
    """
    rows = [_one_scene(t, p) for t, p in zip(truth, predicted, strict=True)]
    names = ("sa", "ari", "vi", "scene_accuracy")
    return dict(zip(names, np.array(rows).reshape(-1, 4).T, strict=True))


def same_partition(
    first: Int[np.ndarray, "scenes N"], second: Int[np.ndarray, "scenes N"]
) -> Bool[np.ndarray, " scenes"]:
    """Whether two labellings group the rows alike, whatever the labels are called."""
    together_first = first[..., :, None] == first[..., None, :]
    together_second = second[..., :, None] == second[..., None, :]
    return (together_first == together_second).all(axis=(-2, -1))


def _one_scene(
    truth: Int[np.ndarray, " N"], predicted: Int[np.ndarray, " N"]
) -> tuple[float, float, float, float]:
    table = contingency_matrix(truth, predicted)
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
        float(same_partition(truth, predicted)),
    )
