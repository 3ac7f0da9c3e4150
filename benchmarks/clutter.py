"""How well scenes with clutter are parsed: exact inference and VI, without noise.

Scenes have up to three objects, each with probability 1/2, and up to three points that belong to no
object, each with probability 1/2 and uniform in the frame. The program is `presence_constellation`
with three slots: the same probabilities, whole objects, and a Normal density of the clutter. The
scenes are of a seed that nothing was chosen on. A scene is right if its points are grouped as in
the truth and its clutter is the truth's clutter.
"""

from collections.abc import Iterator

import numpy as np

from capsules import methods
from capsules.experiments.generator import sample_scenes
from inference.diagnostics.metrics import same_partition, score
from models.scenes import Scene

SEED, SCENES, CLUTTER = 20_261, 256, 3
ROWS = (("exact", "presence"), ("ds", "presence"), ("ransac", "uniform"))


def scenes_of(seed: int = SEED, count: int = SCENES) -> Scene:
    """Scenes that have points."""
    drawn = sample_scenes(2 * count, sigma=0.0, seed=seed, clutter=CLUTTER)
    return drawn.take(slice(count))


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Scene accuracy and its standard error, agreement with exact inference, time of a scene."""
    scenes = scenes_of()
    best = None
    for method, prior in ROWS:
        options = {"tolerance": 0.05} if method == "ransac" else {}
        result = methods.infer(method, scenes, prior=prior, clutter=CLUTTER, **options)
        right = score(result)["partition"]["scene_accuracy"]
        error = right.std() / np.sqrt(len(right))
        best = result.labels if best is None else best
        agree = same_partition(result.labels, best, result.pose_mean.shape[-2]).mean()
        yield (
            f"{method}, {prior} prior, {len(right)} scenes with clutter",
            f"as exact {agree:.3f}",
            f"{right.mean():.3f} ± {error:.3f}",
            f"{1e3 * result.seconds / len(right):.0f} ms a scene, compilation included",
        )
