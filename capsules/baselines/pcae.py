"""PCAE, the part capsule autoencoder (Kosiorek et al. 2019), from its description.

Convolutions read an image; for each part they give an affine pose and a presence, each pooled over
places by attention. A part draws its learned template under its pose. A pixel is a mixture of
Normals around the values that the parts and a background have there.

Places are in pixels from the centre of the image, (x, y) with y pointing down.
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models.numerics.arrays import AnyArray

SIZE, TEMPLATE = 40, 11
"""Pixels of an edge of the image, and of a template."""

KERNEL, STRIDES = 3, (2, 2, 1, 1)
FIRST_INK, TEMPLATE_GAIN = -2.0, 10.0
"""Initial logit of the ink of templates, and its change per weight: Adam moves a weight by at most
its rate, and templates must change more than the rest of the network."""

PRESENCE_NOISE = 2.0


class Images(NamedTuple):
    """Training images."""

    image: Float[AnyArray, "images size size"]


class Found(NamedTuple):
    """The parts of an image: part p maps its point v to matrix_p v + place_p."""

    matrix: Float[Array, "K 2 2"]
    """Pixels of the image for each pixel of the template."""
    place: Float[Array, "K 2"]
    presence_logit: Float[Array, " K"]


class Pcae(eqx.Module):
    """The network: convolutions, a head for each part, and templates."""

    convolutions: list[eqx.nn.Conv2d]
    bias: Float[Array, "channels side side"]
    """One for each place, because pooling loses the place of a feature."""
    head: eqx.nn.Linear
    template: Float[Array, "K edge edge"]
    sharpness: Float[Array, ""]
    background: Float[Array, " 2"]
    """Grey value and mixing logit."""

    def __init__(self, num_parts: int, channels: int, key: Array) -> None:
        head_key, template_key, *keys = jax.random.split(key, 2 + len(STRIDES))
        single, inputs, side = {"dtype": jnp.float32}, 1, SIZE
        self.convolutions = []
        for stride, key in zip(STRIDES, keys, strict=True):
            layer = eqx.nn.Conv2d(inputs, channels, KERNEL, stride, key=key, **single)
            self.convolutions.append(layer)
            inputs, side = channels, (side - KERNEL) // stride + 1
        self.bias = jnp.zeros((channels, side, side), jnp.float32)
        self.head = eqx.nn.Linear(channels, 8 * num_parts, key=head_key, **single)
        shape = (num_parts, TEMPLATE, TEMPLATE)
        self.template = jax.random.normal(template_key, shape, jnp.float32) / TEMPLATE_GAIN
        self.sharpness = jnp.asarray(2.0, jnp.float32)
        self.background = jnp.zeros(2, jnp.float32)

    @property
    def templates(self) -> Float[Array, "K edge edge"]:
        """The ink of each template, 0 to 1."""
        return jax.nn.sigmoid(FIRST_INK + TEMPLATE_GAIN * self.template)

    def __call__(self, image: Float[AnyArray, "size size"]) -> Found:
        """The parts of one image."""
        features = jnp.asarray(image, jnp.float32)[None]
        for layer in self.convolutions:
            features = jax.nn.relu(layer(features))
        features = (features + self.bias).reshape(len(features), -1).T
        numbers = jax.vmap(self.head)(features).reshape(len(features), -1, 8)
        attention = jax.nn.softmax(numbers[..., 7], axis=0)
        pooled = jnp.einsum("sp,spn->pn", attention, numbers[..., :7])
        matrix, place = affine(pooled[:, :6])
        return Found(matrix, place, pooled[:, 6])


def affine(theta: Float[Array, "*batch 6"]) -> tuple[Array, Array]:
    """Matrix and place of six numbers: two scales, a turn, a shear, and a translation."""
    half = SIZE / 2
    wide, high = (jax.nn.sigmoid(theta[..., i]) + 0.01 for i in (0, 1))
    angle, shear = 2 * jnp.pi * theta[..., 2], jnp.tanh(5 * theta[..., 3])
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    columns = (
        jnp.stack([cosine, sine], axis=-1) * wide[..., None],
        jnp.stack([shear * cosine - sine, shear * sine + cosine], axis=-1) * high[..., None],
    )
    matrix = 2 * half / TEMPLATE * jnp.stack(columns, axis=-1)
    return matrix, half * jnp.tanh(5 * theta[..., 4:6])


def grid(size: int) -> Float[np.ndarray, "size 2"]:
    """Coordinates of pixels along an edge, from the centre."""
    return (np.arange(size) - (size - 1) / 2).astype(np.float32)


def warp(
    template: Float[AnyArray, "height width"],
    matrix: Float[AnyArray, "2 2"],
    place: Float[AnyArray, "2"],
    size: int = SIZE,
) -> Float[Array, "size size"]:
    """Draw a template under u = matrix v + place, interpolated, and zero outside the template."""
    down, right = jnp.meshgrid(grid(size), grid(size), indexing="ij")
    x, y = right - place[0], down - place[1]
    (a, b), (c, d) = matrix
    determinant = a * d - b * c
    height, width = template.shape
    row = jnp.clip((a * y - c * x) / determinant + (height + 1) / 2, 0, height + 1)
    column = jnp.clip((d * x - b * y) / determinant + (width + 1) / 2, 0, width + 1)
    upper, left = jnp.clip(jnp.floor(row), 0, height), jnp.clip(jnp.floor(column), 0, width)
    below, beside = row - upper, column - left
    above, before = 1.0 - below, 1.0 - beside
    weights = [above * before, above * beside, below * before, below * beside]
    edged = jnp.pad(template, 1)  # all four neighbours in one look-up, which is fast backwards too
    corners = [edged[:-1, :-1], edged[:-1, 1:], edged[1:, :-1], edged[1:, 1:]]
    table = jnp.stack(corners, axis=-1).reshape(-1, 4)
    index = (upper * (width + 1) + left).astype(jnp.int32)
    return jnp.sum(table[index] * jnp.stack(weights, axis=-1), axis=-1)


def drawn(network: Pcae, found: Found) -> Float[Array, "K size size"]:
    """The picture that each part draws alone."""
    return jax.vmap(warp)(network.templates, found.matrix, found.place)


def log_mixing(network: Pcae, found: Found, pictures: Float[Array, "K size size"]) -> Array:
    """Log weights of each part and, last, the background, in each pixel."""
    presence = jax.nn.log_sigmoid(found.presence_logit)[:, None, None]
    logits = presence + jnp.exp(network.sharpness) * pictures
    background = jnp.broadcast_to(network.background[1], (1, *pictures.shape[1:]))
    return jax.nn.log_softmax(jnp.concatenate([logits, background]), axis=0)


def log_likelihood(
    network: Pcae, found: Found, image: Float[AnyArray, "size size"]
) -> Float[Array, ""]:
    """Log likelihood of an image: in each pixel a mixture of Normals of scale one."""
    pictures = drawn(network, found)
    grey = jnp.broadcast_to(network.background[0], (1, *image.shape))
    apart = image - jnp.concatenate([pictures, grey])
    density = -0.5 * apart**2 - 0.5 * math.log(2 * math.pi)
    return jax.nn.logsumexp(log_mixing(network, found, pictures) + density, axis=0).sum()


def reconstruction(network: Pcae, found: Found) -> Float[Array, "size size"]:
    """The mean of each pixel."""
    pictures = drawn(network, found)
    grey = jnp.broadcast_to(network.background[0], (1, *pictures.shape[1:]))
    weights = jnp.exp(log_mixing(network, found, pictures))
    return jnp.sum(weights * jnp.concatenate([pictures, grey]), axis=0)


def loss(network: Pcae, images: Images, rng_key: Array) -> Float[Array, ""]:
    """Mean over images of -log likelihood, with noise on the presences."""

    def of_image(image: Array, key: Array) -> Float[Array, ""]:
        found = network(image)
        noise = jax.random.uniform(key, found.presence_logit.shape, jnp.float32, -1.0, 1.0)
        noisy = found._replace(presence_logit=found.presence_logit + PRESENCE_NOISE * noise)
        return -log_likelihood(network, noisy, image)

    keys = jax.random.split(rng_key, len(images.image))
    return jax.vmap(of_image)(images.image, keys).mean()
