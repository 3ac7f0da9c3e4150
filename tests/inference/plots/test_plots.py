"""The structure of figures: panels, outlines, colours, and the naming of identical objects."""

import itertools
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from capsules.experiments.generator import sample_scenes
from inference.diagnostics.metrics import same_partition
from inference.diagnostics.readout import most_probable_match, relabel
from inference.plots import outlines, scenes
from inference.result import Result
from models.constellation import PARTS
from models.geometry import similarity_pose
from models.scenes import Scene, join
from models.templates import SHAPES, shapes, stack, template_kinds

NAMES = scenes.object_names(["square", "triangle", "square"])
OWNER = np.asarray(PARTS.owner)
POSES = np.asarray(
    similarity_pose(
        np.array([[-0.5, -0.5], [0.1, 0.4], [0.5, -0.3]]), np.array([0.3, 0.2, 0.25]), 0.4
    )
)
TRUTH = OWNER.copy()
SCENE = Scene(np.asarray(PARTS.predict(POSES)), np.ones(11, bool), TRUTH)


def make_result(labels=TRUTH, poses=POSES, match=None, scene=SCENE, method="ds", **changes):
    """A result as a method would give it, with the match that the labels ask for."""
    match = np.eye(11) if match is None else match
    return Result(
        method=method,
        scene=scene,
        match_probs=match,
        pose_mean=poses,
        pose_covariance=np.tile(np.eye(4), (3, 1, 1)),
        labels=np.asarray(labels),
        owner=OWNER,
        converged=np.array(True),
        steps=np.array(3),
        **{"elbo": np.array(-3.0), **changes},
    )


SWAPPED = make_result(
    labels=np.array([2, 1, 0])[TRUTH],
    poses=POSES[[2, 1, 0]],
    match=np.eye(11)[:, [7, 8, 9, 10, 4, 5, 6, 0, 1, 2, 3]],
    method="gmm",
)
"""The truth with the two squares swapped."""


def artists(axes, gid):
    return [artist for artist in axes.get_children() if artist.get_gid() == gid]


def crosses(a, b, c, d):
    """Whether the open segments ab and cd cross."""

    def side(p, q, r):
        return np.sign(np.linalg.det(np.stack([q - p, r - p])))

    return side(a, b, c) * side(a, b, d) < 0 and side(c, d, a) * side(c, d, b) < 0


# --- outlines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_outlines_do_not_cross_themselves(name, seed):
    rng = np.random.default_rng(seed)
    parts = stack(shapes(name))
    pose = similarity_pose(rng.normal(size=(1, 2)), rng.uniform(0.1, 2), rng.uniform(0, 7))
    outline = outlines.in_angular_order(np.asarray(parts.predict(pose)))
    assert len(np.unique(outline.round(9), axis=0)) == len(SHAPES[name])
    edges = list(zip(outline, np.roll(outline, -1, axis=0), strict=True))
    assert not any(crosses(*e, *f) for e, f in itertools.combinations(edges, 2))


def test_a_square_is_drawn_as_a_square():
    outline = outlines.result_outlines(make_result(), PARTS)[0]
    sides = np.linalg.norm(outline - np.roll(outline, 1, axis=0), axis=1)
    assert outline.shape == (4, 2)
    np.testing.assert_allclose(sides, 0.3 * np.sqrt(2))  # side of a square of mean square norm 1


def test_objects_without_points_have_no_outline():
    labels = np.where(TRUTH == 1, -1, TRUTH)
    assert set(outlines.result_outlines(make_result(labels), PARTS)) == {0, 2}
    assert set(outlines.truth_outlines(SCENE, labels)) == {0, 2}


def test_an_average_over_matches_is_drawn_at_the_most_probable_match():
    averaged = POSES * np.array([1, 1, 0, 0])  # over the four turns of a square
    swap = np.array([7, 8, 9, 10, 4, 5, 6, 0, 1, 2, 3])  # the match breaks the tie the other way
    result = make_result(poses=averaged, best_match=np.argsort(swap))
    for k, outline in outlines.result_outlines(result, PARTS).items():
        np.testing.assert_allclose(outline, outlines.truth_outlines(SCENE, TRUTH)[k], atol=1e-9)


def test_draws_are_drawn_at_the_match_that_most_of_them_have():
    """Turned squares and swapped names average to nothing; a wrong parse is outnumbered."""
    turned = np.r_[1, 2, 3, 0, 4:11]
    swapped = np.r_[7:11, 4:7, 0:4]
    wrong = np.r_[4, 1:4, 0, 5:11]
    match = np.stack([np.arange(11), turned, turned[swapped], turned[swapped], wrong, wrong])
    draws = {"match": match.reshape(2, 3, 11), "pose": np.zeros((2, 3, 3, 4))}
    averaged = POSES * np.array([1, 1, 0, 0])
    result = make_result(poses=averaged, draws=draws, elbo=None, method="nuts")
    np.testing.assert_array_equal(most_probable_match(result), turned[swapped])
    for named in (result, relabel(result, PARTS, SWAPPED.labels)):
        assert set(outlines.result_outlines(named, PARTS)) == {0, 1, 2}
        points = SCENE.points[named.labels == 0]
        centre = outlines.result_outlines(named, PARTS)[0].mean(axis=0)
        np.testing.assert_allclose(centre, points.mean(axis=0), atol=1e-9)
    true_match = replace(result, draws=draws | {"match": np.arange(11)[None, None]})
    for k, outline in outlines.result_outlines(true_match, PARTS).items():
        np.testing.assert_allclose(outline, outlines.truth_outlines(SCENE, TRUTH)[k], atol=1e-9)


def test_draws_of_a_variational_result_are_drawn_at_its_mean():
    draws = {"match": np.arange(11)[None, None], "pose": np.zeros((1, 1, 3, 4))}
    result = make_result(poses=2 * POSES, draws=draws)
    expected = outlines.result_outlines(make_result(poses=2 * POSES), PARTS)
    for k, outline in outlines.result_outlines(result, PARTS).items():
        np.testing.assert_array_equal(outline, expected[k])


def test_no_outline_where_points_fix_no_pose():
    labels = np.where(np.arange(11) == 0, 2, TRUTH)  # a fifth point of square 2: not of its match
    labels[5:7] = -1  # and a single point of the triangle
    result = make_result(labels, best_match=np.arange(11))
    assert set(outlines.result_outlines(result, PARTS)) == {0}


# --- identical objects --------------------------------------------------------------------------


def test_identical_templates_are_found():
    np.testing.assert_array_equal(template_kinds(PARTS), [0, 1, 0])
    mixed = stack(shapes("L", "plane", "L", "plane", "square"))
    np.testing.assert_array_equal(template_kinds(mixed), [0, 1, 0, 1, 4])


def test_relabelling_undoes_a_swap_of_identical_objects():
    result = relabel(SWAPPED, PARTS, TRUTH)
    np.testing.assert_array_equal(result.labels, TRUTH)
    np.testing.assert_array_equal(result.pose_mean, POSES)
    np.testing.assert_array_equal(result.match_probs, np.eye(11))


def test_relabelling_leaves_other_mistakes_alone():
    mistaken = make_result(labels=np.where(TRUTH == 0, 1, TRUTH))
    np.testing.assert_array_equal(relabel(mistaken, PARTS, TRUTH).labels, mistaken.labels)


def test_relabelling_does_not_swap_without_need():
    result = make_result(labels=np.full(11, -1))
    again = relabel(result, PARTS, TRUTH)
    np.testing.assert_array_equal(again.pose_mean, POSES)
    np.testing.assert_array_equal(again.labels, -1)


@pytest.mark.parametrize("seed", range(5))
def test_relabelling_keeps_the_partition_and_what_is_predicted(seed):
    rng = np.random.default_rng(seed)
    result = make_result(rng.integers(-1, 3, 11), match=rng.dirichlet(np.ones(11), 11))
    again = relabel(result, PARTS, TRUTH)
    assert same_partition(again.labels, result.labels)
    assert (again.labels == TRUTH).sum() >= (result.labels == TRUTH).sum()
    before, after = (r.match_probs @ PARTS.predict(r.pose_mean) for r in (result, again))
    np.testing.assert_allclose(after, before)


def test_names_are_numbered_only_where_there_are_several():
    assert NAMES == ["square 1", "triangle", "square 2"]
    assert scenes.object_names(["L", "plane"]) == ["L", "plane"]


# --- figures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_a_demo_has_two_panels_for_each_method_and_two_for_the_scene(count):
    figure = scenes.plot_demo([make_result(method=f"m{i}") for i in range(count)], PARTS, NAMES)
    titles = [axes.get_title() for axes in figure.axes]
    assert isinstance(figure, Figure)
    assert len(figure.axes) == 2 * (count + 1) + 1  # and a colour bar
    assert sum("objects found" in title for title in titles) == count
    assert sum("match prob" in title for title in titles) == count
    assert {"points", "truth"} <= set(titles)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == NAMES


def test_an_estimate_of_the_evidence_is_shown_with_its_error():
    sampled = {"elbo": None, "log_evidence": np.array(-9.5)}
    exact = make_result(method="exact", **sampled)
    estimated = make_result(method="gibbs", log_evidence_error=np.array(0.254), **sampled)
    figure = scenes.plot_demo([exact, estimated], PARTS, NAMES)
    titles = [axes.get_title() for axes in figure.axes]
    assert sum("log evidence -9.50" in title for title in titles) == 2
    assert sum("log evidence -9.50 ± 0.25" in title for title in titles) == 1


def test_colours_agree_with_the_truth_although_squares_are_swapped():
    figure = scenes.plot_demo([make_result(), SWAPPED], PARTS, NAMES)
    panels = [axes for axes in figure.axes if "objects found" in axes.get_title()]
    for axes in [*panels, next(a for a in figure.axes if a.get_title() == "truth")]:
        for k in range(3):
            (points,), (outline,) = artists(axes, f"object {k}"), artists(axes, f"outline {k}")
            np.testing.assert_allclose(points.get_offsets(), SCENE.points[k == TRUTH])
            assert to_hex(points.get_facecolor()[0]) == scenes.colour(k).lower()
            assert to_hex(outline.get_color()) == scenes.colour(k).lower()
        assert not artists(axes, "wrong")


def test_wrong_points_have_a_ring_and_the_legend_says_so():
    labels = np.where(np.arange(11) == 3, 1, TRUTH)
    figure = scenes.plot_demo([make_result(labels)], PARTS, NAMES)
    axes = next(a for a in figure.axes if "objects found" in a.get_title())
    (ring,) = artists(axes, "wrong")
    np.testing.assert_allclose(ring.get_offsets(), SCENE.points[[3]])
    assert len(figure.legends[0].get_texts()) == 4


def test_rows_of_the_match_are_sorted_by_object_with_missing_ones_last():
    present = OWNER != 1
    shuffle = np.random.default_rng(0).permutation(11)
    labels = np.where(present, OWNER, -1)[shuffle]
    scene = Scene(SCENE.points[shuffle], present[shuffle], labels)
    result = make_result(labels, match=np.eye(11)[shuffle], scene=scene)
    axes = Figure().subplots()
    image = scenes.draw_match(axes, result, NAMES)
    blocks = np.asarray(image.get_array()) @ np.eye(3)[OWNER]
    np.testing.assert_array_equal(blocks.argmax(axis=1), [0] * 4 + [2] * 4 + [1] * 3)
    assert [t.get_text() for t in axes.get_yticklabels()] == ["square 1", "square 2", "missing"]
    assert [t.get_text() for t in axes.get_xticklabels()] == NAMES
    assert image.get_clim() == (0.0, 1.0)


def test_scenes_have_equal_aspect_y_up_and_everything_in_sight():
    far = make_result(poses=POSES * 3)
    figure = scenes.plot_demo([make_result(), far], PARTS, NAMES)
    vertices = np.concatenate(list(outlines.result_outlines(far, PARTS).values()))
    for axes in figure.axes:
        if axes.get_title() in ("points", "truth") or "objects found" in axes.get_title():
            (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
            assert axes.get_aspect() == 1
            assert bottom < top
            assert left < vertices[:, 0].min() and vertices[:, 0].max() < right
            assert bottom < vertices[:, 1].min() and vertices[:, 1].max() < top


@pytest.mark.parametrize("count", [3, 7])
def test_nothing_is_clipped_or_overlaps(count):
    exact = make_result(method="exact", elbo=None, log_evidence=np.array(1.5))
    results = [make_result(), SWAPPED, exact] + [make_result()] * (count - 3)
    figure = scenes.plot_demo(results, PARTS, NAMES)
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    page = figure.bbox
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes]
    boxes.append(figure.legends[0].get_window_extent(renderer))
    for box in boxes:
        assert page.x0 <= box.x0 and box.x1 <= page.x1
        assert page.y0 <= box.y0 and box.y1 <= page.y1
    for a, b in itertools.combinations(boxes, 2):
        assert not a.overlaps(b)


def test_a_scene_without_the_truth_follows_the_first_result():
    unknown = SCENE._replace(object=None)
    results = [replace(result, scene=unknown) for result in (SWAPPED, make_result())]
    figure = scenes.plot_demo(results, PARTS)
    panels = [axes for axes in figure.axes if "objects found" in axes.get_title()]
    assert "truth" not in [axes.get_title() for axes in figure.axes]
    for k in range(3):
        first, second = (artists(axes, f"object {k}")[0].get_offsets() for axes in panels)
        np.testing.assert_allclose(first, second)


@pytest.mark.parametrize("seed", range(4))
def test_any_scene_can_be_drawn(tmp_path, seed):
    scene = sample_scenes(20, 0.1, seed).take(seed)
    labels = np.where(scene.present, np.random.default_rng(seed).integers(0, 3, 11), -1)
    figure = scenes.plot_demo([make_result(labels, scene=scene)], PARTS, NAMES)
    figure.savefig(tmp_path / "picture.png")


def test_the_style_stays_within_the_figure():
    before = dict(mpl.rcParams)
    scenes.plot_demo([make_result()], PARTS, NAMES)
    assert dict(mpl.rcParams) == before


def test_there_are_as_many_colours_as_shapes_and_they_differ():
    assert len(set(scenes.COLOURS)) == len(scenes.COLOURS) == len(scenes.MARKERS) >= len(SHAPES)


# --- several scenes -----------------------------------------------------------------------------


def test_scenes_stand_beside_each_other_in_one_window():
    """Five scenes in two rows; points outside one scene's own range show that the window is one."""
    far = SCENE._replace(points=SCENE.points + 5.0)
    figure = scenes.plot_scenes(join([SCENE, SCENE, SCENE, SCENE, far]), list("abcde"))
    used, unused = figure.axes[:5], figure.axes[5:]
    assert [axes.get_title() for axes in used] == list("abcde")
    assert not any(axes.axison for axes in unused)
    assert len(unused) == 3
    limits = {(axes.get_xlim(), axes.get_ylim()) for axes in used}
    assert len(limits) == 1
    (left, right), (bottom, top) = limits.pop()
    assert bottom < top  # y points up
    assert right - left == pytest.approx(top - bottom)
    everything = np.concatenate([SCENE.points, far.points])
    assert left < everything[:, 0].min() < everything[:, 0].max() < right
    for axes, scene in zip(used, [SCENE] * 4 + [far], strict=True):
        for k in range(3):
            (drawn,) = artists(axes, f"object {k}")
            np.testing.assert_allclose(drawn.get_offsets(), scene.points[scene.object == k])


def test_scenes_without_truth_are_points():
    (axes,) = scenes.plot_scenes(SCENE._replace(object=None)).axes
    (points,) = artists(axes, "points")
    assert len(points.get_offsets()) == 11
    assert not artists(axes, "object 0")
