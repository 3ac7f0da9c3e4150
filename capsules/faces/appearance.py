"""The appearance model of faces: probabilistic PCA of each part, a factor analyser over all parts.

Pixels of a part become a few scores, by a probabilistic PCA that keeps 95 % of the variance. The
scores of the five parts of a face, stacked, have a factor analyser

    scores = loadings @ factors + mean + noise,    factors ~ Normal(0, I),  noise diagonal,

whose factors are the appearance dimensions of a face's pose. Both are fitted by scikit-learn. Parts
are combined at random within a group, so one part tells only the group of another.
"""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from sklearn.decomposition import PCA, FactorAnalysis

from capsules.faces.images import FaceImages
from models.errors import InputError
from models.faces import FactorAnalyser

NUM_TRAIN, NUM_TEST = 18_000, 7_614
"""Faces of the paper's split, balanced over groups."""

VARIANCE_KEPT = 0.95
MAX_FACTORS = 12


class PartPCA(NamedTuple):
    """Probabilistic PCA of one part type; its scores are whitened."""

    mean: Float[np.ndarray, " pixels"]
    components: Float[np.ndarray, "scores pixels"]
    """Directions of unit length times the standard deviation along them."""

    def encode(self, pixels: Float[np.ndarray, "*batch pixels"]) -> Float[np.ndarray, "*batch q"]:
        """The scores of a part's pixels."""
        lengths = np.sum(self.components**2, axis=1)
        return (pixels - self.mean) @ self.components.T / lengths

    def decode(self, scores: Float[np.ndarray, "*batch q"]) -> Float[np.ndarray, "*batch pixels"]:
        """The pixels of a part with these scores."""
        return scores @ self.components + self.mean


class Appearance(NamedTuple):
    """The fitted model, and the errors by which the number of factors was chosen."""

    pca: tuple[PartPCA, ...]
    factors: FactorAnalyser
    prediction_error: Float[np.ndarray, "candidates 2"]
    """For 1, 2, ... factors the leave-one-part-out error and its standard error."""

    def encode(
        self, images: FaceImages, faces: Int[np.ndarray, "faces 6"]
    ) -> Float[np.ndarray, "faces D"]:
        """The stacked scores of faces, each given by a group and five variants."""
        return stack_scores(self.tables(images), faces)

    def tables(self, images: FaceImages) -> list[Float[np.ndarray, "groups variants q"]]:
        """The scores of every part image."""
        return [pca.encode(pixels) for pca, pixels in zip(self.pca, images.pixels, strict=True)]


class Split(NamedTuple):
    """Training and test faces, one in each row: group, then a variant of each part."""

    train: Int[np.ndarray, "train 6"]
    test: Int[np.ndarray, "test 6"]


def split_faces(images: FaceImages, seed: int = 0) -> Split:
    """Up to 18,000 training and 7,614 test faces, the same number of each group."""
    groups, variants = images.num_groups, images.num_variants
    in_group = variants**5
    num_train = min(NUM_TRAIN // groups, int(0.7 * in_group))
    num_test = min(NUM_TEST // groups, in_group - num_train)
    rng = np.random.default_rng(seed)
    train, test = [], []
    for group in range(groups):
        chosen = rng.permutation(in_group)[: num_train + num_test]
        digits = np.stack(np.unravel_index(chosen, (variants,) * 5), axis=1)
        faces = np.c_[np.full(len(chosen), group), digits]
        train.append(faces[:num_train])
        test.append(faces[num_train:])
    return Split(np.concatenate(train), np.concatenate(test))


def stack_scores(
    tables: list[Float[np.ndarray, "groups variants q"]], faces: Int[np.ndarray, "faces 6"]
) -> Float[np.ndarray, "faces D"]:
    """The scores of the five parts of each face, side by side."""
    group = faces[:, 0]
    columns = [table[group, v] for table, v in zip(tables, faces[:, 1:].T, strict=True)]
    return np.concatenate(columns, axis=1)


def fit_part(pixels: Float[np.ndarray, "groups variants pixels"]) -> PartPCA:
    """Probabilistic PCA of the images of one part type, keeping 95 % of the variance."""
    images = np.asarray(pixels, float).reshape(-1, pixels.shape[-1])
    if np.ptp(images, axis=0).max() == 0:
        raise InputError(
            "all images of a part are the same, so there is no appearance to model; give variants "
            "that differ"
        )
    fit = PCA(VARIANCE_KEPT, svd_solver="full").fit(images)
    scale = np.sqrt(fit.explained_variance_)
    # A direction has no sign; the largest pixel is made positive so that a refit agrees.
    sign = np.sign(fit.components_[np.arange(len(scale)), np.abs(fit.components_).argmax(axis=1)])
    return PartPCA(fit.mean_, fit.components_ * (sign * scale)[:, None])


def fit_factors(
    scores: Float[np.ndarray, "faces D"], part_dims: tuple[int, ...], num_factors: int
) -> FactorAnalyser:
    """The maximum likelihood factor analyser.

    It depends on the faces only through their mean and covariance, so scikit-learn gets 2 D rows
    with the same mean and covariance instead of thousands.
    """
    mean = scores.mean(axis=0)
    triangle = np.asarray(np.linalg.qr(scores - mean, mode="r"))
    rows = np.concatenate([triangle, -triangle]) * np.sqrt(len(triangle) / len(scores))
    fit = FactorAnalysis(num_factors, svd_method="lapack", tol=1e-3, max_iter=10_000).fit(rows)
    return FactorAnalyser(fit.components_.T.copy(), mean, fit.noise_variance_, part_dims)


def prediction_error(
    factors: FactorAnalyser, scores: Float[np.ndarray, "faces D"]
) -> Float[np.ndarray, " faces"]:
    """Mean squared error of each face's scores, each part predicted from the four others."""
    squares = np.zeros(len(scores))
    centred = scores - factors.mean
    for part in factors.slices:
        weights = factors.loadings / factors.noise_variance[:, None]
        weights[part] = 0.0
        precision = np.eye(factors.num_factors) + factors.loadings.T @ weights
        posterior_mean = np.linalg.solve(precision, weights.T @ centred.T)
        residual = centred[:, part].T - factors.loadings[part] @ posterior_mean
        squares += np.sum(residual**2, axis=0)
    return squares / scores.shape[1]


def choose_num_factors(
    scores: Float[np.ndarray, "faces D"], part_dims: tuple[int, ...], seed: int = 0
) -> tuple[int, Float[np.ndarray, "candidates 2"]]:
    """Choose the number of factors by the error of predicting a left-out part.

    Fits on five sixths of the faces and predicts each part of the others from the rest of its face.
    Returns the smallest number whose error is within one standard error of the lowest, and the
    errors of 1, 2, ... factors with their standard errors.
    """
    order = np.random.default_rng(seed).permutation(len(scores))
    held_out, kept = np.split(order, [len(order) // 6])
    table = []
    for number in range(1, min(MAX_FACTORS, sum(part_dims) - 1) + 1):
        errors = prediction_error(fit_factors(scores[kept], part_dims, number), scores[held_out])
        table.append((errors.mean(), errors.std(ddof=1) / np.sqrt(len(errors))))
    errors_of = np.array(table)
    lowest = errors_of[:, 0].argmin()
    enough = errors_of[:, 0] <= errors_of[lowest].sum()
    return int(np.argmax(enough)) + 1, errors_of


def fit_appearance(images: FaceImages, seed: int = 0, num_factors: int | None = None) -> Appearance:
    """Fit the appearance model to the training faces of `split_faces(images, seed)`.

    Args:
        num_factors: number of factors; by default chosen by `choose_num_factors`.
    """
    if num_factors is not None and num_factors < 1:
        raise InputError(f"the number of factors must be at least 1, got {num_factors}; try 5")
    return _fit_once(_Key(images, seed, num_factors))


@functools.lru_cache(maxsize=4)
def _fit_once(key: "_Key") -> Appearance:
    """Fit one model for each set of images in a process."""
    return _fit(key.images, key.seed, key.num_factors)


class _Key:
    """Arguments of a fit that are equal when their images are."""

    def __init__(self, images: FaceImages, seed: int, num_factors: int | None) -> None:
        self.images, self.seed, self.num_factors = images, seed, num_factors
        self.settings = (images.fingerprint, seed, num_factors)

    def __hash__(self) -> int:
        return hash(self.settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.settings == other.settings


def _fit(images: FaceImages, seed: int, num_factors: int | None) -> Appearance:
    pca = tuple(fit_part(pixels) for pixels in images.pixels)
    part_dims = tuple(len(part.components) for part in pca)
    tables = [part.encode(pixels) for part, pixels in zip(pca, images.pixels, strict=True)]
    scores = stack_scores(tables, split_faces(images, seed).train)
    chosen, errors = choose_num_factors(scores, part_dims, seed)
    factors = fit_factors(scores, part_dims, num_factors or chosen)
    return Appearance(pca, factors, errors)
