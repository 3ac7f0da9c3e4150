"""Training of networks: reproducible steps, checkpoints, and files of weights.

A step depends only on the key, its number and the weights. So a run that was killed resumes from
its checkpoint and ends in the same weights as one that was not.
"""

import contextlib
import errno
import hashlib
import io
import json
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from guides.simulation import as_arrays
from models.errors import InputError

MAX_STEPS = 100_000_000
"""Largest number of training steps, whose losses take 400 MB."""

MAX_BYTES = 2 << 30
"""Largest size of a file of weights."""

SAVED_EVERY = 500
"""Steps between checkpoints."""

REPORTED_EVERY = 10

Network = TypeVar("Network", bound=eqx.Module)
Loss = Callable[[Any, Any, Array], Float[Array, ""]]
"""The loss of a network on a batch of draws, given a key."""
Source = Callable[[Array, int], Any]
"""Takes a key and a number, and returns that many draws: a tree of arrays, one row for each."""
Report = Callable[[int, int], None]
"""Called with (steps done, steps in all) now and then."""


def silent(done: int, total: int) -> None:
    """Report nothing."""


class Plan(NamedTuple):
    """Number of steps, scenes of a batch, and batches of a draw."""

    num_steps: int
    batch_size: int = 64
    batches_in_a_draw: int = 150
    """Batches from one call of the simulator."""


def train(
    network: Network,
    loss: Loss,
    simulator: Source,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    rng_key: Array,
    *,
    path: Path | None = None,
    report: Report = silent,
) -> tuple[Network, Float[np.ndarray, " steps"]]:
    """Minimise the mean loss over draws of a simulator; returns the network and each step's loss.

    Args:
        path: the future file of weights. A checkpoint is kept beside it during training, from which
            an interrupted run resumes.
    """
    weights, rest = eqx.partition(network, eqx.is_array)
    losses = jnp.zeros(plan.num_steps, jnp.float32)
    state = (weights, optimizer.init(weights), losses)
    mark = {"plan": plan._asdict(), "key": np.asarray(jax.random.key_data(rng_key)).tolist()}
    checkpoint = None if path is None else path.with_suffix(".checkpoint")
    state, first = _resumed(checkpoint, state, mark)
    draw_key, loss_key = jax.random.split(rng_key)

    @jax.jit
    def step(state: Any, batch: Any, i: Array) -> Any:
        weights, memory, losses = state

        def mean_loss(weights: Any) -> Float[Array, ""]:
            return loss(eqx.combine(weights, rest), batch, jax.random.fold_in(loss_key, i))

        value, gradient = jax.value_and_grad(mean_loss)(weights)
        change, memory = optimizer.update(gradient, memory, weights)
        return optax.apply_updates(weights, change), memory, losses.at[i].set(value)

    drawn, number = None, -1
    for i in range(first, plan.num_steps):
        if i // plan.batches_in_a_draw != number:
            number = i // plan.batches_in_a_draw
            scenes = plan.batch_size * plan.batches_in_a_draw
            drawn = simulator(jax.random.fold_in(draw_key, number), scenes)
        place = (i % plan.batches_in_a_draw) * plan.batch_size
        some = slice(place, place + plan.batch_size)
        batch = as_arrays(jax.tree.map(operator.itemgetter(some), drawn))
        state = step(state, batch, jnp.asarray(i))
        if (i + 1) % REPORTED_EVERY == 0 or i + 1 == plan.num_steps:
            jax.block_until_ready(state[2])
            report(i + 1, plan.num_steps)
        if checkpoint is not None and (i + 1) % SAVED_EVERY == 0 and i + 1 < plan.num_steps:
            save(checkpoint, mark | {"step": i + 1}, state)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    weights, _, losses = state
    return eqx.combine(weights, rest), np.asarray(losses)


def _resumed(checkpoint: Path | None, state: Any, mark: dict[str, Any]) -> tuple[Any, int]:
    """The state to start from, and the number of its next step."""
    if checkpoint is None or not checkpoint.exists():
        return state, 0
    try:
        header = read_header(checkpoint)
    except InputError:  # damaged: start from the beginning
        return state, 0
    if {name: header.get(name) for name in mark} != mark:
        return state, 0
    return load(checkpoint, state), int(header["step"])


def checked_steps(num_steps: int) -> int:
    """Return the number of steps; raise an InputError if it is out of range."""
    if not 1 <= num_steps <= MAX_STEPS:
        raise InputError(
            f"the number of training steps must be 1 to {MAX_STEPS:,}, got {num_steps:,}"
        )
    return num_steps


def save(path: Path, header: dict[str, Any], tree: Any) -> None:
    """Write a line of JSON and the arrays of a tree; the file appears whole or not at all.

    A digest of both is the first line.
    """
    content = io.BytesIO()
    content.write(json.dumps(header).encode() + b"\n")
    eqx.tree_serialise_leaves(content, tree)
    with _whole_file(path) as file:
        file.write(_digest(content.getbuffer()) + b"\n" + content.getbuffer())


def read_header(path: Path, kind: str | None = None) -> dict[str, Any]:
    """Read the header of a file of weights.

    Args:
        kind: the required kind of network, if any.
    """
    header = json.loads(_content(path).readline())
    found = header.get("kind") if isinstance(header, dict) else None
    if kind is not None and found != kind:
        raise InputError(
            f"{path} has the weights of {found!r}, but those of {kind!r} are required; make them "
            f"with `capsules train {kind}`"
        )
    return header


def load(path: Path, like: Any) -> Any:
    """Load the arrays of a file into a tree like the given one."""
    try:
        content = _content(path)
        content.readline()
        return eqx.tree_deserialise_leaves(content, like)
    except (ValueError, EOFError, RuntimeError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"the weights in {path} cannot be used ({str(error).splitlines()[0]}); remove the file "
            "and train again"
        ) from error


def _content(path: Path) -> io.BytesIO:
    """The content of a file of weights after its digest, which is checked."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is not an ordinary file")
        if path.stat().st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MAX_BYTES >> 30} GiB")
        digest, _, content = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from error
    if digest != _digest(content):
        raise _unreadable(path, "it is damaged, or not a file of weights")
    return io.BytesIO(content)


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _unreadable(path: Path, reason: str) -> InputError:
    return InputError(
        f"{path} is not a readable file of weights ({reason}); make one with `capsules train`"
    )


@contextlib.contextmanager
def _whole_file(path: Path) -> Any:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    file: BinaryIO
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            yield file
        os.replace(part, path)
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({os.strerror(error.errno or errno.EIO)}); choose a folder that "
            "is writable"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
