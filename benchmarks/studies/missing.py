"""Scenes with parts missing: VI, the best parse (by set packing), and exact inference.

Scenes have all of 3, 6, 12 or 24 objects: square, triangle and square, or the six shapes in turn.
Each part is missing with probability 0.1, and at least three of each object are seen. The program
is the presence prior with a visibility of 0.9. Scenes are of a seed that nothing was chosen on.

A wrong scene has one of three causes (`Causes`): the search missed something better, the bound of
`ds` prefers what is wrong although the density does not, or the model itself does.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from benchmarks.report import Pieces, Table, share
from capsules.experiments.generator import sample_scenes
from inference import cavi, exact, map_parse
from inference.conditions.problem import Problem, read_problem
from inference.diagnostics.metrics import partition_metrics
from inference.diagnostics.readout import most_probable_match
from inference.result import Result
from models.constellation import presence_constellation
from models.program.sites import Program
from models.scenes import Scene
from models.templates import SHAPES, shapes, stack

SEED = 52_711
MISSING, FEWEST = 0.1, 3
SCENES = {3: 200, 6: 100, 12: 48, 24: 24}
"""By the number of objects."""

_ROUNDING = 1e-6  # nats
_NEAR = 1e-3  # nats; what runs that end in the same optimum may differ by
_CERTAIN = 20.0  # nats by which the true match is preferred where ascent begins


class Setting(NamedTuple):
    """Template noise, the precision that the program has, and what is run on which sizes."""

    sigma: float
    precision: float
    methods: dict[str, tuple[int, ...]]


EVERY = (3, 6, 12, 24)
SETTINGS = (
    Setting(0.0, 1e6, {"ds": EVERY, "map": EVERY}),
    Setting(0.0, 3e3, {"exact": (3,), "ds": EVERY, "map": EVERY}),
    Setting(0.1, 3e3, {"exact": (3,), "ds": (3, 6), "map": (3, 6)}),
)


def pieces() -> Pieces:
    """Scene accuracy of each setting and method by the number of objects, and causes of errors."""
    causes: dict[str, dict[int, str]] = {}
    headings = [f"{count} objects, {num_parts_of(count)} parts" for count in EVERY]
    yield Table("missing", ["", *headings], rows(causes))
    lines = [[name, *(of.get(count, "") for count in EVERY)] for name, of in causes.items()]
    yield Table("missing_causes", ["search, bound, model", *headings], lines)


def rows(causes: dict[str, dict[int, str]]) -> Iterator[list[str]]:
    """Scene accuracies; causes of errors are added to `causes`, by row and number of objects."""
    for sigma, precision, methods in SETTINGS:
        for method, sizes in methods.items():
            name = f"σ = {sigma:g}, precision {precision:,.0f}: `{method}`"
            cells, causes[name] = dict.fromkeys(EVERY, ""), {}
            for count in sizes:
                program = program_of(count, precision)
                scenes = occluded(shapes_of(count), SCENES[count], SEED, sigma)
                result = METHODS[method](program, scenes)
                assert scenes.object is not None
                right = partition_metrics(scenes.object, result.labels)["scene_accuracy"]
                cells[count] = share(right)
                found = causes_of(program, result, np.flatnonzero(right < 1))
                bound = found.bound if method == "ds" else "–"
                causes[name][count] = f"{found.search}, {bound}, {found.model}"
            yield [name, *cells.values()]
    yield ["scenes", *(str(SCENES[count]) for count in EVERY)]


def program_of(count: int, precision: float) -> Program:
    """The presence prior for a number of objects."""
    return functools.partial(
        presence_constellation,
        parts=stack(shapes(*shapes_of(count))),
        visibility=1 - MISSING,
        precision=precision,
    )


def num_parts_of(count: int) -> int:
    """How many parts all objects have."""
    return sum(len(SHAPES[name]) for name in shapes_of(count))


def shapes_of(count: int) -> tuple[str, ...]:
    """The paper's three objects, or the six shapes in turn."""
    if count == 3:
        return ("square", "triangle", "square")
    return tuple(itertools.islice(itertools.cycle(SHAPES), count))


def occluded(names: tuple[str, ...], count: int, seed: int, sigma: float = 0.0) -> Scene:
    """Scenes of all named objects, of which some parts are missing."""
    scenes = sample_scenes(count, sigma, seed, objects=names, presence=1.0)
    assert scenes.object is not None
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(len(names)), [len(SHAPES[name]) for name in names])
    present = np.zeros_like(scenes.present)
    for row, k in itertools.product(present, range(len(names))):
        while row[owner == k].sum() < FEWEST:
            row[owner == k] = rng.random((owner == k).sum()) >= MISSING
    return Scene(
        np.where(present[..., None], scenes.points, 0.0),
        present,
        np.where(present, scenes.object, -1),
    )


class Causes(NamedTuple):
    """Why scenes are wrong."""

    search: int
    """There is something better by the method's own objective: ascent from the true match ends in a
    higher ELBO or, for methods without one, the true match has a higher density."""
    bound: int
    """The ELBO prefers what was found, and the density the true match."""
    model: int
    """What was found has the higher density."""


def causes_of(program: Program, result: Result, wrong: Int[np.ndarray, " wrong"]) -> Causes:
    """Tell the causes of wrong scenes apart; in the truth row n is part n."""
    if not len(wrong):
        return Causes(0, 0, 0)
    scenes = result.scene.take(wrong)
    truth = np.where(scenes.present, np.arange(scenes.present.shape[1]), -1)
    found = np.stack([most_probable_match(result.take(int(i))) for i in wrong])
    densities = [log_density(program, scenes, result.owner, match) for match in (found, truth)]
    is_below = densities[0] < densities[1] - _ROUNDING
    is_missed = is_below
    if result.elbo is not None and result.method == "ds":
        is_missed = result.elbo[wrong] < elbo_from_truth(program, scenes, result.owner) - _NEAR
    return Causes(
        search=int(is_missed.sum()),
        bound=int((is_below & ~is_missed).sum()),
        model=int((~is_below & ~is_missed).sum()),
    )


def elbo_from_truth(
    program: Program, scenes: Scene, owner: Int[np.ndarray, " N"]
) -> Float[np.ndarray, " scenes"]:
    """Where coordinate ascent ends that begins at the true match, all objects being there."""
    count, num_parts = scenes.present.shape
    given = scenes._replace(presence=np.ones((count, owner.max() + 1), int))
    logits = np.tile(np.where(np.eye(num_parts, dtype=bool), 0.0, -_CERTAIN), (count, 1, 1))
    begun = cavi.run(
        program, given, jax.random.key(0), num_restarts=1, init_strategy=lambda _: logits
    )
    assert begun.elbo is not None
    return begun.elbo


def log_density(
    program: Program,
    scenes: Scene,
    owner: Int[np.ndarray, " N"],
    match: Int[np.ndarray, "scenes N"],
) -> Float[np.ndarray, " scenes"]:
    """log p(points, match), the objects with points being those that are present.

    Args:
        match: the part of each row, -1 for none.
    """
    point = np.full_like(match, -1)
    scene, row = np.nonzero(match >= 0)
    point[scene, match[scene, row]] = row
    presence = [(point[:, owner == k] >= 0).any(axis=1) for k in range(owner.max() + 1)]
    problem = read_problem(program, scenes, {"presence": np.stack(presence, 1)}, or_bound=True)
    assert isinstance(problem, Problem)
    judged = map_parse.judged(problem, map_parse.completed(problem, point))
    return judged.log_density + problem.log_constant


METHODS: dict[str, Callable[[Program, Scene], Result]] = {
    "exact": exact.run,
    "ds": lambda program, scenes: cavi.run(program, scenes, jax.random.key(0)),
    "map": map_parse.run,
}
