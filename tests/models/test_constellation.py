"""The constellation program: its sites, and the moments of what it draws."""

from functools import partial

import jax
import numpy as np
import pytest
from numpyro.handlers import seed, substitute, trace

from models.constellation import (
    PARTS,
    constellation,
    mixture_constellation,
    published_mixture,
    uniform_match,
)
from models.distributions.likelihood import MatchedParts
from models.distributions.match import DoublyStochasticMatch, MixtureMatch, PermutationMatch
from models.errors import InputError
from models.geometry import translation
from models.program.batches import check_conjugate
from models.program.reading import read
from models.scenes import make_scene
from models.templates import Parts, stack

# Parts that are not centred, so that the mean of a scene is not zero.
OFF_CENTRE = stack(
    [[[0.0, 1.0], [1.0, 3.0]], [[2.0, 0.0], [5.0, 1.0], [3.0, 2.0]]], translation, variance=0.3
)
VARIANTS = {
    "doubly_stochastic": (constellation, DoublyStochasticMatch),
    "permutation": (partial(constellation, match_prior="permutation"), PermutationMatch),
    "mixture": (mixture_constellation, MixtureMatch),
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def scene_moments(parts: Parts, variant: str, precision: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean (N d,) and covariance (N d, N d) of all points of a scene, in closed form.

    Given that points m and m' are the parts n and n', their covariance over standard Normal poses
    is F_n F_n'^T if one object owns both, plus the noise if m = m'. Over matches, the offsets vary
    too. One point is each part with 1/N; two points are any two different parts of a permutation,
    and any two parts, the same or not, of a mixture.
    """
    F, offset, variance, owner = (
        np.asarray(x) for x in (parts.F, parts.offset, parts.variance, parts.owner)
    )
    N, d = offset.shape
    centred = offset - offset.mean(axis=0)
    pairs = np.einsum("iap,jbp->ijab", F, F) * (owner[:, None] == owner)[..., None, None]
    pairs = pairs + np.einsum("ia,jb->ijab", centred, centred)
    own = np.mean([pairs[n, n] for n in range(N)], axis=0)
    noise = np.diag(variance.mean(axis=0)) / precision
    if variant == "mixture":
        other = pairs.mean(axis=(0, 1))
    else:
        other = (pairs.sum(axis=(0, 1)) - N * own) / (N * (N - 1))
    same_point = np.eye(N)[:, :, None, None]
    covariance = same_point * (own + noise) + (1 - same_point) * other
    return np.tile(offset.mean(axis=0), N), covariance.swapaxes(1, 2).reshape(N * d, N * d)


@pytest.mark.long
@each_variant
@pytest.mark.parametrize(
    ("parts", "draws"), [(PARTS, 2_000), (OFF_CENTRE, 8_000)], ids=["shapes", "off_centre"]
)
def test_prior_draws_have_the_closed_form_moments(variant, parts, draws):
    program, _ = VARIANTS[variant]
    precision, beta = 8.0, 0.5
    keys = jax.random.split(jax.random.key(0), draws)

    @jax.jit
    @jax.vmap
    def draw(key):
        return seed(program, key)(parts=parts, precision=precision, beta=beta)

    scenes = np.asarray(draw(keys)).reshape(draws, -1)
    mean, covariance = scene_moments(parts, variant, precision * beta)
    products = (scenes - mean)[:, :, None] * (scenes - mean)[:, None, :]
    for sample, expected in ((scenes, mean), (products, covariance)):
        standard_error = sample.std(axis=0) / np.sqrt(draws)
        assert (abs(sample.mean(axis=0) - expected) <= 5 * standard_error).all()


@each_variant
def test_the_sites_are_those_of_the_paper(variant):
    program, family = VARIANTS[variant]
    points, present = np.zeros((11, 2)), np.arange(11) < 6
    known = substitute(program, {"match": np.eye(11)})  # no need to draw it
    sites = trace(seed(known, 0)).get_trace(points, present)
    assert list(sites) == ["object", "pose", "match", "points"]
    assert isinstance(sites["match"]["fn"], family)
    np.testing.assert_allclose(sites["match"]["fn"].log_weights, np.full((11, 11), -np.log(11)))
    likelihood = sites["points"]["fn"]
    assert isinstance(likelihood, MatchedParts)
    assert (likelihood.precision, likelihood.beta) == (1e4, 1.0)
    assert sites["points"]["value"] is points
    assert sites["pose"]["value"].shape == (3, 4)


def test_missing_points_are_drawn_as_nothing():
    present = np.arange(11) < 6
    points = seed(mixture_constellation, 0)(present=present)
    assert (points[6:] == 0).all()
    assert (points[:6] != 0).all()


def test_the_templates_are_two_squares_and_a_triangle():
    assert (PARTS.num_parts, PARTS.num_objects, PARTS.pose_dim) == (11, 3, 4)
    np.testing.assert_array_equal(np.bincount(PARTS.owner), [4, 3, 4])
    coordinates = np.asarray(PARTS.F)[:, 0, 2:]
    for k in range(3):
        own = coordinates[PARTS.owner == k]
        np.testing.assert_allclose(own.mean(axis=0), 0, atol=1e-12)
        np.testing.assert_allclose(np.mean(np.sum(own**2, axis=1)), 1)


def test_the_published_mixture_is_centred_on_the_points():
    """With a Dirichlet(1) over the parts, and conjugate."""
    scene = make_scene(np.random.default_rng(0).normal([3, 5], 1, (6, 2)), 11)
    check_conjugate(published_mixture, scene)
    pieces = read(published_mixture, scene)
    centre = scene.points[:6].mean(axis=0)
    np.testing.assert_allclose(pieces.pose_mean, np.tile([*centre, 0, 0], (3, 1)))
    np.testing.assert_allclose(pieces.pose_covariance, np.stack([np.eye(4)] * 3))
    np.testing.assert_array_equal(pieces.part_prior, np.ones(11))
    assert pieces.match_family is MixtureMatch


def test_an_unknown_match_prior_is_named():
    with pytest.raises(InputError, match="mixtrue"):
        uniform_match("mixtrue", 3)
