"""Symmetries of a program: against those of the posterior, and orbit sums against listing them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from guides.symmetries import find
from inference.posterior import symmetry
from models.constellation import constellation, presence_constellation
from models.distributions.likelihood import MatchedParts
from models.distributions.match import PermutationMatch
from models.scenes import make_scene
from models.templates import shapes, stack, with_clutter

PARTS = stack(shapes("square", "triangle", "square"))
TRIANGLES = stack(shapes("triangle", "triangle"))
POINTS = np.random.default_rng(0).normal(size=(11, 2))


@functools.cache
def of_paper():
    return find(constellation)


def test_two_squares_and_a_triangle_have_thirty_two():
    found = of_paper()
    assert found.order == 2 * 4 * 4
    assert [kind.tolist() for kind in found.kinds] == [[0, 2], [1]]
    assert symmetry.find(constellation, make_scene(POINTS, 11)).order == found.order


def test_a_way_lays_each_part_where_another_was():
    found = of_paper()
    for part, source, target in zip(found.part, found.source, found.target, strict=True):
        own = found.owner == source
        assert (part[~own] == -1).all()
        assert sorted(part[own]) == np.flatnonzero(found.owner == target).tolist()
        # distances between parts stay, and squares have no mirror image among their turns
        before, after = (np.asarray(PARTS.F)[x][:, 0, 2:] for x in (np.flatnonzero(own), part[own]))
        for some in (before, after):
            corners = some[:3] - some[0]
            area = np.linalg.det(corners[1:])
            assert np.isclose(area, np.linalg.det((before[:3] - before[0])[1:]))
        np.testing.assert_allclose(
            np.linalg.norm(before[:, None] - before, axis=-1),
            np.linalg.norm(after[:, None] - after, axis=-1),
            atol=1e-9,
        )


@pytest.mark.long
def test_slots_for_clutter_are_alike():
    program = functools.partial(presence_constellation, parts=with_clutter(TRIANGLES, 3))
    assert find(program).order == 2 * 6


@pytest.mark.parametrize(
    ("probs", "order"), [(jnp.array([0.5, 0.5]), 2), (jnp.array([0.3, 0.6]), 1)]
)
def test_objects_that_are_there_more_often_are_told_apart(probs, order):
    program = functools.partial(presence_constellation, parts=TRIANGLES, presence_prob=probs)
    assert find(program).order == order


def with_pose_prior(mean, covariance):
    parts = stack(shapes("square"))

    def program(points=None, present=None):
        with numpyro.plate("object", 1):
            pose = numpyro.sample("pose", dist.MultivariateNormal(mean, covariance))
        match = numpyro.sample("match", PermutationMatch(jnp.zeros((4, 4))))
        return numpyro.sample(
            "points", MatchedParts(match, pose, parts, present=present), obs=points
        )

    return program


@pytest.mark.parametrize(
    ("mean", "scale", "order"),
    [
        ([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], 4),
        ([1.0, 0.0, 0.0, 0.0], [1.0, 2.0, 1.0, 1.0], 4),  # wherever it is, it may be turned
        ([0.0, 0.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0], 1),  # it stands upright
        ([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 2.0], 2),  # or upside down
    ],
)
def test_an_edited_prior_breaks_turns(mean, scale, order):
    assert find(with_pose_prior(jnp.array(mean), jnp.diag(jnp.array(scale)))).order == order


def all_elements(found):
    """Every permutation of parts in the group, by listing."""
    groups = [np.flatnonzero(found.owner == k) for k in range(found.num_objects)]
    ways = {}
    for part, j, k in zip(found.part, found.source, found.target, strict=True):
        ways.setdefault((int(j), int(k)), []).append(part)
    for targets in itertools.permutations(range(found.num_objects)):
        pairs = list(enumerate(targets))
        if all(pair in ways for pair in pairs):
            for chosen in itertools.product(*(ways[pair] for pair in pairs)):
                element = np.zeros(len(found.owner), int)
                for group, part in zip(groups, chosen, strict=True):
                    element[group] = part[group]
                yield element


def test_the_orbit_sum_is_that_of_all_elements():
    found, rng = of_paper(), np.random.default_rng(1)
    elements = list(all_elements(found))
    assert len(elements) == len({tuple(e) for e in elements}) == 32
    log_probs = np.log(rng.dirichlet(np.ones(11), size=11))
    part, present = rng.permutation(11), rng.random(11) < 0.7
    expected = sum(
        np.exp(sum(log_probs[m, element[part[m]]] for m in np.flatnonzero(present)))
        for element in elements
    )
    value = found.log_orbit_prob(jnp.asarray(log_probs), jnp.asarray(part), jnp.asarray(present))
    np.testing.assert_allclose(value, np.log(expected), rtol=1e-9)


def test_its_gradient_is_that_of_differences():
    found, rng = of_paper(), np.random.default_rng(2)
    log_probs = rng.normal(size=(11, 11))
    part, present = jnp.arange(11), jnp.arange(11) < 8

    def value(x):
        return found.log_orbit_prob(x, part, present)

    gradient = jax.grad(value)(jnp.asarray(log_probs))
    for m, n in ((0, 0), (3, 9), (5, 4), (9, 2)):
        step = np.zeros((11, 11))
        step[m, n] = 1e-5
        slope = (value(log_probs + step) - value(log_probs - step)) / 2e-5
        np.testing.assert_allclose(gradient[m, n], slope, atol=1e-7)
