"""Each pose design moves its parts as its docstring says."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from models.errors import InputError
from models.geometry import DESIGNS, pose_names, similarity_pose
from models.templates import stack

PARTS = 3
numbers = st.floats(-10, 10, allow_subnormal=False)


def turned_clockwise(points: np.ndarray, scale: float, angle: float) -> np.ndarray:
    """Points (x, y), y axis up, scaled and turned clockwise about the origin."""
    cosine, sine = np.cos(angle), np.sin(angle)
    return scale * points @ np.array([[cosine, sine], [-sine, cosine]]).T


def translated(part: np.ndarray, pose: np.ndarray) -> np.ndarray:
    return part + pose


def similar(part: np.ndarray, pose: np.ndarray) -> np.ndarray:
    scale, angle = np.hypot(*pose[2:]), np.arctan2(pose[3], pose[2])
    return pose[:2] + turned_clockwise(part[:, :2], scale, angle)


def oriented(part: np.ndarray, pose: np.ndarray) -> np.ndarray:
    scale, angle = np.hypot(*pose[2:]), np.arctan2(pose[3], pose[2])
    size, direction = np.hypot(part[:, 2], part[:, 3]), np.arctan2(part[:, 3], part[:, 2])
    own = [scale * size * np.cos(direction + angle), scale * size * np.sin(direction + angle)]
    return np.concatenate([similar(part, pose), np.transpose(own)], axis=1)


def linear(part: np.ndarray, pose: np.ndarray) -> np.ndarray:
    return pose[:2] + part @ pose[2:].reshape(2, -1).T


class Expected(NamedTuple):
    coordinates: int
    pose: int
    moved: Callable[[np.ndarray, np.ndarray], np.ndarray]


EXPECTED = {
    "translation": Expected(2, 2, translated),
    "similarity": Expected(2, 4, similar),
    "oriented_similarity": Expected(4, 4, oriented),
    "affine": Expected(2, 6, linear),
    "affine_camera": Expected(3, 8, linear),
}


def test_every_design_has_a_row_here():
    assert EXPECTED.keys() == DESIGNS.keys()


@pytest.mark.parametrize("name", EXPECTED)
@given(data=st.data())
def test_a_pose_moves_the_parts(name, data):
    expected = EXPECTED[name]
    part = data.draw(arrays(float, (PARTS, expected.coordinates), elements=numbers))
    pose = data.draw(arrays(float, expected.pose, elements=numbers))
    F, offset = DESIGNS[name](jnp.asarray(part))
    moved = np.asarray(F) @ pose + np.asarray(offset)
    np.testing.assert_allclose(moved, expected.moved(part, pose), rtol=1e-10, atol=1e-10)


@given(
    template=arrays(float, (PARTS, 2), elements=numbers, unique=True),
    move=arrays(float, 2, elements=numbers),
    scale=st.floats(0.1, 5),
    angle=st.floats(-np.pi, np.pi),
    further_move=arrays(float, 2, elements=numbers),
    further_scale=st.floats(0.1, 5),
    further_angle=st.floats(-np.pi, np.pi),
)
def test_similarities_compose(
    template, move, scale, angle, further_move, further_scale, further_angle
):
    """Turning, scaling and moving a posed template is the same as posing it so at once."""
    parts = stack([template])
    points = np.asarray(parts.predict(similarity_pose(move, scale, angle)[None]))
    further = further_move + turned_clockwise(points, further_scale, further_angle)
    at_once = similarity_pose(
        further_move + turned_clockwise(move, further_scale, further_angle),
        further_scale * scale,
        further_angle + angle,
    )
    np.testing.assert_allclose(parts.predict(at_once[None]), further, rtol=1e-9, atol=1e-9)


@given(
    part=arrays(float, (PARTS, 4), elements=numbers),
    pose=arrays(float, 4, elements=numbers),
)
def test_position_and_orientation_turn_together(part, pose):
    """The tip of the arrow that a part draws moves like any point fixed to the object.

    The direction phi is measured clockwise, so with the y axis up the arrow of (c, s) is (c, -s).
    """

    def tips(features):
        return features[:, :2] + features[:, 2:] * np.array([1, -1])

    F, _ = DESIGNS["oriented_similarity"](jnp.asarray(part))
    point_map, _ = DESIGNS["similarity"](jnp.asarray(tips(part)))
    np.testing.assert_allclose(
        tips(np.asarray(F) @ pose), np.asarray(point_map) @ pose, rtol=1e-10, atol=1e-10
    )


def test_a_turn_by_hand():
    """A part at (1, 0) that points to the right, turned by 90 degrees clockwise, y up.

    It is at (0, -1) then, and its direction is phi = 90 degrees: (cos phi, -sin phi), down.
    """
    part = np.array([[1.0, 0.0, 1.0, 0.0]])
    pose = similarity_pose(np.zeros(2), scale=1.0, angle=np.pi / 2)
    F, offset = DESIGNS["oriented_similarity"](part)
    x, y, cosine, sine = np.asarray(F @ pose + offset)[0]
    np.testing.assert_allclose([x, y], [0, -1], atol=1e-15)
    np.testing.assert_allclose([cosine, -sine], [0, -1], atol=1e-15)


NAMES = {
    "translation": ["t_x", "t_y"],
    "similarity": ["t_x", "t_y", "s_cos", "s_sin"],
    "oriented_similarity": ["t_x", "t_y", "s_cos", "s_sin"],
    "affine": ["t_x", "t_y", "a_11", "a_12", "a_21", "a_22"],
    "affine_camera": ["t_x", "t_y", "a_11", "a_12", "a_13", "a_21", "a_22", "a_23"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_dimensions_of_a_pose_have_names(name):
    part = np.random.default_rng(0).normal(size=(PARTS, EXPECTED[name].coordinates))
    F, _ = DESIGNS[name](part)
    assert pose_names(np.asarray(F)) == NAMES[name]
    # Further dimensions, such as the factors of a face, have numbers.
    more = np.concatenate([F, np.random.default_rng(1).normal(size=(*F.shape[:2], 1))], axis=-1)
    assert pose_names(more)[-1] == str(F.shape[-1])
    assert pose_names(np.asarray(F) + 1.0) == [str(i) for i in range(F.shape[-1])]


def test_translation_takes_points_of_any_dimension():
    coordinates = np.arange(6.0).reshape(2, 3)
    F, offset = DESIGNS["translation"](jnp.asarray(coordinates))
    move = np.array([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(F @ move + offset, coordinates + move)


def test_similarity_poses_broadcast():
    pose = similarity_pose(np.zeros((5, 1, 2)), scale=np.ones(3), angle=0.0)
    assert pose.shape == (5, 3, 4)
    np.testing.assert_array_equal(pose[0, 0], [0, 0, 1, 0])


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "translation"])
def test_a_wrong_number_of_coordinates_is_named(name):
    with pytest.raises(InputError, match=rf"{name} requires parts with .* got .*shape \(3, 5\)"):
        DESIGNS[name](jnp.zeros((3, 5)))
