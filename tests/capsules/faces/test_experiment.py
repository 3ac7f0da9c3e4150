"""Inference of faces: closed form of factor analysis, bounds, assignments, the published model."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

from capsules.faces import experiment
from capsules.faces.experiment import (
    RANSAC_OPTIONS,
    Cell,
    appearance_rmse,
    blocks_of,
    explain,
    measure,
    open_study,
    run_blocks,
)
from capsules.faces.rendering import render_poses
from capsules.faces.report import draw_face_frames
from capsules.faces.scenes import FaceScenes, face_points
from capsules.store import Store
from inference import cavi, exact, nuts, ransac
from inference.diagnostics.metrics import same_partition
from models.faces import FactorAnalyser, face_parts, faces_program
from models.scenes import join
from tests.agreement import assert_means

pytestmark = pytest.mark.long

K = 2


@pytest.fixture(scope="module")
def study():
    return open_study()


@pytest.fixture(scope="module")
def scenes(study):
    """Two scenes with every part, one with hidden ones and one with a mouth for a face."""
    whole, hidden, last = study.scenes(2, K), study.scenes(1, K, occluded=True), study.scenes(1, K)
    scene = last.scene
    gone = (scene.object == 1) & (scene.point_type != 2)
    mouth = scene._replace(
        points=np.where(gone[..., None], 0.0, scene.points),
        present=~gone,
        object=np.where(gone, -1, scene.object),
        point_type=np.where(gone, -1, scene.point_type),
    )
    batch = join([whole.scene, hidden.scene, mouth])
    chosen = zip(whole[1:], hidden[1:], last[1:], strict=True)
    return FaceScenes(batch, *(np.concatenate(some) for some in chosen))


@pytest.fixture(scope="module")
def fitted(study, scenes):
    return cavi.run(
        study.program(K),
        scenes.scene,
        jax.random.key(0),
        num_restarts=3,
        fewest_points=1,
    )


def closed_form(factors: FactorAnalyser, scores: np.ndarray, seen: np.ndarray):
    """Mean and covariance of the factors, by conditioning a joint Normal on what was seen."""
    loadings, noise = factors.loadings[seen], factors.noise_variance[seen]
    covariance = loadings @ loadings.T + np.diag(noise)
    gain = np.linalg.solve(covariance, loadings).T
    mean = gain @ (scores[seen] - factors.mean[seen])
    return mean, np.eye(factors.num_factors) - gain @ loadings


@pytest.mark.slow
def test_assignments_are_right(scenes, fitted):
    assert same_partition(np.asarray(scenes.scene.object), fitted.labels).all()
    assert fitted.converged.all()


def test_appearance_is_the_closed_form_of_factor_analysis_with_missing_parts(study, scenes, fitted):
    factors = study.appearance.factors
    stacked = study.appearance.encode(study.images, scenes.faces.reshape(-1, 6))
    hidden = 0
    for i in range(len(scenes.poses)):
        scene = scenes.scene.take(i)
        for face in range(K):
            rows = np.flatnonzero(scene.object == face)
            seen = np.zeros(len(factors.mean), bool)
            for kind in scene.point_type[rows]:
                seen[factors.slices[kind]] = True
            hidden += (~seen).any()
            mean, covariance = closed_form(factors, stacked[i * K + face], seen)
            (k,) = np.unique(fitted.labels[i][rows])
            np.testing.assert_allclose(fitted.pose_mean[i, k, 4:], mean, atol=1e-8)
            np.testing.assert_allclose(fitted.pose_covariance[i, k, 4:, 4:], covariance, atol=1e-8)
    assert hidden  # or nothing was tested of missing parts


def test_a_film_has_a_frame_for_each_step(study, scenes, fitted):
    result, blank = fitted.take(0), np.zeros_like(fitted.pose_mean[0])
    history = {
        "match_probs": np.stack([np.full_like(result.match_probs, 0.1), result.match_probs]),
        "pose_mean": np.stack([blank, result.pose_mean]),
        "elbo": np.array([-9.0, -1.0]),
        "beta": np.array([0.1, 1.0]),
    }
    figure, pictures = Figure(), []
    for _ in draw_face_frames(figure, study, scenes, replace(result, history=history)):
        pictures.append(np.asarray(figure.axes[2].images[0].get_array()))
    assert [picture.max() > 0.2 for picture in pictures] == [False, True]
    expected = render_poses(study.images, study.appearance, result.pose_mean)
    np.testing.assert_allclose(pictures[1], expected)
    assert figure.axes[1].get_title() == "parts, step 2 of 2"
    seen = np.asarray(figure.axes[0].images[0].get_array())
    np.testing.assert_allclose(seen, experiment.true_scene(study, scenes, 0)[0])


@pytest.fixture(scope="module")
def truth(study, scenes):
    return exact.run(study.program(K), scenes.scene)


def test_the_elbo_climbs(study, scenes):
    options = {"num_restarts": 1, "init_strategy": "uniform", "history": True}
    found = cavi.run(study.program(K), scenes.scene, jax.random.key(0), **options)
    elbo, beta = found.history["elbo"].T, found.history["beta"].T
    same_beta = np.diff(beta, axis=0) == 0
    # beta of a step is the one after it, so the step that follows a rise is not compared.
    comparable = same_beta[1:] & same_beta[:-1]
    assert (np.diff(elbo, axis=0)[1:][comparable] > -1e-6).all()
    assert comparable.sum() > 5  # or nothing was tested


@pytest.mark.slow
def test_the_elbo_stays_below_the_evidence(scenes, fitted, truth):
    assert (fitted.elbo <= truth.log_evidence + 1e-6).all()
    assert same_partition(np.asarray(scenes.scene.object), truth.labels).all()


def test_ransac_from_one_part_and_refitted(study, scenes, fitted):
    explained = explain(study, scenes, restarts=3)
    numbers = measure(study, scenes, explained)
    for name in ("vi", "ransac", "refit"):
        assert numbers[f"right_{name}"].all()
    assert (numbers["scene_vi"] < numbers["scene_ransac"]).all()
    assert (numbers["mask_vi"] < numbers["mask_ransac"]).all()
    assert (numbers["appearance_vi"] < numbers["appearance_draw"]).all()
    np.testing.assert_allclose(numbers["scene_vi"], numbers["scene_refit"], rtol=0.01)
    # The single part is the first one of the face that is seen: the eyes, or the nose, ...
    single = ransac.run(
        study.program(K), scenes.scene, jax.random.key(0), refit=False, **RANSAC_OPTIONS
    )
    factors = study.appearance.factors
    stacked = study.appearance.encode(study.images, scenes.faces.reshape(-1, 6))
    for i in range(len(scenes.poses)):
        for face in range(K):
            rows = np.flatnonzero(scenes.scene.object[i] == face)
            (k,) = np.unique(single.labels[i][rows])
            seen = np.zeros(len(factors.mean), bool)
            seen[factors.slices[scenes.scene.point_type[i, rows].min()]] = True
            mean, covariance = closed_form(factors, stacked[i * K + face], seen)
            np.testing.assert_allclose(single.pose_mean[i, k, 4:], mean, atol=1e-8)
            np.testing.assert_allclose(single.pose_covariance[i, k, 4:, 4:], covariance, atol=1e-8)


def test_blocks_are_kept_and_read_again(study, tmp_path, monkeypatch):
    def made_up(study, scenes, explained):
        return {"right_vi": np.arange(len(scenes.poses), dtype=float)}

    monkeypatch.setattr(experiment, "explain", lambda *_: None)
    monkeypatch.setattr(experiment, "measure", made_up)
    monkeypatch.setattr(experiment, "BLOCK", 2)
    store = Store(tmp_path)
    blocks = blocks_of(study, [Cell(2)], 3, 0, store)
    first = run_blocks(study, blocks, 0, store)
    np.testing.assert_array_equal(first[Cell(2)]["right_vi"], [0, 1, 0])
    assert {block.entry.path for block in blocks} == set(tmp_path.glob("*.npz"))
    monkeypatch.setattr(experiment, "measure", lambda *_: pytest.fail("done again"))
    again = run_blocks(study, blocks, 0, store)
    np.testing.assert_array_equal(again[Cell(2)]["right_vi"], [0, 1, 0])
    others = blocks_of(study, [Cell(2), Cell(2, occluded=True)], 3, 1, store)
    assert not any(store.has(block.entry) for block in others)


@pytest.mark.slow
def test_nuts_agrees_with_exact_inference(study, scenes, truth):
    """In a scene with hidden parts; the names of the two faces are put in order first."""
    exact_one, scene = truth.take(2), scenes.scene.take(2)
    (first, probability), *_ = exact_one.partitions
    assert probability > 1 - 1e-6 and same_partition(scene.object, first)
    parts = face_parts(study.appearance.factors, study.images.centres, K)
    mean, variance = np.zeros((2, K, parts.pose_dim))
    part_of = exact_one.best_match
    for k in range(K):
        precision, information = np.eye(parts.pose_dim), np.zeros(parts.pose_dim)
        for row in np.flatnonzero(scene.present):
            n = part_of[row]
            if parts.owner[n] != k:
                continue
            weighted = np.asarray(parts.F[n]).T * (parts.feature_mask[n] / parts.variance[n])
            precision += weighted @ np.asarray(parts.F[n])
            information += weighted @ np.asarray(scene.points[row] - parts.offset[n])
        covariance = np.linalg.inv(precision)
        mean[k], variance[k] = covariance @ information, np.diag(covariance)

    result = nuts.run(study.program(K), scene, jax.random.key(0), num_warmup=200, num_samples=400)
    assert result.converged
    assert same_partition(scene.object, result.labels)
    pose = result.draws["pose"]
    swapped = np.abs(pose[..., 0, :2] - mean[0, :2]).max(-1) > np.abs(
        pose[..., 0, :2] - mean[1, :2]
    ).max(-1)
    pose = np.where(swapped[..., None, None], pose[..., ::-1, :], pose)
    assert_means(pose, mean)
    assert_means((pose - mean) ** 2, variance)


@pytest.mark.slow
def test_the_published_model(study, shared_data):
    """Draws of the published factor analyser: the figures that are known of it."""
    with np.load(shared_data / "faces_fa.npz") as file:
        dims = tuple(int(d) for d in file["part_dims"])
        names = ("loadings", "mean", "noise_variance")
        factors = FactorAnalyser(*(file[name] for name in names), dims)
        centres = np.c_[np.zeros(5), -file["part_y"]]
        eyes = list(file["part_names"]).index("eyes")
    num_faces, count = 3, 48
    sampled = study.scenes(count, num_faces)
    rng = np.random.default_rng(0)
    seen = np.ones((num_faces, 5), bool)
    made, scores = [], []
    for poses in sampled.poses:
        hidden = rng.normal(size=(num_faces, factors.num_factors))
        noise = np.sqrt(factors.noise_variance) * rng.normal(size=(num_faces, sum(dims)))
        scores.append(hidden @ factors.loadings.T + factors.mean + noise)
        made.append(face_points(poses, scores[-1], dims, centres, seen, rng))
    batch = join(made)
    program = faces_program(factors, centres, num_faces)
    result = cavi.run(program, batch, jax.random.key(0), num_restarts=4)
    assert same_partition(np.asarray(batch.object), result.labels).all()

    scenes = FaceScenes(batch, sampled.faces, sampled.poses)
    stand_in = experiment.FaceStudy(
        study.images, study.appearance._replace(factors=factors), study.faces
    )
    poses = experiment.poses_of_faces(result, scenes)
    rmse = appearance_rmse(stand_in, scenes, poses)
    error = rmse.std() / np.sqrt(count)
    assert 0.86 - 5 * error < np.sqrt(np.mean(rmse**2)) < 0.87 + 5 * error
    only_eyes = np.zeros(len(factors.mean), bool)
    only_eyes[factors.slices[eyes]] = True
    alone = np.stack(
        [[closed_form(factors, s, only_eyes)[0] for s in of_scene] for of_scene in scores]
    )
    from_eyes = np.concatenate([poses[..., :4], alone], axis=-1)
    rmse_eyes = appearance_rmse(stand_in, scenes, from_eyes)
    assert 0.90 - 5 * error < np.sqrt(np.mean(rmse_eyes**2)) < 0.92 + 5 * error
    assert (rmse < rmse_eyes).all()
