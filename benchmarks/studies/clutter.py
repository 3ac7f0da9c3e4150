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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Float

from benchmarks.report import Pieces, Table, share
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


class Setting(NamedTuple):
    """Template noise, and what the program is told of poses and noise."""

    name: str
    sigma: float
    given: dict[str, Any]


SETTINGS = (
    Setting("σ = 0", 0.0, {}),
    Setting("σ = 0.1", 0.1, {}),
    Setting("σ = 0.1, a pose prior that fits", 0.1, {"pose_prior": FITTING, "precision": 3e3}),
)
TOLERANCE = 0.05
"""Of RANSAC, on the distance."""

METHODS: dict[str, Callable[..., Result]] = {
    "exact": exact.run,
    "ds": functools.partial(cavi.run, rng_key=jax.random.key(0)),
    "map": map_parse.run,
}


def scenes_of(sigma: float = 0.0, seed: int = SEED, count: int = SCENES) -> Scene:
    """Scenes that have points."""
    drawn = sample_scenes(2 * count, sigma=sigma, seed=seed, clutter=CLUTTER)
    return drawn.take(slice(count))


def pieces() -> Pieces:
    """Scene accuracy of each method, and how often it has the partition of exact inference."""
    yield Table("clutter", ["", *(setting.name for setting in SETTINGS)], rows())


def rows() -> Iterator[list[str]]:
    """A row for each method, then one for each beside exact inference."""
    labels: dict[str, list[np.ndarray]] = {}
    for name, run in METHODS.items():
        results = [
            run(
                functools.partial(presence_constellation, parts=CLUTTERED, **setting.given),
                scenes_of(setting.sigma),
            )
            for setting in SETTINGS
        ]
        labels[name] = [result.labels for result in results]
        yield [f"`{name}`", *(share(right(result)) for result in results)]
    uniform = functools.partial(constellation, parts=CLUTTERED)
    result = ransac.run(uniform, scenes_of(), jax.random.key(0), tolerance=TOLERANCE)
    yield [f"`ransac`, tolerance {TOLERANCE}", share(right(result)), "", ""]
    for name in ("ds", "map"):
        pairs = zip(labels[name], labels["exact"], strict=True)
        alike = (same_partition(found, best, CLUTTERED.num_objects) for found, best in pairs)
        yield [f"`{name}` has the partition of `exact`", *map(share, alike)]
    yield ["scenes", *[str(SCENES)] * len(SETTINGS)]


def right(result: Result) -> Float[np.ndarray, " scenes"]:
    """1 for each scene whose points and clutter are as in the truth."""
    return score(result)["partition"]["scene_accuracy"]
