"""What CCAE's objective rewards while it trains: `python -m benchmarks.ccae`.

The small variant is trained twice, with votes that may become as narrow as those published and with
its own, on noise-free scenes. Each line has the mean loss of the last steps, and the scene accuracy
on scenes that are not reported elsewhere.
"""

import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from capsules.baselines import ccae
from capsules.baselines.ccae import VARIANTS, Ccae
from capsules.experiments.generator import sample_scenes
from capsules.experiments.simulator import paper_simulator
from guides.simulation import as_arrays
from inference.diagnostics.metrics import partition_metrics

TRAINING_SEED, SEED, DRAWS = 101, 555, 600
STEPS, EVERY, BATCHES = 4000, 1000, 150


def accuracies(network: Ccae) -> tuple[float, float]:
    """Scene accuracy and SA."""
    scenes = sample_scenes(DRAWS, 0.0, SEED)
    mass, _ = ccae.read_out(network, scenes)
    labels = np.where(scenes.present, mass.argmax(axis=-1), -1)
    truth = np.where(scenes.present, scenes.object, -1)
    found = partition_metrics(truth, labels, mass.shape[-1])
    return float(found["scene_accuracy"].mean()), float(found["sa"].mean())


def main() -> None:
    """Train as `capsules train ccae` does, and look every thousand steps."""
    print("| narrowest | steps | loss | scene accuracy | SA |\n| --- | --- | --- | --- | --- |")
    small, simulator = VARIANTS["small"], paper_simulator(0.0)
    optimizer, batch_size = small.optimizer(STEPS), small.batch_size
    train_key, init_key = jax.random.split(jax.random.key(TRAINING_SEED))
    draw_key, loss_key = jax.random.split(train_key)
    for narrowest in (VARIANTS["published"].narrowest, small.narrowest):
        network = small._replace(narrowest=narrowest).network(init_key)
        memory, losses = optimizer.init(eqx.filter(network, eqx.is_array)), []

        @eqx.filter_jit
        def step(network, memory, batch, i):
            key = jax.random.fold_in(loss_key, i)
            value, gradient = eqx.filter_value_and_grad(ccae.loss)(network, batch, key)
            change, memory = optimizer.update(gradient, memory)
            return eqx.apply_updates(network, change), memory, value

        for i in range(STEPS):
            if i % BATCHES == 0:
                key = jax.random.fold_in(draw_key, i // BATCHES)
                drawn = simulator(key, batch_size * BATCHES)
            place = (i % BATCHES) * batch_size
            some = operator.itemgetter(slice(place, place + batch_size))
            batch = as_arrays(jax.tree.map(some, drawn))
            network, memory, value = step(network, memory, batch, jnp.asarray(i))
            losses.append(value)
            if (i + 1) % EVERY == 0:
                scene_accuracy, sa = accuracies(network)
                loss = np.mean(losses[-EVERY:])
                print(f"| {narrowest} | {i + 1} | {loss:.1f} | {scene_accuracy:.3f} | {sa:.3f} |")


if __name__ == "__main__":
    main()
