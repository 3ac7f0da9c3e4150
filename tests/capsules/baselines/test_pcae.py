"""PCAE on tiny networks against plain numpy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capsules.baselines import pcae
from capsules.baselines.pcae import SIZE, Images, Pcae, warp

pytestmark = pytest.mark.long

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)


def tiny():
    return Pcae(2, 3, KEY)


def plain_warp(template, matrix, place, size):
    """Bilinear interpolation, pixel by pixel."""
    height, width = template.shape
    picture = np.zeros((size, size))
    for r in range(size):
        for c in range(size):
            u = np.array([c, r]) - (size - 1) / 2
            x, y = np.linalg.solve(matrix, u - place)
            down = np.maximum(0, 1 - np.abs(y + (height - 1) / 2 - np.arange(height)))
            right = np.maximum(0, 1 - np.abs(x + (width - 1) / 2 - np.arange(width)))
            picture[r, c] = down @ template @ right
    return picture


def test_the_warp_is_bilinear_interpolation():
    template = RNG.uniform(size=(3, 5))
    for _ in range(4):
        matrix, place = RNG.normal(size=(2, 2)) + np.eye(2), RNG.normal(size=2)
        expected = plain_warp(template, matrix, place, 9)
        np.testing.assert_allclose(warp(template, matrix, place, 9), expected, atol=1e-6)


def test_a_pose_puts_the_template_at_its_place():
    spot = np.zeros((11, 11))
    spot[5, 8] = 1.0  # three pixels to the right of the centre
    quarter = np.array([[0.0, -1.0], [1.0, 0.0]])
    picture = np.asarray(warp(spot, quarter, np.array([0.5, 2.5])))
    row, column = np.unravel_index(picture.argmax(), picture.shape)
    assert (column - (SIZE - 1) / 2, row - (SIZE - 1) / 2) == (0.5, 5.5)


def test_affine_maps_have_two_scales_a_turn_and_a_shear():
    theta = np.array([0.3, -0.2, 0.1, 0.05, 0.02, -0.04])
    matrix, place = (np.asarray(x) for x in pcae.affine(jnp.asarray(theta)))
    wide, high = 1 / (1 + np.exp(-theta[:2])) + 0.01
    angle, shear = 2 * np.pi * theta[2], np.tanh(5 * theta[3])
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    expected = 40 / 11 * turn @ np.array([[1, shear], [0, 1]]) @ np.diag([wide, high])
    np.testing.assert_allclose(matrix, expected, rtol=1e-6)
    np.testing.assert_allclose(place, 20 * np.tanh(5 * theta[4:]), rtol=1e-6)


def test_the_likelihood_is_a_mixture_of_normals_in_each_pixel():
    network, image = tiny(), RNG.uniform(size=(SIZE, SIZE)).astype(np.float32)
    found = network(image)
    pictures = [
        plain_warp(np.asarray(t, float), np.asarray(m, float), np.asarray(p, float), SIZE)
        for t, m, p in zip(network.templates, found.matrix, found.place, strict=True)
    ]
    value, logit = np.asarray(network.background, float)
    presence = 1 / (1 + np.exp(-np.asarray(found.presence_logit, float)))
    weights = [q * np.exp(np.exp(2.0) * x) for q, x in zip(presence, pictures, strict=True)]
    weights.append(np.full(image.shape, np.exp(logit)))
    means = [*pictures, np.full(image.shape, value)]
    normal = [np.exp(-0.5 * (image - m) ** 2) / np.sqrt(2 * np.pi) for m in means]
    mixture = sum(w * n for w, n in zip(weights, normal, strict=True)) / sum(weights)
    expected = np.log(mixture).sum()
    np.testing.assert_allclose(pcae.log_likelihood(network, found, image), expected, rtol=1e-5)
    mean = sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)
    np.testing.assert_allclose(pcae.reconstruction(network, found), mean, atol=1e-4)


def test_the_gradient_is_that_of_finite_differences():
    double = jax.tree.map(lambda x: x.astype(float) if eqx.is_array(x) else x, tiny())
    images = Images(jnp.asarray(RNG.uniform(size=(2, SIZE, SIZE))))
    found = jax.tree.map(lambda x: x.astype(float), jax.vmap(tiny())(images.image))

    @jax.jit
    def loss(templates, matrix, place):
        network = eqx.tree_at(lambda n: n.template, double, templates)
        one = found._replace(matrix=matrix, place=place)
        each = jax.vmap(lambda f, x: pcae.log_likelihood(network, f, x))(one, images.image)
        return each.sum()

    at = [double.template, found.matrix, found.place]
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*at)
    step = 1e-6
    for i, (value, slope) in enumerate(zip(at, gradient, strict=True)):
        direction = RNG.normal(size=value.shape)
        ahead, behind = (
            loss(*at[:i], value + sign * step * direction, *at[i + 1 :]) for sign in (1, -1)
        )
        expected = (ahead - behind) / (2 * step)
        np.testing.assert_allclose(np.sum(slope * direction), expected, rtol=1e-4)


def test_the_loss_has_noise_on_presences_alone():
    network, image = tiny(), RNG.uniform(size=(1, SIZE, SIZE)).astype(np.float32)
    value = pcae.loss(network, Images(image), KEY)
    noise = jax.random.uniform(jax.random.split(KEY, 1)[0], (2,), jnp.float32, -2.0, 2.0)
    found = network(image[0])
    noisy = found._replace(presence_logit=found.presence_logit + noise)
    np.testing.assert_allclose(value, -pcae.log_likelihood(network, noisy, image[0]), rtol=1e-6)
    assert value.dtype == np.float32
