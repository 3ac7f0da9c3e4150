"""Reading a program: what is read, what is refused, and the program with its match summed out."""

import dataclasses
import inspect
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.handlers import seed, trace
from numpyro.infer.util import log_density

from models.constellation import PARTS as constellation_parts
from models.constellation import constellation
from models.distributions.likelihood import MarginalParts, MatchedParts
from models.distributions.match import DoublyStochasticMatch, MixtureMatch, PermutationMatch
from models.errors import ConjugacyError, InputError
from models.program.batches import check_conjugate, read_scenes
from models.program.marginal import marginal, match_posterior
from models.program.reading import read
from models.program.versions import as_it_stands
from models.program.witness import check_program
from models.scenes import Scene, make_scene
from models.templates import stack
from tests import oracle

PARTS = stack([[[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], [[0.0, 1.0], [1.0, 3.0]]])
N, K, P = PARTS.num_parts, PARTS.num_objects, PARTS.pose_dim
SCENE = make_scene(np.random.default_rng(0).normal(size=(4, 2)), N)
LOGITS = np.random.default_rng(1).normal(size=(N, N))
PRIORS = {
    "doubly_stochastic": DoublyStochasticMatch(oracle.sinkhorn(LOGITS)),
    "permutation": PermutationMatch(LOGITS),
    "mixture": MixtureMatch(LOGITS),
}
MEAN = np.zeros(P)
NORMAL = dist.MultivariateNormal(MEAN, np.eye(P))


def program(
    points=None,
    present=None,
    *,
    pose_prior=NORMAL,
    match_prior=PRIORS["permutation"],
    precision=10.0,
    beta=1.0,
    change_pose=lambda pose: pose,
    change_match=lambda match: match,
    further=lambda pose, match: None,
):
    """A program whose pieces can be exchanged, one for each test."""
    with numpyro.plate("object", K):
        pose = numpyro.sample("pose", pose_prior)
    match = numpyro.sample("match", match_prior)
    further(pose, match)
    if callable(precision):
        precision = precision(pose)
    likelihood = MatchedParts(
        change_match(match),
        change_pose(pose),
        PARTS,
        precision=precision,
        beta=beta,
        present=present,
    )
    return numpyro.sample("points", likelihood, obs=points)


def assert_same(first, second):
    """Two readings agree in every field."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PRIORS)
def test_the_pieces_are_those_of_the_program(family):
    rng = np.random.default_rng(2)
    mean, factor = rng.normal(size=(K, P)), rng.normal(size=(K, P, P))
    covariance = factor @ factor.swapaxes(1, 2) + np.eye(P)
    prior = PRIORS[family]
    this = partial(
        program,
        pose_prior=dist.MultivariateNormal(mean, covariance),
        match_prior=prior,
        precision=4.0,
        beta=0.5,
    )
    check_conjugate(this, SCENE)
    result = read(this, SCENE)
    np.testing.assert_allclose(result.pose_mean, mean)
    np.testing.assert_allclose(result.pose_covariance, covariance, rtol=1e-12)
    expected_logits = np.log(oracle.sinkhorn(LOGITS)) if family == "doubly_stochastic" else LOGITS
    np.testing.assert_allclose(result.match_logits, expected_logits, rtol=1e-12)
    assert result.match_family is type(prior)
    np.testing.assert_array_equal(result.points, SCENE.points)
    np.testing.assert_array_equal(result.seen, np.repeat(SCENE.present[:, None], 2, axis=1))
    np.testing.assert_allclose(result.parts.F, PARTS.F)
    np.testing.assert_allclose(result.parts.variance, np.full((N, 2), 1 / (4.0 * 0.5)))
    assert result.precision_prior is None
    assert result.num_objects == K


@pytest.mark.parametrize(
    ("prior", "mean", "covariance"),
    [
        (dist.Normal(1.0, 2.0).expand([P]).to_event(1), np.ones((K, P)), 4 * np.eye(P)),
        (dist.Normal(np.arange(P), np.arange(1.0, 1 + P)).to_event(1), None, None),
        (
            dist.LowRankMultivariateNormal(MEAN, np.ones((P, 1)), np.full(P, 0.5)),
            np.zeros((K, P)),
            np.ones((P, P)) + 0.5 * np.eye(P),
        ),
        (
            dist.MultivariateNormal(MEAN, precision_matrix=4 * np.eye(P)),
            np.zeros((K, P)),
            np.eye(P) / 4,
        ),
    ],
    ids=["expanded", "independent", "low_rank", "by_precision"],
)
def test_every_way_to_write_a_normal_prior(prior, mean, covariance):
    if mean is None:
        mean, covariance = np.tile(np.arange(P), (K, 1)), np.diag(np.arange(1.0, 1 + P) ** 2)
    this = partial(program, pose_prior=prior)
    check_conjugate(this, SCENE)
    result = read(this, SCENE)
    np.testing.assert_allclose(result.pose_mean, mean)
    np.testing.assert_allclose(result.pose_covariance, np.stack([covariance] * K), rtol=1e-12)


def test_an_edit_of_the_pose_prior_changes_the_reading_and_nothing_else():
    """The source of the shipped program with five other lines, as a user would edit it."""
    source = inspect.getsource(constellation)
    edits = {
        "pose_mean = np.zeros(parts.pose_dim)": "pose_mean = jnp.arange(12.0).reshape(3, 4)",
        "pose_covariance = np.eye(parts.pose_dim)": (
            "correlated = 0.5 * jnp.eye(parts.pose_dim) + 0.5\n"
            "    scales = jnp.array([1.0, 2.0, 3.0])\n"
            "    pose_covariance = scales[:, None, None] * correlated"
        ),
    }
    for line, edited in edits.items():
        assert source.count(line) == 1
        source = source.replace(line, edited)
    namespace = dict(vars(sys.modules["models.constellation"]))
    exec(source, namespace)  # the program, edited
    scene = make_scene(np.random.default_rng(3).normal(size=(6, 2)), 11)
    check_conjugate(namespace["constellation"], scene)
    edited, original = (read(p, scene) for p in (namespace["constellation"], constellation))
    np.testing.assert_array_equal(edited.pose_mean, np.arange(12.0).reshape(3, 4))
    correlated = 0.5 * np.eye(4) + 0.5
    np.testing.assert_allclose(edited.pose_covariance, [correlated, 2 * correlated, 3 * correlated])
    np.testing.assert_array_equal(original.pose_mean, np.zeros((3, 4)))
    np.testing.assert_array_equal(original.pose_covariance, np.stack([np.eye(4)] * 3))
    restored = dataclasses.replace(
        edited, pose_mean=original.pose_mean, pose_covariance=original.pose_covariance
    )
    assert_same(restored, original)


def gamma_precision(points=None, present=None):
    precision = numpyro.sample("precision", dist.Gamma(2.0, 3.0))
    return program(points, present, precision=precision, beta=0.5)


def test_a_gamma_precision_is_read():
    check_conjugate(gamma_precision, SCENE)
    result = read(gamma_precision, SCENE)
    np.testing.assert_array_equal(result.precision_prior, [2.0, 3.0])
    # The variance is that at a precision of one.
    np.testing.assert_allclose(result.parts.variance, np.full((N, 2), 1 / 0.5))


def centred_on_the_points(points=None, present=None):
    centre = jnp.sum(jnp.where(present[:, None], points, 0), axis=0) / jnp.sum(present)
    mean = jnp.concatenate([centre, jnp.zeros(2)])
    return program(points, present, pose_prior=dist.MultivariateNormal(mean, np.eye(P)))


def test_a_prior_that_depends_on_the_points_is_read_for_each_scene():
    rng = np.random.default_rng(4)
    present = np.array([[True] * 5, [True] * 3 + [False] * 2, [True] + [False] * 4])
    batch = Scene(np.where(present[..., None], rng.normal(size=(3, N, 2)), 0.0), present)
    result = jax.jit(jax.vmap(lambda scene: read(centred_on_the_points, scene)))(batch)
    for index in range(3):
        scene = batch.take(index)
        check_conjugate(centred_on_the_points, scene)
        centre = scene.points[scene.present].mean(axis=0)
        np.testing.assert_allclose(result.pose_mean[index, :, :2], np.stack([centre] * K))
        one = read(centred_on_the_points, scene)
        np.testing.assert_allclose(result.pose_mean[index], one.pose_mean)
        np.testing.assert_array_equal(result.seen[index], one.seen)


@pytest.mark.parametrize("this", [program, centred_on_the_points])
def test_a_batch_is_read_with_the_scenes_last_and_only_what_varies_repeated(this):
    points = np.random.default_rng(6).normal(size=(3, N, 2))
    batch = Scene(points, np.ones((3, N), bool))
    reading = read_scenes(this, batch)
    varies, result = reading.varies, reading.model
    assert varies.points
    assert varies.pose_mean == (this is centred_on_the_points)
    assert not varies.match_logits
    assert result.match_logits.shape == (N, N, 1)
    for index in range(3):
        here = index if varies.pose_mean else 0
        one = read(this, batch.take(index))
        np.testing.assert_allclose(result.points[..., index], one.points)
        np.testing.assert_allclose(result.pose_mean[..., here], one.pose_mean)


def mixture_of(change):
    """A mixture whose part probabilities have a Dirichlet prior."""

    def this(points=None, present=None):
        part_probs = numpyro.sample("part_probs", dist.Dirichlet(np.arange(1.0, N + 1)))
        logits = jnp.broadcast_to(change(jnp.log(part_probs)), (N, N))
        return program(points, present, match_prior=MixtureMatch(logits))

    return this


def test_a_dirichlet_over_the_parts_of_a_mixture_is_read():
    this = mixture_of(lambda logits: logits)
    check_conjugate(this, SCENE)
    np.testing.assert_array_equal(read(this, SCENE).part_prior, np.arange(1.0, N + 1))
    assert read(program, SCENE).part_prior is None


def hierarchical(points=None, present=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    return program(points, present, pose_prior=dist.MultivariateNormal(MEAN, scale * np.eye(P)))


def test_a_further_site_may_be_given():
    given = {"scale": jnp.asarray(0.3)}
    check_conjugate(hierarchical, SCENE, given)
    result = read(hierarchical, SCENE, given)
    np.testing.assert_allclose(result.pose_covariance, np.stack([0.3 * np.eye(P)] * K))


def observed_precision(points=None, present=None):
    precision = numpyro.sample("precision", dist.Gamma(2.0, 3.0), obs=100.0)
    return program(points, present, precision=precision)


def test_an_observed_site_keeps_its_value():
    check_conjugate(observed_precision, SCENE)
    variance = read(observed_precision, SCENE).parts.variance
    np.testing.assert_allclose(variance, np.full((N, 2), 0.01))


# --- what is refused ----------------------------------------------------------------------------


def without_match(points, present):
    with numpyro.plate("object", K):
        pose = numpyro.sample("pose", NORMAL)
    numpyro.sample("points", MatchedParts(np.eye(N), pose, PARTS, present=present), obs=points)


def without_pose(points, present):
    match = numpyro.sample("match", PRIORS["permutation"])
    poses = np.zeros((K, P))
    numpyro.sample("points", MatchedParts(match, poses, PARTS, present=present), obs=points)


def without_points(points, present):
    with numpyro.plate("object", K):
        numpyro.sample("pose", NORMAL)
    numpyro.sample("match", PRIORS["permutation"])


def other_likelihood(points, present):
    with numpyro.plate("object", K):
        numpyro.sample("pose", NORMAL)
    numpyro.sample("match", PRIORS["permutation"])
    numpyro.sample("points", dist.Laplace(0, 1).expand([N, 2]).to_event(2), obs=points)


def other_match(points, present):
    with numpyro.plate("object", K):
        pose = numpyro.sample("pose", NORMAL)
    match = numpyro.sample("match", dist.Normal(0, 1).expand([N, N]).to_event(2))
    numpyro.sample("points", MatchedParts(match, pose, PARTS, present=present), obs=points)


def single_pose(points, present):
    pose = numpyro.sample("pose", dist.MultivariateNormal(MEAN, np.eye(P)))
    match = numpyro.sample("match", PRIORS["permutation"])
    poses = jnp.stack([pose] * K)
    numpyro.sample("points", MatchedParts(match, poses, PARTS, present=present), obs=points)


def lognormal_precision(points, present):
    return program(points, present, precision=numpyro.sample("precision", dist.LogNormal(0.0, 1.0)))


def squared_precision(points, present):
    precision = numpyro.sample("precision", dist.Gamma(2.0, 3.0))
    return program(points, present, precision=precision**2)


def match_prior_from_the_pose(points, present):
    with numpyro.plate("object", K):
        pose = numpyro.sample("pose", NORMAL)
    match = numpyro.sample("match", PermutationMatch(LOGITS + pose[0, 0] * np.eye(N)))
    numpyro.sample("points", MatchedParts(match, pose, PARTS, present=present), obs=points)


STUDENT = dist.StudentT(3.0).expand([P]).to_event(1)
REFUSED = {
    "student_pose": (partial(program, pose_prior=STUDENT), "pose", "a StudentT prior", "Normal"),
    "one_pose_for_all": (single_pose, "pose", "values of shape (4,)", "(K, p)"),
    "precision_from_pose": (
        partial(program, precision=lambda pose: 1 + pose[0, 0] ** 2),
        "points",
        "precision depends on a latent site",
        "a site 'precision' with a Gamma prior",
    ),
    "lognormal_precision": (lognormal_precision, "precision", "a LogNormal", "no such site"),
    "squared_precision": (squared_precision, "precision", "a Gamma", "no such site"),
    "tempered_part_probs": (
        mixture_of(lambda logits: 0.5 * logits),
        "match",
        "does not take the site 'part_probs' as it is",
        "the log of 'part_probs'",
    ),
    "further_latent": (hierarchical, "scale", "a HalfNormal", "no such site"),
    "transposed_match": (
        partial(program, change_match=jnp.transpose),
        "points",
        "match is not the value of the site 'match'",
        "takes the site 'match' as it is",
    ),
    "squared_pose": (
        partial(program, change_pose=jnp.square),
        "points",
        "pose is not the value of the site 'pose'",
        "takes the site 'pose' as it is",
    ),
    "absolute_pose": (
        partial(program, change_pose=jnp.abs),
        "points",
        "pose is not the value of the site 'pose'",
        "takes the site 'pose' as it is",
    ),
    "match_prior_from_pose": (match_prior_from_the_pose, "match", "changes with another", "fixed"),
    "no_match": (without_match, "match", "no such sample site, only pose, points", "one of"),
    "no_pose": (without_pose, "pose", "no such sample site, only match, points", "one of"),
    "no_points": (without_points, "points", "no such sample site, only pose, match", "one of"),
    "other_match": (other_match, "match", "a Normal", "PermutationMatch"),
    "other_likelihood": (other_likelihood, "points", "a Laplace", "MatchedParts"),
    "factor_on_the_pose": (
        partial(program, further=lambda pose, match: numpyro.factor("far", -(pose[0, 0] ** 2))),
        "far",
        "",
        "",
    ),
    "further_data_on_the_pose": (
        partial(
            program,
            further=lambda pose, match: numpyro.sample("gps", dist.Normal(pose[0, 0]), obs=0.3),
        ),
        "gps",
        "",
        "",
    ),
}


@pytest.mark.parametrize(("this", "site", "found", "wanted"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_conjugate_is_refused_by_name(this, site, found, wanted):
    with pytest.raises(ConjugacyError) as caught:
        check_conjugate(this, SCENE)
    error = caught.value
    assert error.site == site
    assert found in error.found
    assert wanted in error.required
    for piece in (repr(site), error.found, error.required, "nuts, svi with"):
        assert piece in str(error)


@pytest.mark.parametrize("this", [REFUSED["student_pose"][0], other_likelihood])
def test_reading_refuses_the_same(this):
    with pytest.raises(ConjugacyError):
        read(this, SCENE)


# --- the match summed out -----------------------------------------------------------------------


def density(this, pose, **scene):
    value, _ = log_density(seed(this, 0), (), scene or SCENE.observed, {"pose": pose})
    return value


POSE = np.random.default_rng(5).normal(size=(K, P))


def brute_force_density(family: str, log_pose_prior: float) -> float:
    parts = [np.asarray(field) for field in (PARTS.F, PARTS.offset, PARTS.owner)]
    table = oracle.log_likelihood(
        SCENE.points,
        oracle.predicted_parts(*parts, POSE),
        np.asarray(PARTS.variance) / 10.0,
        np.broadcast_to(SCENE.present[:, None, None], (N, N, 2)),
    )
    log_weights = np.log(oracle.sinkhorn(LOGITS)) if family == "doubly_stochastic" else LOGITS
    listed = oracle.assignments(N, N) if family == "mixture" else oracle.permutations(N)
    return log_pose_prior + oracle.log_marginal(log_weights, table, listed)


def test_the_marginal_program_has_no_match():
    sites = trace(seed(marginal(program), 0)).get_trace(**SCENE.observed)
    assert list(sites) == ["object", "pose", "points"]
    assert isinstance(sites["points"]["fn"], MarginalParts)
    assert sites["points"]["is_observed"]


@pytest.mark.parametrize("family", PRIORS)
def test_the_marginal_density_under_a_normal_prior(family):
    this = partial(program, match_prior=PRIORS[family])
    log_prior = -0.5 * np.sum(POSE**2) - 0.5 * POSE.size * np.log(2 * np.pi)
    expected = brute_force_density(family, log_prior)
    np.testing.assert_allclose(density(marginal(this), POSE), expected, rtol=1e-11)


def test_the_marginal_density_under_a_student_prior():
    """No conjugacy is needed."""
    this = partial(program, pose_prior=STUDENT)
    constant = np.log(2 / (np.pi * np.sqrt(3)))  # Student-t with 3 degrees of freedom
    log_prior = np.sum(constant - 2 * np.log1p(POSE**2 / 3))
    expected = brute_force_density("permutation", log_prior)
    np.testing.assert_allclose(density(marginal(this), POSE), expected, rtol=1e-11)


@pytest.mark.parametrize("family", PRIORS)
def test_the_match_is_recovered_given_the_pose(family):
    posterior = match_posterior(partial(program, match_prior=PRIORS[family]), SCENE, {"pose": POSE})
    likelihood = MatchedParts(
        np.eye(N), POSE, PARTS, precision=10.0, present=SCENE.present
    ).pair_log_likelihood(SCENE.points)
    log_weights = np.log(oracle.sinkhorn(LOGITS)) if family == "doubly_stochastic" else LOGITS
    listed = oracle.assignments(N, N) if family == "mixture" else oracle.permutations(N)
    expected = oracle.marginals(log_weights + np.asarray(likelihood), listed)
    np.testing.assert_allclose(jax.jit(lambda q: q.mean)(posterior), expected, atol=1e-11)


def assert_noticed(this):
    """The density of the marginal program is NaN, or there is a sentence."""
    try:
        value = density(marginal(this), POSE)
    except InputError:
        return
    assert np.isnan(value)


def test_a_match_that_is_used_elsewhere_is_noticed():
    assert_noticed(partial(program, further=lambda pose, match: numpyro.factor("f", match[0, 0])))


def test_a_match_that_is_changed_on_its_way_to_the_points_is_noticed():
    assert_noticed(partial(program, change_match=jnp.transpose))


# --- programs that do not run -------------------------------------------------------------------


def test_a_program_that_does_not_take_the_scene_is_explained():
    with pytest.raises(InputError, match="does not take the scene's points, present"):
        check_program(lambda image: None, SCENE)


def test_a_scene_with_too_few_rows_is_explained():
    for look in (read, check_program):
        with pytest.raises(InputError, match=r"which of the 11 rows are points, .* got \(5,\)"):
            look(constellation, SCENE)


@pytest.mark.parametrize("read_or_check", [check_conjugate, check_program])
@pytest.mark.parametrize("shape", [(3,), (11,)])
def test_a_precision_of_each_part_is_refused_with_what_to_write_instead(shape, read_or_check):
    """NumPyro would take it for a batch of scenes."""
    program = partial(constellation, precision=np.full(shape, 1e3))
    sentence = r"precision of MatchedParts must be one number, got shape .*parts._replace\(variance"
    with pytest.raises(InputError, match=sentence):
        read_or_check(program, make_scene(np.zeros((3, 2)), 11))


@pytest.mark.parametrize("read_or_check", [check_conjugate, check_program])
def test_an_object_without_parts_is_refused(read_or_check):
    parts = constellation_parts._replace(owner=np.array([0, 0, 0, 0, 1, 1, 1, 3, 3, 3, 3]))
    with pytest.raises(InputError, match="site 'points': object 2 has no part; number the owners"):
        read_or_check(partial(constellation, parts=parts), make_scene(np.zeros((3, 2)), 11))


@pytest.mark.parametrize("read_or_check", [check_conjugate, check_program])
@pytest.mark.parametrize(("owner", "site"), [(-1, "points"), (2, "pose")])
def test_a_part_whose_owner_has_no_pose_is_refused(read_or_check, owner, site):
    """JAX takes the last pose for number -1, and for any number that is too large."""
    parts = PARTS._replace(owner=np.append(np.asarray(PARTS.owner)[:-1], owner))

    def this(points, present):
        with numpyro.plate("object", K):
            pose = numpyro.sample("pose", NORMAL)
        match = numpyro.sample("match", PRIORS["permutation"])
        numpyro.sample("points", MatchedParts(match, pose, parts, present=present), obs=points)

    with pytest.raises(InputError, match=f"site '{site}'"):
        read_or_check(this, SCENE)


@pytest.mark.parametrize("check", [check_conjugate, as_it_stands])
@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda at: at["pose"][0, 0] > 3 and 1, "site 'pose'"),
        (lambda at: float(at["pose"][0, 0]), "site 'pose'"),
        (lambda at: np.asarray(at["match"]), "site 'match'"),
        (lambda at: [0.0, 1.0][at["kind"]], "site 'kind'"),
        (lambda at: at["points"].sum() > 0 and 1, "the scene's points"),
        (lambda at: bool(at["present"][1]), "the scene's present"),
    ],
    ids=["if", "float", "numpy", "index", "points", "present"],
)
def test_what_a_program_branches_on_in_python_is_named(check, use, what):
    def branching(points, present):
        with numpyro.plate("object", K):
            pose = numpyro.sample("pose", NORMAL)
        kind = numpyro.sample("kind", dist.Bernoulli(0.5))
        match = numpyro.sample("match", PRIORS["permutation"])
        use({"pose": pose, "kind": kind, "match": match, "points": points, "present": present})
        numpyro.sample("points", MatchedParts(match, pose, PARTS, present=present), obs=points)

    with pytest.raises(InputError, match=f"^{what}: the program branches in Python on its value"):
        check(branching, SCENE)


def test_points_with_an_obs_mask_are_refused():
    def masked(points, present):
        with numpyro.plate("object", K):
            pose = numpyro.sample("pose", NORMAL)
        match = numpyro.sample("match", PRIORS["permutation"])
        likelihood = MatchedParts(match, pose, PARTS, precision=10.0, present=present)
        numpyro.sample("points", likelihood, obs=points, obs_mask=present)

    for look in (check_conjugate, check_program):
        with pytest.raises(InputError, match="site 'points"):
            look(masked, SCENE)


def test_a_good_program_passes():
    check_program(program, SCENE)
    check_program(constellation, make_scene(np.zeros((2, 2)), 11))
