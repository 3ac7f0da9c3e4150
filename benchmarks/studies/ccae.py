"""CCAE as trained here, beside what the paper prints, on scenes that it has not seen."""

from collections.abc import Iterator

from benchmarks.report import Pieces, Table, mean, number, share
from benchmarks.studies.training import TRAININGS, weights
from capsules.experiments.generator import sample_scenes
from capsules.experiments.paper import PARTITION, SIGMAS
from capsules.methods import infer
from inference.diagnostics.metrics import score

DRAWS, SEED = 1200, 31_415
PRINTED_STEPS = 300_000

NETWORKS = {
    "ccae-0": "small",
    "ccae-seed-1": "small, `--seed 1`",
    "ccae-published": "`--variant published`",
    "ccae-0.1": "small",
    "ccae-0.25": "small",
}


def pieces() -> Pieces:
    """One table, by partitions."""
    yield Table("ccae", ("σ", "network", "steps", "scene accuracy", "SA"), _rows())


def _rows() -> Iterator[list[str]]:
    for sigma in SIGMAS:
        sa, _, _, scene_accuracy = PARTITION["ccae", None, sigma]
        printed = [number(scene_accuracy), number(sa)]
        yield [f"{sigma:g}", "printed in the paper", f"{PRINTED_STEPS:,}", *printed]
        scenes = sample_scenes(DRAWS, sigma, SEED)
        for name, title in NETWORKS.items():
            if TRAININGS[name].sigma == sigma:
                result = infer("ccae", scenes, weights=str(weights(name)))
                scores = score(result)["partition"]
                cells = [share(scores["scene_accuracy"]), mean(scores["sa"])]
                yield [f"{sigma:g}", title, f"{TRAININGS[name].num_steps:,}", *cells]
