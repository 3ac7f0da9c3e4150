"""Scenes of faces: which faces, where they are, and which of their parts can be seen.

Coordinates are those of the canvas, from -1 to 1 with y down, both for the scene and for the
upright face. A pose (t_x, t_y, s cos a, s sin a) maps a place on the face to one in the scene (see
`models.geometry.similarity`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from capsules.faces.appearance import stack_scores
from capsules.faces.images import CANVAS, PART_TYPES, FaceImages, pixel_grid
from models.errors import InputError
from models.faces import GEOMETRIC
from models.scenes import Scene, join

MAX_FACES = 12
_TRIES = 300  # places to try for a face before its scene is drawn again
_SAMPLED = 150  # pixels of a part, or of the outline, that stand for all of them
SEEN_SHARE = 0.5
"""A part is observed if more than this share of it can be seen."""


class FaceScenes(NamedTuple):
    """A batch of scenes with everything that is known about them."""

    scene: Scene
    """The input of inference, with the true object of each row."""
    faces: Int[np.ndarray, "scenes K 6"]
    """Group and variants of each face; a later face hides an earlier one."""
    poses: Float[np.ndarray, "scenes K 4"]

    def take(self, index: slice | Int[np.ndarray, " some"]) -> "FaceScenes":
        """Some of the scenes, by slice or numbers."""
        return FaceScenes(self.scene.take(index), self.faces[index], self.poses[index])


def sample_face_scenes(
    images: FaceImages,
    tables: list[Float[np.ndarray, "groups variants q"]],
    faces: Int[np.ndarray, "test 6"],
    num_scenes: int,
    num_faces: int,
    seed: int = 0,
    *,
    occluded: bool = False,
    first: int = 0,
) -> FaceScenes:
    """Draw scenes of different faces; each scene depends only on the seed and its own number.

    Faces are scaled to at most a half, smaller if there are many, turned by any angle, and placed
    one after another so that they are inside the canvas and do not overlap. Occluded scenes drop
    both conditions: parts behind another face or beyond the edge are missing. At least one part of
    each scene is missing, but at least one part of every face is seen.

    Args:
        tables: the scores of every part image (`Appearance.tables`).
        faces: the faces to choose from (`split_faces(images).test`).
        first: the number of the first scene.
    """
    if not 1 <= num_faces <= MAX_FACES or num_scenes < 1 or seed < 0:
        raise InputError(
            f"scenes of faces require 1 to {MAX_FACES} faces, at least one scene and a seed of 0 "
            f"or more, got {num_faces} faces, {num_scenes} scenes, seed {seed}; try 3, 250, 0"
        )
    shape = _Shape.of(images)
    dims = tuple(table.shape[-1] for table in tables)
    scenes = []
    for number in range(first, first + num_scenes):
        rng = np.random.default_rng([seed, num_faces, int(occluded), number])
        chosen = faces[rng.choice(len(faces), num_faces, replace=False)]
        if occluded:
            poses, seen = _overlapping(rng, num_faces, shape)
        else:
            poses = _apart(rng, num_faces, shape)
            seen = np.ones((num_faces, len(PART_TYPES)), bool)
        scores = stack_scores(tables, chosen)
        scene = face_points(poses, scores, dims, images.centres, seen, rng)
        scenes.append((scene, chosen, poses))
    batch = join([scene for scene, _, _ in scenes])
    return FaceScenes(batch, *(np.stack(x) for x in list(zip(*scenes, strict=True))[1:]))


def face_points(
    poses: Float[np.ndarray, "K 4"],
    scores: Float[np.ndarray, "K D"],
    part_dims: tuple[int, ...],
    centres: Float[np.ndarray, "types 2"],
    seen: Bool[np.ndarray, "K types"],
    rng: np.random.Generator,
) -> Scene:
    """The scene of some faces without noise, its rows in random order."""
    num_faces, types = seen.shape
    points = np.zeros((num_faces, types, GEOMETRIC + max(part_dims)))
    points[..., :2] = _place(poses[:, None], centres)
    points[..., 2:GEOMETRIC] = poses[:, None, 2:]  # upright and of size 1 in the face itself
    ends = np.cumsum(part_dims)
    for t, (size, end) in enumerate(zip(part_dims, ends, strict=True)):
        points[:, t, GEOMETRIC : GEOMETRIC + size] = scores[:, end - size : end]
    owner, kind = np.indices((num_faces, types)).reshape(2, -1)
    order = rng.permutation(num_faces * types)
    present = seen.ravel()[order]
    return Scene(
        points=np.where(present[:, None], points.reshape(-1, points.shape[-1])[order], 0.0),
        present=present,
        object=np.where(present, owner[order], -1),
        point_type=np.where(present, kind[order], -1),
    )


class _Shape(NamedTuple):
    """The shape of a face, from its masks."""

    mask: Bool[np.ndarray, "224 224"]
    outline: Float[np.ndarray, "some 2"]
    """Places on its edge."""
    parts: list[Float[np.ndarray, "some 2"]]
    """Places within each part."""

    @classmethod
    def of(cls, images: FaceImages) -> "_Shape":
        grid = np.stack(pixel_grid(), axis=-1)
        mask = images.mask
        padded = np.pad(mask, 1)
        inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
        return cls(mask, _some(grid[mask & ~inner]), [_some(grid[m]) for m in images.masks])

    def covers(
        self, pose: Float[np.ndarray, " 4"], places: Float[np.ndarray, "*n 2"]
    ) -> Bool[np.ndarray, "*n"]:
        """Which places of the scene a face with this pose covers."""
        x, y = np.moveaxis(places - pose[:2], -1, 0)
        c, s = pose[2:] / np.sum(pose[2:] ** 2)
        column, row = (
            np.floor((v + 1) * (CANVAS / 2)).astype(int) for v in (c * x - s * y, s * x + c * y)
        )
        inside = (np.minimum(row, column) >= 0) & (np.maximum(row, column) < CANVAS)
        return inside & self.mask[np.where(inside, row, 0), np.where(inside, column, 0)]


def _some(places: Float[np.ndarray, "all 2"]) -> Float[np.ndarray, "some 2"]:
    """Choose evenly spaced ones of many places."""
    return places[np.unique(np.linspace(0, len(places) - 1, _SAMPLED).astype(int))]


def _place(
    pose: Float[np.ndarray, "*n 4"], places: Float[np.ndarray, "*n 2"]
) -> Float[np.ndarray, "*n 2"]:
    """Map places of the face to the scene (eq. nxycs, rows 1 and 2)."""
    t_x, t_y, c, s = np.moveaxis(pose, -1, 0)
    x, y = np.moveaxis(places, -1, 0)
    return np.stack([t_x + c * x + s * y, t_y + c * y - s * x], axis=-1)


def _proposals(rng: np.random.Generator, num_faces: int) -> Iterator[Float[np.ndarray, "K 4"]]:
    """Yield random poses with sizes of at most a half, so that K faces leave room."""
    largest = min(0.5, 1.0 / np.sqrt(num_faces))
    while True:
        scale = np.sort(rng.uniform(0.5 * largest, largest, num_faces))[::-1]
        angle = rng.uniform(-np.pi, np.pi, num_faces)
        move = rng.uniform(-1, 1, (num_faces, 2))
        yield np.c_[move, scale * np.cos(angle), scale * np.sin(angle)]


def _apart(rng: np.random.Generator, num_faces: int, shape: _Shape) -> Float[np.ndarray, "K 4"]:
    """Poses of faces inside the canvas that do not overlap, the largest placed first."""
    for poses in _proposals(rng, num_faces):
        placed = 0
        for k in range(num_faces):
            for _ in range(_TRIES):
                edge = _place(poses[k], shape.outline)
                if np.abs(edge).max() < 1 and not any(
                    shape.covers(other, edge).any()
                    or shape.covers(poses[k], _place(other, shape.outline)).any()
                    for other in poses[:k]
                ):
                    placed += 1
                    break
                poses[k, :2] = rng.uniform(-1, 1, 2)
            if placed <= k:
                break
        if placed == num_faces:
            return poses[rng.permutation(num_faces)]
    raise AssertionError("proposals never end")


def _overlapping(
    rng: np.random.Generator, num_faces: int, shape: _Shape
) -> tuple[Float[np.ndarray, "K 4"], Bool[np.ndarray, "K 5"]]:
    """Poses of faces anywhere, later ones in front, and which of their parts can be seen."""
    for poses in _proposals(rng, num_faces):
        seen = visible_parts(poses, shape)
        if not seen.all() and seen.any(axis=1).all():
            return poses, seen
    raise AssertionError("proposals never end")


def visible_parts(poses: Float[np.ndarray, "K 4"], shape: _Shape) -> Bool[np.ndarray, "K 5"]:
    """Whether more than half of each part is neither behind a later face nor beyond the edge."""
    seen = np.zeros((len(poses), len(shape.parts)), bool)
    for k, pose in enumerate(poses):
        for t, places in enumerate(shape.parts):
            there = _place(pose, places)
            free = np.abs(there).max(axis=-1) < 1
            for other in poses[k + 1 :]:
                free &= ~shape.covers(other, there)
            seen[k, t] = free.mean() > SEEN_SHARE
    return seen
