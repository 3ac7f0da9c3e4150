"""A stand-in for a method, for tests of everything around it."""

import numpy as np

from inference.result import Result


def quick(program, scene, rng_key, progress_bar=False, **options):
    """It requires what a method may rely on, and answers at once."""
    scenes = scene.batch()
    assert np.isfinite(scenes.points).all() and scenes.present.any(axis=1).all()
    assert scenes.points.shape[1:] == (11, 2)
    n, rows = scenes.present.shape
    answer = Result(
        method="ransac",
        scene=scenes,
        match_probs=np.tile(np.eye(rows), (n, 1, 1)),
        pose_mean=np.tile([0.0, 0.0, 1.0, 0.0], (n, 3, 1)),
        pose_covariance=np.tile(np.eye(4), (n, 3, 1, 1)),
        labels=np.where(scenes.present, 0, -1),
        owner=np.repeat([0, 1, 2], [4, 3, 4]),
        converged=np.ones(n, bool),
        steps=np.ones(n, int),
    )
    return answer if scene.is_batch else answer.take(0)
