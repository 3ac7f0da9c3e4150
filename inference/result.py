"""The result type of all methods, and the decorator of their `run`.

A `Result` says what was asked, what was found, and whether to believe it.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Concatenate, ParamSpec

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from models.errors import InputError
from models.program.sites import Program
from models.scenes import Scene, check_scene

_ROUNDING = 1e-6  # tolerance of the sum of a row's probabilities

Settings = ParamSpec("Settings")
Report = Callable[[int, int], None]
"""Called with (steps done, steps in total) to report progress."""


@dataclass(frozen=True)
class Result:
    """What a method found in a scene or in a batch of scenes, with a leading axis in all fields.

    `elbo` and `log_evidence` go up as the fit gets better. A method has one of them or neither.
    """

    method: str
    scene: Scene
    match_probs: Float[np.ndarray, "*batch N N"]
    """Probability of each row (point or dummy) being each part."""
    pose_mean: Float[np.ndarray, "*batch K p"]
    pose_covariance: Float[np.ndarray, "*batch K p p"]
    labels: Int[np.ndarray, "*batch N"]
    """The most probable partition: the object of each point, K for clutter, -1 in dummy rows."""
    owner: Int[np.ndarray, " N"]
    """The object that each part belongs to, K for slots of clutter."""
    converged: Bool[np.ndarray, "*batch"]
    """Whether the ELBO has settled (ds, gmm, svi), chains agree by R-hat (nuts, gibbs), or every
    point is explained (map, ransac). Exact inference has converged unless a quadrature has not."""
    steps: Int[np.ndarray, "*batch"]
    elbo: Float[np.ndarray, "*batch"] | None = None
    log_evidence: Float[np.ndarray, "*batch"] | None = None
    log_evidence_error: Float[np.ndarray, "*batch"] | None = None
    """Standard error of a sampler's estimate."""
    best_match: Int[np.ndarray, "*batch N"] | None = None
    """The part of each row in the most probable match, -1 in dummy rows; from exact inference."""
    partitions: list[Any] | None = None
    """The most probable partitions, (labels, probability), of a scene or of each scene."""
    explained: Bool[np.ndarray, "*batch N"] | None = None
    """Which rows have a part, for a method that may leave points unexplained."""
    conditions: dict[str, np.ndarray] = field(default_factory=dict)
    """Values of the sites that were summed or integrated over, in the best run."""
    seconds: float = 0.0
    history: dict[str, np.ndarray] | None = None
    """Quantities at each step, (*batch, steps, ...), if requested."""
    draws: dict[str, np.ndarray] | None = None
    """Draws of a sampling method by site, (chains, draws, ...); `match` is the part of each row, -1
    in dummy rows. For single scenes only."""
    sample_stats: dict[str, np.ndarray] | None = None
    """Statistics of the sampler for each draw, (chains, draws), under ArviZ's names."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further results that are specific to the method; in a batch, a value for each scene."""

    def __post_init__(self) -> None:
        """Reject non-finite or unnormalised results."""
        rows = np.abs(self.match_probs.sum(axis=-1) - 1.0).max(axis=-1)
        sound = np.isfinite(self.pose_mean).all(axis=(-2, -1)) & (rows < _ROUNDING)
        for bound in (self.elbo, self.log_evidence):
            sound &= True if bound is None else np.isfinite(bound)
        if not np.all(sound):
            which = f" of scene {np.flatnonzero(~sound)[0]}" if self.is_batch else ""
            raise InputError(
                f"{self.method} produced non-finite or unnormalised probabilities{which}; rescale "
                "the points to about [-1, 1], and look for extreme numbers in the priors and the "
                "precision"
            )

    @property
    def log_value(self) -> Float[np.ndarray, "*batch"]:
        """The log evidence or, for a method that bounds it, the ELBO."""
        value = self.elbo if self.log_evidence is None else self.log_evidence
        assert value is not None
        return value

    @property
    def is_batch(self) -> bool:
        """Whether all fields have a leading axis of scenes."""
        return self.match_probs.ndim == 3

    def __len__(self) -> int:
        return len(self.match_probs) if self.is_batch else 1

    @property
    def status(self) -> str:
        """One sentence on whether to believe the result."""
        converged, total = int(np.sum(self.converged)), int(np.size(self.converged))
        bound = self.log_evidence if self.log_evidence is not None else self.elbo
        name = "log evidence" if self.log_evidence is not None else "ELBO"
        error = self.log_evidence_error
        if total > 1:
            error = None if bound is None else np.std(bound, ddof=1) / np.sqrt(total)
        value = "" if bound is None else f", {name} {np.mean(bound):.3f}"
        value += "" if bound is None or error is None else f" ± {float(error):.2g}"
        if total > 1:
            mean = " on average" if value else ""
            return f"{self.method}: {converged} of {total} scenes converged{value}{mean}"
        state = "converged" if converged else "did not converge"
        return f"{self.method}: {state} after {int(np.sum(self.steps))} steps{value}"

    def take(self, index: Any) -> "Result":
        """The result for one scene of a batch, or for several by an array of indices."""
        return _mapped(lambda x: x[index], [self]) if self.is_batch else self


def method(
    run: Callable[Concatenate[Program, Scene, Settings], Result],
) -> Callable[Concatenate[Program, Scene, Settings], Result]:
    """Decorate `run`: check the scene before, and record the seconds that it took.

    `run` may return a batch of one for a single scene; this is reduced to a single result.
    """

    @functools.wraps(run)
    def whole(
        program: Program, scene: Scene, *args: Settings.args, **settings: Settings.kwargs
    ) -> Result:
        began = time.perf_counter()
        key = args[0] if args else settings.get("rng_key")
        if isinstance(key, int):
            raise InputError(f"rng_key must be a JAX key, got {key}; give jax.random.key({key})")
        result = run(program, check_scene(scene), *args, **settings)
        if result.is_batch and not scene.is_batch:
            result = result.take(0)
        return replace(result, seconds=time.perf_counter() - began)

    return whole


def reporter(progress_bar: bool | Report) -> Report:
    """The function that reports progress: a bar on the screen, nothing, or the one given."""
    if callable(progress_bar):
        return progress_bar
    if not progress_bar:
        return lambda done, total: None
    from tqdm.auto import tqdm  # slow to import in a notebook

    bar = tqdm()

    def report(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return report


def join_results(results: Sequence[Result]) -> Result:
    """Join the results of one method for several batches."""
    if len(results) == 1:
        return results[0]

    def joined(*values: Any) -> Any:
        is_list = isinstance(values[0], list)
        return list(itertools.chain(*values)) if is_list else np.concatenate(values)

    whole = _mapped(joined, results)
    return replace(whole, seconds=sum(result.seconds for result in results))


_OF_ALL_SCENES = ("method", "owner", "seconds", "draws", "sample_stats")


def _mapped(function: Callable[..., Any], results: Sequence[Result]) -> Result:
    """Apply a function to all fields that have a value for each scene."""
    names = [field.name for field in fields(Result) if field.name not in _OF_ALL_SCENES]
    trees = [{name: getattr(result, name) for name in names} for result in results]
    mapped = jax.tree.map(function, *trees, is_leaf=lambda x: isinstance(x, list))
    return replace(results[0], **mapped)


def partition(
    match_probs: Float[np.ndarray, "*batch N N"],
    owner: Int[np.ndarray, " N"],
    present: Bool[np.ndarray, "*batch N"],
) -> Int[np.ndarray, "*batch N"]:
    """The most probable object of each point, K for clutter, -1 for dummy rows."""
    mass = match_probs @ np.eye(owner.max() + 1)[owner]
    return np.where(present, mass.argmax(axis=-1), -1)


def certain(
    match: Int[np.ndarray, "scenes N"], present: Bool[np.ndarray, "scenes N"]
) -> Float[np.ndarray, "scenes N N"]:
    """A match as probabilities; dummy rows share the remaining parts equally."""
    points = np.where(present[..., None], np.eye(match.shape[-1])[match], 0.0)
    left = 1.0 - points.sum(axis=1, keepdims=True)
    dummies = np.maximum((~present).sum(axis=1), 1)[:, None, None]
    return np.where(present[..., None], points, left / dummies)


def grouping_of(
    labels: Int[np.ndarray, "*batch N"], num_objects: int | None
) -> Bool[np.ndarray, "*batch N N"]:
    """Which rows belong together, whatever the names of their objects, and which are clutter.

    The diagonal is true for clutter only, so a group of clutter differs from the same group as an
    object. Labellings are the same partition if and only if these matrices are equal.

    Args:
        num_objects: K, the label of clutter; None without clutter.
    """
    together = labels[..., :, None] == labels[..., None, :]
    is_clutter = np.equal(labels, -2 if num_objects is None else num_objects)
    return np.where(np.eye(labels.shape[-1], dtype=bool), is_clutter[..., None], together)
