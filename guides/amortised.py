"""An amortised guide: a network that maps the points of any scene to match logits in one pass.

It is trained only on draws from the program itself, or from a generator. Its loss is

    -log sum over g of q(g z | x),   q(z | x) = prod_m softmax(logits_m)[z_m],

where g runs over all symmetries of the program (`guides.symmetries`), so the network need not guess
which of two squares is called the first.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from guides import training
from guides.set_transformer import SetTransformer
from guides.simulation import Draws, Simulator, simulator_of
from guides.symmetries import Symmetries, find, likelihood_of_program
from guides.training import Plan, Report
from models.errors import InputError
from models.numerics.arrays import AnyArray
from models.numerics.sinkhorn import refine, swept
from models.program.sites import Program, trace_sites
from models.scenes import Layout, Scene

VERSION = 1
"""Raise it when a change of the code makes stored weights stale."""

KIND = "amortised"

TOLERANCE = 1e-9
"""Largest deviation of a column sum from one."""

BLOCK = 256
"""Scenes per forward pass: their activations fit into the cache."""


class Size(NamedTuple):
    """Size of the network."""

    width: int = 64
    num_layers: int = 3
    num_heads: int = 4


class AmortisedGuide(eqx.Module):
    """Match logits of any scene of up to N points; see `amortise`."""

    encoder: SetTransformer
    head: eqx.nn.Linear

    def __init__(self, num_features: int, num_parts: int, size: Size, key: Array) -> None:
        encoder_key, head_key = jax.random.split(key)
        width, num_layers, num_heads = size
        self.encoder = SetTransformer(num_features, width, num_heads, num_layers, encoder_key)
        self.head = eqx.nn.Linear(width, num_parts, dtype=jnp.float32, key=head_key)

    @property
    def num_parts(self) -> int:
        """N, parts of all objects."""
        return int(self.head.out_features)

    def __call__(
        self, points: Float[AnyArray, "N d"], present: Bool[AnyArray, " N"]
    ) -> Float[Array, "N N"]:
        """Logits of each row being each part; zero in dummy rows."""
        logits = jax.vmap(self.head)(self.encoder(points, present))
        return jnp.where(present[:, None], logits, 0.0)

    def match_logits(self, scenes: Scene) -> Float[np.ndarray, "scenes N N"]:
        """Logits of a batch of scenes."""
        return self._in_blocks(_logits, scenes)

    def match_probs(self, scenes: Scene) -> Float[np.ndarray, "scenes N N"]:
        """Doubly stochastic match probabilities of a batch of scenes."""
        return self._in_blocks(_probs, scenes)

    def _in_blocks(self, compute: Any, scenes: Scene) -> Float[np.ndarray, "scenes N N"]:
        count, rows = np.shape(scenes.present)
        if rows != self.num_parts:
            raise InputError(
                f"the guide was trained for {self.num_parts} parts, but the scenes have {rows} "
                "rows; amortise the program that the scenes are for"
            )
        points = np.where(scenes.present[..., None], scenes.points, 0.0).astype(np.float32)
        size, present = min(BLOCK, count), np.asarray(scenes.present)
        found = np.empty((count, rows, rows))
        for start in range(0, count, size):
            some = np.resize(np.arange(start, min(start + size, count)), size)
            block = np.asarray(compute(self, points[some], present[some]))
            found[start : start + size] = block[: count - start]
        return found


@eqx.filter_jit
def _logits(guide: AmortisedGuide, points: Array, present: Array) -> Array:
    return jax.vmap(guide)(points, present)


@eqx.filter_jit
def _probs(guide: AmortisedGuide, points: Array, present: Array) -> Array:
    logits = jax.vmap(guide)(points, present).astype(float)
    logits = jnp.moveaxis(logits, 0, -1)
    return jnp.moveaxis(refine(logits, swept(logits), TOLERANCE).matrix, -1, 0)


class Settings(NamedTuple):
    """Training settings: Adam, with a learning rate that decays to zero along a cosine."""

    num_steps: int = 30_000
    batch_size: int = 64
    learning_rate: float = 1e-3
    size: Size = Size()


DEFAULT = Settings()


def amortise(
    program: Program,
    rng_key: Array,
    folder: Path,
    *,
    simulator: Simulator | None = None,
    about: str = "",
    settings: Settings = DEFAULT,
    say: Callable[[str], None] = print,
    report: Report = training.silent,
) -> AmortisedGuide:
    """Train a guide for a program, or load it if it was trained before.

    Args:
        program: a NumPyro program with a Normal pose prior and `MatchedParts`.
        rng_key: decides the weights, with the settings.
        folder: where weights are kept, named by a digest of the program, the key and the settings.
            An edited program has another digest, and is trained again.
        simulator: draws scenes with their matches; the program itself by default.
        about: a description of the simulator, which is part of the digest.
        say: called with a sentence if the folder has other guides but a new one is trained.
        report: called with (steps done, steps in all) now and then.
    """
    if simulator is not None and not about:
        raise InputError(
            "a simulator requires a description, which names its weights; got none, give `about`"
        )
    path = folder / f"amortised-{digest(program, about, settings, rng_key)}.eqx"
    if path.exists():
        return load_guide(path)
    if others := len(list(folder.glob("amortised-*.eqx"))):
        say(f"{folder} has {others} trained guides, but none of this program and these settings.")
    guide = fit(program, rng_key, simulator, settings, path, report)
    save_guide(path, guide, settings, {"about": about})
    return guide


def fit(
    program: Program,
    rng_key: Array,
    simulator: Simulator | None = None,
    settings: Settings = DEFAULT,
    path: Path | None = None,
    report: Report = training.silent,
) -> AmortisedGuide:
    """Train a guide for a program, without looking for stored weights.

    Args:
        path: the future file of weights; a checkpoint is kept beside it during training.
    """
    key, init_key = jax.random.split(rng_key)
    parts = likelihood_of_program(program).parts
    guide = AmortisedGuide(parts.num_features, parts.num_parts, settings.size, init_key)
    num_steps = training.checked_steps(settings.num_steps)
    schedule = optax.cosine_decay_schedule(settings.learning_rate, num_steps)
    trained, _ = training.train(
        guide,
        orbit_loss(find(program)),
        simulator or simulator_of(program),
        optax.adam(schedule),
        Plan(num_steps, settings.batch_size),
        key,
        path=path,
        report=report,
    )
    return trained


def save_guide(
    path: Path, guide: AmortisedGuide, settings: Settings, about: dict[str, Any]
) -> None:
    """Write the weights of a guide, with a header that is needed to read them."""
    shape = [guide.encoder.embed.in_features, guide.num_parts]
    header = {"kind": KIND, "shape": shape, "size": settings.size._asdict()}
    training.save(path, header | {"steps": settings.num_steps} | about, guide)


def load_guide(path: Path) -> AmortisedGuide:
    """Load a guide from a file of weights."""
    header = training.read_header(path, KIND)
    num_features, num_parts = header["shape"]
    size = Size(**header["size"])
    like = AmortisedGuide(num_features, num_parts, size, jax.random.key(0))
    return training.load(path, like)


def orbit_loss(symmetries: Symmetries) -> training.Loss:
    """Mean over scenes of -log sum over g of q(g z | x)."""

    def loss(guide: AmortisedGuide, draws: Draws, rng_key: Array) -> Float[Array, ""]:
        log_probs = jax.nn.log_softmax(jax.vmap(guide)(draws.points, draws.present))
        of_scene = jax.vmap(symmetries.log_orbit_prob)(log_probs, draws.part, draws.present)
        return -jnp.mean(of_scene).astype(jnp.float32)

    return loss


def digest(program: Program, about: str, settings: Settings, rng_key: Array) -> str:
    """A digest of all that weights depend on: sites, distributions, numbers, parts, settings."""
    parts = likelihood_of_program(program).parts
    blank = Layout(parts.num_parts, parts.num_features, False, None).blank()
    found = hashlib.sha256(repr((VERSION, about, settings)).encode())
    found.update(np.asarray(jax.random.key_data(rng_key)).tobytes())
    for name, site in trace_sites(program, blank).items():
        found.update(f"{name} {type(site['fn']).__name__}".encode())
        found.update(_fingerprint(jax.tree.leaves(site["fn"])))
    return found.hexdigest()[:16]


def _fingerprint(numbers: Iterable[Any]) -> bytes:
    """A digest of arrays in any order, as the order of a distribution's fields differs by run."""
    arrays = [np.asarray(number) for number in numbers]
    each = (f"{x.shape} {x.dtype}".encode() + x.tobytes() for x in arrays)
    return b"".join(sorted(hashlib.sha256(one).digest() for one in each))
