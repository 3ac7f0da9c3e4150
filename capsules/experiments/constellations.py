"""The experiments of the paper: which method on which scenes with which settings, kept as they go.

A cell is one number of a table before averaging: a method with its settings on the scenes of one
noise level. It is worked off in blocks of scenes that are always the same, whatever is written to a
file at a time, and a file appears whole or not at all: so an experiment that was killed goes on
where it stopped and ends in the same numbers.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from capsules.experiments.generator import sample_scenes
from capsules.experiments.paper import BETAS, SIGMAS
from capsules.files.scenes import load_scenes, whole_file
from capsules.methods import PRESETS, TRAINED, Preset, infer, templates
from inference.diagnostics.metrics import METRICS, PROTOCOLS, Scores, ccae_scores, score
from inference.variational.ascent import Schedule
from models.errors import InputError
from models.scenes import Scene

BLOCK = 256
"""Scenes that a method gets at a time."""

VERSION = 3
"""To be raised where a change of the code makes stored numbers stale."""

MAIN_BETA = 0.05
"""Initial beta of the paper's main table."""


class Cell(NamedTuple):
    """A method under a preset, with an initial beta where it has one, at one noise level."""

    method: str
    preset: str
    beta: float | None
    sigma: float
    weights: str | None = None
    """The file of a trained network."""

    @property
    def name(self) -> str:
        beta = "" if self.beta is None else f"-beta{self.beta:g}"
        return f"{self.method}-{self.preset}{beta}-sigma{self.sigma:.2f}"


class Scenes(NamedTuple):
    """The scenes of one noise level and, where a file has them, the predictions of CCAE."""

    scenes: Scene
    ccae: dict[str, Scores] | None


Numbers = dict[str, Scores]
"""By protocol, every metric of every scene."""


def study_cells(study: str, methods: Sequence[str], weights: Path | None = None) -> list[Cell]:
    """The cells of `table1`, of `beta` (those of `mask` are the same ones) or of `all`.

    Args:
        weights: the folder of trained networks, for methods that are some.
    """
    main = [
        Cell(
            method,
            preset,
            MAIN_BETA if method in ("ds", "gmm") else None,
            sigma,
            _weights_of(method, sigma, weights) if method in TRAINED else None,
        )
        for sigma in SIGMAS
        for method in methods
        for preset in ("paper", "default")
        if preset == "default" or method in PRESETS["paper"]
    ]
    betas = [
        Cell(method, preset, beta, sigma)
        for sigma in SIGMAS
        for method in methods
        if method in ("ds", "gmm")
        for beta in BETAS
        for preset in ("paper", "default")
    ]
    cells = {"table1": main, "beta": betas, "mask": betas, "all": main + betas}[study]
    return list(dict.fromkeys(cells))


def _weights_of(method: str, sigma: float, folder: Path | None) -> str:
    path = (folder or Path("weights")) / f"{method}-{sigma:.2f}.eqx"
    if not path.is_file():
        raise InputError(
            f"there are no weights {path} for {method}; make them with `capsules train {method} "
            f"--sigma {sigma:g} --out {path}`, or leave {method} out"
        )
    return str(path)


def scene_sets(folder: Path | None, draws: int, seed: int) -> dict[float, Scenes]:
    """The scenes of each noise level: drawn, or of files constellations_0.10.npz and so on."""
    if folder is None:
        return {s: Scenes(sample_scenes(draws, s, seed), None) for s in SIGMAS}
    return {sigma: _stored(folder / f"constellations_{sigma:.2f}.npz", draws) for sigma in SIGMAS}


def _stored(path: Path, draws: int) -> Scenes:
    scenes = load_scenes(path, limit=draws)
    if scenes.object is None:
        raise InputError(
            f"{path} has no `object`, the truth; give files as `capsules sample` makes"
        )
    with np.load(path) as file:
        if not {"ccae_object", "ccae_present"} <= set(file.files):
            return Scenes(scenes, None)
        occupied = file["present"][:draws].any(axis=1)
        predicted, present = (file[n][:draws][occupied] for n in ("ccae_object", "ccae_present"))
    owner = np.asarray(templates().owner)
    truth = np.where(scenes.present, scenes.object, -1)
    return Scenes(scenes, ccae_scores(truth, predicted, present, owner))


class Store:
    """The folder in which the numbers of an experiment are kept, a file for some blocks of a cell.

    The name of a cell's folder has a digest of all that its numbers depend on, so numbers of other
    scenes, seeds or settings are never taken for them.
    """

    def __init__(self, folder: Path, tests: Mapping[float, Scenes], seed: int) -> None:
        self.folder, self.tests, self.seed = folder, tests, seed

    def place(self, cell: Cell) -> Path:
        scenes = self.tests[cell.sigma].scenes
        digest = hashlib.sha256(repr((VERSION, BLOCK, self.seed, _options(cell))).encode())
        for array in (scenes.points, scenes.present, scenes.object):
            digest.update(np.ascontiguousarray(array).tobytes())
        if cell.weights is not None:
            digest.update(Path(cell.weights).read_bytes())
        return self.folder / f"{cell.name}-{digest.hexdigest()[:12]}"

    def load(self, cell: Cell) -> dict[int, dict[str, np.ndarray]]:
        """The blocks of a cell that are there, by number."""
        blocks = {}
        for path in sorted(self.place(cell).glob("blocks-*.npz")):
            with np.load(path) as file:
                arrays = {name: file[name] for name in file.files}
            for i, number in enumerate(arrays.pop("block")):
                blocks[int(number)] = {name: x[i] for name, x in arrays.items()}
        return blocks

    def save(self, cell: Cell, blocks: Mapping[int, dict[str, np.ndarray]]) -> None:
        numbers = sorted(blocks)
        arrays = {
            name: np.stack([blocks[number][name] for number in numbers])
            for name in blocks[numbers[0]]
        }
        folder = self.place(cell)
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / f"blocks-{numbers[0]:04d}-{numbers[-1]:04d}.npz") as file:
            np.savez(file, allow_pickle=False, block=np.array(numbers), **arrays)

    def forget(self, cells: Sequence[Cell]) -> None:
        """Remove what is there of these cells."""
        for cell in cells:
            for path in self.place(cell).glob("blocks-*.npz"):
                path.unlink()


def run_cells(
    cells: Sequence[Cell],
    store: Store,
    chunk: int = BLOCK,
    progress: Callable[[Cell, int, int], None] | None = None,
) -> Iterator[tuple[Cell, Numbers]]:
    """Work off the cells, and yield the numbers of each.

    Args:
        chunk: scenes between two files, rounded up to whole blocks; it does not change a number.
        progress: called with the cell, the blocks done of all cells, and the blocks there are.
    """
    known = {cell: store.load(cell) for cell in cells}
    num_blocks = {cell: -(-len(store.tests[cell.sigma].scenes.points) // BLOCK) for cell in cells}
    in_all, at_a_time = sum(num_blocks.values()), max(1, -(-chunk // BLOCK))

    def report(cell: Cell) -> None:
        if progress is not None:
            progress(cell, sum(len(blocks) for blocks in known.values()), in_all)

    for cell in cells:
        report(cell)
        scenes = store.tests[cell.sigma].scenes
        new: dict[int, dict[str, np.ndarray]] = {}
        for number in range(num_blocks[cell]):
            if number in known[cell]:
                continue
            known[cell][number] = new[number] = run_block(cell, scenes, number, store.seed)
            if len(new) == at_a_time:
                store.save(cell, new)
                new = {}
            report(cell)
        if new:
            store.save(cell, new)
        yield cell, _joined(known[cell], len(scenes.points))


def run_block(cell: Cell, scenes: Scene, number: int, seed: int) -> dict[str, np.ndarray]:
    """The metrics of one block of scenes; the last of several is filled up with its own scenes."""
    some = np.arange(number * BLOCK, min((number + 1) * BLOCK, len(scenes.points)))
    block = scenes.take(np.resize(some, min(BLOCK, len(scenes.points))))
    key = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    result = infer(cell.method, block, key, preset=cell.preset, **_options(cell))
    return {
        f"{protocol}_{name}": values
        for protocol, scores in score(result).items()
        for name, values in scores.items()
    }


def _options(cell: Cell) -> dict[str, Any]:
    """What the cell adds to its preset: the initial beta, or weights."""
    if cell.weights is not None:
        return {"weights": cell.weights}
    if cell.beta is None:
        return {}
    preset = PRESETS[cell.preset].get(cell.method, Preset({})).options
    schedule: Schedule = preset.get("schedule", Schedule())
    return {"schedule": schedule._replace(beta_start=cell.beta)}


def _joined(blocks: Mapping[int, dict[str, np.ndarray]], num_scenes: int) -> Numbers:
    def all_scenes(name: str) -> np.ndarray:
        return np.concatenate([blocks[number][name] for number in sorted(blocks)])[:num_scenes]

    return {p: {name: all_scenes(f"{p}_{name}") for name in METRICS} for p in PROTOCOLS}
