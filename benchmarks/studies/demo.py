"""The picture of the README, and what its edit of the prior does to the scene in it."""

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from benchmarks.report import Picture, Pieces, Table
from capsules.commands.demo import demo
from capsules.experiments.generator import sample_scenes
from inference import cavi, exact
from models.constellation import constellation

SIGMA, SEED, DRAWS = 0.1, 51, 64
EDITED = dist.MultivariateNormal(jnp.zeros(4), jnp.diag(jnp.array([0.3, 0.3, 0.03, 0.03])))
"""The pose prior of the README."""


def pieces() -> Pieces:
    """The scene of `capsules demo` by every method, and its evidence under two priors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo.png"
        demo(SEED, SIGMA, path)
        yield Picture("demo", path)
    yield Table("demo", ("pose prior", "log evidence", "ELBO of `ds`"), rows())


def rows() -> Iterator[list[str]]:
    """Before and after the edit."""
    scene = sample_scenes(DRAWS, SIGMA, SEED).take(0)
    for name, prior in (("N(0, I)", None), ("edited", EDITED)):
        program = functools.partial(constellation, pose_prior=prior)
        evidence = exact.run(program, scene).log_evidence
        elbo = cavi.run(program, scene, jax.random.key(SEED)).elbo
        assert evidence is not None and elbo is not None
        yield [name, f"{float(evidence):.2f}", f"{float(elbo):.2f}"]
