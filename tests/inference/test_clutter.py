"""Clutter: points that belong to no object, by every method, against brute force."""

import itertools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import seed, trace
from numpyro.infer.util import log_density

from guides import meanfield
from inference import cavi, exact, gibbs, nuts, ransac, svi
from inference.diagnostics.metrics import partition_metrics, same_partition, score
from inference.diagnostics.to_arviz import to_arviz
from inference.plots.scenes import plot_demo, plot_scenes
from inference.posterior import symmetry
from inference.result import grouping_of
from inference.variational import pool, published
from models.constellation import (
    cluttered_constellation,
    constellation,
    presence_constellation,
)
from models.distributions.match_priors import point_count
from models.errors import InputError
from models.program.marginal import marginal
from models.program.reading import read
from models.scenes import Scene, make_scene
from models.templates import CLUTTER, shapes, stack, with_clutter
from tests import oracle_edits as right

pytestmark = pytest.mark.long

K, N, C, P = 2, 7, 2, 4
PRECISION = 1e3
PARTS = stack(shapes("square", "triangle"), clutter=C, clutter_mean=[0.1, -0.2], clutter_scale=0.8)
POSES = np.array([[0.5, -0.4, 0.3, 0.1], [-0.6, 0.5, 0.2, -0.25]])


def scene_of(parts: list[int], stray: list[list[float]], noise: float = 0.02) -> Scene:
    """Some parts at `POSES`, and stray points."""
    rng = np.random.default_rng(0)
    places = np.asarray(PARTS.predict(jnp.asarray(POSES)))[parts]
    points = [*(places + noise * rng.normal(size=places.shape)), *stray]
    truth = np.r_[np.asarray(PARTS.owner)[parts], np.full(len(stray), K)]
    scene = make_scene(points, N + C)
    return scene._replace(object=np.r_[truth, np.full(N + C - len(points), -1)])


SCENES = {
    "a whole square and a stray point": scene_of([0, 1, 2, 3], [[-0.9, 0.2]]),
    "both objects and two stray points": scene_of(list(range(7)), [[0.9, 0.9], [-0.2, -0.8]]),
    "clutter alone": scene_of([], [[0.4, 0.1], [-0.5, -0.6]]),
    "a part of an object": scene_of([0, 1, 4, 5, 6], [[0.8, 0.8]]),
}
SMALL = ("a whole square and a stray point", "clutter alone")
"""Of few points: exact inference compiles for each number of them."""


def scenes_of(*in_make_test: str) -> Any:
    """Every scene; `make test-all` has the others."""
    names = [pytest.param(x, marks=[pytest.mark.slow] * (x not in in_make_test)) for x in SCENES]
    return pytest.mark.parametrize("name", names)


def assumed(scene: Scene, precision: Any = PRECISION, **changes: Any) -> right.Assumed:
    """The background as one more object whose pose moves nothing."""
    precision = np.asarray(precision, float)
    of_parts = np.ones((*precision.shape, N, 2)) / precision[..., None, None]
    own = np.broadcast_to(np.asarray(PARTS.variance)[N:], (*precision.shape, C, 2))
    numbers = right.Assumed(
        np.asarray(scene.points),
        np.asarray(scene.present),
        np.asarray(PARTS.F),
        np.asarray(PARTS.owner),
        np.zeros((K + 1, P)),
        np.tile(np.eye(P), (K + 1, 1, 1)),
        np.concatenate([of_parts, own], axis=-2),
        np.zeros((N + C, N + C)),
        offset=np.asarray(PARTS.offset),
    )
    return numbers._replace(**changes)


def plain(match_prior: str = "doubly_stochastic", precision: float = PRECISION) -> Any:
    return partial(
        cluttered_constellation, match_prior=match_prior, precision=precision, parts=PARTS
    )


VISIBILITY, CLUTTER_PROB, PRESENCE = 0.8, 0.3, 0.6


def with_presence(points: Any = None, present: Any = None, presence: Any = None) -> Any:
    return presence_constellation(
        points,
        present,
        presence,
        presence_prob=PRESENCE,
        visibility=VISIBILITY,
        clutter_prob=CLUTTER_PROB,
        precision=PRECISION,
        parts=PARTS,
    )


def presence_oracle(scene: Scene) -> right.Oracle:
    """Every part of a present object is seen and every slot is used, or not, by itself."""
    present, owner = np.asarray(scene.present), np.asarray(PARTS.owner)
    count = int(present.sum())

    def given(presence: tuple[bool, ...]) -> right.Assumed:
        prob = np.append(np.where(presence, VISIBILITY, 0.0), CLUTTER_PROB)[owner]
        with np.errstate(divide="ignore"):
            logits = np.where(present[:, None], np.log(prob), np.log1p(-prob))
        of_count = np.array([1.0])
        for p in prob:
            of_count = np.convolve(of_count, [1 - p, p])
        constant = np.log(of_count[count]) if of_count[count] > 0 else -np.inf
        return assumed(scene, match_logits=logits, log_constant=constant)

    sets = list(itertools.product((False, True), repeat=K))
    log_prob = [sum(math.log(PRESENCE if x else 1 - PRESENCE) for x in s) for s in sets]
    return right.Oracle(given, {"presence": list(zip(sets, log_prob, strict=True))})


# --- the model ------------------------------------------------------------------------------------


def test_slots_are_columns_without_a_pose():
    assert PARTS.num_objects == K and PARTS.num_parts == N + C
    assert PARTS.owner.tolist() == [0] * 4 + [1] * 3 + [2] * 2
    assert np.asarray(PARTS.is_clutter).tolist() == [False] * N + [True] * C
    assert np.all(PARTS.type[N:] == CLUTTER) and not np.any(PARTS.F[N:])
    np.testing.assert_allclose(PARTS.offset[N:], [[0.1, -0.2]] * 2)
    np.testing.assert_allclose(PARTS.variance[N:], 0.64)
    np.testing.assert_allclose(PARTS.predict(jnp.asarray(POSES))[N:], [[0.1, -0.2]] * 2)
    plain_parts = stack(shapes("square", "triangle"))
    for field, other in zip(with_clutter(plain_parts, C, [0.1, -0.2], 0.8), PARTS, strict=True):
        np.testing.assert_array_equal(field, other)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"clutter": -1}, "at least 1"), ({"clutter": 1, "clutter_scale": 0.0}, "positive scale")],
)
def test_impossible_clutter_is_refused(options, sentence):
    with pytest.raises(InputError, match=sentence):
        stack(shapes("square"), **options)


@pytest.mark.parametrize("precision", [1e-2, 1e2, 1e8])
def test_neither_precision_nor_beta_touches_clutter(precision):
    program = partial(constellation, parts=PARTS, precision=precision, beta=0.3)
    sites = trace(seed(program, 0)).get_trace(**SCENES["clutter alone"].observed)
    variance = np.asarray(sites["points"]["fn"].noise_variance)
    np.testing.assert_allclose(variance[N:], 0.64)
    np.testing.assert_allclose(variance[:N], 1 / (0.3 * precision))


@pytest.mark.parametrize("presence", [[0, 0], [0, 1], [1, 1]])
def test_the_number_of_points_counts_parts_and_slots(presence):
    prob = np.append(np.array(presence) * VISIBILITY, CLUTTER_PROB)[PARTS.owner]
    wanted = np.array([1.0])
    for p in prob:
        wanted = np.convolve(wanted, [1 - p, p])
    counts = point_count(jnp.array(presence), VISIBILITY, PARTS.owner, CLUTTER_PROB)
    np.testing.assert_allclose(np.exp(counts.log_prob(jnp.arange(N + C + 1))), wanted, atol=1e-12)


def test_scenes_with_clutter_are_drawn():
    drawn = trace(seed(with_presence, 3)).get_trace()
    assert drawn["points"]["value"].shape == (N + C, 2)


# --- closed forms against brute force -------------------------------------------------------------


@scenes_of(SMALL[0])
def test_exact_inference_is_the_sum_over_every_match(name):
    scene = SCENES[name]
    wanted = float(right.log_evidence_given(assumed(scene)))
    result = exact.run(plain(), scene)
    assert result.log_evidence == pytest.approx(wanted, rel=1e-9)
    assert result.pose_mean.shape == (K, P)
    bound = cavi.run(plain(), scene, jax.random.key(0))
    assert bound.elbo <= wanted + 1e-9 and bound.pose_mean.shape == (K, P)


@pytest.mark.slow
@pytest.mark.parametrize("name", [SMALL[0], "clutter alone"])
def test_a_mixture_may_have_clutter(name):
    scene = SCENES[name]
    wanted = float(right.log_evidence_given(assumed(scene), "mixture"))
    assert exact.run(plain("mixture"), scene).log_evidence == pytest.approx(wanted, rel=1e-9)
    assert cavi.run(plain("mixture"), scene, jax.random.key(0)).elbo <= wanted + 1e-9


@scenes_of("clutter alone")
def test_presence_and_clutter_together(name):
    scene = SCENES[name]
    wanted = presence_oracle(scene).log_evidence()
    result = exact.run(with_presence, scene)
    assert result.log_evidence == pytest.approx(wanted, rel=1e-9)
    if name != "a part of an object":  # two points of a square do not tell which of three they are
        assert result.labels.tolist() == scene.object.tolist()


@scenes_of()
def test_the_bound_with_presence_and_clutter(name):
    scene = SCENES[name]
    bound = cavi.run(with_presence, scene, jax.random.key(0))
    assert bound.elbo <= presence_oracle(scene).log_evidence() + 1e-9
    if name != "a part of an object":
        assert bound.labels.tolist() == scene.object.tolist()


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x != "clutter alone")) for x in SMALL]
)
def test_an_unknown_precision_learns_nothing_from_clutter(name):
    scene = SCENES[name]
    concentration, rate = 2.0, 2e-3

    def program(points: Any, present: Any) -> Any:
        precision = numpyro.sample("precision", dist.Gamma(concentration, rate))
        return cluttered_constellation(points, present, precision=precision, parts=PARTS)

    scalar = right.Scalar(partial(right.gamma, concentration, rate))
    grid = right.Oracle(lambda precision: assumed(scene, precision), {}, {"precision": scalar})
    wanted = grid.log_evidence()
    assert exact.run(program, scene).log_evidence == pytest.approx(wanted, rel=1e-6)
    bound = cavi.run(program, scene, jax.random.key(0))
    assert bound.elbo <= wanted + 1e-6
    assert bound.elbo >= wanted - 15  # of the turns of a square, and van der Waerden's inequality


def test_only_points_of_objects_count_for_the_precision():
    def program(points: Any, present: Any) -> Any:
        precision = numpyro.sample("precision", dist.Gamma(2.0, 2e-3))
        return cluttered_constellation(points, present, precision=precision, parts=PARTS)

    model = read(program, SCENES["clutter alone"])
    energy = jnp.full((N + C, N + C), 7.0)
    for columns, features, misfit in (([N, N + 1, *range(N)], 0, 0), ([0, N, 1], 2, 7.0)):
        rest = [n for n in range(N + C) if n not in columns]
        match = jnp.eye(N + C)[np.array([*columns, *rest])]
        match = match * model.seen.any(axis=1)[:, None]  # dummy rows have no energy
        concentration, rate = meanfield.precision_gamma(model, match, energy, jnp.asarray(0.5))
        assert float(concentration) == 2.0 + 0.5 * features
        assert float(rate) == pytest.approx(2e-3 + 0.25 * misfit)


def test_exact_draws_have_the_exact_marginals():
    scene = SCENES["a whole square and a stray point"]
    found = exact.run(plain(), scene)
    drawn = exact.sample(plain(), scene, jax.random.key(0), 4000)
    assert drawn.pose.shape == (4000, K, P)
    rows = np.flatnonzero(scene.present)
    frequency = np.stack([np.bincount(drawn.match[:, m], minlength=N + C) for m in rows]) / 4000
    error = np.sqrt(found.match_probs[rows] * (1 - found.match_probs[rows]) / 4000)
    assert np.all(np.abs(frequency - found.match_probs[rows]) < 5 * error + 1e-3)


def test_the_most_probable_partition_tells_clutter_from_objects():
    """Every partition of two points, by listing matches: clutter is not one more object."""
    scene = SCENES["clutter alone"]
    owner = np.asarray(PARTS.owner)
    weight: dict[bytes, float] = {}
    evidence = float(right.log_evidence_given(assumed(scene)))
    for first, second in itertools.permutations(range(N + C), 2):
        logits = np.full((N + C, N + C), -np.inf)
        logits[0, first] = logits[1, second] = 0.0
        logits[2:] = 0.0
        # log_evidence_given normalises by this match alone; undo it by the number of all matches.
        term = float(right.log_evidence_given(assumed(scene, match_logits=logits)))
        labels = np.full(N + C, -1)
        labels[:2] = owner[[first, second]]
        name = grouping_of(labels, K).tobytes()
        share = math.exp(term - math.log(math.perm(N + C, 2)) - evidence)
        weight[name] = weight.get(name, 0.0) + share
    assert sum(weight.values()) == pytest.approx(1.0)
    for labels, probability in exact.run(plain(), scene).partitions:
        assert probability == pytest.approx(weight[grouping_of(labels, K).tobytes()], rel=1e-8)


# --- other methods --------------------------------------------------------------------------------


def test_the_sum_over_matches_has_clutter():
    scene = SCENES["a whole square and a stray point"]
    background = np.zeros((1, P))
    pose = np.concatenate([POSES, background])
    wanted = right.log_density_given(assumed(scene), pose)
    wanted -= float(right.multivariate_normal(background[0], np.zeros(P), np.eye(P)))
    found, _ = log_density(marginal(plain()), (), scene.observed, {"pose": jnp.asarray(POSES)})
    assert float(found) == pytest.approx(wanted, rel=1e-9)


CHAIN: dict[str, Any] = {"num_chains": 2, "num_warmup": 40, "num_samples": 40}


@pytest.mark.slow
@pytest.mark.parametrize("run", [gibbs.run, nuts.run], ids=["gibbs", "nuts"])
def test_chains_have_poses_of_objects_only(run):
    scene = SCENES["both objects and two stray points"]
    options = CHAIN | ({"num_temperatures": 4} if run is gibbs.run else {})
    result = run(plain(), scene, jax.random.key(0), **options)
    assert result.draws["pose"].shape[2:] == (K, P)
    wanted = exact.run(plain(), scene)
    assert same_partition(result.labels, wanted.labels, K)
    if run is gibbs.run:
        data = to_arviz(result, plain(), jax.random.key(0), predictive=False, match=True)
        assert data.posterior.coords["object"].values.tolist() == ["square", "triangle"]
        assert data.posterior.coords["part"].values[-1] == "background, part 1"
        assert data.constant_data["owner"].values[-C:].tolist() == ["background"] * C


@pytest.mark.slow
def test_the_mean_field_guide_fits_clutter():
    scene = SCENES["a whole square and a stray point"]
    result = svi.run(plain(), scene, jax.random.key(0), num_restarts=2, num_steps=200)
    assert result.pose_mean.shape == (K, P)
    assert result.elbo <= float(right.log_evidence_given(assumed(scene))) + 1e-6


@pytest.mark.parametrize("name", SMALL)
def test_ransac_leaves_clutter_over(name):
    scene = SCENES[name]
    result = ransac.run(plain(), scene, jax.random.key(0), tolerance=0.1)
    assert result.labels.tolist() == scene.object.tolist() and result.converged
    np.testing.assert_allclose(result.match_probs.sum(axis=0), 1.0)
    np.testing.assert_allclose(result.match_probs.sum(axis=1), 1.0)


def test_ransac_says_where_there_is_more_clutter_than_slots():
    scene = scene_of([0, 1, 2, 3], [[0.9, 0.9], [-0.9, 0.7], [-0.2, -0.8]])
    result = ransac.run(plain(), scene, jax.random.key(0), tolerance=0.05)
    assert not result.converged and result.explained.tolist()[:7] == [True] * 4 + [False] * 3


def test_the_published_code_knows_no_clutter():
    with pytest.raises(InputError, match="no clutter"):
        published.run(plain(), SCENES["clutter alone"], jax.random.key(0))


def test_the_background_is_never_sparse():
    """A single point is too few for an object, and enough for clutter."""
    owner = np.asarray(PARTS.owner)
    match = np.eye(N + C)[None, [0, 1, 2, 3, N, 4, 5, 6, N + 1]]
    alone = np.eye(N + C)[None, [0, 1, 2, 3, 4, N, 5, 6, N + 1]]
    present = (np.arange(N + C) < 5)[None]
    assert not pool._is_sparse(match, present, owner, K)[0]
    assert pool._is_sparse(alone, present, owner, K)[0]


def test_symmetries_are_between_objects():
    found = symmetry.find(plain(), SCENES["clutter alone"])
    assert found.num_objects == K and found.order == 4


# --- metrics and pictures -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicted", "right_scene"),
    [
        ([0, 0, 0, 2, 2, -1], 1.0),
        ([1, 1, 1, 2, 2, -1], 1.0),
        ([0, 0, 0, 1, 1, -1], 0.0),  # grouped alike, but clutter is no object
        ([2, 2, 2, 0, 0, -1], 0.0),
        ([0, 0, 0, 2, 1, -1], 0.0),
    ],
)
def test_clutter_is_no_object_to_the_metrics(predicted, right_scene):
    truth = np.array([[0, 0, 0, 2, 2, -1]])
    found = partition_metrics(truth, np.array([predicted]), num_objects=2)
    assert found["scene_accuracy"][0] == right_scene
    assert same_partition(truth, np.array([predicted]), 2)[0] == bool(right_scene)


def test_results_with_clutter_are_scored():
    scene = SCENES["both objects and two stray points"]
    scores = score(ransac.run(plain(), scene, jax.random.key(0), tolerance=0.05))
    assert scores["partition"]["scene_accuracy"] == 1 and scores["partition"]["sa"] == 1


def test_clutter_is_drawn_as_grey_crosses_without_an_outline():
    scene = SCENES["both objects and two stray points"]
    result = ransac.run(plain(), scene, jax.random.key(0), tolerance=0.05)
    figure = plot_demo([result], PARTS, ["square", "triangle"])
    panels = [axes for axes in figure.axes if axes.get_title() == "truth"]
    panels += [axes for axes in figure.axes if "objects found" in axes.get_title()]
    for axes in panels:
        crosses = [x for x in axes.collections if x.get_gid() == "clutter"]
        assert len(crosses) == 1 and len(crosses[0].get_offsets()) == 2
        gids = {line.get_gid() for line in axes.lines}
        assert gids == {"outline 0", "outline 1"}
    assert "clutter" in [text.get_text() for text in figure.legends[0].get_texts()]
    names = [text.get_text() for axes in figure.axes for text in axes.get_xticklabels()]
    assert "clutter" in names
    plain_scenes = plot_scenes(scene.batch(), num_objects=K)
    assert "clutter" in [x.get_gid() for x in plain_scenes.axes[0].collections]
