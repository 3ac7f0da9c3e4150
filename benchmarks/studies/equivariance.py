"""Do the parts of PCAE rotate with the image? What `capsules reproduce equivariance` computes.

A second table has each network by itself, since networks of the same size learn different parts.
Networks are kept in a store, so an interrupted run resumes.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from benchmarks.report import BUILD, Picture, Pieces, Table
from capsules.experiments import digits
from capsules.experiments.digits import Network
from capsules.experiments.equivariance import ANGLES
from capsules.experiments.equivariance_report import (
    DIGITS,
    LINES,
    SHARES,
    Measurements,
    measured,
    plot_parts,
    plot_residuals,
    table_lines,
)
from capsules.store import Store
from models.numerics.arrays import AnyArray

SEED, STEPS = 0, 4000
SAID_EVERY = 1000
SHOWN = ("rmse", "ink", "best_ink", *SHARES)
"""Numbers of the second table."""


def pieces() -> Pieces:
    """Both tables and both pictures."""
    fours, networks = digits.fours(), digits.networks_of(SEED)
    store = Store(BUILD / "equivariance")
    with store.alone():
        found = digits.run_networks(networks, fours, STEPS, store, _say)
    sets = measured(found, SEED)
    yield Table("equivariance", ["", *sets], table_lines(sets))
    yield Table(
        "equivariance-networks",
        ["", "seed", *(LINES[name] for name in SHOWN)],
        _each(sets, fours[-digits.HELD_OUT :]),
    )
    yield Picture("equivariance_parts", plot_parts(found))
    yield Picture("equivariance_residuals", plot_residuals(sets))


def _each(sets: Measurements, held_out: AnyArray) -> Iterator[list[str]]:
    for name, seeds in sets.items():
        for seed, one in enumerate(seeds, start=SEED):
            if not np.isnan(one.rmse):  # our model draws no pictures
                numbers = ((line, one.numbers[line]) for line in SHOWN)
                yield [name, str(seed), *(_cell(line, x) for line, x in numbers)]
    yield ["a uniformly grey picture", "", _cell("rmse", _grey(held_out)), *[""] * (len(SHOWN) - 1)]


def _cell(line: str, value: float) -> str:
    """A number as in the first table."""
    return f"{100 * value if line in SHARES else value:.{DIGITS.get(line, 1)}f}"


def _grey(held_out: Float[AnyArray, "n 28 28"]) -> float:
    """The RMSE of a picture that is grey all over, as dark as the image is on average."""
    still = np.zeros((len(held_out), 2), np.float32)
    images = np.stack(
        [
            np.asarray(digits.turned(held_out, np.full(len(held_out), angle, np.float32), still))
            for angle in ANGLES
        ]
    )
    return float(np.sqrt(images.var(axis=(-2, -1)).mean()))


def _say(network: Network, done: int, total: int) -> None:
    if done % SAID_EVERY == 0:
        print(f"{network.name}: {done} of {total} steps", flush=True)
