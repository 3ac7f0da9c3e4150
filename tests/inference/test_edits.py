"""New priors in a copy of the model file alone, and what each method says to them."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import models.constellation
from inference import cavi, exact, nuts, svi
from models.errors import ConjugacyError
from models.scenes import make_scene
from models.templates import shapes, stack

pytestmark = pytest.mark.slow  # compiles for minutes; `make test-all` runs it

NORMAL = "dist.MultivariateNormal(pose_mean, pose_covariance)"
STUDENT = "dist.MultivariateStudentT(3.0, pose_mean, pose_covariance)"
POSE = "    with numpyro.plate("
GAMMA = '    precision = numpyro.sample("precision", dist.Gamma(2.0, 2e-3))\n\n'
PARTS = stack(shapes("triangle", "L"))
POSES = np.array([[0.3, 0.2, 0.4, 0.1], [-0.5, -0.3, 0.2, 0.3]])
NOISE = 0.03 * np.random.default_rng(0).normal(size=(9, 2))
SCENE = make_scene(np.asarray(PARTS.predict(POSES))[:8] + NOISE[:8], 9)


def edited(folder: Path, *changes: tuple[str, str]):
    """The program of a copy of the model file, with some of its text replaced."""
    text = Path(models.constellation.__file__).read_text()
    for old, new in changes:
        assert text.count(old) >= 1
        text = text.replace(old, new, 1)
    copy = folder / "edited_constellation.py"
    copy.write_text(text)
    spec = importlib.util.spec_from_file_location("edited_constellation", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def program(points=None, present=None):
        return module.constellation(points, present, parts=PARTS, precision=1e3)

    return program


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A Student-t pose prior and a Gamma precision."""
    changes = ((NORMAL, STUDENT), (POSE, GAMMA + POSE))
    return edited(tmp_path_factory.mktemp("both"), *changes)


def test_nuts_and_svi_take_both_and_agree(both):
    drawn = nuts.run(both, SCENE, 0, num_chains=2, num_warmup=200, num_draws=300)
    fitted = svi.run(both, SCENE, 0, guide="AutoMultivariateNormal", restarts=1)
    assert drawn.converged and fitted.converged
    spread = np.sqrt(np.diagonal(drawn.pose_covariance, axis1=1, axis2=2))
    assert (np.abs(drawn.pose_mean - POSES) < 5 * spread).all()
    assert (np.abs(drawn.pose_mean - fitted.pose_mean) < 0.5 * spread).all()
    log_precision = [np.log(r.draws["precision"]) for r in (drawn, fitted)]
    assert abs(log_precision[0].mean() - log_precision[1].mean()) < 0.5 * log_precision[0].std()
    assert log_precision[0].std() > 0.1
    assert drawn.object.tolist() == fitted.object.tolist() == [0] * 3 + [1] * 5 + [-1]


def test_the_closed_forms_say_what_they_need(both):
    for run in (cavi.run, exact.run, svi.run):
        with pytest.raises(ConjugacyError) as error:
            run(both, SCENE)
        assert "'pose': found a MultivariateStudentT prior" in str(error.value)
        assert "want a Normal or MultivariateNormal prior" in str(error.value)
        assert "nuts, svi with an automatic guide" in str(error.value)


def test_coordinate_ascent_and_exact_inference_take_the_gamma(tmp_path):
    gamma = edited(tmp_path, (POSE, GAMMA + POSE))
    found = cavi.run(gamma, SCENE, 0, restarts=8)
    assert found.converged
    assert found.object.tolist() == [0] * 3 + [1] * 5 + [-1]
    certain = exact.run(gamma, SCENE)
    assert found.elbo < certain.log_evidence
    assert certain.object.tolist() == found.object.tolist()
