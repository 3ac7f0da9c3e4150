"""What learning finds, what it is good for on scenes that it has not seen, and how long it takes.

Noise and poses are learnt from scenes with template noise, and applied to others under both
priors. Templates are learnt from scenes without noise, from vertices that are wrong or random. On
scenes of a known program the standard errors are held against the truth.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Float
from numpyro.distributions import constraints
from numpyro.infer import Predictive

from benchmarks.report import Pieces, Table, difference, mean, number, share
from capsules.experiments.generator import sample_scenes
from capsules.experiments.learnable import arguments, leave_open
from capsules.methods import PAPER
from inference import cavi, exact, learn
from inference.diagnostics.metrics import same_partition
from inference.learning import Learned
from inference.learning.expectation import EStep
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

DRAWS, SEEDS, ROUNDS = 460, (101, 102, 103), 60
OTHERS, SEED_OF_OTHERS = 2000, 7007
"""Draws that are learnt from, and others that nothing is learnt from."""
SEED = SEEDS[0]

EARLY = 10
"""Rounds at template noise of 0.25 after which poses have no direction yet: a plateau."""

SIZED = 250
"""Draws for the sized prior, which is slow."""

BY_HAND = {
    "precision": 660.0,
    "pose_mean": np.array([-0.3, -0.3, 0.18, 0.0]),
    "pose_covariance": np.diag([0.12, 0.12, 0.02, 0.02]),
}
"""The best prior that was set by hand, for template noise of 0.25."""

NAMES = ("square", "triangle")
STARTS = 3
"""Random starts of the templates, of which the best held-out objective chooses one."""

WRONG_SEEDS, RANDOM_SEEDS, TEMPLATE_DRAWS = 3, 10, 670
REPETITIONS, KNOWN = 20, 400
"""Sets of scenes of the known program, and scenes of each."""

E_STEPS: tuple[EStep, ...] = ("exact", "ds")
SHIPPED, LEARNT, BY_DS, EARLY_NAME = (
    "as shipped",
    "learnt",
    "learnt by `ds`",
    f"after {EARLY} rounds",
)
TITLES = {
    "precision": "precision",
    "covariance": "covariance of poses",
    "presence_prob": "presence",
}


def pieces(study: str, *arguments: Any) -> Pieces:
    """One of `STUDIES`."""
    return STUDIES[study](*arguments)


def noise_and_poses(sigma: float) -> Pieces:
    """Scenes right and evidence of other scenes under each set of numbers, and paired gains.

    Numbers are learnt from several sets of scenes; a scene counts with its mean over them.
    """
    others = sample_scenes(OTHERS, sigma, SEED_OF_OTHERS)
    learned = {e_step: [_learnt(sigma, seed, e_step) for seed in SEEDS] for e_step in E_STEPS}
    sets: dict[str, list[Mapping[str, Any]]] = {
        LEARNT: [one.params for one in learned["exact"]],
        BY_DS: [one.params for one in learned["ds"]],
        EARLY_NAME: [{n: x[EARLY] for n, x in one.history.items()} for one in learned["exact"]],
        "by hand": [BY_HAND],
        "from labels": [_from_labels(sigma, seed) for seed in SEEDS],
    }
    right: dict[str, dict[str, np.ndarray]] = {}
    evidence: dict[str, dict[str, np.ndarray]] = {}
    for prior in (constellation, presence_constellation):
        programs = {SHIPPED: [prior]} | {
            name: [functools.partial(prior, **arguments(prior, one, PAPER)) for one in some]
            for name, some in sets.items()
        }
        for method, run in (("ds", _ascend), ("exact", exact.run)):
            results = {name: [run(one, others) for one in some] for name, some in programs.items()}
            right[f"`{prior.__name__}`, `{method}`"] = {
                name: np.mean([_right(one, others) for one in some], axis=0)
                for name, some in results.items()
            }
        evidence[f"`{prior.__name__}`"] = {
            name: np.mean([_evidence(one) for one in some], axis=0)
            for name, some in results.items()
        }
    upright = {  # presence, exact
        name: np.mean([_upright(one, others) for one in some], axis=0)
        for name, some in results.items()
    }

    name = f"learning-noise-{sigma:g}"
    shares = {f"scenes right, {title}": found for title, found in right.items()}
    values = {f"log evidence of a scene, {title}": found for title, found in evidence.items()}
    triangles = f"lone triangles on their own vertices, of {len(upright[SHIPPED])}"
    rounds = [f"{_rounds(learned[e_step])}" for e_step in E_STEPS]
    rows = [
        ["rounds of learning", "", *rounds, str(EARLY), "", ""],
        *_about(sets),
        *([title, *map(share, found.values())] for title, found in shares.items()),
        *([title, *(mean(x, 2) for x in found.values())] for title, found in values.items()),
        [triangles, *map(share, upright.values())],
        ["scenes", *[str(len(others.points))] * len(upright)],
    ]
    yield Table(name, ["", SHIPPED, *sets], rows)

    pairs = [(LEARNT, SHIPPED), (BY_DS, SHIPPED), (EARLY_NAME, SHIPPED)]
    pairs += [("by hand", LEARNT), ("from labels", LEARNT)]
    headings = ["gain in scenes right", *(f"{one} − {other}" for one, other in pairs)]
    rows = [
        [title, *(difference(found[one], found[other]) for one, other in pairs)]
        for title, found in right.items()
    ]
    yield Table(f"{name}-gains", headings, rows)


def _rounds(learned: Sequence[Learned]) -> str:
    """Rounds of each learning, and how many converged."""
    rounds = ", ".join(str(len(one.objective) - 1) for one in learned)
    return f"{rounds}; {sum(one.converged for one in learned)} of {len(learned)} converged"


def _about(sets: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[list[str]]:
    """The numbers themselves, as means over the sets of scenes that they are learnt from."""
    precisions = (np.mean([x["precision"] for x in some]) for some in sets.values())
    yield ["precision", "", *(f"{x:,.0f}" for x in precisions)]
    poses = [np.mean([x["pose_mean"] for x in some], axis=0) for some in sets.values()]
    yield ["mean of pose: place", "", *(", ".join(number(x, 2) for x in p[:2]) for p in poses)]
    polar = ((np.hypot(*p[2:]), np.degrees(np.arctan2(*p[:1:-1]))) for p in poses)
    shown = (f"{number(size, 2)}, {angle:.0f}°".replace("-", "−") for size, angle in polar)
    yield ["mean of pose: size, direction", "", *shown]


def sized(sigma: float = 0.25) -> Pieces:
    """The prior whose noise grows with an object, against the learnt plain one: the same scenes."""
    others = sample_scenes(SIZED, sigma, SEED_OF_OTHERS)
    numbers = _learnt(sigma, SEEDS[0]).params
    plain = functools.partial(
        presence_constellation, **arguments(presence_constellation, numbers, PAPER)
    )
    narrow, wide = (
        _right(exact.run(program, others), others) for program in (plain, sized_constellation)
    )
    cells = [share(narrow), share(wide), difference(wide, narrow), str(len(wide))]
    headings = ["", "learnt presence prior", "sized prior", "difference", "scenes"]
    yield Table("learning-sized", headings, [[f"scenes right, `exact`, σ = {sigma:g}", *cells]])


def seconds_of_a_round(num_scenes: int = 1000, num_rounds: int = 11) -> Pieces:
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
    search = each[:, 1].argmax()
    rows = {
        "that searches for parses": each[search],
        "that continues": np.delete(each, search, axis=0).mean(axis=0),
        f"on average, with a search every {SEARCH_EVERY}": each.mean(axis=0),
    }
    headings = [f"a round of `ds` on {num_scenes:,} scenes", "seconds", "processor seconds"]
    lines = [[name, *(f"{x:.2f}" for x in seconds)] for name, seconds in rows.items()]
    yield Table("learning-time", headings, lines)


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


def coverage() -> Pieces:
    """How often the truth is within 1.96 standard errors, over scenes of the known program."""
    headings = ["", "numbers", "truth within 1.96 errors", "beyond 3", "largest deviation, errors"]
    yield Table("learning-coverage", headings, _coverage())


def _coverage() -> Iterator[list[str]]:
    deviations: dict[str, list[np.ndarray]] = {name: [] for name in TRUTH}
    draw = Predictive(at(known, TRUTH), num_samples=KNOWN)
    for key in jax.random.split(jax.random.key(SEED), REPETITIONS):
        drawn = draw(key)
        points, count = np.asarray(drawn["points"]), np.asarray(drawn["count"])
        scenes = join(
            [make_scene(x[:n], num_parts=len(x)) for x, n in zip(points, count, strict=True) if n]
        )
        learned = learn(known, scenes, key, e_step="exact")
        print(learned.status, flush=True)
        for name, truth in TRUTH.items():
            lower = np.tril(np.ones(np.shape(truth), bool)) if np.ndim(truth) else True
            off = (learned.params[name] - truth) / learned.standard_errors[name]
            deviations[name].append(np.ravel(off[lower]))
    for name, found in deviations.items():
        off = np.abs(np.stack(found))
        cells = number((off < 1.96).mean(), 2), str((off > 3).sum()), f"{off.max():.1f}"
        yield [TITLES[name], str(off.size), *cells]


def templates() -> Pieces:
    """Relative error of the vertices of both shapes, from vertices that are wrong, and random."""
    headings = ["begun at", "seeds", "starts of each", "error of the start"]
    headings += ["largest error learnt, chosen start", "of all starts"]
    yield Table("learning-templates", headings, _templates())


def _templates() -> Iterator[list[str]]:
    for name, noise, seeds, starts in (
        ("vertices with noise of 0.3 of their size", 0.3, WRONG_SEEDS, 1),
        ("random vertices", 1.0, RANDOM_SEEDS, STARTS),
    ):
        begun, errors = (
            np.array(x)
            for x in zip(*(_from_starts(noise, seed, starts) for seed in range(seeds)), strict=True)
        )
        spread = f"{begun.min():.2f} to {begun.max():.2f}"
        largest = f"{errors[:, 0].max():.0e}", f"{errors.max():.0e}"
        yield [name, str(seeds), str(starts), spread, *largest]


def _from_starts(noise: float, seed: int, num_starts: int) -> tuple[list[float], list[float]]:
    """Errors of the starts and of what is learnt from them, by falling held-out objective."""
    rng = np.random.default_rng(seed)
    right = dict(zip(NAMES, shapes(*NAMES), strict=True))
    training = sample_scenes(TEMPLATE_DRAWS, 0.0, SEED + seed, NAMES)
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
        print(learned.status, flush=True)
        assert learned.holdout is not None
        tried.append((learned.holdout[-1], _farthest(begun, right), learned))
    tried.sort(key=lambda one: -one[0])
    errors = [_farthest(learned.params, right) for _, _, learned in tried]
    return [start for _, start, _ in tried], errors


def _with_templates(points=None, present=None, *, begun):  # type: ignore[no-untyped-def]
    own = [normalise(numpyro.param(name, jnp.asarray(x))) for name, x in begun.items()]
    precision = numpyro.param("precision", 1e2, constraint=constraints.positive)
    return presence_constellation(points, present, precision=precision, parts=stack(own))


def _learnt(sigma: float, seed: int, e_step: EStep = "exact") -> Learned:
    """Noise and poses, from scenes under the presence prior."""
    training = sample_scenes(DRAWS, sigma, seed)
    program = leave_open(presence_constellation, ("precision", "pose"), PAPER)
    learned = learn(program, training, jax.random.key(0), e_step=e_step, num_steps=ROUNDS)
    print(learned.status, flush=True)
    return learned


def _from_labels(sigma: float, seed: int) -> Mapping[str, Any]:
    """The same numbers with the true matches: moments of poses by least squares, and residuals."""
    scenes = sample_scenes(DRAWS, sigma, seed)
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


def _farthest(found: Mapping[str, Any], right: Mapping[str, np.ndarray]) -> float:
    return max(_apart(np.asarray(found[name]), right[name]) for name in right)


def _apart(found: Float[np.ndarray, "n 2"], right: Float[np.ndarray, "n 2"]) -> float:
    """Distance after the best similarity and order, relative to the size."""
    wanted, points = ((x - x.mean(axis=0)) @ [1, 1j] for x in (right, found))
    orders = (points[list(order)] for order in itertools.permutations(range(len(points))))
    fits = (np.linalg.norm(wanted - np.vdot(z, wanted) / np.vdot(z, z) * z) for z in orders)
    return float(min(fits) / np.linalg.norm(wanted))


STUDIES: dict[str, Callable[..., Pieces]] = {
    "time": seconds_of_a_round,
    "coverage": coverage,
    "noise": noise_and_poses,
    "templates": templates,
    "sized": sized,
}
