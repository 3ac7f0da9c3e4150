"""What trained guides are worth: alone, as a start of coordinate ascent, and as probabilities.

Scenes are of seeds on which nothing was chosen. Beside each share of scenes that are right are its
paired differences, scene by scene, from the guide alone and from coordinate ascent by itself under
the same prior.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from benchmarks.report import Picture, Pieces, Table, difference, number, share
from benchmarks.studies.training import weights
from capsules.experiments.generator import sample_scenes
from capsules.experiments.paper import SIGMAS
from guides.amortised import AmortisedGuide, load_guide
from inference import cavi
from inference.diagnostics.metrics import score
from inference.diagnostics.reliability import Reliability, pairs_together, reliability
from inference.plots.reliability import plot_reliability
from inference.result import Result
from inference.variational import amortised
from inference.variational.ascent import Schedule
from models.constellation import constellation, presence_constellation
from models.scenes import Scene

DRAWS, SEED = 600, 20_261
BETAS, SEED_OF_BETAS = (0.01, 0.03, 0.05, 0.1, 0.3, 1.0), 888
"""Where annealing may begin, and the scenes on which this is looked at."""

MANY = 16_384
"""Scenes of a batch whose speed is measured."""

LIKELY = 6
"""Of ten bins, that of probabilities from .6 to .7."""

KEY = jax.random.key(1)


class Answers(NamedTuple):
    """Results under one prior: coordinate ascent by itself, and what is compared with it."""

    prior: str
    by_itself: Result
    others: dict[str, Result]


def pieces() -> Pieces:
    """Accuracy, start of annealing, calibration and speed, in this order."""
    guides = {sigma: load_guide(weights(f"amortised-{sigma:g}")) for sigma in SIGMAS}
    alone = {sigma: _alone(guide, sigma) for sigma, guide in guides.items()}
    headings = ("", "scene accuracy", "SA", "gain on guide alone", "gain on `ds` by itself")
    yield Table("amortised", headings, _accuracies(guides, alone))
    start_of_annealing = _starts_of_annealing(guides[0.0])
    yield Table("amortised-annealing", ("first β", "scene accuracy, σ = 0"), start_of_annealing)
    calibrated = {f"σ = {s:g}": reliability(*pairs_together(x)) for s, x in alone.items()}
    headings = ("pairs of points of one object", *calibrated)
    yield Table("amortised-calibration", headings, _calibration(list(calibrated.values())))
    yield Picture("reliability", plot_reliability(calibrated))
    headings = ("a batch", "scenes per processor second")
    yield Table("amortised-speed", headings, _speeds(guides[0.0]))


def _alone(guide: AmortisedGuide, sigma: float) -> Result:
    scenes = sample_scenes(DRAWS, sigma, SEED)
    return amortised.run(constellation, scenes, KEY, match_logits=guide.match_logits)


def _accuracies(
    guides: dict[float, AmortisedGuide], alone: dict[float, Result]
) -> Iterator[list[str]]:
    for sigma, guide in guides.items():
        scenes, guess = alone[sigma].scene, _right(alone[sigma])
        yield [f"σ = {sigma:g}, guide alone", share(guess), share(_sa(alone[sigma])), "", ""]
        for prior, by_itself, others in _ascents(scenes, guide, sigma):
            right = _right(by_itself)
            for name, result in others.items():
                gains = [difference(_right(result), base) for base in (guess, right)]
                cells = [share(_right(result)), share(_sa(result)), *gains]
                yield [f"σ = {sigma:g}, {name}{prior}", *cells]
            cells = [share(right), share(_sa(by_itself)), difference(right, guess), ""]
            yield [f"σ = {sigma:g}, `ds` by itself{prior}", *cells]


def _ascents(scenes: Scene, guide: AmortisedGuide, sigma: float) -> Iterator[Answers]:
    """Coordinate ascent from the guide and by itself, under the priors of a noise level."""
    logits = guide.match_logits
    one = cavi.run(
        constellation, scenes, KEY, init_strategy=logits, num_restarts=1, fewest_points=0.0
    )
    by_itself = cavi.run(constellation, scenes, KEY)
    yield Answers("", by_itself, {"`ds` from that one start": one})
    if sigma > 0:
        both = (
            cavi.run(presence_constellation, scenes, KEY, init_strategy=logits),
            cavi.run(presence_constellation, scenes, KEY),
        )
        yield Answers(", presence prior", both[1], {"`ds` from the guide": both[0]})


def _starts_of_annealing(guide: AmortisedGuide) -> Iterator[tuple[str, str]]:
    scenes = sample_scenes(DRAWS, 0.0, SEED_OF_BETAS)
    for beta in BETAS:
        result = cavi.run(
            constellation,
            scenes,
            KEY,
            init_strategy=guide.match_logits,
            num_restarts=1,
            fewest_points=0.0,
            schedule=Schedule(beta_start=beta),
        )
        yield f"{beta:g}", share(_right(result))


def _calibration(found: list[Reliability]) -> Iterator[list[str]]:
    bins = [np.flatnonzero((10 * one.said).astype(int) == LIKELY) for one in found]

    def of_bin(values: list[Float[np.ndarray, " bins"]]) -> list[str]:
        chosen = zip(values, bins, strict=True)
        return [number(x[place[0]], 2) if len(place) else "" for x, place in chosen]

    yield ["expected calibration error", *(number(one.error) for one in found)]
    yield ["mean of probabilities from .6 to .7", *of_bin([one.said for one in found])]
    yield ["of these pairs, share of one object", *of_bin([one.happened for one in found])]


def _speeds(guide: AmortisedGuide) -> Iterator[tuple[str, str]]:
    """Everything is compiled before it is timed."""
    scenes = sample_scenes(DRAWS, 0.0, SEED)
    many = scenes.take(np.resize(np.arange(len(scenes.points)), MANY))
    logits = guide.match_logits
    tasks: dict[str, Callable[[], Any]] = {
        "the network alone": lambda: logits(many),
        "match probabilities": lambda: guide.match_probs(many),
        "match probabilities, poses and ELBO": lambda: amortised.run(
            constellation, many, KEY, match_logits=logits
        ),
    }
    for name, task in tasks.items():
        task()
        began = time.process_time()
        task()
        yield name, f"{MANY / (time.process_time() - began):,.0f}"


def _right(result: Result) -> Float[np.ndarray, " scenes"]:
    return np.asarray(score(result)["partition"]["scene_accuracy"], float)


def _sa(result: Result) -> Float[np.ndarray, " scenes"]:
    return np.asarray(score(result)["partition"]["sa"], float)
