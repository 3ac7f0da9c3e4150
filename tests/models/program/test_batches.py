"""Programs that differ in their numbers alone share compiled code, and batches are read whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capsules.experiments.generator import sample_scenes
from inference import cavi, exact
from inference.exact import solutions
from inference.variational import pool
from models.constellation import constellation, mixture_constellation, presence_constellation
from models.program.batches import map_scenes, read_scenes
from models.program.reading import read
from models.templates import shapes, stack

NAMES = ("triangle", "triangle")
PAIR = stack(shapes(*NAMES))
pair = functools.partial(constellation, parts=PAIR)


@pytest.fixture(scope="module")
def scenes():
    return sample_scenes(16, 0.1, 3, NAMES)


def test_the_skeleton_does_not_have_the_numbers(scenes):
    first = read_scenes(pair, scenes).skeleton
    assert first == read_scenes(functools.partial(pair, precision=7.0), scenes).skeleton
    assert first.owner == (0, 0, 0, 1, 1, 1)
    assert first.alike == first.exchangeable == (0, 0)
    assert (first.pose_dim, first.num_features, first.num_objects) == (4, 2, 2)
    assert [p.tolist() for p in first.parts] == [[0, 1, 2], [3, 4, 5]]


def test_the_skeleton_has_what_code_is_compiled_for(scenes):
    first = read_scenes(pair, scenes).skeleton
    mixture = functools.partial(mixture_constellation, parts=PAIR)
    assert read_scenes(mixture, scenes).skeleton.match_family is not first.match_family
    other = functools.partial(constellation, parts=stack(shapes("square", "triangle")))
    wider = sample_scenes(4, 0.1, 3, ("square", "triangle"))
    assert read_scenes(other, wider).skeleton.alike == (0, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "kept"),
    [
        (exact.run, solutions._solver),
        (functools.partial(cavi.run, rng_key=jax.random.key(0), num_restarts=2), pool.engine),
    ],
    ids=["exact", "cavi"],
)
def test_an_edited_prior_compiles_no_method_anew(scenes, run, kept):
    """And its numbers are those that are used."""
    scene = scenes.take(0)
    bounds, misses = [], []
    for precision in (1e3, 4e3):
        result = run(functools.partial(pair, precision=precision), scene)
        bounds.append(result.log_evidence if result.elbo is None else result.elbo)
        misses.append(kept.cache_info().misses)
    assert misses[0] == misses[1]
    assert abs(bounds[0] - bounds[1]) > 0.1


def test_a_batch_is_read_and_mapped_scene_by_scene(scenes):
    """Pieces that no scene changes are there once, and a map gives every scene its own."""
    pieces = read_scenes(pair, scenes).model
    assert pieces.points.shape[-1] == len(scenes.points)
    assert pieces.pose_mean.shape[-1] == 1

    def summary(model, weight):
        return weight * jnp.sum(model.points) + jnp.sum(model.parts.F) + jnp.sum(model.seen)

    weights = np.arange(1.0, 1.0 + len(scenes.points))
    mapped = map_scenes(summary, pieces, weights)
    wanted = [summary(read(pair, scenes.take(i)), weight) for i, weight in enumerate(weights)]
    np.testing.assert_allclose(mapped, jax.device_get(wanted), rtol=1e-12)


def test_numbers_of_values_share_compiled_code():
    """A lattice of values grows, and its nodes are read without compiling anything for them."""
    program = functools.partial(presence_constellation, parts=PAIR, visibility=0.9)
    names: list[str] = []

    def note(event, duration, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(about["fun_name"])

    def read_at(count):
        values = np.resize([[True, True], [True, False]], (count, 2))
        same = sample_scenes(1, 0.1, 3, NAMES, presence=1.0).take(np.zeros(count, int))
        return read_scenes(program, same, {"presence": values}).model.log_constant

    first = read_at(13)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        second = read_at(10)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not names
    np.testing.assert_array_equal(second, first[:10])
