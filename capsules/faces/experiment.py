"""The faces experiment: scenes of drawn faces, explained by coordinate ascent and by RANSAC.

A cell is a number of faces, apart from each other or occluded. It is computed in blocks of scenes,
each kept in the store, so an interrupted experiment resumes where it stopped and ends in the same
numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from capsules.faces.appearance import Appearance, fit_appearance, split_faces
from capsules.faces.artist import draw_images
from capsules.faces.images import FaceImages, load_images
from capsules.faces.rendering import render, render_poses, scene_rmse
from capsules.faces.scenes import FaceScenes, sample_face_scenes
from capsules.methods import key_of
from capsules.store import Entry, Store, sealed
from inference import cavi, ransac
from inference.diagnostics.metrics import same_partition
from inference.result import Result
from models.faces import GEOMETRIC, faces_program
from models.program.sites import Program

BLOCK = 50
"""Scenes of a block, which are inferred at a time and kept in one entry of the store."""

RESTARTS = 4
"""Restarts of coordinate ascent on a scene; the paper has 5."""

RANSAC_OPTIONS: dict[str, Any] = {
    "features": GEOMETRIC,
    "tolerance": 0.05,
    "cover": "sequential",
    "fewest_points": 1,
}

METHODS = {
    "vi": "VI",
    "ransac": "RANSAC, one part",
    "draw": "RANSAC, one part, a draw",
    "refit": "RANSAC, refitted",
}
"""The methods compared. The appearance of a face comes from all its parts by VI; from the posterior
of a single part, its mean or a draw; or from all parts that RANSAC matched."""


@dataclass(frozen=True, eq=False)
class FaceStudy:
    """Part images, the appearance model fitted to them, and the faces that scenes are made of."""

    images: FaceImages
    appearance: Appearance
    faces: Int[np.ndarray, "test 6"]
    programs: dict[int, Program] = field(default_factory=dict)

    def program(self, num_faces: int) -> Program:
        """The program for a number of faces, always the same one: methods compile once for each."""
        if num_faces not in self.programs:
            self.programs[num_faces] = faces_program(
                self.appearance.factors, self.images.centres, num_faces
            )
        return self.programs[num_faces]

    def scenes(
        self,
        num_scenes: int,
        num_faces: int,
        seed: int = 0,
        occluded: bool = False,
        first: int = 0,
    ) -> FaceScenes:
        """Scenes of the test faces (`capsules.faces.scenes.sample_face_scenes`)."""
        options: dict[str, Any] = {"occluded": occluded, "first": first}
        tables = self.appearance.tables(self.images)
        return sample_face_scenes(
            self.images, tables, self.faces, num_scenes, num_faces, seed, **options
        )


def open_study(folder: Path | None = None, seed: int = 0) -> FaceStudy:
    """Load part images from a folder, or draw them, and fit the model to their training faces."""
    images = draw_images(seed) if folder is None else load_images(folder)
    return FaceStudy(images, fit_appearance(images, seed), split_faces(images, seed).test)


class Explained(NamedTuple):
    """The results of all methods on a batch of scenes."""

    results: dict[str, Result]
    poses: dict[str, Float[np.ndarray, "scenes K p"]]
    """For each of `METHODS` the pose of each true face, as far as its points were found."""


def explain(
    study: FaceStudy, scenes: FaceScenes, seed: int = 0, restarts: int = RESTARTS
) -> Explained:
    """Run every method on a batch of scenes.

    One part determines the pose of a face, so VI and RANSAC both allow faces with a single part.
    """
    program = study.program(scenes.poses.shape[1])
    single, refitted = (
        ransac.run(program, scenes.scene, key_of(seed), refit=refit, **RANSAC_OPTIONS)
        for refit in (False, True)
    )
    results = {
        "vi": cavi.run(program, scenes.scene, key_of(seed), num_restarts=restarts, fewest_points=1),
        "ransac": single,
        "refit": refitted,
    }
    poses = {name: poses_of_faces(result, scenes) for name, result in results.items()}
    poses["draw"] = poses_of_faces(single, scenes, np.random.default_rng([seed, 1]))
    return Explained(results, poses)


def poses_of_faces(
    result: Result, scenes: FaceScenes, rng: np.random.Generator | None = None
) -> Float[np.ndarray, "scenes K p"]:
    """The pose, its mean or a draw, of the object with the most points of each true face.

    Faces are exchangeable, so an object is identified only by its points.
    """
    num_objects = result.pose_mean.shape[1]
    truth = np.asarray(scenes.scene.object)
    together = np.eye(num_objects)[truth] * (truth >= 0)[..., None]
    shared = np.swapaxes(together, 1, 2) @ np.eye(num_objects)[result.labels]
    index = (np.arange(len(truth))[:, None], shared.argmax(axis=2))
    mean = result.pose_mean[index]
    if rng is None:
        return mean
    root = np.linalg.cholesky(result.pose_covariance[index])
    drawn = mean + np.einsum("skpq,skq->skp", root, rng.normal(size=mean.shape))
    return np.concatenate([mean[..., :GEOMETRIC], drawn[..., GEOMETRIC:]], axis=-1)


def appearance_rmse(
    study: FaceStudy, scenes: FaceScenes, poses: Float[np.ndarray, "scenes K p"]
) -> Float[np.ndarray, " scenes"]:
    """RMSE of the scores of observed parts, as predicted from poses."""
    factors, scene = study.appearance.factors, scenes.scene
    predicted = poses[..., GEOMETRIC:] @ factors.loadings.T + factors.mean
    squares, count = np.zeros((2, len(poses)))
    rows = np.arange(len(poses))[:, None]
    for t, own in enumerate(factors.slices):
        size = factors.part_dims[t]
        seen = scene.present & (scene.point_type == t)
        residual = (
            scene.points[..., GEOMETRIC : GEOMETRIC + size] - predicted[rows, scene.object, own]
        )
        squares += np.sum(residual**2 * seen[..., None], axis=(1, 2))
        count += size * seen.sum(axis=1)
    return np.sqrt(squares / count)


def measure(study: FaceStudy, scenes: FaceScenes, explained: Explained) -> dict[str, np.ndarray]:
    """For each scene: whether the assignment is right, and the errors of each method.

    Points match only parts of their type, so an assignment is right if the partition into faces is.
    `scene_` errors are over the whole canvas, `mask_` ones over what the true faces cover.
    """
    truth = np.asarray(scenes.scene.object)
    numbers = {
        f"right_{name}": same_partition(truth, result.labels).astype(float)
        for name, result in explained.results.items()
    }
    for name, poses in explained.poses.items():
        numbers[f"appearance_{name}"] = appearance_rmse(study, scenes, poses)
        numbers[f"scene_{name}"], numbers[f"mask_{name}"] = np.zeros((2, len(poses)))
    for i in range(len(truth)):
        wanted, cover = true_scene(study, scenes, i)
        for name, poses in explained.poses.items():
            drawn = render_poses(study.images, study.appearance, poses[i])
            numbers[f"scene_{name}"][i] = scene_rmse(wanted, drawn)
            numbers[f"mask_{name}"][i] = scene_rmse(wanted, drawn, cover)
    return numbers


def true_scene(
    study: FaceStudy, scenes: FaceScenes, index: int
) -> tuple[Float[np.ndarray, "224 224"], Float[np.ndarray, "224 224"]]:
    """The scene as it was drawn, and the share of each pixel that faces cover."""
    images = [study.images.compose(face[0], face[1:]) for face in scenes.faces[index]]
    return render(images, study.images.mask, scenes.poses[index])


class Cell(NamedTuple):
    """Scenes with `num_faces` faces each."""

    num_faces: int
    occluded: bool = False

    @property
    def name(self) -> str:
        """The heading in tables."""
        return f"{self.num_faces} faces" + (", occluded" if self.occluded else "")


CELLS = (Cell(2), Cell(3), Cell(4), Cell(5), Cell(3, occluded=True))
MORE_CELLS = tuple(Cell(number) for number in range(6, 11))
"""Cells that the paper does not have."""


class Block(NamedTuple):
    """Some scenes of a cell, and where their numbers are kept."""

    cell: Cell
    first: int
    size: int
    entry: Entry


def blocks_of(
    study: FaceStudy, cells: Sequence[Cell], num_scenes: int, seed: int, store: Store
) -> list[Block]:
    """All blocks of all cells."""
    data = study.images.fingerprint, study.appearance.factors.num_factors

    def block(cell: Cell, first: int) -> Block:
        size = min(BLOCK, num_scenes - first)
        name = f"{cell.name.replace(', ', '-').replace(' ', '-')}-{first:05d}"
        settings = {"seed": seed, "restarts": RESTARTS, "scenes": [first, size, BLOCK]}
        return Block(cell, first, size, store.entry(name, cell=cell, data=data, **settings))

    return [block(cell, first) for cell in cells for first in range(0, num_scenes, BLOCK)]


def run_blocks(
    study: FaceStudy,
    blocks: Sequence[Block],
    seed: int,
    store: Store,
    progress: Callable[[Cell, int, int], None] | None = None,
) -> dict[Cell, dict[str, np.ndarray]]:
    """The numbers of every scene of every cell, computed or read from the store.

    Args:
        progress: called with the cell, and the blocks done and in all.
    """
    numbers: dict[Cell, list[dict[str, np.ndarray]]] = {}
    for done, block in enumerate(blocks):
        if progress is not None:
            progress(block.cell, done, len(blocks))
        found = store.read(block.entry)
        if found is None:
            found = _numbers(study, block, seed)
            store.write(block.entry, sealed(block.entry, found))
        numbers.setdefault(block.cell, []).append(found)
    return {
        cell: {name: np.concatenate([one[name] for one in some]) for name in some[0]}
        for cell, some in numbers.items()
    }


def _numbers(study: FaceStudy, block: Block, seed: int) -> dict[str, np.ndarray]:
    cell, size = block.cell, block.size
    scenes = study.scenes(size, cell.num_faces, seed, cell.occluded, block.first)
    scenes = scenes.take(np.resize(np.arange(size), BLOCK))  # one compiled shape for all blocks
    key = int(np.random.SeedSequence([seed, block.first]).generate_state(1)[0])
    numbers = measure(study, scenes, explain(study, scenes, key))
    return {name: values[:size] for name, values in numbers.items()}
