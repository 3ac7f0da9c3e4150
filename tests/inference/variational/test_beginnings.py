"""Where chains and automatic guides begin under programs that coordinate ascent does not take."""

import jax
import numpy as np
import pytest

from inference.variational.beginnings import beginnings
from tests import oracle
from tests.inference.edited_programs import EDITS, PARTS, POSES, SCENE

pytestmark = pytest.mark.long

NOT_CONJUGATE = [
    "a factor of the pose",
    "an observed site that depends on the pose",
    "a factor beyond a threshold",
    "poses that are clipped",
    "a precision beyond a threshold",
    "a match that depends on the pose",
    "a precision that depends on the pose",
]


@pytest.mark.parametrize(
    "name",
    [NOT_CONJUGATE[0], *(pytest.param(n, marks=pytest.mark.slow) for n in NOT_CONJUGATE[1:])],
)
def test_chains_begin_at_the_objects_whatever_else_depends_on_the_poses(name):
    edit = next(edit for edit in EDITS if edit.name == name)
    begin = beginnings(edit.program_of("nuts"), SCENE, jax.random.key(0), 1).values["pose"][0]
    F, owner, points = np.asarray(PARTS.F), np.asarray(PARTS.owner), SCENE.points[SCENE.present]
    places = oracle.predicted_parts(F, np.zeros(F.shape[:2]), owner, np.asarray(begin))
    apart = np.linalg.norm(points[:, None] - places, axis=-1).min(axis=1)
    assert apart.max() < 0.2, f"points are {apart} from the parts at {begin}, truth {POSES}"
