"""What CCAE's objective rewards while it trains.

The small variant is trained twice on scenes without noise, as `capsules train ccae` does: with
votes that may become as narrow as the published ones, and with its own. Each row has the mean loss
of the last steps, and the accuracy on scenes that are not reported elsewhere.
"""

import operator
from collections.abc import Iterator
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import Pieces, Table, number
from capsules.baselines import ccae
from capsules.baselines.ccae import VARIANTS, Ccae, Variant
from capsules.experiments.generator import sample_scenes
from capsules.experiments.simulator import paper_simulator
from guides.simulation import as_arrays
from inference.diagnostics.metrics import partition_metrics

TRAINING_SEED, SEED, DRAWS = 101, 555, 600
STEPS, EVERY, BATCHES = 4000, 1000, 150


class State(NamedTuple):
    """How training stands after some steps."""

    num_steps: int
    loss: float
    scene_accuracy: float
    sa: float


def pieces() -> Pieces:
    """One table."""
    small = VARIANTS["small"]
    both = [small._replace(narrowest=VARIANTS["published"].narrowest), small]
    bounds = [number(variant.narrowest, 2) for variant in both]
    titles = [x for bound in bounds for x in (f"loss, scale ≥ {bound}", "scene accuracy", "SA")]
    yield Table("ccae-objective", ["steps", *titles], _rows(both))


def _rows(variants: list[Variant]) -> Iterator[list[str]]:
    for states in zip(*map(_training, variants), strict=True):
        cells = [
            cell
            for state in states
            for cell in (
                f"{state.loss:.1f}".replace("-", "−"),
                number(state.scene_accuracy),
                number(state.sa),
            )
        ]
        yield [f"{states[0].num_steps:,}", *cells]


def _training(variant: Variant) -> Iterator[State]:
    """Train, and look now and then."""
    simulator, batch_size = paper_simulator(0.0), variant.batch_size
    optimizer = variant.optimizer(STEPS)
    train_key, init_key = jax.random.split(jax.random.key(TRAINING_SEED))
    draw_key, loss_key = jax.random.split(train_key)
    network = variant.network(init_key)
    memory, losses = optimizer.init(eqx.filter(network, eqx.is_array)), []

    @eqx.filter_jit
    def step(network, memory, batch, i):  # type: ignore[no-untyped-def]
        key = jax.random.fold_in(loss_key, i)
        value, gradient = eqx.filter_value_and_grad(ccae.loss)(network, batch, key)
        change, memory = optimizer.update(gradient, memory)
        return eqx.apply_updates(network, change), memory, value

    for i in range(STEPS):
        if i % BATCHES == 0:
            drawn = simulator(jax.random.fold_in(draw_key, i // BATCHES), batch_size * BATCHES)
        place = (i % BATCHES) * batch_size
        some = operator.itemgetter(slice(place, place + batch_size))
        batch = as_arrays(jax.tree.map(some, drawn))
        network, memory, value = step(network, memory, batch, jnp.asarray(i))
        losses.append(value)
        if (i + 1) % EVERY == 0:
            loss = float(np.mean(losses[-EVERY:]))
            yield State(i + 1, loss, *_accuracies(network))


def _accuracies(network: Ccae) -> tuple[float, float]:
    """Scene accuracy and SA."""
    scenes = sample_scenes(DRAWS, 0.0, SEED)
    mass, _ = ccae.read_out(network, scenes)
    labels = np.where(scenes.present, mass.argmax(axis=-1), -1)
    truth = np.where(scenes.present, scenes.object, -1)
    found = partition_metrics(truth, labels, mass.shape[-1])
    return float(found["scene_accuracy"].mean()), float(found["sa"].mean())
