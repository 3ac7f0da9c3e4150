"""What learning finds, and what it is good for on scenes that it has not seen.

Noise and poses are learnt from scenes with template noise, and applied to others under both
priors. Templates are learnt from scenes without noise, from vertices that are wrong or random.
"""

import functools
import itertools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jaxtyping import Float
from numpyro.distributions import constraints

from capsules.experiments.generator import sample_scenes
from capsules.experiments.learnable import arguments, leave_open
from capsules.methods import PAPER
from inference import cavi, exact, learn
from inference.diagnostics.metrics import same_partition
from inference.result import Result
from models.constellation import constellation, presence_constellation
from models.program.sites import Program
from models.scenes import Scene
from models.templates import normalise, shapes, stack

DRAWS, SEED, ROUNDS = 460, 101, 30
NAMES = ("square", "triangle")
STARTS = (0.3, 0.3, 0.3, 1.0, 1.0, 1.0)
"""Noise of the vertices that templates begin at, of their size; 1 for random vertices."""

Row = tuple[str, str, str, str]


def rows() -> Iterator[Row]:
    """Rows of the benchmark table."""
    for sigma in (0.1, 0.25):
        yield from noise_and_poses(sigma)
    for seed, start in enumerate(STARTS):
        yield templates(start, seed)


def noise_and_poses(sigma: float) -> Iterator[Row]:
    """Scene accuracy and log evidence of other scenes, before and after."""
    training = sample_scenes(DRAWS, sigma, SEED)
    others = sample_scenes(DRAWS, sigma, SEED + 101)
    program = leave_open(presence_constellation, ("precision", "pose"), PAPER)
    began = time.perf_counter()
    learned = learn(program, training, jax.random.key(0), e_step="exact", num_steps=ROUNDS)
    seconds = time.perf_counter() - began
    yield (
        f"log evidence of a scene, learnt from {learned.num_scenes} at {sigma}",
        f"{learned.objective[0]:.2f}",
        f"{learned.objective[-1]:.2f}",
        f"{seconds:.0f} s",
    )
    for prior in (constellation, presence_constellation):
        after = functools.partial(prior, **arguments(prior, learned.params, PAPER))
        for name, run in (("ds", _ascend), ("exact", exact.run)):
            results = [run(program, others) for program in (prior, after)]
            right = [_right(result, others) for result in results]
            yield (f"scene accuracy, {prior.__name__}, {name}", *map(_share, right), "")
            if name == "exact":
                evidence = [result.log_evidence for result in results]
                shown = (f"{x.mean():.2f} ± {_error(x):.2f}" for x in evidence)  # type: ignore[union-attr]
                yield (f"held-out log evidence, {prior.__name__}", *shown, "")


def templates(noise: float, seed: int) -> Row:
    """Relative error of the vertices of both shapes, after the best similarity."""
    rng = np.random.default_rng(seed)
    right = dict(zip(NAMES, shapes(*NAMES), strict=True))
    starts = {
        name: (noise < 1) * vertices + noise * rng.normal(size=vertices.shape)
        for name, vertices in right.items()
    }

    def program(points=None, present=None):  # type: ignore[no-untyped-def]
        own = [normalise(numpyro.param(name, jnp.asarray(x))) for name, x in starts.items()]
        precision = numpyro.param("precision", 1e2, constraint=constraints.positive)
        return presence_constellation(points, present, precision=precision, parts=stack(own))

    training = sample_scenes(670, 0.0, SEED + seed, NAMES)
    learned = learn(program, training, jax.random.key(0), e_step="exact", num_steps=40)
    errors = [
        max(_apart(np.asarray(found[name]), right[name]) for name in NAMES)
        for found in (starts, learned.params)
    ]
    what = "random vertices" if noise == 1 else f"vertices {noise} off"
    return f"templates, {what}, seed {seed}", *(f"{x:.2g}" for x in errors), ""


def _ascend(program: Program, scenes: Scene) -> Result:
    return cavi.run(program, scenes, jax.random.key(1))


def _right(result: Result, scenes: Scene) -> np.ndarray:
    assert scenes.object is not None
    pairs = zip(result.labels, scenes.object, strict=True)
    return np.array([same_partition(found, truth) for found, truth in pairs])


def _error(values: np.ndarray) -> float:
    return float(values.std() / np.sqrt(len(values)))


def _share(right: np.ndarray) -> str:
    return f"{right.mean():.3f} ± {_error(right):.3f}"


def _apart(found: Float[np.ndarray, "n 2"], right: Float[np.ndarray, "n 2"]) -> float:
    """Distance after the best similarity and order, relative to the size."""
    wanted, points = ((x - x.mean(axis=0)) @ [1, 1j] for x in (right, found))
    orders = (points[list(order)] for order in itertools.permutations(range(len(points))))
    fits = (np.linalg.norm(wanted - np.vdot(z, wanted) / np.vdot(z, z) * z) for z in orders)
    return float(min(fits) / np.linalg.norm(wanted))
