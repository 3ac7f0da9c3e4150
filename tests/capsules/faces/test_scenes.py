"""Scenes of faces and their pictures, against painting pixel by pixel."""

import numpy as np
import pytest

from capsules.faces.appearance import fit_part, split_faces
from capsules.faces.artist import draw_images
from capsules.faces.images import CANVAS, pixel_grid
from capsules.faces.rendering import render, scene_rmse
from capsules.faces.scenes import sample_face_scenes
from models.errors import InputError
from models.faces import FactorAnalyser, face_parts, faces_program
from models.program.reading import read
from models.templates import Parts


@pytest.fixture(scope="module")
def images():
    return draw_images(2, num_groups=3, num_variants=3)


@pytest.fixture(scope="module")
def tables(images):
    return [fit_part(pixels).encode(pixels) for pixels in images.pixels]


@pytest.fixture(scope="module")
def sample(images, tables):
    faces = split_faces(images).test

    def draw(count, num_faces, seed=0, **options):
        return sample_face_scenes(images, tables, faces, count, num_faces, seed, **options)

    return draw


def made_up_factors(dims, num_factors=3) -> FactorAnalyser:
    rng = np.random.default_rng(0)
    size = sum(dims)
    return FactorAnalyser(
        rng.normal(size=(size, num_factors)), rng.normal(size=size), rng.uniform(0.1, 1, size), dims
    )


def cover_of(mask, pose):
    """The pixels of the scene that a face covers: every one looked up on the face."""
    x, y = pixel_grid()
    linear = np.array([[pose[2], pose[3]], [-pose[3], pose[2]]])
    on_face = np.linalg.solve(linear, np.stack([x - pose[0], y - pose[1]]).reshape(2, -1))
    column, row = np.floor((on_face + 1) * CANVAS / 2).astype(int)
    inside = (row >= 0) & (row < CANVAS) & (column >= 0) & (column < CANVAS)
    covered = np.zeros(CANVAS**2, bool)
    covered[inside] = mask[row[inside], column[inside]]
    return covered.reshape(CANVAS, CANVAS)


@pytest.mark.parametrize("num_faces", [2, 5, 8])
def test_faces_do_not_overlap_and_are_inside(images, sample, num_faces):
    scenes = sample(4, num_faces)
    for poses in scenes.poses:
        covers = np.stack([cover_of(images.mask, pose) for pose in poses])
        assert (covers.sum(axis=0) > 1).sum() <= 3 * num_faces  # pixels that outlines share
        area = images.mask.sum() * np.sum(poses[:, 2:] ** 2, axis=1)
        np.testing.assert_allclose(covers.sum(axis=(1, 2)), area, rtol=0.02)  # nothing is cut off
        assert (np.hypot(*poses[:, 2:].T) <= 0.5).all()
    assert scenes.scene.present.all()


def test_rows_are_the_parts_that_the_program_expects(images, tables, sample):
    """Geometry by the program's own templates, scores by the tables."""
    scenes = sample(2, 3, seed=1)
    dims = tuple(table.shape[-1] for table in tables)
    parts = face_parts(made_up_factors(dims), images.centres, 3)
    for i in range(2):
        pose = np.c_[scenes.poses[i], np.zeros((3, 3))]
        predicted = np.asarray(parts.predict(pose))[:, :4].reshape(3, 5, 4)
        scene = scenes.scene.take(i)
        for row in range(15):
            face, kind = scene.object[row], scene.point_type[row]
            np.testing.assert_allclose(scene.points[row, :4], predicted[face, kind], atol=1e-12)
            group, *variants = scenes.faces[i, face]
            own = scene.points[row, 4 : 4 + dims[kind]]
            np.testing.assert_array_equal(own, tables[kind][group, variants[kind]])
            assert not scene.points[row, 4 + dims[kind] :].any()
        assert not np.array_equal(scene.object, np.repeat(np.arange(3), 5))


def test_the_first_scenes_stay_the_same(sample):
    few, many, last = sample(2, 2), sample(4, 2), sample(2, 2, first=2)
    np.testing.assert_array_equal(few.scene.points, many.scene.points[:2])
    np.testing.assert_array_equal(last.scene.points, many.scene.points[2:])
    assert not np.array_equal(sample(2, 2, seed=9).poses, few.poses)


def test_what_is_hidden_is_missing(images, sample):
    scenes = sample(6, 3, occluded=True)
    for i, poses in enumerate(scenes.poses):
        scene = scenes.scene.take(i)
        seen = np.zeros((3, 5), bool)
        seen[scene.object[scene.present], scene.point_type[scene.present]] = True
        for k, pose in enumerate(poses):
            free = np.ones((CANVAS, CANVAS), bool)
            for other in poses[k + 1 :]:
                free &= ~cover_of(images.mask, other)
            for t, mask in enumerate(images.masks):
                visible = (cover_of(mask, pose) & free).sum()
                share = visible / (mask.sum() * np.sum(pose[2:] ** 2))
                if abs(share - 0.5) > 0.05:  # pixels stand for areas
                    assert seen[k, t] == (share > 0.5)
        assert not seen.all() and seen.any(axis=1).all()
        assert not scene.points[~scene.present].any()
        assert (scene.object[~scene.present] == -1).all()


@pytest.mark.parametrize("given", [(1, 0), (1, 13), (0, 2)])
def test_what_is_refused(sample, given):
    with pytest.raises(InputError, match="require 1 to 12 faces"):
        sample(*given)


# --- the program ---------------------------------------------------------------------------------


def test_templates_have_a_block_for_each_kind_of_feature(images):
    dims = (2, 4, 1, 3, 2)
    factors = made_up_factors(dims)
    parts: Parts = face_parts(factors, images.centres, 2, precision=1e4)
    assert parts.F.shape == (10, 8, 7)
    np.testing.assert_array_equal(parts.type, [0, 1, 2, 3, 4] * 2)
    np.testing.assert_array_equal(
        np.asarray(parts.feature_mask).sum(axis=1)[:5], 4 + np.array(dims)
    )
    pose = np.random.default_rng(1).normal(size=7)
    for n in range(10):
        t = n % 5
        start = sum(dims[:t])
        x, y = images.centres[t]
        t_x, t_y, c, s = pose[:4]
        geometric = [t_x + c * x + s * y, t_y - s * x + c * y, c, s]
        scores = factors.loadings[start : start + dims[t]] @ pose[4:]
        wanted = np.r_[geometric, scores + factors.mean[start : start + dims[t]]]
        got = np.asarray(parts.F[n] @ pose + parts.offset[n])
        np.testing.assert_allclose(got[: len(wanted)], wanted, atol=1e-12)
        variance = np.r_[[1e-4] * 4, factors.noise_variance[start : start + dims[t]]]
        np.testing.assert_allclose(np.asarray(parts.variance)[n, : len(wanted)], variance)


def test_points_only_meet_parts_of_their_type(images, tables, sample):
    dims = tuple(table.shape[-1] for table in tables)
    program = faces_program(made_up_factors(dims), images.centres, 3)
    scene = sample(1, 3, occluded=True).scene.take(0)
    probs = np.exp(np.asarray(read(program, scene).match_logits))
    kind = np.tile(np.arange(5), 3)
    for row in np.flatnonzero(scene.present):
        np.testing.assert_allclose(probs[row], (kind == scene.point_type[row]) / 3, atol=1e-12)
    np.testing.assert_allclose(probs.sum(axis=0), 1.0, atol=1e-12)
    np.testing.assert_allclose(probs.sum(axis=1), 1.0, atol=1e-12)


# --- pictures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, 0.25, 0.5])
def test_a_face_is_drawn_where_its_pose_says(shift):
    """The middle of a soft spot, found by weighing pixels, to a hundredth of a pixel."""
    x, y = pixel_grid()
    place = np.array([0.3, -0.2])
    spot = np.exp(-((x - place[0]) ** 2 + (y - place[1]) ** 2) / 0.01)
    scale, angle = 0.45, 0.8
    c, s = scale * np.cos(angle), scale * np.sin(angle)
    pose = np.array([0.1 + shift * 2 / CANVAS, -0.15, c, s])
    scene, cover = render([spot], np.ones((CANVAS, CANVAS), bool), pose[None])
    middle = [np.sum(v * scene) / np.sum(scene) for v in (x, y)]
    wanted = pose[:2] + np.array([[c, s], [-s, c]]) @ place
    np.testing.assert_allclose(middle, wanted, atol=0.01 * 2 / CANVAS)
    np.testing.assert_allclose(scene.sum(), spot.sum() * scale**2, rtol=1e-3)
    np.testing.assert_allclose(cover.sum(), CANVAS**2 * scale**2, rtol=0.02)


def test_an_upright_face_of_size_one_is_itself(images):
    face = images.compose(1, (0, 1, 2, 0, 1))
    scene, cover = render([face], images.mask, np.array([[0.0, 0.0, 1.0, 0.0]]))
    np.testing.assert_allclose(scene, face, atol=1e-12)
    np.testing.assert_array_equal(cover, images.mask)


def test_a_later_face_is_in_front_and_a_tiny_one_left_out():
    mask = np.ones((CANVAS, CANVAS), bool)
    pose = np.array([[0.0, 0.0, 0.5, 0.0], [0.2, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    scene, _ = render([0.3 * mask, 0.9 * mask, mask], mask, pose)
    np.testing.assert_allclose(scene[112, [75, 112, 160]], [0.3, 0.9, 0.9], atol=1e-9)


def test_rmse():
    first = np.zeros((CANVAS, CANVAS))
    second = first.copy()
    second[:10, :10] = 0.5
    np.testing.assert_allclose(scene_rmse(first, second), 0.5 * 10 / CANVAS)
    np.testing.assert_allclose(scene_rmse(first, second, second > 0), 0.5)
