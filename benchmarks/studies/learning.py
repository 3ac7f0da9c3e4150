"""What learning finds, what it is good for on scenes that it has not seen, and how long it takes.

Noise and poses are learnt from scenes with template noise, and applied to others under both
priors. Templates are learnt from scenes without noise, from vertices that are wrong or random. On
scenes of a known program the standard errors are held against the truth.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Float
from numpyro.distributions import constraints
from numpyro.infer import Predictive

from capsules.experiments.generator import sample_scenes
from capsules.experiments.learnable import arguments, leave_open
from capsules.methods import PAPER
from inference import cavi, exact, learn
from inference.diagnostics.metrics import same_partition
from inference.learning import Learned
from inference.learning.learn import SEARCH_EVERY
from inference.learning.params import at
from inference.result import Result
from models.constellation import (
    PARTS,
    constellation,
    presence_constellation,
    sized_constellation,
)
from models.program.sites import Program
from models.scenes import Scene, join, make_scene
from models.templates import normalise, shapes, stack

DRAWS, SEED, ROUNDS = 460, 101, 60
OTHERS, SEED_OF_OTHERS = 2000, 7007
"""Draws that are learnt from, and others that nothing is learnt from."""

EARLY = 10
"""Rounds at template noise of 0.25 after which poses have no direction yet: a plateau."""

SIZED = 1000
"""Draws for the prior that takes long."""

BY_HAND = {
    "precision": 660.0,
    "pose_mean": np.array([-0.3, -0.3, 0.18, 0.0]),
    "pose_covariance": np.diag([0.12, 0.12, 0.02, 0.02]),
}
"""The best prior that was set by hand, for template noise of 0.25."""

NAMES = ("square", "triangle")
STARTS = 3
"""Random starts of the templates, of which the best held-out objective chooses one."""

Row = tuple[str, str, str, str]


def noise_and_poses(sigma: float) -> Iterator[Row]:
    """Scene accuracy and log evidence of other scenes: as it is, learnt, by hand, from labels."""
    others = sample_scenes(OTHERS, sigma, SEED_OF_OTHERS)
    learned, row = _learnt(sigma)
    yield row
    sets: dict[str, Mapping[str, Any]] = {
        "learnt": learned.params,
        f"after {EARLY} rounds": {name: x[EARLY] for name, x in learned.history.items()},
        "by hand": BY_HAND,
        "from labels": _from_labels(sigma),
    }
    for prior in (constellation, presence_constellation):
        programs = {"as it is": prior} | {
            name: functools.partial(prior, **arguments(prior, numbers, PAPER))
            for name, numbers in sets.items()
        }
        for method, run in (("ds", _ascend), ("exact", exact.run)):
            results = {name: run(program, others) for name, program in programs.items()}
            right = {name: _right(result, others) for name, result in results.items()}
            title = f"sigma {sigma}, {prior.__name__}, {method}"
            before = right["as it is"]
            for name in sets:
                gain = _difference(right[name], before)
                yield (
                    f"{title}: scene accuracy, {name}",
                    _share(before),
                    _share(right[name]),
                    gain,
                )
            for name in list(sets)[1:]:
                apart = _difference(right[name], right["learnt"])
                yield (f"{title}: {name} less learnt", "", apart, "")
            if method == "exact":
                values = {name: _mean(_evidence(result)) for name, result in results.items()}
                for name in sets:
                    what = f"{title}: log evidence of a scene, {name}"
                    yield (what, values["as it is"], values[name], "")
            if method == "exact" and prior is presence_constellation:
                upright = {name: _upright(result, others) for name, result in results.items()}
                for name in sets:
                    what = f"{title}: lone triangles on their own vertices, {name}"
                    yield (what, _share(upright["as it is"]), _share(upright[name]), "")


def sized(sigma: float = 0.25) -> Iterator[Row]:
    """The prior whose noise grows with an object, against the learnt plain one: the same scenes."""
    others = sample_scenes(SIZED, sigma, SEED_OF_OTHERS)
    learned, row = _learnt(sigma)
    yield row
    plain = functools.partial(
        presence_constellation, **arguments(presence_constellation, learned.params, PAPER)
    )
    learnt = _right(exact.run(plain, others), others)
    found = []
    for first in range(0, len(others.points), SIZED // 10):
        some = others.take(slice(first, first + SIZED // 10))
        found.append(_right(exact.run(sized_constellation, some), some))
        wide = np.concatenate(found)
        narrow = learnt[: len(wide)]
        title = f"sigma {sigma}, learnt and sized, exact, {len(wide)} scenes"
        yield (title, _share(narrow), _share(wide), _difference(wide, narrow))


def seconds_of_a_round(num_scenes: int = 1000, num_rounds: int = 11) -> Iterator[Row]:
    """Of `ds`, on scenes with rows for 11 points: E-step and M-step, once all is compiled."""
    scenes = sample_scenes(2 * num_scenes, 0.25, SEED).take(slice(num_scenes))
    program = leave_open(presence_constellation, ("precision", "pose"), PAPER)
    times: list[tuple[float, float]] = []
    learn(
        program,
        scenes,
        jax.random.key(0),
        num_steps=num_rounds,
        tolerance=0.0,
        keep=lambda rounds: times.append((time.perf_counter(), time.process_time())),
    )
    each = np.diff(times, axis=0)[-SEARCH_EVERY:]  # one of them with a search
    for name, x in zip(("s", "s of processor time"), each.T, strict=True):
        title = f"a round of ds on {num_scenes} scenes, {name}: mean; with a search"
        yield (title, f"{x.mean():.2f}", f"{x.max():.2f}", "")


TRUTH = {
    "precision": np.array(200.0),
    "covariance": 0.3 * np.eye(4) + 0.1 * np.outer([1, -1, 1, 0], [1, -1, 1, 0]),
    "presence_prob": np.array(0.6),
}
"""The numbers of a known program, which are to be found again from its scenes."""


def known(points=None, present=None):  # type: ignore[no-untyped-def]
    """A square, and a triangle that may be absent, begun at other numbers than `TRUTH`."""
    precision = numpyro.param("precision", 50.0, constraint=constraints.positive)
    covariance = numpyro.param("covariance", jnp.eye(4), constraint=constraints.positive_definite)
    presence = numpyro.param("presence_prob", 0.3, constraint=constraints.unit_interval)
    return presence_constellation(
        points,
        present,
        presence_prob=jnp.stack([jnp.ones(()), presence]),
        visibility=0.9,
        precision=precision,
        parts=stack(shapes(*NAMES)),
        pose_prior=dist.MultivariateNormal(jnp.array([0.2, -0.1, 0.6, 0.3]), covariance),
    )


def coverage(repetitions: int = 20, num_scenes: int = 400) -> Iterator[Row]:
    """How often the truth is within 1.96 standard errors, over scenes of the known program."""
    deviations = {name: [] for name in TRUTH}  # type: dict[str, list[np.ndarray]]
    draw = Predictive(at(known, TRUTH), num_samples=num_scenes)
    for number, key in enumerate(jax.random.split(jax.random.key(SEED), repetitions)):
        drawn = draw(key)
        points, count = np.asarray(drawn["points"]), np.asarray(drawn["count"])
        scenes = join(
            [make_scene(x[:n], num_parts=len(x)) for x, n in zip(points, count, strict=True) if n]
        )
        learned = learn(known, scenes, key, e_step="exact")
        for name, truth in TRUTH.items():
            lower = np.tril(np.ones(np.shape(truth), bool)) if np.ndim(truth) else True
            off = (learned.params[name] - truth) / learned.standard_errors[name]
            deviations[name].append(np.ravel(off[lower]))
        largest = [np.abs(found[-1]).max() for found in deviations.values()]
        shown = ", ".join(f"{x:.2f}" for x in largest)
        yield (f"repetition {number}: largest deviations, errors", "", shown, learned.status)
    for name, found in deviations.items():
        off = np.abs(np.stack(found))
        yield (
            f"{name}: 1.96 standard errors cover; the largest deviation",
            f"{(off < 1.96).mean():.3f}",
            f"{off.max():.2f}",
            f"{off.size} numbers",
        )


def templates() -> Iterator[Row]:
    """Relative error of the vertices of both shapes, from vertices that are wrong, and random."""
    for seed in range(3):
        yield _templates(0.3, seed, 1)
    for seed in range(10):
        yield _templates(1.0, seed, STARTS)


def _templates(noise: float, seed: int, num_starts: int) -> Row:
    """From vertices with noise of their size, or random ones; the best of a few starts."""
    rng = np.random.default_rng(seed)
    right = dict(zip(NAMES, shapes(*NAMES), strict=True))
    training = sample_scenes(670, 0.0, SEED + seed, NAMES)
    tried = []
    for _ in range(num_starts):
        begun = {
            name: (noise < 1) * vertices + noise * rng.normal(size=vertices.shape)
            for name, vertices in right.items()
        }
        program = functools.partial(_with_templates, begun=begun)
        learned = learn(
            program, training, jax.random.key(0), e_step="exact", num_steps=40, holdout=0.2
        )
        assert learned.holdout is not None
        tried.append((learned.holdout[-1], _farthest(begun, right), learned))
    tried.sort(key=lambda one: -one[0])
    errors = [_farthest(learned.params, right) for _, _, learned in tried]
    what = f"the best of {num_starts} random starts" if noise == 1 else f"vertices {noise} off"
    shown = ", ".join(
        f"{x:.2g} ({value:.1f})" for x, (value, _, _) in zip(errors, tried, strict=True)
    )
    return f"templates, {what}, seed {seed}", f"{tried[0][1]:.2g}", f"{errors[0]:.2g}", shown


def _with_templates(points=None, present=None, *, begun):  # type: ignore[no-untyped-def]
    own = [normalise(numpyro.param(name, jnp.asarray(x))) for name, x in begun.items()]
    precision = numpyro.param("precision", 1e2, constraint=constraints.positive)
    return presence_constellation(points, present, precision=precision, parts=stack(own))


def _learnt(sigma: float) -> tuple[Learned, Row]:
    """Noise and poses, from scenes under the presence prior, and how that went."""
    training = sample_scenes(DRAWS, sigma, SEED)
    program = leave_open(presence_constellation, ("precision", "pose"), PAPER)
    began = time.process_time()
    learned = learn(program, training, jax.random.key(0), e_step="exact", num_steps=ROUNDS)
    seconds = time.process_time() - began
    evidence = (f"{learned.objective[i]:.3f}" for i in (0, -1))
    title = f"sigma {sigma}, log evidence of a scene that is learnt from; {learned.status}"
    return learned, (title, *evidence, f"{seconds:.0f} s of processor time")


def _from_labels(sigma: float) -> Mapping[str, Any]:
    """The same numbers with the true matches: moments of poses by least squares, and residuals."""
    scenes = sample_scenes(DRAWS, sigma, SEED)
    design, owner = np.asarray(PARTS.F), np.asarray(PARTS.owner)
    poses, squares, freedom = [], 0.0, 0
    for points, present in zip(scenes.points, scenes.present, strict=True):
        for rows in (owner == k for k in range(PARTS.num_objects)):
            if present[rows].all():  # an object is whole or absent, its rows in the order of parts
                matrix, data = design[rows].reshape(-1, PARTS.pose_dim), points[rows].ravel()
                pose, left, _, _ = np.linalg.lstsq(matrix, data, rcond=None)
                poses.append(pose)
                squares, freedom = squares + left.sum(), freedom + len(data) - PARTS.pose_dim
    mean, covariance = np.mean(poses, axis=0), np.cov(np.transpose(poses))
    return {"precision": freedom / squares, "pose_mean": mean, "pose_covariance": covariance}


def _ascend(program: Program, scenes: Scene) -> Result:
    return cavi.run(program, scenes, jax.random.key(1))


def _evidence(result: Result) -> np.ndarray:
    assert result.log_evidence is not None
    return result.log_evidence


def _right(result: Result, scenes: Scene) -> np.ndarray:
    assert scenes.object is not None
    pairs = zip(result.labels, scenes.object, strict=True)
    return np.array([same_partition(found, truth) for found, truth in pairs])


def _upright(result: Result, scenes: Scene) -> np.ndarray:
    """Of scenes of one triangle alone: whether its points are most probably their own vertices."""
    rows = np.asarray(PARTS.owner) == 1
    alone = (scenes.present == rows).all(axis=1)
    match_probs = result.match_probs[alone][:, rows]
    return (match_probs.argmax(axis=2) == np.flatnonzero(rows)).all(axis=1)


def _mean(values: np.ndarray, digits: int = 2) -> str:
    error = float(values.std() / np.sqrt(len(values)))
    return f"{values.mean():.{digits}f} ± {error:.{digits}f}"


def _share(right: np.ndarray) -> str:
    return _mean(right, 3)


def _difference(these: np.ndarray, those: np.ndarray) -> str:
    """Of scenes that are right, paired."""
    return _mean(these.astype(float) - those, 3)


def _farthest(found: Mapping[str, Any], right: Mapping[str, np.ndarray]) -> float:
    return max(_apart(np.asarray(found[name]), right[name]) for name in right)


def _apart(found: Float[np.ndarray, "n 2"], right: Float[np.ndarray, "n 2"]) -> float:
    """Distance after the best similarity and order, relative to the size."""
    wanted, points = ((x - x.mean(axis=0)) @ [1, 1j] for x in (right, found))
    orders = (points[list(order)] for order in itertools.permutations(range(len(points))))
    fits = (np.linalg.norm(wanted - np.vdot(z, wanted) / np.vdot(z, z) * z) for z in orders)
    return float(min(fits) / np.linalg.norm(wanted))


PIECES: dict[str, Callable[[], Iterator[Row]]] = {
    "time": seconds_of_a_round,
    "coverage": coverage,
    "noise-0.1": functools.partial(noise_and_poses, 0.1),
    "noise-0.25": functools.partial(noise_and_poses, 0.25),
    "templates": templates,
    "sized": sized,
}
"""Each is a benchmark of its own: `python -m benchmarks learning-templates`."""
