"""Rendering of faces with sub-pixel accuracy, and the difference of two scenes.

The value of a pixel of the scene is interpolated at its place on the face, so a face that moves by
a tenth of a pixel changes by a tenth. Faces are smoothed first, as much as they will be shrunk.
Edges are soft: a face covers a share of the pixels on its outline.
"""

import numpy as np
from jaxtyping import Bool, Float
from scipy.ndimage import affine_transform, gaussian_filter

from capsules.faces.appearance import Appearance
from capsules.faces.images import CANVAS, FaceImages
from models.faces import GEOMETRIC

_HALF = CANVAS / 2


def render(
    images: list[Float[np.ndarray, "224 224"]],
    mask: Bool[np.ndarray, "224 224"],
    poses: Float[np.ndarray, "K 4"],
) -> tuple[Float[np.ndarray, "224 224"], Float[np.ndarray, "224 224"]]:
    """Draw upright faces at their poses on black, later ones in front.

    Faces smaller than a pixel are left out. Returns the scene and the share of each pixel that is
    covered by faces.
    """
    scene, cover = np.zeros((2, CANVAS, CANVAS))
    for image, pose in zip(images, poses, strict=True):
        if np.hypot(*pose[2:]) * CANVAS < 1:
            continue
        alpha = _moved(mask.astype(float), pose)
        scene = scene * (1 - alpha) + _moved(image * mask, pose)
        cover = cover * (1 - alpha) + alpha
    return scene, cover


def imagine(
    images: FaceImages, appearance: Appearance, factors: Float[np.ndarray, " k"]
) -> Float[np.ndarray, "224 224"]:
    """The upright face that the appearance model predicts from some factors."""
    model = appearance.factors
    scores = model.loadings @ factors + model.mean
    parts = [pca.decode(scores[own]) for pca, own in zip(appearance.pca, model.slices, strict=True)]
    return np.clip(images.paint(parts), 0, 1)


def render_poses(
    images: FaceImages, appearance: Appearance, poses: Float[np.ndarray, "K p"]
) -> Float[np.ndarray, "224 224"]:
    """Draw the scene of inferred poses, with their geometric and appearance dimensions."""
    faces = [imagine(images, appearance, pose[GEOMETRIC:]) for pose in poses]
    return render(faces, images.mask, poses[:, :GEOMETRIC])[0]


def scene_rmse(
    first: Float[np.ndarray, "224 224"],
    second: Float[np.ndarray, "224 224"],
    cover: Float[np.ndarray, "224 224"] | None = None,
) -> float:
    """Root mean square difference over the canvas or, with a cover, over what it covers."""
    weight = np.ones_like(first) if cover is None else cover
    return float(np.sqrt(np.sum(weight * (first - second) ** 2) / np.sum(weight)))


def _moved(
    image: Float[np.ndarray, "224 224"], pose: Float[np.ndarray, " 4"]
) -> Float[np.ndarray, "224 224"]:
    """Draw an image of the upright face at a pose.

    The place on the face of (x, y) in the scene is the inverse of eq. nxycs; the centre of pixel
    (row, column) is (y, x) = (row + 1/2, column + 1/2) / 112 - 1.
    """
    scale = np.hypot(*pose[2:])
    c, s = pose[2:] / scale**2
    inverse = np.array(
        [[c, s], [-s, c]]
    )  # (y, x) of the scene, less the move, to (y, x) of the face
    centre = _HALF - 0.5
    offset = centre - inverse @ (centre + _HALF * pose[1::-1])
    smooth = gaussian_filter(image, max(0.0, 0.5 * (1 / scale - 1)), mode="constant")
    return affine_transform(smooth, inverse, offset, order=1, mode="constant")
