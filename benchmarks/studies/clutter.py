"""How well scenes with clutter are parsed: exact inference, VI, the best parse and RANSAC.

Scenes have up to three objects, each with probability 1/2, and up to three points that belong to no
object, each with probability 1/2 and uniform in the frame. The program is `presence_constellation`
with three slots: the same probabilities, whole objects, and a Normal density of the clutter. Under
noise it is tried with the paper's pose prior, N(0, I), and with one that fits the objects. The
scenes are of a seed that nothing was chosen on. A scene is right if its points are grouped as in
the truth and its clutter is the truth's clutter.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from capsules.experiments.generator import sample_scenes
from inference import cavi, exact, map_parse, ransac
from inference.diagnostics.metrics import same_partition, score
from inference.result import Result
from models.constellation import CLUTTERED, constellation, presence_constellation
from models.scenes import Scene

SEED, SCENES, CLUTTER = 20_261, 256, 3

FITTING = dist.MultivariateNormal(
    jnp.array([-0.3, -0.3, 0.18, 0.0]), jnp.diag(jnp.array([0.12, 0.12, 0.02, 0.02]))
)
"""Where objects of the experiment are, and how large."""

PRIORS: dict[str, dict[str, Any]] = {
    "N(0, I) poses": {},
    "a pose prior that fits": {"pose_prior": FITTING, "precision": 3e3},
}
METHODS: dict[str, Callable[..., Result]] = {
    "exact": exact.run,
    "ds": functools.partial(cavi.run, rng_key=jax.random.key(0)),
    "map": map_parse.run,
}


def scenes_of(sigma: float = 0.0, seed: int = SEED, count: int = SCENES) -> Scene:
    """Scenes that have points."""
    drawn = sample_scenes(2 * count, sigma=sigma, seed=seed, clutter=CLUTTER)
    return drawn.take(slice(count))


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Scene accuracy and its standard error, agreement with exact inference, time of a scene."""
    for sigma, names in ((0.0, ("N(0, I) poses",)), (0.1, tuple(PRIORS))):
        scenes = scenes_of(sigma)
        for name in names:
            program = functools.partial(presence_constellation, parts=CLUTTERED, **PRIORS[name])
            best = None
            for method, run in METHODS.items():
                result = run(program, scenes)
                best = result.labels if best is None else best
                yield _row(f"{method}, σ = {sigma}, {name}", result, best)
    uniform = functools.partial(constellation, parts=CLUTTERED)
    result = ransac.run(uniform, scenes_of(), jax.random.key(0), tolerance=0.05)
    yield _row("ransac, σ = 0, tolerance 0.05", result, result.labels)


def _row(what: str, result: Result, best: np.ndarray) -> tuple[str, str, str, str]:
    right = score(result)["partition"]["scene_accuracy"]
    error = right.std() / np.sqrt(len(right))
    agree = same_partition(result.labels, best, result.pose_mean.shape[-2]).mean()
    return (
        f"{what}, {len(right)} scenes with clutter",
        "" if result.labels is best else f"as exact {agree:.3f}",
        f"{right.mean():.3f} ± {error:.3f}",
        f"{1e3 * result.seconds / len(right):.0f} ms a scene, compilation included",
    )
