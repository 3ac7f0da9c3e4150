"""Markov chains: how they are run."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from inference.method import Report
from models.errors import InputError
from models.program.reading import Program
from models.scenes import Scene, check_scene

_CHUNK = 100  # steps between two reports of progress, at most


def run_chains(
    advance: Callable[[Any, int], tuple[Any, Any]],
    state: Any,
    num_warmup: int,
    num_samples: int,
    report: Report,
) -> Any:
    """What `advance(state, length)` collects after the warm-up, as numpy, (draws, ...)."""
    common = math.gcd(num_warmup, num_samples)
    length = max(n for n in range(1, _CHUNK + 1) if common % n == 0)
    total, kept = num_warmup + num_samples, []
    for done in range(0, total, length):
        state, collected = advance(state, length)
        if done >= num_warmup:
            kept.append(jax.tree.map(np.asarray, collected))
        jax.block_until_ready(state)
        report(done + length, total)
    return jax.tree.map(lambda *pieces: np.concatenate(pieces), *kept)


def check_budget(
    program: Program, scene: Scene, num_chains: int, num_warmup: int, num_samples: int
) -> Scene:
    """The scene, once it is clear that chains can be run on it."""
    scene = check_scene(scene)
    if scene.is_batch:
        raise InputError("chains are for one scene, got a batch; use scene.take(i)")
    if num_chains < 1 or num_warmup < 0 or num_samples < 4:
        raise InputError(
            f"wanted at least one chain, no less than 0 steps of warm-up and at least 4 draws, got "
            f"{num_chains}, {num_warmup} and {num_samples}; try 4, 500 and 500"
        )
    return scene
