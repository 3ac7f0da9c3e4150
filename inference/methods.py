"""The methods by name, on the constellations program: what the command line offers.

Each takes the program itself. A new method is one line in `METHODS`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from inference import cavi, exact, gibbs, nuts, svi
from inference.result import Result
from models.constellation import PARTS, constellation
from models.errors import InputError
from models.reading import Program
from models.scenes import Scene, check_scene
from models.templates import Parts, shapes, stack

MatchPrior = Literal["doubly_stochastic", "permutation", "mixture"]
Progress = Callable[[int, int], None]
"""Called with (done, in all) now and then."""


class Method(NamedTuple):
    """How a method is run, and on which variant of the program."""

    run: Callable[[Program, Scene, int, Progress | None], Result]
    match_prior: MatchPrior


def _coordinate_ascent(
    program: Program, scene: Scene, seed: int, progress: Progress | None
) -> Result:
    return cavi.run(program, scene, seed, progress=progress)


def _exact(program: Program, scene: Scene, seed: int, progress: Progress | None) -> Result:
    return exact.run(program, scene, progress=progress)


def _svi(program: Program, scene: Scene, seed: int, progress: Progress | None) -> Result:
    return svi.run(program, scene, seed, restarts=8, particles=4, progress=progress)


def _nuts(program: Program, scene: Scene, seed: int, progress: Progress | None) -> Result:
    return nuts.run(program, scene, seed, num_warmup=100, num_draws=100, progress=progress)


def _gibbs(program: Program, scene: Scene, seed: int, progress: Progress | None) -> Result:
    return gibbs.run(program, scene, seed, num_warmup=100, num_draws=100, progress=progress)


METHODS: dict[str, Method] = {
    "ds": Method(_coordinate_ascent, "doubly_stochastic"),
    "gmm": Method(_coordinate_ascent, "mixture"),
    "exact": Method(_exact, "doubly_stochastic"),
    "svi": Method(_svi, "doubly_stochastic"),
    "nuts": Method(_nuts, "doubly_stochastic"),
    "gibbs": Method(_gibbs, "doubly_stochastic"),
}
"""Budgets of the sampling methods are those of a first look; call their `run` for more."""


def program_of(
    method: str, objects: Sequence[str] | None = None, precision: float | None = None
) -> Program:
    """The constellations program as a method runs it.

    Args:
        method: a name in `METHODS`.
        objects: shapes to make the templates of; by default the program's own templates.
        precision: of the noise; by default the program's own.
    """
    if method not in METHODS:
        raise InputError(f"there is no method {method!r}; choose from {', '.join(METHODS)}")
    return _program(
        METHODS[method].match_prior, None if objects is None else tuple(objects), precision
    )


@functools.cache
def templates(objects: tuple[str, ...] | None = None) -> Parts:
    """Templates of the named shapes, or the program's own."""
    return PARTS if objects is None else stack(shapes(*objects))


def infer(
    method: str,
    scene: Scene,
    seed: int = 0,
    *,
    objects: Sequence[str] | None = None,
    precision: float | None = None,
    progress: Progress | None = None,
) -> Result:
    """Run a method by its name on one scene or a batch; the other arguments as in `program_of`."""
    if seed < 0:
        raise InputError(f"the seed must be 0 or more, got {seed}; try 0")
    program = program_of(method, objects, precision)
    parts = templates(None if objects is None else tuple(objects))
    scene = check_scene(scene, parts.num_parts, parts.num_features)
    return METHODS[method].run(program, scene, seed, progress)


@functools.lru_cache(maxsize=32)  # a method compiles once for each program, told apart by identity
def _program(
    match_prior: MatchPrior, objects: tuple[str, ...] | None, precision: float | None
) -> Program:
    given: dict[str, Any] = {"match_prior": match_prior, "parts": templates(objects)}
    if precision is not None:
        given["precision"] = precision
    return functools.partial(constellation, **given)
