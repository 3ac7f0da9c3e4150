"""Learn the values of a program's `numpyro.param` sites from many scenes without labels.

By expectation maximisation: the E-step infers every scene (`inference.learning.expectation`), and
the M-step maximises the expected log joint density over the parameters with that posterior fixed
(`inference.learning.maximisation`). With exact E-steps the summed log evidence never falls.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from inference.learning.expectation import EStep, Expectations, expect, join_expectations
from inference.learning.information import standard_errors
from inference.learning.maximisation import Objective, refuse_supports_that_depend
from inference.learning.params import LARGEST, Movable, Params, Values, at, params_of
from inference.result import Report, reporter
from models.errors import InputError
from models.program.sites import Program
from models.scenes import Scene, check_scene

SEARCH_EVERY = 5
"""With `ds`, parses are searched for again in rounds divisible by this; in the others, coordinate
ascent starts from the last match probabilities."""

_NO_SLOPE = 1e-6  # slope per scene that counts as zero, where scores cancel by symmetry

_FLAT = 1e-10  # mean squared score at which no scene informs a parameter


class Rounds(NamedTuple):
    """The state of learning: everything that the next round depends on."""

    path: Float[np.ndarray, "rounds n"]
    """The unconstrained parameters, initial ones first; the last are those of the next E-step."""
    objective: Float[np.ndarray, " done"]
    holdout: Float[np.ndarray, " done"]
    """Objective of the held-out scenes; empty without any."""
    expected: tuple[Expectations, ...]
    """The last E-step of each batch and, if there are any, of the held-out scenes."""


@dataclass(frozen=True)
class Learned:
    """The learnt parameters, the history of learning, and whether it converged."""

    program: Program
    """The same program with its parameters at the learnt values; every method takes it."""
    params: Values
    history: dict[str, np.ndarray]
    """The values of each parameter by round, beginning with the initial values."""
    objective: Float[np.ndarray, " rounds"]
    """Mean log evidence, or ELBO, of a training scene at the parameters of its E-step."""
    holdout: Float[np.ndarray, " rounds"] | None
    """The same for held-out scenes."""
    converged: bool
    e_step: str
    num_scenes: int
    find_standard_errors: Callable[[], Values]

    @functools.cached_property
    def standard_errors(self) -> Values:
        """Standard errors from the observed information; NaN where that is not positive.

        It may not be positive before learning has converged. They are computed on first access,
        which takes two E-steps for each learnt number.
        """
        return self.find_standard_errors()

    @property
    def status(self) -> str:
        """One sentence on whether to believe it."""
        state = "converged" if self.converged else "did not converge"
        name = "log evidence" if self.e_step == "exact" else "ELBO"
        text = (
            f"{self.e_step}: {state} after {len(self.objective) - 1} rounds on {self.num_scenes} "
            f"scenes, {name} {self.objective[0]:.3f} to {self.objective[-1]:.3f} a scene"
        )
        if self.holdout is not None:
            text += f", held out {self.holdout[0]:.3f} to {self.holdout[-1]:.3f}"
        capped = [n for n, x in self.params.items() if np.any(np.asarray(x) >= 0.999 * LARGEST)]
        if capped:
            text += f"; {', '.join(capped)} is at the largest value there is: there is no noise"
        return text


def learn(
    program: Program,
    scenes: Scene,
    rng_key: Array,
    *,
    e_step: EStep = "ds",
    num_steps: int = 100,
    batch_size: int | None = None,
    tolerance: float = 1e-5,
    holdout: float = 0.0,
    begin: Rounds | None = None,
    keep: Callable[[Rounds], None] | None = None,
    progress_bar: bool | Report = False,
) -> Learned:
    """Learn the `numpyro.param` sites of a program from a batch of scenes.

    Args:
        program: a NumPyro program as for coordinate ascent, with at least one `numpyro.param`.
        scenes: a batch; no labels are used.
        rng_key: key for the E-steps by coordinate ascent.
        e_step: "exact" sums over all matches, "ds" is coordinate ascent, and "map" treats the best
            parse as certain, which is quick and biased.
        num_steps: largest number of rounds; a round infers every scene once.
        batch_size: number of scenes between M-steps, each of which uses the last E-steps of all
            scenes so far; by default all scenes. With batches a large file takes few rounds.
        tolerance: stop once the objective changes by less than this, in nats per scene.
        holdout: share of the scenes, taken from the end, that are not learnt from.
        begin: completed rounds of the same call, to resume after an interruption.
        keep: called after each round with all rounds so far; pass the last of these as `begin`.
        progress_bar: show one, or call a function with (rounds done, largest number of rounds).
    """
    scenes = check_scene(scenes).batch()
    training, others = _split(scenes, holdout)
    batches = _batches(training, batch_size)
    params = params_of(program, training.take(0))
    _refuse_too_few(len(batches[0].points), sum(params.size.values()))
    refuse_supports_that_depend(program, params, training.take(0))
    movable = Movable(program, params)
    report = reporter(progress_bar)
    every = [*batches, others] if others is not None else batches

    flat = params.flat(params.start) if begin is None else begin.path[-1]
    path = [flat] if begin is None else list(begin.path)
    objective = [] if begin is None else list(begin.objective)
    held_out = [] if begin is None else list(begin.holdout)
    expected: list[Expectations] = [] if begin is None else list(begin.expected)
    maximiser: Objective | None = None
    converged = False
    for step in range(len(objective), num_steps + 1):
        is_last = step == num_steps
        was_settled = _settled(objective, tolerance)
        searched = e_step != "ds" or step % SEARCH_EVERY == 0 or is_last or was_settled
        for b, some in enumerate(every):
            last = None if searched else expected[b]
            found = expect(movable.at(flat), some, e_step, rng_key, last)
            expected[b : b + 1] = [found]
            if maximiser is None:
                maximiser = Objective.of(program, params, training.take(0), found.first_given())
                _refuse_idle(params, maximiser.scores(some, found, flat))
            if b < len(batches) - 1 and not is_last:
                flat = maximiser.maximise(training, join_expectations(expected, batches), flat)
        whole = join_expectations(expected, batches)
        objective.append(float(whole.value.mean()))
        if others is not None:
            held_out.append(float(expected[-1].value.mean()))
        report(step, num_steps)
        assert maximiser is not None
        # If the rounds before had settled and a search finds less, it has found nothing new.
        no_better = was_settled and objective[-1] < objective[-2]
        if searched and (no_better or _settled(objective, tolerance)):
            # A failed M-step also leaves the objective as it was, so check the scores.
            converged = _is_at_top(params, flat, maximiser.scores(training, whole, flat))
        if converged or is_last:
            path[-1] = flat  # several batches: the M-steps within this round count
            break
        flat = maximiser.maximise(training, whole, flat)
        path.append(flat)
        if keep is not None:
            so_far = np.array(path), np.array(objective), np.array(held_out)
            keep(Rounds(*so_far, tuple(expected)))
    report(num_steps, num_steps)
    assert maximiser is not None

    def scores_at(flat: Float[np.ndarray, " n"]) -> Float[np.ndarray, "scenes n"]:
        found = expect(movable.at(flat), training, e_step, rng_key, whole, precisely=True)
        return maximiser.scores(training, found, flat)

    values = jax.tree.map(np.asarray, params.values(flat))
    rounds = [jax.tree.map(np.asarray, params.values(x)) for x in path]
    return Learned(
        program=at(program, values),
        params=values,
        history={name: np.stack([x[name] for x in rounds]) for name in values},
        objective=np.array(objective),
        holdout=np.array(held_out) if others is not None else None,
        converged=converged,
        e_step=e_step,
        num_scenes=len(training.points),
        find_standard_errors=lambda: standard_errors(params, flat, scores_at),
    )


def _settled(objective: list[float], tolerance: float) -> bool:
    return len(objective) > 1 and abs(objective[-1] - objective[-2]) < tolerance


def _is_at_top(
    params: Params, flat: Float[np.ndarray, " n"], scores: Float[np.ndarray, "scenes n"]
) -> bool:
    """Whether each summed score is within a standard error of zero.

    If a parameter is at its bound there is no noise, so the errors of the others mean nothing.
    """
    slope, error = np.abs(scores.sum(axis=0)), np.sqrt((scores**2).sum(axis=0))
    is_bounded = (flat >= params.highest() - 1e-9).any()
    return bool(is_bounded or (slope <= error + _NO_SLOPE * len(scores)).all())


def _batches(scenes: Scene, batch_size: int | None) -> list[Scene]:
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    count = len(scenes.points)
    number = max(1, round(count / min(batch_size or count, count)))
    ends = [count * b // number for b in range(number + 1)]
    return [scenes.take(slice(*pair)) for pair in itertools.pairwise(ends)]


def _split(scenes: Scene, holdout: float) -> tuple[Scene, Scene | None]:
    if not 0 <= holdout < 1:
        raise InputError(f"holdout must be a share of the scenes in [0, 1), got {holdout}")
    count = len(scenes.points)
    kept = count - round(holdout * count)
    return scenes.take(slice(0, kept)), scenes.take(slice(kept, count)) if kept < count else None


def _refuse_too_few(num_scenes: int, num_params: int) -> None:
    if num_scenes <= num_params:
        raise InputError(
            f"{num_scenes} scenes are too few to learn {num_params} numbers from; give more scenes "
            "or fix some of the numpyro.param sites"
        )


def _refuse_idle(params: Params, scores: Float[np.ndarray, "scenes n"]) -> None:
    squares = (scores**2).sum(axis=0)
    names = np.array(params.names())
    idle = [name for name in params.size if (squares[names == name] <= _FLAT * len(scores)).any()]
    if idle:
        raise InputError(
            f"no scene informs the parameter {idle[0]!r}: the objective does not depend on it; "
            "fix it in the program"
        )
