"""The witness, how often a program is traced, and what is traced again."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from inference import cavi, exact
from models.constellation import constellation, presence_constellation
from models.distributions.likelihood import MatchedParts
from models.distributions.match import PermutationMatch
from models.errors import ConjugacyError, InputError
from models.program import witness
from models.program.batches import read_scenes
from models.scenes import make_scene
from models.templates import shapes, stack

PARTS = stack(shapes("triangle", "triangle"))
SCENE = make_scene(np.random.default_rng(0).normal(size=(3, 2)), PARTS.num_parts)


def counting(program):
    """The program, and how often it was run."""
    calls = []

    def counted(points, present):
        calls.append(None)
        return program(points, present, parts=PARTS)

    return counted, calls


@pytest.mark.long
@pytest.mark.parametrize(
    "run", [exact.run, partial(cavi.run, rng_key=jax.random.key(0))], ids=["exact", "ds"]
)
@pytest.mark.parametrize(
    ("program", "first", "again"), [(constellation, 4, 1), (presence_constellation, 6, 6)]
)
def test_a_call_traces_the_program_a_few_times_at_most(run, program, first, again):
    counted, calls = counting(program)
    for most in (first, again):
        calls.clear()
        run(counted, SCENE)
        assert len(calls) <= most


def test_the_witness_is_called_once_for_a_program_and_a_layout(monkeypatch):
    asked = []
    monkeypatch.setattr("models.program.batches.testify", lambda *probes: asked.append(probes))
    this = partial(constellation, parts=PARTS, precision=123.0)
    for _ in range(3):
        read_scenes(this, SCENE.batch())
    assert len(asked) == 1
    read_scenes(partial(this, precision=124.0), SCENE.batch())
    assert len(asked) == 2


def test_a_number_that_a_program_looks_up_is_that_of_the_call():
    """A notebook's global, say: what a program says at the time of the call counts."""
    numbers = {"precision": 10.0}

    def this(points, present):
        return constellation(points, present, parts=PARTS, precision=numbers["precision"])

    first = read_scenes(this, SCENE.batch()).model.parts.variance
    numbers["precision"] = 40.0
    np.testing.assert_allclose(read_scenes(this, SCENE.batch()).model.parts.variance, first / 4)


@pytest.mark.parametrize(
    "edit",
    [
        lambda pose, match: {"factor": -3.0 * pose[1, 2] ** 2},
        lambda pose, match: {"factor": jnp.where(pose[1, 2] > 9.0, -5.0, 0.0)},
        lambda pose, match: {"precision": jnp.exp(pose[0, 2])},
        lambda pose, match: {"pose": jnp.clip(pose, -9.0, 9.0)},
        lambda pose, match: {"factor": 0.0 if pose[0, 0] > 0 else 1.0},
        lambda pose, match: {"factor": jnp.where((match == jnp.eye(6)).all(), 5.0, 0.0)},
    ],
    ids=["factor", "threshold", "noise", "clipped", "branch", "one match"],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_a_dependence_is_refused_even_if_it_came_later_or_shows_nowhere(edit, is_known):
    """A helper function that is edited in a notebook, say, while the program stays."""
    helper = {"edit": (lambda pose, match: {}) if is_known else edit}

    def this(points, present):
        with numpyro.plate("object", 2):
            pose = numpyro.sample("pose", dist.Normal(0, 1).expand([4]).to_event(1))
        match = numpyro.sample("match", PermutationMatch(jnp.zeros((6, 6))))
        own = {"pose": pose, "precision": 1.0, "factor": 0.0} | helper["edit"](pose, match)
        numpyro.factor("bonus", own["factor"])
        likelihood = MatchedParts(
            match, own["pose"], PARTS, precision=own["precision"], present=present
        )
        numpyro.sample("points", likelihood, obs=points)

    if is_known:
        read_scenes(this, SCENE.batch())
        helper["edit"] = edit
    with pytest.raises(InputError, match=r"'bonus'|'points'|branches in Python"):
        read_scenes(this, SCENE.batch())


def test_both_numbers_are_in_the_sentence():
    def this(points, present):
        with numpyro.plate("object", 2):
            pose = numpyro.sample("pose", dist.Normal(0, 1).expand([4]).to_event(1))
        match = numpyro.sample("match", PermutationMatch(jnp.zeros((6, 6))))
        numpyro.factor("hidden", 3.0 * match[0, 0])
        numpyro.sample("points", MatchedParts(match, pose, PARTS, present=present), obs=points)

    with pytest.raises(ConjugacyError, match=r"'hidden'.* log density is .* what was read has"):
        read_scenes(this, SCENE.batch())


def test_the_densities_are_those_of_numpyro():
    """Plain numpy against `log_density`, at the values that the witness chooses."""
    program = partial(constellation, parts=PARTS, match_prior="permutation")
    model = read_scenes(program, SCENE.batch()).at(0)
    rng = np.random.default_rng(3)
    match = witness._random_match(rng, model, dense=False)
    values = {"match": match} | witness._random_values(rng, model)
    found = sum(witness.log_densities(model, values).values())
    value, _ = numpyro.infer.util.log_density(handlers.seed(program, 0), (), SCENE.observed, values)
    np.testing.assert_allclose(found, value, rtol=1e-12)
