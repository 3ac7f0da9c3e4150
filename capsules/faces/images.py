"""Sets of part images of faces, and folders of PNG files that hold one.

A set has some groups of people and for each group some variants of each of the five part types. Any
variants of one group make a face, so 6 groups of 7 variants make 6 x 7^5 = 100,842 faces. They are
not stored; `compose` makes one on demand. Images are grey, 0 black and 1 white, on a canvas of
224 x 224 pixels. The masks of the part types do not overlap; together they are the face.

A folder holds a set as

    masks/eyes.png   masks/nose.png   masks/mouth.png   masks/jaw.png   masks/hair.png
    0/eyes_0.png     0/eyes_1.png     ...               (group / part type _ variant)
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.image import imread, imsave
from PIL import Image

from models.errors import InputError

CANVAS = 224
"""Pixels of a side of the canvas."""

PART_TYPES = ("eyes", "nose", "mouth", "jaw", "hair")
"""Part types in the paper's order; a type's number is its index here."""


class FaceImages(NamedTuple):
    """A set of part images."""

    masks: Bool[np.ndarray, "5 224 224"]
    """The pixels of each part type."""
    pixels: tuple[Float[np.ndarray, "groups variants pixels"], ...]
    """For each part type the pixels of its mask, in the order of numpy's boolean indexing."""

    @property
    def num_groups(self) -> int:
        """Number of groups of faces."""
        return self.pixels[0].shape[0]

    @property
    def num_variants(self) -> int:
        """Number of images of each part in a group."""
        return self.pixels[0].shape[1]

    @property
    def mask(self) -> Bool[np.ndarray, "224 224"]:
        """The pixels of the whole face."""
        return np.asarray(self.masks.any(axis=0))

    @property
    def fingerprint(self) -> str:
        """A digest of all pixels."""
        digest = hashlib.sha256(np.packbits(self.masks).tobytes())
        for pixels in self.pixels:
            digest.update(np.ascontiguousarray(pixels, np.float32).tobytes())
        return digest.hexdigest()[:16]

    @property
    def centres(self) -> Float[np.ndarray, "5 2"]:
        """The middle of each mask, (x, y) in units of half the canvas, y down: the template."""
        x, y = pixel_grid()
        middle = [((v[mask].min() + v[mask].max()) / 2) for mask in self.masks for v in (x, y)]
        return np.array(middle).reshape(-1, 2)

    def compose(
        self, group: int, variants: Int[np.ndarray, " 5"] | tuple[int, ...]
    ) -> Float[np.ndarray, "224 224"]:
        """Compose a face from a variant of each part of one group."""
        return self.paint([self.pixels[t][group, v] for t, v in enumerate(variants)])

    def paint(self, parts: list[Float[np.ndarray, " pixels"]]) -> Float[np.ndarray, "224 224"]:
        """Put the pixels of five parts in their places, on black."""
        image = np.zeros((CANVAS, CANVAS))
        for mask, pixels in zip(self.masks, parts, strict=True):
            image[mask] = pixels
        return image


def pixel_grid() -> tuple[Float[np.ndarray, "224 224"], Float[np.ndarray, "224 224"]]:
    """x and y of the pixel centres, from -1 to 1 over the canvas, y down."""
    line = (np.arange(CANVAS) + 0.5) / (CANVAS / 2) - 1
    x, y = np.meshgrid(line, line)
    return x, y


def load_images(folder: str | Path) -> FaceImages:
    """Read a set of part images from a folder of PNG files, laid out as above.

    Groups and variants are counted from 0. There must be at least two groups and two variants, and
    the same number of variants of every part in every group.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}; give one with masks/ and a folder for each group, "
            "numbered from 0"
        )
    masks = np.stack([_read(folder / "masks" / f"{name}.png") > 0.5 for name in PART_TYPES])
    for name, mask in zip(PART_TYPES, masks, strict=True):
        if not mask.any():
            raise InputError(
                f"the mask {folder / 'masks' / name}.png is black all over; paint the pixels of "
                "the part white"
            )
    if (overlap := masks.sum(axis=0) > 1).any():
        row, column = np.argwhere(overlap)[0]
        both = [PART_TYPES[t] for t in np.flatnonzero(masks[:, row, column])]
        raise InputError(
            f"the masks of {' and '.join(both)} in {folder / 'masks'} overlap at {overlap.sum()} "
            f"pixels, the first at row {row}, column {column}; give every pixel to one part"
        )
    num_groups = _count(folder, "{}")
    num_variants = _count(folder / "0", f"{PART_TYPES[0]}_{{}}.png")
    if num_groups < 2 or num_variants < 2:
        raise InputError(
            f"{folder} has {num_groups} groups (folders 0, 1, ...) with {num_variants} variants of "
            f"each part ({PART_TYPES[0]}_0.png, ...), but must have at least 2 of both; add images"
        )
    pixels = tuple(
        np.stack(
            [
                [_read(folder / str(g) / f"{name}_{v}.png")[mask] for v in range(num_variants)]
                for g in range(num_groups)
            ]
        )
        for name, mask in zip(PART_TYPES, masks, strict=True)
    )
    return FaceImages(masks, pixels)


def save_images(folder: str | Path, images: FaceImages) -> None:
    """Write a set of part images as PNG files, for `load_images` or to look at."""
    folder = Path(folder)
    (folder / "masks").mkdir(parents=True, exist_ok=True)
    for t, (name, mask) in enumerate(zip(PART_TYPES, images.masks, strict=True)):
        _write(folder / "masks" / f"{name}.png", mask.astype(float))
        for group in range(images.num_groups):
            (folder / str(group)).mkdir(exist_ok=True)
            for variant in range(images.num_variants):
                canvas = np.zeros((CANVAS, CANVAS))
                canvas[mask] = images.pixels[t][group, variant]
                _write(folder / str(group) / f"{name}_{variant}.png", canvas)


def _count(folder: Path, pattern: str) -> int:
    """Count numbered files from 0 up to the first gap."""
    count = 0
    while (folder / pattern.format(count)).exists():
        count += 1
    return count


def _read(path: Path) -> Float[np.ndarray, "224 224"]:
    """A PNG file as grey values between 0 and 1; colours are averaged."""
    if not path.is_file():
        raise InputError(
            f"there is no image {path}; a set of part images has masks/PART.png and "
            f"GROUP/PART_VARIANT.png, PART one of {', '.join(PART_TYPES)}, numbers from 0"
        )
    try:
        with Image.open(path) as unread:
            width, height = unread.size
        if (width, height) == (CANVAS, CANVAS):  # before it is unpacked
            image = np.asarray(imread(path), float)
    except Exception as error:  # a damaged file makes the reader raise nearly anything
        raise InputError(
            f"cannot read {path} as a PNG image ({error}); save it again as PNG"
        ) from error
    if (width, height) != (CANVAS, CANVAS):
        raise InputError(
            f"the image {path} has {width} x {height} pixels, but must have {CANVAS} x {CANVAS}; "
            "scale or pad it"
        )
    return image if image.ndim == 2 else image[..., :3].mean(axis=-1)


def _write(path: Path, image: Float[np.ndarray, "224 224"]) -> None:
    levels = np.round(255 * image).astype(np.uint8)
    imsave(path, np.repeat(levels[..., None], 3, axis=-1))
