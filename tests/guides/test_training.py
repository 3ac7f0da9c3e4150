"""Training of a toy network: a killed run ends in the weights of one that was not."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from guides import training
from guides.simulation import Draws
from guides.training import Plan, train
from models.errors import InputError

KEY = jax.random.key(0)
PLAN = Plan(num_steps=30, batch_size=8, batches_in_a_draw=4)


def simulate(rng_key, count):
    rng = np.random.default_rng(np.asarray(jax.random.key_data(rng_key)))
    points = rng.normal(size=(count, 3, 2))
    return Draws(points, np.ones((count, 3), bool), (points[..., 0] > 0).astype(int))


def loss(network, draws, rng_key):
    """Which side a point is on, with noise from the key."""
    noise = 0.1 * jax.random.normal(rng_key, draws.points.shape, jnp.float32)
    logits = jax.vmap(jax.vmap(network))(draws.points + noise)
    return optax.softmax_cross_entropy_with_integer_labels(logits, draws.part).mean()


def run(key=KEY, **options):
    network = eqx.nn.Linear(2, 2, dtype=jnp.float32, key=jax.random.key(7))
    trained, losses = train(network, loss, simulate, optax.adam(0.1), PLAN, key, **options)
    return np.asarray(trained.weight), losses


class KilledError(Exception):
    pass


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SAVED_EVERY", 10)
    monkeypatch.setattr(training, "REPORTED_EVERY", 1)
    path, steps = tmp_path / "toy.eqx", []
    whole, losses = run()

    def die(done, total):
        if done == 17:
            raise KilledError

    with pytest.raises(KilledError):
        run(path=path, report=die)
    assert [file.name for file in tmp_path.iterdir()] == ["toy.checkpoint"]
    resumed, all_losses = run(path=path, report=lambda done, total: steps.append(done))
    assert steps == list(range(11, 31))
    np.testing.assert_array_equal(resumed, whole)
    np.testing.assert_array_equal(all_losses, losses)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_run_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SAVED_EVERY", 10)
    path = tmp_path / "toy.eqx"
    other, _ = run(jax.random.key(1))

    def die(done, total):
        if done == 20:
            raise KilledError

    with pytest.raises(KilledError):
        run(path=path, report=die)
    found, _ = run(jax.random.key(1), path=path)
    np.testing.assert_array_equal(found, other)


def test_a_flip_of_any_bit_of_weights_is_noticed(tmp_path):
    path = tmp_path / "toy.eqx"
    training.save(path, {"kind": "toy"}, np.arange(9.0))
    content = path.read_bytes()
    for place in range(0, len(content), 10):
        spoilt = bytearray(content)
        spoilt[place] ^= 1 << place // 10 % 8
        path.write_bytes(spoilt)
        with pytest.raises(InputError, match="it is damaged, or not a file of weights"):
            training.load(path, np.zeros(9))


def test_a_damaged_checkpoint_is_not_taken(tmp_path):
    path = tmp_path / "toy.eqx"
    path.with_suffix(".checkpoint").write_bytes(b"half of a chec")
    np.testing.assert_array_equal(run(path=path)[0], run()[0])


def test_the_loss_falls():
    _, losses = run()
    assert losses.shape == (30,)
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()


def test_the_same_key_gives_the_same_weights():
    np.testing.assert_array_equal(run()[0], run()[0])
    assert np.abs(run()[0] - run(jax.random.key(1))[0]).max() > 1e-3


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InputError, match="cannot write"):
        training.save(blocked / "weights.eqx", {}, jnp.zeros(2))
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]
