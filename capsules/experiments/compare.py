"""Several methods on one scene, side by side, and against exact inference if it is possible."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float
from rich import box
from rich.table import Table

from capsules.methods import (
    METHODS,
    check_options,
    key_of,
    methods_for,
    program_of,
    templates,
)
from inference import exact
from inference.conditions.sets import discrete_sites
from inference.diagnostics.importance import GOOD_K, importance
from inference.diagnostics.posterior_draws import draws_of
from inference.posterior import symmetry
from inference.posterior.arviz_api import ess, rhat
from inference.posterior.densities import Draws, flat
from inference.posterior.relabel import Frame, frame_of, match_probs, relabel, rename
from inference.posterior.symmetry import Symmetry
from inference.result import Report, Result
from models.errors import ConjugacyError, InputError
from models.program.sites import Program
from models.scenes import Scene, check_layout, check_scene

EXACT_DRAWS = 4000
"""Number of exact posterior draws from which moments in one frame are computed."""
SMALLEST_ERROR = 0.02
"""About one standard error of these moments, in standard deviations."""


class Row(NamedTuple):
    """The numbers of one method; None for those that it does not have."""

    method: str
    elbo: float | None
    log_evidence: float | None
    log_evidence_error: float | None
    """Standard error of a sampler's estimate."""
    weighted_evidence: float | None
    """Log evidence by importance weights of q, and its standard error."""
    weighted_error: float | None
    covered: float | None
    """The share of that evidence in the modes of q; a search from q has found the others."""
    match_error: float | None
    """Largest difference of a match probability from the exact one."""
    match_distance: float | None
    """Total variation from the exact match marginals of a point, averaged over points."""
    pose_error: float | None
    """Largest difference of a pose mean from the exact one, in exact standard deviations."""
    ess_per_second: float | None
    """Smallest bulk ESS of a pose dimension, for methods that sample."""
    r_hat: float | None
    """Largest of a pose dimension, for methods that sample."""
    pareto_k: float | None
    seconds: float
    """Time of a call with everything compiled."""
    first_seconds: float
    """Time of the first call, which compiles."""
    converged: bool


def compare(
    scene: Scene,
    methods: Sequence[str] = methods_for("uniform"),
    *,
    seed: int = 0,
    objects: Sequence[str] | None = None,
    precision: float | None = None,
    prior: str = "uniform",
    learned: str | None = None,
    rungs: int | None = None,
    twice: bool = True,
    progress: Callable[[str], Report] | None = None,
) -> list[Row]:
    """Run methods on one scene, each on its own variant of the program.

    Poses and matches are compared in one frame, that of the exact solution if there is one, so
    names of identical objects and turns of a square onto itself do not matter. The exact moments in
    that frame are those of 4000 draws, so errors below about 0.02 are not significant.

    Args:
        methods: names in `capsules.methods.METHODS`.
        objects, precision, prior, learned: as in `capsules.methods.program_of`.
        rungs: number of tempered replicas for gibbs and nuts, 1 for none; by default gibbs has 12
            and nuts none.
        twice: call each method once more, to time it without compilation.
        progress: called with the name of a method; returns a function that reports its progress.
    """
    if scene.is_batch:
        raise InputError("methods are compared on one scene, got a batch; use scene.take(i)")
    unknown = [name for name in methods if name not in METHODS]
    if unknown or not methods:
        raise InputError(
            f"there is no method {(unknown or [''])[0]!r}; choose from {', '.join(METHODS)}"
        )
    parts = templates(None if objects is None else tuple(objects))
    scene = check_scene(scene)
    check_layout(scene.points.shape, parts.num_parts, parts.num_features)
    tempered: dict[str, Any] = {} if rungs is None else {"num_temperatures": rungs}
    options = {
        name: {option: x for option, x in tempered.items() if option in METHODS[name].options}
        for name in methods
    }
    given: dict[str, Any] = {"objects": objects, "precision": precision, "prior": prior}
    given |= {"learned": learned}
    programs = {name: check_options(name, seed, **given, **options[name]) for name in methods}
    found = {
        name: _timed(name, program, scene, seed, options[name], twice, progress)
        for name, program in programs.items()
    }
    truth = _exact_in_frame(program_of("ds", **given), scene)
    return [
        _row(name, result, first, programs[name], truth) for name, (result, first) in found.items()
    ]


class _Exact(NamedTuple):
    """The exact posterior in one frame."""

    frame: Frame
    match_probs: Float[np.ndarray, "N N"]
    pose_mean: Float[np.ndarray, "K p"]
    pose_deviation: Float[np.ndarray, "K p"]


def _exact_in_frame(program: Program, scene: Scene) -> _Exact | None:
    """The exact posterior, or None if exact inference refuses the program or the scene."""
    try:
        result = exact.run(program, scene)
    except (ConjugacyError, InputError):
        return None
    frame = frame_of(program, result)
    draws = draws_of(program, result, jax.random.key(1), EXACT_DRAWS, 1)
    draws = relabel(symmetry.find(program, scene), frame, draws)
    pose = flat(draws)["pose"]
    return _Exact(frame, match_probs(draws), pose.mean(axis=0), pose.std(axis=0))


def _timed(
    name: str,
    program: Program,
    scene: Scene,
    seed: int,
    options: dict[str, Any],
    twice: bool,
    progress: Callable[[str], Report] | None,
) -> tuple[Result, float]:
    report = False if progress is None else progress(name)
    run = functools.partial(METHODS[name].run, program, scene, key_of(seed))
    began = time.perf_counter()
    result = run(progress_bar=report, **options)
    first = time.perf_counter() - began
    return (run(**options) if twice else result), first


def _row(
    name: str, result: Result, first_seconds: float, program: Program, truth: _Exact | None
) -> Row:
    group = symmetry.find(program, result.scene)
    has_posterior = result.draws is not None or result.elbo is not None or name == "exact"
    frame = truth.frame if truth else frame_of(program, result) if has_posterior else None
    draws = None
    if frame is not None and result.draws is not None and result.elbo is None:
        draws = relabel(group, frame, result.draws)
    # Importance weights require one Normal for each pose, not a mixture over conditions.
    is_mixture = result.conditions or discrete_sites(program, result.scene)
    weigh = result.elbo is not None and not is_mixture
    trusted = importance(program, result, jax.random.key(0)) if weigh else None
    match_error, match_distance, pose_error = _errors(result, draws, group, truth)
    ess, r_hat = (None, None) if draws is None else _sampling(draws)
    return Row(
        method=name,
        elbo=_number(result.elbo),
        log_evidence=_number(result.log_evidence),
        log_evidence_error=_number(result.log_evidence_error),
        weighted_evidence=trusted.log_evidence if trusted else None,
        weighted_error=trusted.standard_error if trusted else None,
        covered=trusted.covered if trusted else None,
        match_error=match_error,
        match_distance=match_distance,
        pose_error=pose_error,
        ess_per_second=None if ess is None else ess / result.seconds,
        r_hat=r_hat,
        pareto_k=trusted.pareto_k if trusted else None,
        seconds=result.seconds,
        first_seconds=first_seconds,
        converged=bool(result.converged),
    )


def _errors(
    result: Result, draws: Draws | None, group: Symmetry, truth: _Exact | None
) -> tuple[float | None, float | None, float | None]:
    """Errors against the exact posterior: of the match, largest and on average; of the poses."""
    if truth is None:
        return None, None, None
    if draws is not None:
        probs, mean = match_probs(draws), np.asarray(draws["pose"]).mean(axis=(0, 1))
    elif result.method == "exact":  # the same sum; its moments in the frame are the reference
        return 0.0, 0.0, 0.0
    else:
        renaming = rename(group, truth.frame, result.pose_mean[None])
        probs = np.empty_like(result.match_probs)
        probs[:, renaming.part[0]] = result.match_probs
        mean = renaming.pose[0]
    difference = np.abs(probs - truth.match_probs)[np.asarray(result.scene.present)]
    pose_error = np.abs(mean - truth.pose_mean) / truth.pose_deviation
    return (
        float(difference.max()),
        float(difference.sum(axis=1).mean() / 2),
        float(pose_error.max()),
    )


def _sampling(draws: Draws) -> tuple[float, float]:
    """Smallest bulk ESS and largest R-hat of the poses."""
    pose = np.asarray(draws["pose"])
    entries = np.moveaxis(pose.reshape(*pose.shape[:2], -1), -1, 0)
    return min(map(ess, entries)), max(map(rhat, entries))


def _number(value: Float[np.ndarray, ""] | None) -> float | None:
    return None if value is None else float(value)


def render(rows: Sequence[Row]) -> Table:
    """A table for the terminal, a column for each method: seven of them fit in 80 characters."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column(no_wrap=True)
    for row in rows:
        table.add_column(row.method, justify="right", no_wrap=True)
    lines: dict[str, Callable[[Row], str]] = {
        "ELBO": lambda row: _text(row.elbo, ".2f"),
        "log evidence": lambda row: _text(row.log_evidence, ".2f"),
        "  its error": lambda row: _text(row.log_evidence_error, ".1g"),
        "  by weights": lambda row: _text(row.weighted_evidence, ".2f"),
        "  their error": lambda row: _text(row.weighted_error, ".1g"),
        "  q covers": lambda row: _text(row.covered, ".0%"),
        "Pareto k": lambda row: _text(row.pareto_k, ".2f"),
        "match error": lambda row: _text(row.match_error, ".3f"),
        "match TV": lambda row: _text(row.match_distance, ".3f"),
        "pose error": lambda row: _text(row.pose_error, ".2f"),
        "ESS/s": lambda row: _text(row.ess_per_second, ".0f"),
        "R-hat": lambda row: _text(row.r_hat, ".2f"),
        "converged": lambda row: "yes" if row.converged else "no",
        "time": lambda row: _duration(row.seconds),
        "first call": lambda row: _duration(row.first_seconds),
    }
    for name, text in lines.items():
        table.add_row(name, *map(text, rows))
    notes = []
    if doubtful := [row.method for row in rows if (row.pareto_k or 0.0) > GOOD_K]:
        names = ", ".join(doubtful)
        notes.append(f"Do not rely on the weights of {names}: Pareto k is above {GOOD_K}.")
    if any(row.weighted_evidence is not None for row in rows):
        notes.append(
            "The error of weights is that of draws; it does not cover modes that no search found."
        )
    if any(row.match_error for row in rows):
        notes.append(
            f"Errors of matches and poses are against {EXACT_DRAWS} exact draws: those below "
            f"{SMALLEST_ERROR} are not significant."
        )
    table.caption = "\n".join(notes) or None
    return table


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
