"""The methods by name, on the constellations program: what the command line offers.

Each takes the program itself. A new method is one line in `METHODS`, a new prior one in `PRIORS`.
"""

import functools
from collections import ChainMap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from capsules.baselines import dynamic_routing, em_routing
from capsules.experiments.learnable import TEMPLATE, arguments, check_numbers
from capsules.files.inputs import check_input
from capsules.files.learned import load_learned
from inference import cavi, exact, gibbs, map_parse, nuts, ransac, svi
from inference.result import Report, Result
from inference.variational import published
from models.constellation import (
    PARTS,
    constellation,
    presence_constellation,
    published_mixture,
    sized_constellation,
)
from models.errors import InputError
from models.program.sites import Program
from models.program.witness import LARGEST
from models.scenes import Scene, check_layout
from models.templates import SHAPES, Parts, shapes, stack, with_clutter

PAPER = ("square", "triangle", "square")
"""The shapes of the paper's scenes, which the programs have by themselves."""

MatchPrior = Literal["doubly_stochastic", "permutation", "mixture"]


class Method(NamedTuple):
    """How a method is run, and on which variant of the program."""

    run: Callable[..., Result]
    """`run(program, scene, rng_key, progress_bar=..., **options)`."""
    match_prior: MatchPrior
    options: frozenset[str] = frozenset()
    """Names of its options."""


def _without_key(run: Callable[..., Result]) -> Callable[..., Result]:
    """Give a method without random numbers the same signature as the others."""

    def keyless(program: Program, scene: Scene, rng_key: Array, **options: Any) -> Result:
        return run(program, scene, **options)

    return keyless


_svi = functools.partial(svi.run, num_particles=4)
_nuts = functools.partial(nuts.run, num_warmup=100, num_samples=100)
_gibbs = functools.partial(gibbs.run, num_warmup=300, num_samples=300, num_temperatures=12)

MAX_PARTS = 512
"""Largest number of parts in the command line's programs."""

MEMORY = 2 << 30
"""Bytes that the runs or chains of one scene may take."""

TABLES = 32
"""Number of N x N tables that a run, or a replica of a chain, holds at a time."""

FARTHEST, NEAREST = 1e4, 1e-6
"""Limits of a scene's largest coordinate; the model expects about 1."""

_ASCENT = frozenset(
    {
        "num_restarts",
        "init_strategy",
        "projection",
        "schedule",
        "fewest_points",
        "devices",
    }
)
_RANSAC = frozenset({"bases", "tolerance", "refit", "cost", "cover", "devices"})
_CHAINS = frozenset(
    {"num_chains", "num_warmup", "num_samples", "num_temperatures", "init_strategy"}
)

METHODS: dict[str, Method] = {
    "ds": Method(cavi.run, "doubly_stochastic", _ASCENT),
    "gmm": Method(cavi.run, "mixture", _ASCENT),
    "ransac": Method(ransac.run, "doubly_stochastic", _RANSAC),
    "map": Method(_without_key(map_parse.run), "doubly_stochastic"),
    "exact": Method(_without_key(exact.run), "doubly_stochastic"),
    "svi": Method(_svi, "doubly_stochastic"),
    "nuts": Method(_nuts, "doubly_stochastic", _CHAINS),
    "gibbs": Method(_gibbs, "doubly_stochastic", _CHAINS),
}
"""Sampling methods have small default budgets, for a first look; options change them."""

_ROUTING = frozenset({"num_restarts"})
_WEIGHTS = frozenset({"weights"})


def networks(name: str) -> Any:
    """The module of trained networks, which requires optional packages."""
    try:
        from capsules import trained
    except ImportError as error:
        raise InputError(
            f"{name} requires {error.name}, which is not installed; install the extra `networks`: "
            "pip install generative-capsules[networks]"
        ) from error
    return trained


def _ccae(*args: Any, **options: Any) -> Result:
    return networks("ccae").run_ccae(*args, **options)


def _amortised(*args: Any, **options: Any) -> Result:
    return networks("amortised").run_amortised(*args, **options)


BASELINES: dict[str, Method] = {
    "em_routing": Method(em_routing.run, "doubly_stochastic", _ROUTING),
    "dynamic_routing": Method(dynamic_routing.run, "doubly_stochastic", _ROUTING),
    "ccae": Method(_ccae, "doubly_stochastic", _WEIGHTS),
    "amortised": Method(_amortised, "doubly_stochastic", _WEIGHTS),
}
"""Methods that run only if asked for by name: systems to compare with, and networks."""

TRAINED = ("ccae", "amortised")
"""Methods that require weights, made by `capsules train`."""

EVERY_METHOD = ChainMap(BASELINES, METHODS)  # lists METHODS first

PRIORS: dict[str, Callable[..., Any]] = {
    "uniform": constellation,
    "presence": presence_constellation,
    "sized": sized_constellation,
}
"""The program of each prior over matches; it takes `parts` and, unless sized, `precision`."""

_WITH_PRESENCE = ("ds", "map", "exact", "nuts", "gibbs")
"""Methods that take a program which leaves open which objects are present."""


class Preset(NamedTuple):
    """Options of a method and, if they are not the usual ones, its program and how it is run."""

    options: dict[str, Any]
    program: Callable[..., Any] | None = None
    method: Method | None = None


_PUBLISHED = Method(published.run, "doubly_stochastic", frozenset({"num_restarts", "beta_start"}))

_PAPER: dict[str, Any] = {"init_strategy": "uniform", "num_restarts": 5}

PRESETS: dict[str, dict[str, Preset]] = {
    "default": {},
    "paper": {
        "ds": Preset(_PAPER),
        "gmm": Preset(_PAPER),
        "ransac": Preset(ransac.PAPER),
    },
    "published": {
        "ds": Preset({}, method=_PUBLISHED),
        "gmm": Preset(cavi.PUBLISHED_GMM, published_mixture),
        "ransac": Preset(ransac.PUBLISHED),
    },
}
"""Settings by name: ours, those of the paper's text, and those of the code published with it."""


def program_of(
    method: str,
    objects: Sequence[str] | None = None,
    precision: float | None = None,
    prior: str = "uniform",
    preset: str = "default",
    clutter: int = 0,
    visibility: float | None = None,
    learned: str | None = None,
) -> functools.partial[Any]:
    """The constellations program as a method runs it; its keywords include the templates, `parts`.

    Args:
        method: a name in `EVERY_METHOD`.
        objects: shapes of the templates; by default the program's own templates.
        precision: noise precision; by default the program's own.
        prior: a name in `PRIORS`.
        preset: a name in `PRESETS`.
        clutter: the largest number of points in a scene that belong to no object.
        visibility: probability that a part of a present object is seen; by default 1.
        learned: a file of learnt numbers; other arguments take precedence over it.
    """
    for value, what, known in (
        (method, "method", EVERY_METHOD),
        (prior, "prior", PRIORS),
        (preset, "preset", PRESETS),
    ):
        if value not in known:
            raise InputError(f"there is no {what} {value!r}; choose from {', '.join(known)}")
    if prior != "uniform" and (method not in _WITH_PRESENCE or preset != "default"):
        raise InputError(
            f"the prior {prior!r} is for the methods {', '.join(_WITH_PRESENCE)} with the "
            f"preset 'default', got {method!r} with {preset!r}; choose one of those, or the prior "
            "'uniform'"
        )
    if preset != "default" and clutter:
        raise InputError(
            f"clutter is for the preset 'default', got {preset!r}, whose methods do not model it; "
            "leave one of the two out"
        )
    if visibility is not None and (prior == "uniform" or not 0 < visibility <= 1):
        raise InputError(
            "the visibility is a probability above 0, for the priors presence and sized, got "
            f"{visibility} with {prior!r}; try 0.9 with the prior presence"
        )
    if precision is not None and prior == "sized":
        raise InputError(
            f"the prior 'sized' has noise in proportion to the size of an object, and no precision "
            f"to set, got {precision}; leave the precision out, or choose the prior presence"
        )
    names = None if objects is None else tuple(objects)
    file = None
    if learned is not None:
        if PRESETS[preset].get(method, Preset({})).program is not None:
            raise InputError(
                f"learnt numbers are for our own programs, but the preset {preset!r} has a "
                "program of its own; leave one of the two out"
            )
        check_input(Path(learned), "a file of learnt numbers")
        file = Path(learned), Path(learned).stat().st_mtime
    return _program(method, names, precision, prior, preset, clutter, visibility, file)


def methods_for(prior: str) -> tuple[str, ...]:
    """Names of the methods that take a prior and have a posterior to compare: all but map."""
    names = METHODS if prior == "uniform" else _WITH_PRESENCE
    return tuple(name for name in names if name != "map")


@functools.cache
def templates(objects: tuple[str, ...] | None = None, clutter: int = 0) -> Parts:
    """Templates of the named shapes, or the program's own, and slots for clutter."""
    if clutter < 0:
        raise InputError(f"the number of clutter points must be 0 or more, got {clutter}; try 3")
    named = PARTS.num_parts if objects is None else sum(len(SHAPES[name]) for name in objects)
    num_parts = named + clutter
    if num_parts > MAX_PARTS:
        raise InputError(
            f"shapes and clutter have {num_parts:,} parts in all, more than the limit of "
            f"{MAX_PARTS:,}: a match of them is {8 * num_parts**2 / 2**30:,.1f} GiB for each run "
            "of each scene; cut the scene into smaller ones"
        )
    parts = PARTS if objects is None else stack(shapes(*objects))
    return with_clutter(parts, clutter) if clutter else parts


def infer(
    method: str,
    scene: Scene,
    seed: int = 0,
    *,
    objects: Sequence[str] | None = None,
    precision: float | None = None,
    prior: str = "uniform",
    preset: str = "default",
    clutter: int = 0,
    visibility: float | None = None,
    learned: str | None = None,
    progress_bar: bool | Report = False,
    **options: Any,
) -> Result:
    """Run a method by its name on one scene or a batch.

    The first arguments are as in `program_of`; `options` are those of the method, such as
    `num_restarts`, and override the preset.
    """
    given: dict[str, Any] = {"objects": objects, "precision": precision, "prior": prior}
    given |= {"preset": preset, "clutter": clutter, "visibility": visibility, "learned": learned}
    program = check_options(method, seed, **given, **options)
    parts = templates(None if objects is None else tuple(objects), clutter)
    check_layout(scene.points.shape, parts.num_parts, parts.num_features)
    _check_scale(scene)
    settings = PRESETS[preset].get(method, Preset({})).options | options
    run = _method(method, preset).run
    return run(program, scene, key_of(seed), progress_bar=progress_bar, **settings)


def key_of(seed: int) -> Array:
    """The random key of a seed."""
    if not 0 <= seed < 1 << 63:
        raise InputError(f"the seed must be 0 or more, and less than 2^63, got {seed}; try 0")
    return jax.random.key(seed)


def _method(method: str, preset: str) -> Method:
    return PRESETS[preset].get(method, Preset({})).method or EVERY_METHOD[method]


def check_options(
    method: str,
    seed: int,
    *,
    objects: Sequence[str] | None = None,
    precision: float | None = None,
    prior: str = "uniform",
    preset: str = "default",
    clutter: int = 0,
    visibility: float | None = None,
    learned: str | None = None,
    **options: Any,
) -> functools.partial[Any]:
    """The program of `infer` with these arguments; an InputError if they cannot be used."""
    key_of(seed)
    if precision is not None and precision > LARGEST:
        raise InputError(
            f"the precision must be at most {LARGEST:g}, got {precision}; it is one over the "
            "variance of a point, 1e4 by default"
        )
    program = program_of(method, objects, precision, prior, preset, clutter, visibility, learned)
    if unknown := set(options) - _method(method, preset).options:
        preset = "" if preset == "default" else f" under the preset {preset!r}"
        raise InputError(
            f"the method {method}{preset} has no option {min(unknown)!r}; leave it out, or choose "
            "a method that has it"
        )
    num_parts = templates(None if objects is None else tuple(objects), clutter).num_parts
    _check_counts(num_parts, options)
    return program


def _check_counts(num_parts: int, options: dict[str, Any]) -> None:
    """Raise an InputError for more runs, or replicas of chains, than fit into memory."""
    each = 8 * TABLES * num_parts**2
    for name, copies in (("num_restarts", 1), ("num_temperatures", options.get("num_chains", 4))):
        most = max(1, MEMORY // (each * copies))
        if not 1 <= options.get(name, 1) <= most:
            raise InputError(
                f"{name} must be 1 to {most:,}, got {options[name]:,}: with {num_parts} parts each "
                f"takes {each * copies / 2**20:.2g} MiB, of {MEMORY >> 30} GiB; try 16"
            )


def _check_scale(scene: Scene) -> None:
    """Raise an InputError for a scene in units that do not suit the templates and priors."""
    largest = float(np.abs(np.where(scene.present[..., None], scene.points, 0.0)).max())
    if FARTHEST < largest < np.inf or 0 < largest < NEAREST:
        raise InputError(
            f"the largest coordinate is {largest:.3g}, but objects of the model have sizes and "
            f"places of about 1, and noise of about 0.01; scale the points to about -1 to 1 (at "
            f"most {FARTHEST:g}, and not all below {NEAREST:g})"
        )


@functools.lru_cache(maxsize=32)  # a method compiles once for each program, told apart by identity
def _program(
    method: str,
    objects: tuple[str, ...] | None,
    precision: float | None,
    prior: str,
    preset: str,
    clutter: int,
    visibility: float | None,
    learned: tuple[Path, float] | None,
) -> functools.partial[Any]:
    """Make the program of `program_of`, once for each set of arguments.

    Args:
        learned: a file of learnt numbers and when it was written, so that a new one is read again.
    """
    own = PRESETS[preset].get(method, Preset({})).program
    given: dict[str, Any] = {"parts": templates(objects, clutter)}
    if learned is not None:
        numbers = load_learned(learned[0])
        check_numbers(numbers)
        found = arguments(PRIORS[prior], numbers, objects or PAPER, clutter)
        if set(found) == {"parts"} and not any(n.startswith(TEMPLATE) for n in numbers):
            raise InputError(
                f"{learned[0]} holds {', '.join(numbers)}, and the prior {prior!r} has none of "
                "these; choose another prior"
            )
        given |= found
    if own is None and prior == "uniform":
        given["match_prior"] = EVERY_METHOD[method].match_prior
    if precision is not None:
        given["precision"] = precision
    if visibility is not None:
        given["visibility"] = visibility
    return functools.partial(own or PRIORS[prior], **given)
