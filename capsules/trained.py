"""Trained networks: training on the generator's scenes, and the methods that run them."""

import functools
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float

from capsules.baselines import ccae
from capsules.baselines.ccae import VARIANTS, Ccae
from capsules.experiments.simulator import paper_simulator
from capsules.store import Store
from guides import amortised, training
from guides.amortised import AmortisedGuide
from guides.training import Report as Steps
from inference.result import Report, Result, method, reporter
from inference.variational import amortised as amortised_inference
from models.constellation import PARTS, constellation
from models.errors import InputError
from models.program.sites import Program
from models.scenes import Scene

NETWORKS = ("ccae", "amortised")
SCENES_TO_NAME = 4096
"""Training scenes that decide which object each capsule stands for."""


def train(
    network: str, path: Path, sigma: float, num_steps: int, seed: int, variant: str, report: Steps
) -> None:
    """Train a network on scenes of the paper's generator and write its weights.

    Args:
        network: one of `NETWORKS`.
        path: the file of weights; an interrupted run resumes from the checkpoint beside it if the
            settings and the source are the same.
        variant: variant of CCAE, a name in `VARIANTS`.
    """
    if path.exists():
        raise InputError(f"{path} exists already; remove it to train again, or choose another")
    about, num_steps = {"sigma": sigma, "seed": seed}, training.checked_steps(num_steps)
    asked = {"network": network, "steps": num_steps, "variant": variant}
    mark = Store(path.parent).entry(path.stem, **asked, **about).path  # names the checkpoint
    key, simulator = jax.random.key(seed), paper_simulator(sigma)
    if network == "amortised":
        settings = amortised.Settings(num_steps)
        guide = amortised.fit(constellation, key, simulator, settings, mark, report)
        amortised.save_guide(path, guide, settings, about)
        return
    kind, (train_key, init_key) = VARIANTS[variant], jax.random.split(key)
    optimizer, plan = kind.optimizer(num_steps), kind.plan(num_steps)
    trained, _ = training.train(
        kind.network(init_key),
        ccae.loss,
        simulator,
        optimizer,
        plan,
        train_key,
        path=mark,
        report=report,
    )
    draws = simulator(init_key, SCENES_TO_NAME)
    objects = ccae.objects_of_capsules(trained, draws, np.asarray(PARTS.owner))
    header = {"kind": "ccae", "variant": variant, **kind._asdict(), "objects": objects.tolist()}
    training.save(path, header | {"steps": num_steps} | about, trained)


@method
def run_ccae(
    program: Program,
    scene: Scene,
    rng_key: Array,
    *,
    weights: str | None = None,
    progress_bar: bool | Report = False,
) -> Result:
    """Infer with CCAE, which does not use the program; its poses are of its own templates."""
    scenes, owner = scene.batch(), np.asarray(PARTS.owner)
    if scenes.present.shape[1] != len(owner):
        raise InputError(
            f"CCAE is trained on scenes of {len(owner)} rows, two squares and a triangle, got "
            f"{scenes.present.shape[1]}; leave --shapes and --clutter out"
        )
    network, objects = _ccae(*_named(weights, "ccae"))
    mass, pose = ccae.read_out(network, scenes)
    of_object = np.zeros_like(mass)
    of_object[..., objects] = mass
    match_probs = of_object[..., owner] / np.bincount(owner)[owner]
    match_probs = np.where(scenes.present[..., None], match_probs, 1 / len(owner))
    count = len(mass)
    reporter(progress_bar)(count, count)
    return Result(
        method="ccae",
        scene=scenes,
        match_probs=match_probs,
        pose_mean=pose[:, np.argsort(objects)],
        pose_covariance=np.zeros((*pose.shape, pose.shape[-1])),
        labels=np.where(scenes.present, of_object.argmax(axis=-1), -1),
        owner=owner,
        converged=np.ones(count, bool),
        steps=np.ones(count, int),
    )


def run_amortised(
    program: Program,
    scene: Scene,
    rng_key: Array,
    *,
    weights: str | None = None,
    progress_bar: bool | Report = False,
) -> Result:
    """Infer with only the amortised guide in a file of weights."""
    guide = _guide(*_named(weights, "amortised"))
    return amortised_inference.run(
        program, scene, rng_key, match_logits=guide.match_logits, progress_bar=progress_bar
    )


def _named(weights: str | None, network: str) -> tuple[Path, float]:
    """The file and when it was written, so that a new one is read again."""
    if weights is None:
        raise InputError(
            f"the method {network} requires trained weights, got none; give --weights FILE, made "
            f"by `capsules train {network}`"
        )
    path = Path(weights)
    training.read_header(path, network)
    return path, path.stat().st_mtime


@functools.lru_cache(maxsize=8)
def _guide(path: Path, written: float) -> AmortisedGuide:
    return amortised.load_guide(path)


@functools.lru_cache(maxsize=8)
def _ccae(path: Path, written: float) -> tuple[Ccae, Float[np.ndarray, " K"]]:
    header = training.read_header(path, "ccae")
    variant = VARIANTS[header["variant"]]
    if {name: header.get(name) for name in variant._fields} != variant._asdict():
        raise InputError(
            f"{path} has the weights of another CCAE than the variant {header['variant']} is now; "
            "train it again with `capsules train ccae`"
        )
    return training.load(path, variant.network(jax.random.key(0))), np.array(header["objects"])
