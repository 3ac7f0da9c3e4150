"""Train the networks of other studies, as `capsules train` does, into `benchmarks.report.WEIGHTS`.

Weights are kept under a digest of the source and the settings, so they are trained again only after
an edit, and copied to the names by which `capsules reproduce --weights` finds them.
"""

from pathlib import Path
from typing import NamedTuple

from benchmarks.report import WEIGHTS, Pieces
from capsules import trained
from capsules.files.outputs import whole_file
from capsules.store import Store

SAID_EVERY = 1000
"""Steps between lines of the log."""


class Training(NamedTuple):
    """A network, and how it is trained."""

    network: str
    sigma: float
    num_steps: int
    seed: int = 0
    variant: str = "small"


TRAININGS = {
    "amortised-0": Training("amortised", 0.0, 30_000),
    "amortised-0.1": Training("amortised", 0.1, 20_000),
    "amortised-0.25": Training("amortised", 0.25, 45_000),
    "ccae-0": Training("ccae", 0.0, 6000),
    "ccae-0.1": Training("ccae", 0.1, 6000),
    "ccae-0.25": Training("ccae", 0.25, 6000),
    "ccae-seed-1": Training("ccae", 0.0, 6000, seed=1),
    "ccae-published": Training("ccae", 0.0, 2500, variant="published"),
}
"""The study of each has the prefix `train-`."""


def pieces(name: str) -> Pieces:
    """Train a network; there is nothing to show."""
    weights(name)
    yield from ()


def weights(name: str) -> Path:
    """The weights of a network, which is trained unless it was for the present source."""
    training = TRAININGS[name]
    entry = Store(WEIGHTS / "trained").entry(name, **training._asdict())
    kept = entry.path.with_suffix(".eqx")
    kept.parent.mkdir(parents=True, exist_ok=True)
    if not kept.exists():
        trained.train(
            training.network,
            kept,
            training.sigma,
            training.num_steps,
            training.seed,
            training.variant,
            say,
        )
    is_usual = training.seed == 0 and training.variant == "small"
    stem = f"{training.network}-{training.sigma:.2f}" if is_usual else name
    with whole_file(WEIGHTS / f"{stem}.eqx") as file:
        file.write(kept.read_bytes())
    return WEIGHTS / f"{stem}.eqx"


def say(done: int, total: int) -> None:
    """Print a line now and then."""
    if done % SAID_EVERY == 0:
        print(f"{done} of {total} steps", flush=True)
