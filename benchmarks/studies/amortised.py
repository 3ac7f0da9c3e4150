"""What trained guides are worth: `python -m benchmarks.amortised WEIGHTS`.

Guides are files of `capsules train amortised`. Scenes are of a seed on which nothing was chosen.
Below the rows of a noise level is the mean difference of scene accuracy, scene by scene, between
presence-`ds` from the guide and by itself. The reliability diagram goes to
`docs/images/reliability.png`.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from capsules.experiments.generator import sample_scenes
from guides.amortised import AmortisedGuide, load_guide
from inference import cavi
from inference.diagnostics.metrics import score, summarise
from inference.diagnostics.reliability import pairs_together, reliability
from inference.plots.reliability import plot_reliability
from inference.result import Result
from inference.variational import amortised
from models.constellation import constellation, presence_constellation
from models.scenes import Scene

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "reliability.png"
DRAWS, SEED, MANY = 600, 20_261, 16_384
KEY = jax.random.key(1)
PRESENCE_FROM_IT, PRESENCE = "ds from it, presence", "ds, presence"


def rows(sigma: float, guide: AmortisedGuide, scenes: Scene) -> dict[str, Result]:
    """The guide alone and as a start, beside coordinate ascent by itself."""
    logits = guide.match_logits
    found = {
        "amortised, alone": amortised.run(constellation, scenes, KEY, match_logits=logits),
        "ds from that one start": cavi.run(
            constellation, scenes, KEY, init_strategy=logits, num_restarts=1, fewest_points=0.0
        ),
        "ds": cavi.run(constellation, scenes, KEY),
    }
    if sigma > 0:
        found |= {
            PRESENCE_FROM_IT: cavi.run(presence_constellation, scenes, KEY, init_strategy=logits),
            PRESENCE: cavi.run(presence_constellation, scenes, KEY),
        }
    return found


def scenes_a_second(guide: AmortisedGuide, scenes: Scene) -> Iterator[str]:
    """Rows for many scenes in one batch, everything compiled: by the clock, by processor time."""
    many = scenes.take(np.resize(np.arange(len(scenes.points)), MANY))
    logits = guide.match_logits
    tasks: dict[str, Callable[[], Any]] = {
        "match probabilities": lambda: guide.match_probs(many),
        "with poses and ELBO": lambda: amortised.run(constellation, many, KEY, match_logits=logits),
    }
    for name, task in tasks.items():
        task()
        began, spent = time.perf_counter(), time.process_time()
        task()
        clock, processor = time.perf_counter() - began, time.process_time() - spent
        speeds = f"{MANY / clock:,.0f} a second, {MANY / processor:,.0f} a processor second"
        yield f"scenes, {name}: {speeds}"


def main(folder: Path) -> None:
    diagrams = {}
    print("| σ | | scene accuracy | SA |\n| --- | --- | --- | --- |")
    for path in sorted(folder.glob("amortised-*.eqx")):
        sigma, guide = float(path.stem.removeprefix("amortised-")), load_guide(path)
        scenes, right = sample_scenes(DRAWS, sigma, SEED), {}
        for name, result in rows(sigma, guide, scenes).items():
            scores = score(result)["partition"]
            right[name] = np.asarray(scores["scene_accuracy"], float)
            numbers = (summarise(scores[m]) for m in ("scene_accuracy", "sa"))
            cells = " | ".join(f"{x.mean:.3f} ± {x.standard_error:.3f}" for x in numbers)
            print(f"| {sigma:g} | {name} | {cells} |", flush=True)
            if name.startswith("amortised"):
                diagrams[f"σ = {sigma:g}"] = reliability(*pairs_together(result))
        if sigma > 0:
            gain = summarise(right[PRESENCE_FROM_IT] - right[PRESENCE])
            cell = f"{gain.mean:+.3f} ± {gain.standard_error:.3f}"
            print(f"| {sigma:g} | from it less by itself, presence | {cell} | |", flush=True)
        clock, processor = scenes_a_second(guide, scenes)
        print(
            f"| {sigma:g} | scenes a second: clock {clock:,.0f}, processor {processor:,.0f} | | |"
        )
    plot_reliability(diagrams).savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
