"""The appearance model against plain numpy and against scikit-learn on the data themselves."""

import numpy as np
import pytest
from sklearn.decomposition import FactorAnalysis

from capsules.faces.appearance import (
    choose_num_factors,
    fit_appearance,
    fit_factors,
    fit_part,
    prediction_error,
    split_faces,
    stack_scores,
)
from capsules.faces.artist import draw_images
from models.errors import InputError
from models.faces import FactorAnalyser

DIMS = (3, 2, 4, 2, 3)


@pytest.fixture(scope="module")
def images():
    return draw_images(0)


@pytest.fixture(scope="module")
def small():
    return draw_images(1, num_groups=3, num_variants=3)


def random_factors(num_factors: int, seed: int = 0) -> FactorAnalyser:
    rng = np.random.default_rng(seed)
    size = sum(DIMS)
    return FactorAnalyser(
        rng.normal(size=(size, num_factors)),
        rng.normal(size=size),
        rng.uniform(0.2, 0.6, size),
        DIMS,
    )


def draw_scores(factors: FactorAnalyser, count: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    covariance = factors.loadings @ factors.loadings.T + np.diag(factors.noise_variance)
    return rng.multivariate_normal(factors.mean, covariance, count)


def test_the_split_of_the_paper(images):
    train, test = split_faces(images)
    assert (len(train), len(test)) == (18_000, 7_614)
    for faces, each in ((train, 3_000), (test, 1_269)):
        np.testing.assert_array_equal(np.bincount(faces[:, 0]), [each] * 6)
        assert faces[:, 1:].min() == 0 and faces[:, 1:].max() == 6
    assert len(np.unique(np.concatenate([train, test]), axis=0)) == 25_614
    np.testing.assert_array_equal(train, split_faces(images, 0).train)
    assert not np.array_equal(train, split_faces(images, 1).train)


def test_a_small_set_is_split_too(small):
    train, test = split_faces(small)
    assert len(train) == 3 * 170 and len(train) + len(test) == 3 * 3**5
    assert len(np.unique(np.concatenate([train, test]), axis=0)) == 3 * 3**5


def test_a_part_keeps_95_percent_and_no_more_scores_than_that(images):
    for pixels in images.pixels:
        fitted = fit_part(pixels)
        flat = np.asarray(pixels, float).reshape(42, -1)
        centred = flat - flat.mean(axis=0)
        share = np.linalg.svd(centred, compute_uv=False) ** 2
        share = np.cumsum(share) / share.sum()
        kept = len(fitted.components)
        assert share[kept - 1] >= 0.95 > (share[kept - 2] if kept > 1 else 0)
        loss = np.sum((fitted.decode(fitted.encode(flat)) - flat) ** 2) / np.sum(centred**2)
        np.testing.assert_allclose(loss, 1 - share[kept - 1], rtol=1e-9)
        scores = fitted.encode(flat)
        np.testing.assert_allclose(np.cov(scores.T), np.eye(kept), atol=1e-9)


def test_images_that_are_all_the_same_are_refused():
    with pytest.raises(InputError, match="all images of a part are the same"):
        fit_part(np.ones((2, 3, 10)))


def test_scores_stand_where_their_part_does(small):
    fitted = [fit_part(pixels) for pixels in small.pixels]
    tables = [p.encode(x) for p, x in zip(fitted, small.pixels, strict=True)]
    stacked = stack_scores(tables, np.array([[2, 0, 1, 2, 1, 0]]))[0]
    wanted = [fitted[t].encode(small.pixels[t][2, v]) for t, v in enumerate((0, 1, 2, 1, 0))]
    np.testing.assert_allclose(stacked, np.concatenate(wanted), atol=1e-12)


def test_factors_are_those_of_all_faces():
    """A few rows with the same moments give what scikit-learn finds in the data themselves."""
    scores = draw_scores(random_factors(3), 4000)
    ours = fit_factors(scores, DIMS, 3)
    theirs = FactorAnalysis(3, svd_method="lapack", tol=1e-6, max_iter=5000).fit(scores)
    covariance = ours.loadings @ ours.loadings.T + np.diag(ours.noise_variance)
    np.testing.assert_allclose(covariance, theirs.get_covariance(), atol=2e-3)
    np.testing.assert_allclose(ours.mean, scores.mean(axis=0), atol=1e-12)


def test_prediction_of_a_left_out_part_is_a_conditional_normal():
    factors = random_factors(4)
    scores = draw_scores(factors, 20)
    covariance = factors.loadings @ factors.loadings.T + np.diag(factors.noise_variance)
    wanted = np.zeros(20)
    for own in factors.slices:
        part = np.zeros(len(factors.mean), bool)
        part[own] = True
        gain = covariance[np.ix_(part, ~part)] @ np.linalg.inv(covariance[np.ix_(~part, ~part)])
        predicted = factors.mean[part] + (scores - factors.mean)[:, ~part] @ gain.T
        wanted += np.sum((scores[:, part] - predicted) ** 2, axis=1)
    got = prediction_error(factors, scores)
    np.testing.assert_allclose(got, wanted / len(factors.mean), rtol=1e-10)


def test_the_number_of_factors_is_found():
    chosen, errors = choose_num_factors(draw_scores(random_factors(3), 3000), DIMS)
    assert chosen == 3
    assert errors.shape == (12, 2)
    assert errors[1, 0] > errors[2, 0] + errors[2, 1]


def test_a_model_is_fitted_once_in_a_process(small):
    assert fit_appearance(small, num_factors=2) is fit_appearance(small, num_factors=2)


def test_no_factors_are_refused(small):
    with pytest.raises(InputError, match="factors must be at least 1"):
        fit_appearance(small, num_factors=0)
