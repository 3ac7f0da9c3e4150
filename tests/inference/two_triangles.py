"""Two triangles, one program, and the result of every method on it, run once."""

import functools

import jax
import numpy as np

from inference import cavi, exact, gibbs, nuts, svi
from models.constellation import constellation
from models.scenes import make_scene
from models.templates import shapes, stack

PARTS = stack(shapes("triangle", "triangle"))
PRECISION = 1e3
PROGRAM = functools.partial(constellation, parts=PARTS, precision=PRECISION)
MIXTURE = functools.partial(PROGRAM, match_prior="mixture")
POSES = np.array([[0.5, 0.2, 0.4, 0.1], [-0.5, -0.3, 0.2, 0.3]])


def scene_at(poses, seed, rows=range(6)):
    """Points at some poses, with the program's noise, in another order."""
    rng = np.random.default_rng(seed)
    points = np.asarray(PARTS.predict(poses)) + rng.normal(size=(6, 2)) / np.sqrt(PRECISION)
    return make_scene(points[rng.permutation(list(rows))], 6)


SCENE = scene_at(POSES, seed=0)
"""All six points, with one clear parse; its posterior has two modes that are copies."""
FIVE = scene_at(POSES, seed=0, rows=range(5))
"""The last part of the second triangle is missing."""

PROGRAMS = {"gmm": MIXTURE}
METHODS = {
    "ds": lambda program: cavi.run(program, FIVE, jax.random.key(0), num_restarts=8),
    "gmm": lambda program: cavi.run(program, FIVE, jax.random.key(0), num_restarts=8),
    "exact": lambda program: exact.run(program, FIVE),
    "svi": lambda program: svi.run(
        program, FIVE, jax.random.key(0), num_restarts=4, num_samples=400
    ),
    "gibbs": lambda program: gibbs.run(
        program, FIVE, jax.random.key(0), num_samples=100, num_warmup=100
    ),
    "nuts": lambda program: nuts.run(
        program, FIVE, jax.random.key(0), num_samples=100, num_warmup=200
    ),
}


def program_of(method):
    return PROGRAMS.get(method, PROGRAM)


@functools.cache
def result_of(method):
    return METHODS[method](program_of(method))
