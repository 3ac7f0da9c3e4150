"""Templates: normalised shapes, stacked parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from models import geometry
from models.errors import InputError
from models.templates import SHAPES, normalise, shapes, stack
from tests.oracle import predicted_parts

numbers = st.floats(-100, 100).map(lambda x: round(x, 3))


@given(template=arrays(float, (4, 2), elements=numbers, unique=True))
def test_a_normalised_template_is_centred_with_mean_square_norm_one(template):
    result = normalise(template)
    np.testing.assert_allclose(result.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(np.mean(np.sum(result**2, axis=1)), 1, rtol=1e-12)


def test_a_normalised_template_keeps_its_shape():
    template = np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
    result = normalise(template)
    sides = [np.linalg.norm(result[i] - result[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    np.testing.assert_allclose(np.array(sides) / sides[0], [1, 4 / 3, 5 / 3], rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "distances"),
    [
        ("square", [2, 2, 2, 2, np.sqrt(8), np.sqrt(8)]),
        ("triangle", [2, np.sqrt(5), np.sqrt(5)]),
    ],
)
def test_the_shapes_of_the_paper(name, distances):
    vertices = SHAPES[name]
    pairs = [np.linalg.norm(a - b) for i, a in enumerate(vertices) for b in vertices[:i]]
    np.testing.assert_allclose(sorted(pairs), sorted(distances))


def test_all_shapes_stack():
    assert [len(shape) for shape in shapes(*SHAPES)] == [4, 3, 4, 5, 6, 6]
    parts = stack(shapes(*SHAPES))
    assert (parts.num_parts, parts.num_features, parts.pose_dim, parts.num_objects) == (28, 2, 4, 6)


def test_stacked_parts_keep_to_their_owner():
    parts = stack(shapes("square", "triangle", "square"), variance=0.5)
    np.testing.assert_array_equal(parts.owner, [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    np.testing.assert_array_equal(parts.variance, np.full((11, 2), 0.5))
    assert parts.feature_mask.all()


@pytest.mark.parametrize("design", ["translation", "similarity"])
def test_predictions_follow_the_pose_of_the_owner(design):
    rng = np.random.default_rng(0)
    templates = [rng.normal(size=(count, 2)) for count in (2, 3)]
    parts = stack(templates, geometry.DESIGNS[design])
    poses = rng.normal(size=(6, 2, parts.pose_dim))
    expected = [
        predicted_parts(*map(np.asarray, (parts.F, parts.offset, parts.owner)), pose)
        for pose in poses
    ]
    np.testing.assert_allclose(parts.predict(poses), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: stack([]), "at least one template is required"),
        (lambda: stack([np.zeros((0, 2))]), r"template 0 has no parts .*\(0, 2\)"),
        (lambda: stack([[[0, 0], [1, 1]], [1.0, 2.0]]), r"template 1 has no parts .*\(2,\)"),
        (lambda: stack([[[0, 0], [np.nan, 1]]]), "template 0 has coordinates that are not finite"),
        (lambda: stack([[[3, 4], [3, 4]]]), r"template 0 lie in one place, \[3.0, 4.0\]"),
        (lambda: stack([[[0, 0], [1, 1]]], variance=-2.0), "positive, got -2.0"),
        (lambda: stack([[[0, 0], [1, 1]]], variance=np.inf), "positive, got inf"),
        (lambda: stack([[[0, 0, 0], [1, 1, 1]]]), r"similarity requires .* got .*\(2, 3\)"),
        (
            lambda: shapes("square", "circle"),
            "no shape 'circle'; give some of square",
        ),
        (lambda: normalise([[1.0, 2.0]], "dot"), "dot has a single part"),
        (lambda: normalise(np.zeros((0, 2)), "nothing"), "nothing has no parts"),
        (lambda: normalise([[1e9, 0], [1e9, 0]]), "lie in one place"),
    ],
)
def test_bad_templates_are_explained(call, sentence):
    with pytest.raises(InputError, match=sentence):
        call()
