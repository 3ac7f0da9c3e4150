"""The M-step: maximise the expected log joint density of all scenes over the parameters.

By the envelope theorem (Fisher's identity for exact E-steps) its gradient at the parameters of the
E-step is that of the summed log evidence, or bound.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.optimize import minimize

from inference.learning.expectation import Expectations
from inference.learning.params import Params, at
from inference.learning.statistics import Statistics, expected_log_joint
from models.distributions.match import MixtureMatch
from models.errors import ConjugacyError, InputError
from models.numerics.permanent import MAX_ROWS
from models.program.reading import LinearGaussianModel, read, refuse_moving_supports
from models.program.sites import Program, trace_sites
from models.scenes import Scene

MAX_ITERATIONS = 50
"""L-BFGS iterations in an M-step, at most. More are of no use: the E-step changes the objective."""

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Objective:
    """The expected log joint density of a program as a function of its parameters.

    It is compiled once for a program; runs are padded because their number may change.
    """

    program: Program
    params: Params
    with_normalizer: bool

    @classmethod
    def of(
        cls, program: Program, params: Params, scene: Scene, given: dict[str, Any]
    ) -> "Objective":
        """Make the objective of a program; an error if the data depend on its parameters.

        Args:
            scene, given: one scene, and values of the program's conditions there.
        """
        depends = _pieces_that_depend(program, params, scene, given)
        for name in ("points", "seen"):
            if getattr(depends, name):
                raise ConjugacyError(
                    "points", "data that depend on a numpyro.param", "data that do not"
                )
        rows, is_mixture = len(scene.points), depends.match_family is MixtureMatch
        if depends.match_logits and not is_mixture and rows > MAX_ROWS:
            raise InputError(
                f"site 'match': its prior depends on a numpyro.param, and its normaliser can be "
                f"computed for at most {MAX_ROWS} parts, got {rows}; learn on smaller scenes, or "
                "fix the prior"
            )
        return cls(program, params, bool(depends.match_logits))

    def maximise(
        self, scenes: Scene, expected: Expectations, flat: Float[np.ndarray, " n"]
    ) -> Float[np.ndarray, " n"]:
        """One M-step, which starts at the current parameters."""
        runs = _padded(scenes, expected)

        def negative(flat: Float[np.ndarray, " n"]) -> tuple[float, Float[np.ndarray, " n"]]:
            values, slopes = self._by_run(jnp.asarray(flat), *runs)
            value, slope = np.asarray(values).sum(), np.asarray(slopes).sum(axis=0)
            if not np.isfinite(value):
                return np.inf, np.zeros_like(flat)
            return -float(value), -slope

        bounds = [(None, high if np.isfinite(high) else None) for high in self.params.highest()]
        start, _ = negative(flat)
        found = minimize(
            negative,
            flat,
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": MAX_ITERATIONS, "ftol": 1e-11, "gtol": 1e-7},
        )
        return found.x if found.fun <= start else flat

    def scores(
        self, scenes: Scene, expected: Expectations, flat: Float[np.ndarray, " n"]
    ) -> Float[np.ndarray, "scenes n"]:
        """The gradient of each scene's log evidence, or bound."""
        runs = _padded(scenes, expected)
        _, slopes = self._by_run(jnp.asarray(flat), *runs)
        found = np.zeros((len(scenes.points), len(flat)))
        np.add.at(found, expected.scene, np.asarray(slopes)[: len(expected.scene)])
        return found

    @functools.cached_property
    def _by_run(self) -> Callable[..., tuple[Float[Array, " runs"], Float[Array, "runs n"]]]:
        """Value and gradient of each run, compiled once for both M-steps and scores."""
        return jax.jit(jax.vmap(jax.value_and_grad(self._of_run), (None, 0, 0, 0, 0)))

    def _of_run(
        self,
        flat: Array,
        scene: dict[str, Any],
        given: dict[str, Any],
        weight: Array,
        q: Statistics,
    ) -> Float[Array, ""]:
        model = _read(self.program, self.params, flat, scene, given)
        return weight * expected_log_joint(model, q, self.with_normalizer)


def _read(
    program: Program, params: Params, flat: Array, observed: dict[str, Any], given: dict[str, Any]
) -> LinearGaussianModel:
    return read(at(program, params.values(flat)), Scene(**observed), given, _NOTHING)


def _pieces_that_depend(
    program: Program, params: Params, scene: Scene, given: dict[str, Any]
) -> LinearGaussianModel:
    """For each array that is read from a program, whether it depends on the parameters."""
    kept: list[LinearGaussianModel] = []

    def look(flat: Array) -> Array:
        model = _read(program, params, flat, scene.observed, given)
        kept.append(jax.tree.map(lambda x: isinstance(x, jax.core.Tracer), model))
        return flat

    jax.vmap(look)(jnp.asarray(params.flat(params.start))[None])  # only dependent arrays are traced
    return kept[0]


def refuse_supports_that_depend(program: Program, params: Params, scene: Scene) -> None:
    """The values of a latent site stay while the parameters move, so its support must, too."""

    def look(flat: Array) -> Array:
        sites = trace_sites(at(program, params.values(flat)), scene)
        refuse_moving_supports({n: s["fn"] for n, s in sites.items() if not s["is_observed"]})
        return flat

    jax.vmap(look)(jnp.asarray(params.flat(params.start))[None])


def _padded(
    scenes: Scene, expected: Expectations
) -> tuple[dict[str, Any], dict[str, Any], Float[np.ndarray, " runs"], Statistics]:
    """The runs, padded to a power of two by runs of weight zero."""
    count = len(expected.scene)
    width = 1 << max(count - 1, 0).bit_length()
    rows: Int[np.ndarray, " runs"] = np.resize(np.arange(count), width)
    is_real: Bool[np.ndarray, " runs"] = np.arange(width) < count
    some = scenes.take(expected.scene[rows])
    weight = np.where(is_real, expected.weight[rows], 0.0)
    given, q = jax.tree.map(lambda x: x[rows], (expected.given, expected.statistics))
    return jax.device_put((dict(some.observed), given, weight, q))
