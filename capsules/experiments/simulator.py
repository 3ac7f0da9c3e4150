"""The scene generator as a simulator to train networks on: scenes with known matches."""

import jax
import numpy as np
from jaxtyping import Array

from capsules.experiments.generator import sample_scenes
from guides.simulation import SPARE, Draws, Simulator, some

FIRST_SEED = 1 << 32
"""The first seed of training scenes, far from those of test scenes."""


def paper_simulator(sigma: float) -> Simulator:
    """Scenes of the paper at a noise level; row n is part n."""

    def simulate(rng_key: Array, count: int) -> Draws:
        seed = FIRST_SEED + int(np.asarray(jax.random.key_data(rng_key)).astype(np.uint32)[-1])
        scenes = sample_scenes(int(SPARE * count), sigma, seed)
        part = np.broadcast_to(np.arange(scenes.present.shape[1]), scenes.present.shape)
        return some(Draws(scenes.points, scenes.present, part), count)

    return simulate
