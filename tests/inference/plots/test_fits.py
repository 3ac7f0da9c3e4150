"""Figures of a fit: what they show is what the result says."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from inference.plots import fits
from inference.result import Result
from models.errors import InputError
from models.scenes import join, make_scene
from tests.inference.two_triangles import PARTS, POSES, PRECISION, PROGRAM

SCENE = make_scene(np.asarray(PARTS.predict(POSES)), 6)
COVARIANCE = np.tile(np.diag([4.0, 1.0, 2.0, 2.0]) / PRECISION, (2, 1, 1))
OWNER = np.asarray(PARTS.owner)
RESULT = Result(
    method="ds",
    scene=SCENE,
    match_probs=np.eye(6),
    pose_mean=POSES,
    pose_covariance=COVARIANCE,
    labels=OWNER,
    owner=OWNER,
    converged=np.array(True),
    steps=np.array(4),
    elbo=np.array(-3.0),
    history={"elbo": np.array([-9.0, -5.0, -4.0, -3.0]), "beta": np.array([0.25, 0.5, 1.0, 1.0])},
)
SWAPPED = OWNER[::-1].copy()
WRONG = np.array([0, 1, 0, 1, 0, 1])


def batch(objects, elbo=None, evidence=None, truth=None):
    """A result for a batch of copies of the scene."""
    count = len(objects)
    return Result(
        method="ds" if evidence is None else "exact",
        scene=join([SCENE] * count)._replace(object=truth),
        match_probs=np.tile(np.eye(6), (count, 1, 1)),
        pose_mean=np.tile(POSES, (count, 1, 1)),
        pose_covariance=np.tile(COVARIANCE, (count, 1, 1, 1)),
        labels=np.stack(objects),
        owner=OWNER,
        converged=np.ones(count, bool),
        steps=np.ones(count, int),
        elbo=None if elbo is None else np.array(elbo),
        log_evidence=None if evidence is None else np.array(evidence),
    )


def scatters(axes):
    """Label, colour and places of each kind of point."""
    return {
        c.get_label(): (to_hex(c.get_facecolor()[0]), np.asarray(c.get_offsets()))
        for c in axes.collections
    }


def assert_whole(figure):
    """Nothing of the figure lies outside its page."""
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    for artist in (*figure.axes, *figure.legends):
        box = artist.get_tightbbox(renderer)
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1


# --- outlines and their uncertainty -------------------------------------------------------------


def test_outlines_spread_as_the_pose_covariance_says():
    drawn = fits.posterior_outlines(RESULT, PROGRAM, jax.random.key(0), count=1000)
    for k in (0, 1):
        vertices = np.stack([outlines[k] for outlines in drawn])
        F = np.asarray(PARTS.F)[k == OWNER]
        places = F @ POSES[k]
        distance = np.linalg.norm(vertices[:, None] - places[:, None], axis=-1)
        nearest = np.take_along_axis(vertices, distance.argmin(axis=-1)[..., None], axis=1)
        expected = np.einsum("ndp,pq,ndq->nd", F, COVARIANCE[k], F)
        # A sample variance of 1000 draws has a relative standard error of sqrt(2 / 1000).
        np.testing.assert_allclose(nearest.var(axis=0), expected, rtol=5 * np.sqrt(2 / 1000))
        error = 5 * np.sqrt(expected / 1000)
        assert (np.abs(nearest.mean(axis=0) - places) < error).all()


def test_draws_with_swapped_names_lie_on_each_other():
    pose = np.stack([POSES, POSES[::-1]])[None]
    match = np.stack([np.arange(6), np.r_[3:6, 0:3]])[None]
    result = replace(RESULT, draws={"pose": pose, "match": match}, elbo=None, method="nuts")
    first, second = fits.posterior_outlines(result, PROGRAM, jax.random.key(0), count=2)
    for k in (0, 1):
        np.testing.assert_allclose(first[k], second[k])


def test_an_object_with_a_single_point_has_no_outline():
    match = np.array([0, 1, 2, 3, -1, -1])[None, None]
    scene = make_scene(SCENE.points[:4], 6)
    draws = {"pose": POSES[None, None], "match": match}
    result = replace(RESULT, scene=scene, draws=draws, elbo=None, method="nuts")
    (outlines,) = fits.posterior_outlines(result, PROGRAM, jax.random.key(0), count=1)
    assert len(outlines) == 1


def test_a_picture_of_the_posterior_has_every_outline_within_its_window():
    figure = fits.plot_posterior(
        RESULT, PROGRAM, jax.random.key(0), ["left", "right"], num_outlines=7
    )
    scene, match, _ = figure.axes
    outlines = [line for line in scene.lines if str(line.get_gid()).startswith("outline")]
    assert len(outlines) == 7 * 2
    (left, right), (bottom, top) = scene.get_xlim(), scene.get_ylim()
    for line in outlines:
        x, y = line.get_data()
        assert left < min(x) and max(x) < right and bottom < min(y) and max(y) < top
    np.testing.assert_array_equal(match.images[0].get_array(), np.eye(6))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["left", "right"]
    assert_whole(figure)


# --- ELBO and beta ------------------------------------------------------------------------------


def test_a_history_is_drawn_as_it_was():
    figure = fits.plot_history(RESULT)
    axes, other = figure.axes
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), np.c_[1:5, [-9, -5, -4, -3]])
    np.testing.assert_array_equal(other.lines[0].get_ydata(), [0.25, 0.5, 1.0, 1.0])
    assert axes.get_ylim()[0] < -9 and axes.get_ylim()[1] > -3
    assert_whole(figure)


def test_the_first_steps_are_drawn_in_the_window_of_all():
    axes = fits.plot_history(RESULT).axes[0]
    figure = fits.plot_history(RESULT)
    figure.clear()
    some = figure.subplots()
    fits.draw_history(some, RESULT.history, upto=2)
    np.testing.assert_array_equal(some.lines[0].get_ydata(), [-9, -5])
    assert some.get_xlim() == axes.get_xlim() and some.get_ylim() == axes.get_ylim()


def test_without_a_history_it_says_so():
    with pytest.raises(InputError, match="result has none; infer a single scene with history"):
        fits.plot_history(replace(RESULT, history=None))


# --- restarts and the gap -----------------------------------------------------------------------


def test_restarts_are_sorted_and_compared_with_the_best():
    optima = batch([WRONG, OWNER, SWAPPED], elbo=[-7.0, -3.0, -4.0])
    figure = fits.plot_restarts(optima, log_evidence=-1.0)
    (axes,) = figure.axes
    found = scatters(axes)
    colour, places = found["objects of the best"]
    np.testing.assert_array_equal(places, [[1, -3], [2, -4]])
    np.testing.assert_array_equal(found["other objects"][1], [[3, -7]])
    assert colour != found["other objects"][0]
    assert axes.lines[0].get_ydata()[0] == -1.0
    assert_whole(figure)


def test_restarts_are_compared_with_the_truth_where_it_is_known():
    optima = batch([WRONG, OWNER], elbo=[-2.0, -3.0], truth=np.stack([OWNER, OWNER]))
    found = scatters(fits.plot_restarts(optima).axes[0])
    np.testing.assert_array_equal(found["objects of the truth"][1], [[2, -3]])
    np.testing.assert_array_equal(found["other objects"][1], [[1, -2]])


def test_the_gap_is_evidence_less_elbo():
    variational = batch([OWNER, WRONG, SWAPPED], elbo=[-3.0, -9.0, -4.0])
    exact = batch([OWNER, OWNER, OWNER], evidence=[-1.0, -2.0, -3.5])
    figure = fits.plot_gap(variational, exact)
    found = scatters(figure.axes[0])
    np.testing.assert_array_equal(
        found["objects of exact inference"][1], [[-1.0, 2.0], [-3.5, 0.5]]
    )
    np.testing.assert_array_equal(found["other objects"][1], [[-2.0, 7.0]])
    assert_whole(figure)


def test_pictures_of_batches_want_batches():
    with pytest.raises(InputError, match="the ELBOs of a batch"):
        fits.plot_restarts(RESULT)
    with pytest.raises(InputError, match="the same 2 scenes, got 1 from 'exact'"):
        fits.plot_gap(batch([OWNER, OWNER], elbo=[0.0, 0.0]), batch([OWNER], evidence=[0.0]))
