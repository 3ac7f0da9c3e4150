"""Part images: the artist's, and folders of a user's own."""

import numpy as np
import pytest
from matplotlib.image import imsave

from capsules.faces.artist import draw_images
from capsules.faces.images import CANVAS, PART_TYPES, load_images, save_images
from models.errors import InputError


@pytest.fixture(scope="module")
def images():
    return draw_images(0)


@pytest.fixture
def folder(tmp_path):
    save_images(tmp_path, draw_images(3, num_groups=2, num_variants=2))
    return tmp_path


def test_sizes(images):
    assert images.masks.shape == (5, CANVAS, CANVAS)
    assert [p.shape[:2] for p in images.pixels] == [(6, 7)] * 5
    assert all((p >= 0).all() and (p <= 1).all() for p in images.pixels)


def test_the_seed_decides(images):
    again = draw_images.__wrapped__(0)
    assert all(np.array_equal(a, b) for a, b in zip(images.pixels, again.pixels, strict=True))
    other = draw_images(1, 2, 2)
    assert not np.array_equal(other.pixels[0], images.pixels[0][:2, :2])
    assert other.fingerprint != images.fingerprint == again.fingerprint


def test_masks_share_no_pixel_and_leave_no_hole(images):
    count = images.masks.sum(axis=0)
    assert count.max() == 1
    rows = np.flatnonzero(images.mask.any(axis=1))
    for row in rows:  # the head is convex: each row is one run of pixels
        columns = np.flatnonzero(images.mask[row])
        assert len(columns) == columns[-1] - columns[0] + 1


def test_parts_are_stacked_from_hair_to_jaw_on_one_line(images):
    assert PART_TYPES == ("eyes", "nose", "mouth", "jaw", "hair")  # the paper's order
    centres = images.centres
    np.testing.assert_allclose(centres[:, 0], 0.0, atol=1e-12)
    assert (np.diff(centres[[4, 0, 1, 2, 3], 1]) > 0).all()


def test_groups_differ_more_than_variants_do(images):
    for pixels in images.pixels:
        tone = pixels.mean(axis=2)
        assert tone.mean(axis=1).std() > tone.std(axis=1).mean()


def test_every_variant_differs(images):
    for pixels in images.pixels:
        flat = pixels.reshape(42, -1)
        distance = np.abs(flat[:, None] - flat[None]).max(axis=2)
        assert distance[~np.eye(42, dtype=bool)].min() > 0.02


def test_a_face_is_its_parts(images):
    face = images.compose(4, (0, 1, 2, 3, 4))
    for t, mask in enumerate(images.masks):
        np.testing.assert_array_equal(face[mask], images.pixels[t][4, t])
    assert not face[~images.mask].any()


def test_a_folder_gives_back_what_was_saved(folder):
    saved = draw_images(3, num_groups=2, num_variants=2)
    loaded = load_images(folder)
    np.testing.assert_array_equal(loaded.masks, saved.masks)
    for a, b in zip(loaded.pixels, saved.pixels, strict=True):
        assert np.abs(a - b).max() <= 0.5001 / 255


def test_no_folder(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        load_images(tmp_path / "nowhere")


def test_a_missing_image_is_named(folder):
    (folder / "1" / "nose_1.png").unlink()
    with pytest.raises(InputError, match=r"there is no image .*nose_1\.png"):
        load_images(folder)


def test_an_image_of_another_size_is_named(folder):
    imsave(folder / "0" / "jaw_0.png", np.zeros((100, 80)), cmap="gray")
    with pytest.raises(
        InputError, match=r"jaw_0\.png has 80 x 100 pixels, but must have 224 x 224"
    ):
        load_images(folder)


def test_a_file_that_is_no_image(folder):
    (folder / "0" / "eyes_1.png").write_text("not a picture")
    with pytest.raises(InputError, match=r"cannot read .*eyes_1\.png as a PNG"):
        load_images(folder)


def test_masks_that_overlap(folder):
    imsave(folder / "masks" / "nose.png", np.ones((CANVAS, CANVAS)), cmap="gray", vmin=0, vmax=1)
    with pytest.raises(InputError, match="overlap at"):
        load_images(folder)


def test_an_empty_mask(folder):
    imsave(folder / "masks" / "eyes.png", np.zeros((CANVAS, CANVAS)), cmap="gray", vmin=0, vmax=1)
    with pytest.raises(InputError, match="black all over"):
        load_images(folder)


def test_too_few_variants(folder):
    for group in "01":
        for part in PART_TYPES:
            (folder / group / f"{part}_1.png").unlink()
    with pytest.raises(InputError, match="1 variants"):
        load_images(folder)


@pytest.mark.parametrize("given", [(-1, 6, 7), (0, 1, 7), (0, 6, 1)])
def test_what_the_artist_refuses(given):
    with pytest.raises(InputError, match="at least 2 groups"):
        draw_images(*given)
