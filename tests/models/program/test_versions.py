"""What was compiled of a program is used as long as the program says the same."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import handlers

from inference import svi
from models.constellation import constellation
from models.program.versions import as_it_stands
from models.scenes import make_scene
from models.templates import shapes, stack

PARTS = stack(shapes("triangle", "triangle"))
SCENE = make_scene(np.random.default_rng(0).normal(size=(4, 2)), PARTS.num_parts)


def program_of(numbers):
    def this(points, present):
        numpyro.deterministic("level", numbers["level"])
        numpyro.factor("bonus", jnp.sum(numbers["table"]))
        weighted = jax.jit(lambda x: x @ jnp.asarray(numbers["within a function"]))
        numpyro.factor("weighted", weighted(jnp.ones(2)))
        return constellation(points, present, parts=PARTS, precision=numbers["precision"])

    return this


FIRST = {
    "precision": 10.0,
    "level": 1.0,
    "table": np.linspace(0.0, 1.0, 3000),
    "within a function": np.zeros(2),
}
LATER = {
    "precision": 10.0 + 1e-12,
    "level": 2.0,
    "table": FIRST["table"] + 1e-9,
    "within a function": np.ones(2),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_program_whose_numbers_change_is_another_one(name):
    numbers = dict(FIRST)
    this = program_of(numbers)
    assert as_it_stands(this, SCENE) is this
    numbers[name] = LATER[name]
    other = as_it_stands(this, SCENE)
    assert other is not this
    assert as_it_stands(this, SCENE) is other
    assert as_it_stands(this, SCENE._replace(points=2 * SCENE.points)) is other


def test_a_program_under_handlers_is_told_apart_too():
    data = {"precision": 3.0}

    def this(points, present):
        precision = numpyro.param("precision", 1.0)
        return constellation(points, present, parts=PARTS, precision=precision)

    substituted = handlers.substitute(this, data=data)
    assert as_it_stands(substituted, SCENE) is substituted
    data["precision"] = 4.0
    assert as_it_stands(substituted, SCENE) is not substituted


@pytest.mark.long
def test_svi_climbs_the_elbo_of_the_call():
    numbers = dict(FIRST)
    this, run = program_of(numbers), partial(svi.run, rng_key=jax.random.key(0), num_restarts=1)
    run(this, SCENE, num_steps=100)
    numbers["precision"] = 0.1
    again = run(this, SCENE, num_steps=100).elbo
    assert again == pytest.approx(run(program_of(numbers), SCENE, num_steps=100).elbo, rel=1e-12)
