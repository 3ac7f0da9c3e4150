"""Learning: the values of a program's `numpyro.param` sites from many scenes without labels.

Expectation maximisation. The E-step infers every scene (`inference.learning.expectation`), and the
M-step maximises the expected log joint density over the parameters with that posterior held fixed
(`inference.learning.maximisation`). With exact E-steps the summed log evidence never falls.
"""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Float

from inference.learning.expectation import EStep, Expectations, expect
from inference.learning.maximisation import Objective
from inference.learning.params import LARGEST, Params, Values, at, params_of, spread_of
from inference.method import Report, reporter
from models.errors import InputError
from models.program.sites import Program
from models.scenes import Scene, check_scene

_FLAT = 1e-10  # of the mean squared score, below which no scene informs a parameter


@dataclass(frozen=True)
class Learned:
    """What was learnt, and from how much."""

    program: Program
    """The same program with its parameters at the learnt values; every method takes it."""
    params: Values
    standard_errors: Values
    """From the scores of the scenes, as if the program were true."""
    history: dict[str, np.ndarray]
    """The values of each parameter, by round; the first are those that the program begins with."""
    objective: Float[np.ndarray, " rounds"]
    """Log evidence, or ELBO, of a training scene on average."""
    holdout: Float[np.ndarray, " rounds"] | None
    """The same of scenes that were not learnt from."""
    converged: bool
    e_step: str
    num_scenes: int

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
    tolerance: float = 1e-5,
    holdout: float = 0.0,
    progress_bar: bool | Report = False,
) -> Learned:
    """Learn what a program leaves open, as `numpyro.param`, from a batch of scenes.

    Args:
        program: a NumPyro program as for coordinate ascent, with at least one `numpyro.param`.
        scenes: a batch; no labels are used.
        rng_key: of the E-steps by coordinate ascent.
        e_step: "exact" sums over all matches, "ds" is coordinate ascent, and "map" takes the best
            parse for certain, which is quick and biased.
        num_steps: rounds at most.
        tolerance: stop once the objective changes by less than this, in nats a scene.
        holdout: share of the scenes, the last ones, that are not learnt from.
        progress_bar: show one, or call a function with (rounds done, rounds at most).
    """
    scenes = check_scene(scenes).batch()
    training, others = _split(scenes, holdout)
    params = params_of(program, training.take(0))
    flat = params.flat(params.start)
    _refuse_too_few(len(training.points), len(flat))
    report = reporter(progress_bar)

    def expected_at(flat: Float[np.ndarray, " n"], some: Scene) -> Expectations:
        return expect(at(program, params.values(flat)), some, e_step, rng_key)

    path, objective, held_out = [flat], [], []
    objective_of: Objective | None = None
    converged = False
    for step in range(num_steps + 1):
        expected = expected_at(flat, training)
        objective.append(float(expected.value.mean()))
        if others is not None:
            held_out.append(float(expected_at(flat, others).value.mean()))
        report(step, num_steps)
        converged = step > 0 and abs(objective[-1] - objective[-2]) < tolerance
        if converged or step == num_steps:
            break
        if objective_of is None:
            given = jax.tree.map(lambda x: x[0], expected.given)
            objective_of = Objective.of(program, params, training.take(0), given)
            _refuse_idle(params, objective_of.scores(training, expected, flat))
        flat = objective_of.maximise(training, expected, flat)
        path.append(flat)
    report(num_steps, num_steps)
    assert objective_of is not None
    scores = objective_of.scores(training, expected, flat)
    values = jax.tree.map(np.asarray, params.values(flat))
    rounds = [jax.tree.map(np.asarray, params.values(x)) for x in path]
    return Learned(
        program=at(program, values),
        params=values,
        standard_errors=_standard_errors(params, flat, scores),
        history={name: np.stack([x[name] for x in rounds]) for name in values},
        objective=np.array(objective),
        holdout=np.array(held_out) if others is not None else None,
        converged=converged,
        e_step=e_step,
        num_scenes=len(training.points),
    )


def _split(scenes: Scene, holdout: float) -> tuple[Scene, Scene | None]:
    if not 0 <= holdout < 1:
        raise InputError(f"holdout is a share of the scenes from 0 to below 1, got {holdout}")
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


def _standard_errors(
    params: Params, flat: Float[np.ndarray, " n"], scores: Float[np.ndarray, "scenes n"]
) -> Values:
    """From the information that the scores have, sum_s g_s g_s', and the delta method."""
    at_bound = flat >= params.highest() - 1e-9
    information = scores.T @ scores
    free = np.flatnonzero(~at_bound)
    covariance = np.zeros_like(information)
    covariance[np.ix_(free, free)] = np.linalg.pinv(information[np.ix_(free, free)])
    return spread_of(params.values, flat, covariance)
