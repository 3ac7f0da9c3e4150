"""The experiments of the paper: methods, scenes and settings, with stored results.

A cell is one number of a table before averaging: a method with its settings on the scenes of one
noise level. It is computed in fixed blocks of scenes, each kept in the store, so an interrupted
experiment resumes where it stopped and ends in the same numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from capsules.experiments.generator import sample_scenes
from capsules.experiments.paper import BETAS, SIGMAS
from capsules.files.inputs import load_scenes
from capsules.methods import PRESETS, TRAINED, Preset, infer, templates
from capsules.store import Entry, Store, digest, sealed
from inference.diagnostics.metrics import METRICS, PROTOCOLS, Scores, ccae_scores, score
from inference.variational.ascent import Schedule
from models.errors import InputError
from models.scenes import Scene

BLOCK = 256
"""Scenes of a block, which a method infers at a time and an entry of the store holds."""

MAIN_BETA = 0.05
"""Initial beta of the paper's main table."""

PRESET_NAMES = ("paper", "published", "default")
"""Presets that a method is run with, if it has them."""


class Cell(NamedTuple):
    """A method under a preset and a prior, with an initial beta if it has one, at a noise level."""

    method: str
    preset: str
    beta: float | None
    sigma: float
    weights: str | None = None
    """The file of a trained network."""
    prior: str = "uniform"

    @property
    def name(self) -> str:
        """Its name in the store."""
        beta = "" if self.beta is None else f"-beta{self.beta:g}"
        prior = "" if self.prior == "uniform" else f"-{self.prior}"
        return f"{self.method}-{self.preset}{prior}{beta}-sigma{self.sigma:.2f}"


class Scenes(NamedTuple):
    """The scenes of one noise level and, if a file has them, the predictions of CCAE."""

    scenes: Scene
    ccae: dict[str, Scores] | None
    ccae_labels: Int[np.ndarray, "scenes N"] | None = None
    """CCAE's object for each row, including dummy rows."""


Numbers = dict[str, Scores]
"""By protocol, every metric of every scene."""


def study_cells(study: str, methods: Sequence[str], weights: Path | None = None) -> list[Cell]:
    """The cells of `table1`, of `beta` (those of `mask` are the same ones) or of `all`.

    Args:
        weights: the folder of trained networks, for methods that require them.
    """
    main = [
        Cell(
            method,
            preset,
            MAIN_BETA if method in ("ds", "gmm") else None,
            sigma,
            weights_of(method, sigma, weights) if method in TRAINED else None,
        )
        for sigma in SIGMAS
        for method in methods
        for preset in PRESET_NAMES
        if preset == "default" or method in PRESETS[preset]
    ]
    betas = [
        Cell(method, preset, beta, sigma)
        for sigma in SIGMAS
        for method in methods
        if method in ("ds", "gmm")
        for beta in BETAS
        for preset in PRESET_NAMES
    ]
    cells = {"table1": main, "beta": betas, "mask": betas, "all": main + betas}[study]
    return list(dict.fromkeys(cells))


def weights_of(method: str, sigma: float, folder: Path | None) -> str:
    """The file of a trained network for a noise level."""
    path = (folder or Path("weights")) / f"{method}-{sigma:.2f}.eqx"
    if not path.is_file():
        raise InputError(
            f"there are no weights {path} for {method}; make them with `capsules train {method} "
            f"--sigma {sigma:g} --out {path}`, or leave {method} out"
        )
    return str(path)


def scene_sets(folder: Path | None, draws: int, seed: int) -> dict[float, Scenes]:
    """The scenes of each noise level: drawn, or from files constellations_0.10.npz and so on."""
    if folder is None:
        return {s: Scenes(sample_scenes(draws, s, seed), None) for s in SIGMAS}
    return {sigma: _stored(folder / f"constellations_{sigma:.2f}.npz", draws) for sigma in SIGMAS}


def _stored(path: Path, draws: int) -> Scenes:
    scenes = load_scenes(path, limit=draws)
    if scenes.object is None:
        raise InputError(
            f"{path} has no `object`, the truth; give files as `capsules sample` writes them"
        )
    with np.load(path) as file:
        if not {"ccae_object", "ccae_present"} <= set(file.files):
            return Scenes(scenes, None)
        occupied = file["present"][:draws].any(axis=1)
        predicted, present = (file[n][:draws][occupied] for n in ("ccae_object", "ccae_present"))
    owner = np.asarray(templates().owner)
    truth = np.where(scenes.present, scenes.object, -1)
    return Scenes(scenes, ccae_scores(truth, predicted, present, owner), predicted.astype(int))


def entries_of(
    cells: Sequence[Cell], tests: Mapping[float, Scenes], seed: int, store: Store
) -> dict[Cell, list[Entry]]:
    """The entries of each cell, one for each block of its scenes."""
    data = {sigma: digest(*some.scenes) for sigma, some in tests.items()}
    trained = {path: digest(np.fromfile(path, np.uint8)) for path in _weights(cells)}

    def entry(cell: Cell, number: int) -> Entry:
        depends = {"cell": cell, "options": _options(cell), "seed": seed, "block": [number, BLOCK]}
        if cell.weights is not None:
            depends["weights"] = trained[cell.weights]
        return store.entry(f"{cell.name}-{number:04d}", data=data[cell.sigma], **depends)

    blocks = {s: -(-len(some.scenes.points) // BLOCK) for s, some in tests.items()}
    return {cell: [entry(cell, number) for number in range(blocks[cell.sigma])] for cell in cells}


def _weights(cells: Sequence[Cell]) -> set[str]:
    return {cell.weights for cell in cells if cell.weights is not None}


def run_cells(
    cells: Sequence[Cell],
    tests: Mapping[float, Scenes],
    seed: int,
    store: Store,
    progress: Callable[[Cell, int, int], None] | None = None,
) -> Iterator[tuple[Cell, Numbers]]:
    """Compute the cells, or read what is stored, and yield the numbers of each.

    Args:
        progress: called with the cell, and the blocks done and in all, over all cells.
    """
    entries, done = entries_of(cells, tests, seed, store), 0
    in_all = sum(map(len, entries.values()))
    for cell in cells:
        scenes, blocks = tests[cell.sigma].scenes, []
        for number, entry in enumerate(entries[cell]):
            if progress is not None:
                progress(cell, done, in_all)
            block = store.read(entry)
            if block is None:
                block = run_block(cell, scenes, number, seed)
                store.write(entry, sealed(entry, block))
            blocks.append(block)
            done += 1
        yield cell, _joined(blocks, len(scenes.points))


def run_block(cell: Cell, scenes: Scene, number: int, seed: int) -> dict[str, np.ndarray]:
    """The metrics of one block of scenes; a short last block is padded with its own scenes."""
    some = np.arange(number * BLOCK, min((number + 1) * BLOCK, len(scenes.points)))
    block = scenes.take(np.resize(some, min(BLOCK, len(scenes.points))))
    key = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    result = infer(cell.method, block, key, preset=cell.preset, prior=cell.prior, **_options(cell))
    return {
        f"{protocol}_{name}": values
        for protocol, scores in score(result).items()
        for name, values in scores.items()
    }


def _options(cell: Cell) -> dict[str, Any]:
    """Options of a cell beside its preset: the initial beta, or weights."""
    if cell.weights is not None:
        return {"weights": cell.weights}
    if cell.beta is None:
        return {}
    preset = PRESETS[cell.preset].get(cell.method, Preset({})).options
    schedule: Schedule = preset.get("schedule", Schedule())
    if cell.preset != "published":
        return {"schedule": schedule._replace(beta_start=cell.beta)}
    if cell.method == "ds":
        return {"beta_start": cell.beta}
    # The published mixture does not anneal, so its beta stays at the initial value.
    return {"schedule": schedule._replace(beta_start=cell.beta, beta_max=cell.beta)}


def _joined(blocks: Sequence[dict[str, np.ndarray]], num_scenes: int) -> Numbers:
    def all_scenes(name: str) -> np.ndarray:
        return np.concatenate([block[name] for block in blocks])[:num_scenes]

    return {p: {name: all_scenes(f"{p}_{name}") for name in METRICS} for p in PROTOCOLS}
