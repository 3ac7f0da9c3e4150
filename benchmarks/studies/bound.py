"""How far the ELBO of coordinate ascent lies below the evidence, under each bound of the permanent.

The program is the same, with the uniform match prior; the scenes are of our own generator.
"""

from collections.abc import Iterator
from typing import Literal

import jax
import numpy as np
from jaxtyping import Float

from benchmarks.report import Pieces, Table, number
from capsules.experiments.generator import sample_scenes
from inference import cavi, exact
from models.constellation import constellation

SIGMAS = (0.0, 0.1, 0.25)
DRAWS, SEED = 128, 20_264
PROJECTIONS: dict[str, Literal["sinkhorn", "bethe"]] = {"Sinkhorn": "sinkhorn", "Bethe": "bethe"}


def pieces() -> Pieces:
    """Quartiles of the gap by the level of noise, and how often the Bethe bound is the tighter."""
    headings = ["log evidence − ELBO, quartiles in nats", *(f"σ = {sigma:g}" for sigma in SIGMAS)]
    yield Table("bound", headings, rows())


def rows() -> Iterator[list[str]]:
    """A row for each bound, and one for both."""
    scenes = [sample_scenes(DRAWS, sigma, SEED) for sigma in SIGMAS]
    evidence = [exact.run(constellation, some).log_evidence for some in scenes]
    gaps: dict[str, list[Float[np.ndarray, " scenes"]]] = {name: [] for name in PROJECTIONS}
    for name, of in gaps.items():
        for some, value in zip(scenes, evidence, strict=True):
            elbo = cavi.run(
                constellation, some, jax.random.key(SEED), projection=PROJECTIONS[name]
            ).elbo
            assert value is not None and elbo is not None
            of.append(value - elbo)
        quartiles = (np.percentile(gap, (25, 50, 75)) for gap in of)
        yield [name, *(", ".join(f"{q:.1f}" for q in three) for three in quartiles)]
    pairs = zip(gaps["Bethe"], gaps["Sinkhorn"], strict=True)
    tighter = (number((ours < theirs).mean()) for ours, theirs in pairs)
    yield ["Bethe is tighter, share of scenes", *tighter]
    yield ["scenes", *(str(len(some.points)) for some in scenes)]
