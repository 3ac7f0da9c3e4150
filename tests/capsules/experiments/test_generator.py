"""The scene generator against its own description and against the published test sets."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ks_2samp, kstest

from capsules.experiments.generator import CHUNK, sample_scenes
from capsules.files.inputs import load_scenes
from models.errors import InputError
from models.scenes import Scene
from models.templates import SHAPES

SLOTS = {"square": slice(0, 4), "triangle": slice(4, 7), "second square": slice(7, 11)}
SIGNIFICANCE = 1e-3


def similarity_fits(points: np.ndarray, shape: np.ndarray) -> dict[str, np.ndarray]:
    """Least squares over turns, scales and moves that take the shape to each set of points."""
    template = (shape - shape.mean(axis=0)) @ [1, 1j]
    scene = points @ [1, 1j]
    centroid = scene.mean(axis=1)
    turn = (scene - centroid[:, None]) @ template.conj() / np.sum(abs(template) ** 2)
    residual = scene - centroid[:, None] - turn[:, None] * template
    return {
        "centroid": np.stack([centroid.real, centroid.imag], axis=1),
        "scale": abs(turn),
        "angle": np.angle(turn),
        "residual": np.sum(abs(residual) ** 2, axis=1),
    }


def objects_of(scene: Scene, slot: slice) -> np.ndarray:
    """The points of one object, in the scenes where it is present."""
    return scene.points[:, slot][scene.present[:, slot].all(axis=1)]


# --- what the docstring says --------------------------------------------------------------------


def test_layout():
    scene = sample_scenes(100)
    assert scene.points.shape[1:] == (11, 2)
    owner = np.repeat([0, 1, 2], [4, 3, 4])
    np.testing.assert_array_equal(scene.object, np.where(scene.present, owner, -1))
    assert (scene.points[~scene.present] == 0).all()
    assert scene.present.any(axis=1).all()


def test_other_objects_have_their_own_rows():
    scene = sample_scenes(10, objects=("L", "pentagon"), presence=1.0)
    np.testing.assert_array_equal(scene.object, np.tile(np.repeat([0, 1], [6, 5]), (10, 1)))


@pytest.mark.parametrize("sigma", [0.0, 0.25])
def test_the_first_draws_are_the_same_however_many_are_asked_for(sigma):
    few, many = (sample_scenes(n, sigma, keep_empty=True) for n in (100, CHUNK + 100))
    assert len(many.points) == CHUNK + 100
    for short, long in zip(few[:3], many[:3], strict=True):
        np.testing.assert_array_equal(short, long[:100])


def test_a_seed_repeats_and_another_differs():
    first, again, other = (sample_scenes(50, 0.1, seed, keep_empty=True) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.points, again.points)
    assert not np.array_equal(first.points, other.points)


def test_empty_scenes_are_dropped_unless_kept():
    kept, dropped = (sample_scenes(500, keep_empty=keep) for keep in (True, False))
    occupied = kept.present.any(axis=1)
    assert 0 < occupied.sum() < len(occupied) == 500
    np.testing.assert_array_equal(kept.points[occupied], dropped.points)


@pytest.mark.parametrize("presence", [0.5, 0.2])
def test_objects_are_present_independently(presence):
    present = sample_scenes(CHUNK, presence=presence, keep_empty=True).present[:, [0, 4, 7]]
    for pattern in np.ndindex(2, 2, 2):
        expected = np.prod(np.where(pattern, presence, 1 - presence))
        frequency = (present == np.array(pattern, bool)).all(axis=1).mean()
        assert abs(frequency - expected) <= 5 * np.sqrt(expected * (1 - expected) / CHUNK)


@pytest.mark.parametrize("sigma", [0.0, 0.1])
def test_a_chunk_spans_the_unit_square_with_its_absent_objects(sigma):
    whole = sample_scenes(CHUNK, sigma, presence=1.0)
    assert (whole.points.min(), whole.points.max()) == (-1, 1)
    half = sample_scenes(CHUNK, sigma, keep_empty=True)
    np.testing.assert_array_equal(half.points, np.where(half.present[..., None], whole.points, 0))


def test_every_chunk_has_its_own_extremes():
    second = sample_scenes(2 * CHUNK, presence=1.0).points[CHUNK:]
    assert (second.min(), second.max()) == (-1, 1)


@pytest.mark.parametrize("slot", SLOTS)
def test_turns_scales_and_moves_have_their_distributions(slot):
    """In the units of the chunk: the smallest scale is 1, the least move 0 (up to 1 in 10,000)."""
    shape = SHAPES[slot.split()[-1]]
    scene = sample_scenes(CHUNK, centred=True, presence=1.0)
    fit = similarity_fits(objects_of(scene, SLOTS[slot]), shape)
    np.testing.assert_allclose(fit["residual"], 0, atol=1e-20)
    assert kstest(fit["angle"], "uniform", (-np.pi / 2, np.pi)).pvalue > SIGNIFICANCE
    unit = fit["scale"].min()
    scale = fit["scale"] / unit
    assert kstest(scale, "uniform", (1, 3)).pvalue > SIGNIFICANCE
    origin = fit["centroid"].min()
    moves = (fit["centroid"] - origin) / unit * scale[:, None]
    for axis in (0, 1):
        assert kstest(moves[:, axis], "uniform", (0, 24)).pvalue > SIGNIFICANCE


def test_the_noise_has_the_level_asked_for():
    """The residual of a fit of 4 numbers to 2n noisy ones has 2n - 4 degrees of freedom."""
    sigma = 0.01
    scene = sample_scenes(CHUNK, sigma, presence=1.0)
    for name, slot in SLOTS.items():
        shape = SHAPES[name.split()[-1]]
        fit = similarity_fits(objects_of(scene, slot), shape)
        freedom = 2 * len(shape) - 4
        variance = fit["residual"] / fit["scale"] ** 2 / freedom
        standard_error = sigma**2 * np.sqrt(2 / (freedom * CHUNK))
        assert abs(variance.mean() - sigma**2) <= 5 * standard_error


def test_shapes_that_are_not_centred_are_moved_by_their_turn():
    """By their centroid, turned and scaled; centred ones stay."""
    plain, centred = (sample_scenes(CHUNK, centred=c, presence=1.0) for c in (False, True))
    shape = SHAPES["square"]
    fits = [similarity_fits(objects_of(scene, slice(0, 4)), shape) for scene in (plain, centred)]
    units = [fit["scale"].min() for fit in fits]
    turn = fits[0]["scale"] / units[0] * np.exp(1j * fits[0]["angle"])
    extra = turn * (shape.mean(axis=0) @ [1, 1j])
    plain_centre, centred_centre = (
        fit["centroid"] @ [1, 1j] / unit for fit, unit in zip(fits, units, strict=True)
    )
    offset = plain_centre - extra - centred_centre  # of the common map to [-1, 1]
    np.testing.assert_allclose(offset, offset[0], rtol=1e-9)


@pytest.mark.parametrize(("sigma", "centred"), [(0.0, False), (0.1, True)])
def test_shapes_are_centred_where_there_is_noise(sigma, centred):
    default, explicit = sample_scenes(20, sigma), sample_scenes(20, sigma, centred=centred)
    np.testing.assert_array_equal(default.points, explicit.points)


# --- the published sets -------------------------------------------------------------------------


def statistics(scene: Scene) -> dict[str, np.ndarray]:
    """What a scene looks like: its extent, its number of points, the size of its objects."""
    seen = scene.present[..., None]
    extent = np.where(seen, scene.points, -np.inf).max(axis=1) - np.where(
        seen, scene.points, np.inf
    ).min(axis=1)
    sizes = {
        f"scale of the {name}": np.sqrt(objects_of(scene, slot).var(axis=1).sum(axis=1))
        for name, slot in SLOTS.items()
    }
    return {"width": extent[:, 0], "height": extent[:, 1], "points": seen.sum(axis=(1, 2)), **sizes}


def centroids(scene: Scene) -> dict[str, np.ndarray]:
    return {
        f"{axis} of the {name}": objects_of(scene, slot).mean(axis=1)[:, index]
        for name, slot in SLOTS.items()
        for index, axis in enumerate("xy")
    }


def aligned(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Up to the affine map, common to all coordinates, that the extremes of a chunk make."""
    pooled = np.concatenate(list(values.values()))
    return {name: (value - pooled.mean()) / pooled.std() for name, value in values.items()}


def rejected(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> list[str]:
    """Statistics of which two samples are not drawn from one distribution."""
    return [name for name in first if ks_2samp(first[name], second[name]).pvalue <= SIGNIFICANCE]


def published(shared_data: Path, sigma: float) -> Scene:
    path = shared_data / f"constellations_{sigma:.2f}.npz"
    if not path.exists():
        pytest.skip(f"no {path}")
    return load_scenes(path)


@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.25])
def test_scenes_look_like_the_published_ones(shared_data, sigma):
    theirs, ours = published(shared_data, sigma), sample_scenes(CHUNK, sigma)
    assert rejected(statistics(theirs), statistics(ours)) == []
    places = centroids(theirs), centroids(ours)
    if sigma > 0:  # the extremes of noisy chunks differ
        places = tuple(map(aligned, places))
    assert rejected(*places) == []


@pytest.mark.parametrize(
    ("sigma", "wrong"),
    [(0.0, {"centred": True}), (0.1, {"centred": False}), (0.25, {"centred": False})],
)
def test_the_comparison_notices_a_wrong_setting(shared_data, sigma, wrong):
    theirs, ours = published(shared_data, sigma), sample_scenes(CHUNK, sigma, **wrong)
    sizes = [name for name in statistics(ours) if name != "points"]
    assert rejected(statistics(theirs), statistics(ours)) == sizes


def relative_noise(scene: Scene, row_order: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """How far each object is from its shape, in units of its size."""
    noise = {}
    for name, slot in SLOTS.items():
        vertices = SHAPES[name.split()[-1]]
        fit = similarity_fits(objects_of(scene, slot), vertices[row_order[name]])
        noise[name] = fit["residual"] / fit["scale"] ** 2
    return noise


OUR_ROWS = {"square": [0, 1, 2, 3], "triangle": [0, 1, 2], "second square": [0, 1, 2, 3]}
# The published squares list their corners around the square.
THEIR_ROWS = {"square": [0, 2, 1, 3], "triangle": [0, 1, 2], "second square": [0, 2, 1, 3]}


@pytest.mark.parametrize("sigma", [0.1, 0.25])
def test_the_noise_is_that_of_the_published_sets(shared_data, sigma):
    theirs = relative_noise(published(shared_data, sigma), THEIR_ROWS)
    assert rejected(theirs, relative_noise(sample_scenes(CHUNK, sigma), OUR_ROWS)) == []
    noisier = sample_scenes(CHUNK, 1.3 * sigma)
    assert rejected(theirs, relative_noise(noisier, OUR_ROWS)) == list(SLOTS)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_samples": 0}, "at least 1, got 0"),
        ({"sigma": -0.1}, "sigma must be 0 to 1,000, got -0.1"),
        ({"sigma": np.nan}, "sigma must be 0 to 1,000, got nan"),
        ({"presence": 0.0}, "presence must be above 0 and at most 1, got 0.0"),
        ({"presence": 1.5}, "at most 1, got 1.5"),
        ({"objects": ("square", "circle")}, "no shape 'circle'; choose from square"),
        ({"objects": ()}, "at least one object is required, got none"),
        ({"seed": -1}, "seed must be 0 or more, got -1"),
    ],
)
def test_bad_settings_are_explained(arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        sample_scenes(**arguments)


# --- clutter --------------------------------------------------------------------------------------


def test_clutter_comes_beside_the_same_objects():
    plain = sample_scenes(4000, seed=3, keep_empty=True)
    scene = sample_scenes(4000, seed=3, keep_empty=True, clutter=3)
    assert scene.points.shape == (4000, 14, 2)
    np.testing.assert_array_equal(scene.points[:, :11], plain.points)
    np.testing.assert_array_equal(scene.object[:, :11], plain.object)
    stray = scene.present[:, 11:]
    np.testing.assert_array_equal(scene.object[:, 11:], np.where(stray, 3, -1))
    assert abs(stray.mean() - 0.5) < 5 * 0.5 / np.sqrt(stray.size)
    for coordinate in scene.points[:, 11:][stray].T:
        assert kstest(coordinate, "uniform", (-1, 2)).pvalue > SIGNIFICANCE


def test_fewer_than_no_clutter_is_refused():
    with pytest.raises(InputError, match="clutter"):
        sample_scenes(8, clutter=-1)
