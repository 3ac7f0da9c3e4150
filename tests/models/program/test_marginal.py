"""The program with its match summed out says what the program says, or refuses by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.infer.util import log_density

from models.distributions.likelihood import MatchedParts
from models.distributions.match import DoublyStochasticMatch, MixtureMatch, PermutationMatch
from models.errors import InputError
from models.program.marginal import check_table, marginal, match_posterior
from models.scenes import make_scene
from models.templates import stack
from tests import oracle

PARTS = stack([[[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]]])
N, P = PARTS.num_parts, PARTS.pose_dim
SCENE = make_scene(np.random.default_rng(0).normal(size=(2, 2)), N)
POSE = np.random.default_rng(1).normal(size=(1, P))
LOGITS = np.random.default_rng(2).normal(size=(N, N))
STUDENT = functools.partial(dist.StudentT, 3.0)
PRIORS = {
    "doubly_stochastic": DoublyStochasticMatch(oracle.sinkhorn(LOGITS)),
    "permutation": PermutationMatch(LOGITS),
    "mixture": MixtureMatch(LOGITS),
}


class OwnTable(MatchedParts):
    """A likelihood with a table of its own: Student-t by hand."""

    def pair_log_likelihood(self, points):
        loc = self.parts.predict(self.pose)
        scale = jnp.sqrt(self.noise_variance)
        table = STUDENT(loc, scale).log_prob(points[..., :, None, :]).sum(axis=-1)
        return jnp.where(self.seen[..., :, None, 0], table, 0.0)


class OwnDensity(MatchedParts):
    """A likelihood that is not made of its table."""

    def log_prob(self, value, intermediates=None):
        return super().log_prob(value) - 3.0


def program(
    points,
    present,
    *,
    prior=PRIORS["permutation"],
    likelihood=MatchedParts,
    centre=False,
    further=lambda pose, match: None,
):
    with numpyro.plate("object", 1):
        pose = numpyro.sample("pose", dist.MultivariateNormal(jnp.zeros(P), jnp.eye(P)))
    match = numpyro.sample("match", prior)
    further(pose, match)
    if centre:
        points = points - 10.0
    given = likelihood(match, pose, PARTS, precision=5.0, present=present)
    return numpyro.sample("points", given, obs=points)


def density(of, **values):
    return log_density(of, (), SCENE.observed, values)[0]


def brute_force(of, prior="permutation"):
    """The sum over all matches of the program's own density, less the sum of the match's own."""
    listed = oracle.assignments(N, N) if prior == "mixture" else oracle.permutations(N)
    matches = oracle.as_matrices(listed, N)
    joint = jnp.stack([density(of, pose=POSE, match=match) for match in matches])
    return logsumexp(joint) - logsumexp(jax.vmap(PRIORS[prior].log_prob)(matches))


# --- the table ----------------------------------------------------------------------------------

LIKELIHOODS = {
    "normal": MatchedParts,
    "student": functools.partial(MatchedParts, noise=STUDENT),
    "laplace": functools.partial(MatchedParts, noise=dist.Laplace),
    "subclass": OwnTable,
}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_marginal_sums_the_programs_own_density(likelihood, prior):
    this = functools.partial(program, likelihood=LIKELIHOODS[likelihood], prior=PRIORS[prior])
    expected = brute_force(this, prior)
    np.testing.assert_allclose(density(marginal(this), pose=POSE), expected, rtol=1e-11)
    check_table(this, SCENE)


def test_a_subclass_and_a_noise_say_the_same():
    own, given = (
        functools.partial(program, likelihood=LIKELIHOODS[x]) for x in ("subclass", "student")
    )
    np.testing.assert_allclose(
        density(marginal(own), pose=POSE), density(marginal(given), pose=POSE), rtol=1e-12
    )


def test_the_match_given_the_pose_is_that_of_the_observed_value():
    """The program shifts the points, so nothing may be read from the scene's own array."""
    this = functools.partial(program, centre=True)
    shifted = SCENE._replace(points=SCENE.points - 10.0)
    found = match_posterior(this, SCENE, {"pose": POSE})
    expected = match_posterior(program, shifted, {"pose": POSE})
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-12)


# --- what is refused ----------------------------------------------------------------------------


class Halved(PermutationMatch):
    """A prior with another density than its log weights say."""

    def log_prob(self, value):
        return 0.5 * super().log_prob(value)


def plain_student(points, present):
    pose = numpyro.sample("pose", dist.Normal(jnp.zeros((1, P)), 1.0).to_event(2))
    numpyro.sample("match", PRIORS["permutation"])
    return numpyro.sample("points", STUDENT(PARTS.predict(pose), 0.4).to_event(2), obs=points)


def no_match(points, present):
    pose = numpyro.sample("pose", dist.Normal(jnp.zeros((1, P)), 1.0).to_event(2))
    return numpyro.sample("points", MatchedParts(np.eye(N), pose, PARTS), obs=points)


def two_likelihoods(points, present):
    pose = numpyro.sample("pose", dist.Normal(jnp.zeros((1, P)), 1.0).to_event(2))
    match = numpyro.sample("match", PRIORS["permutation"])
    numpyro.sample("again", MatchedParts(match, pose, PARTS, present=present), obs=points)
    return numpyro.sample("points", MatchedParts(match, pose, PARTS, present=present), obs=points)


def scaled_points(points, present):
    pose = numpyro.sample("pose", dist.Normal(jnp.zeros((1, P)), 1.0).to_event(2))
    match = numpyro.sample("match", PRIORS["permutation"])
    with handlers.scale(scale=2.0):
        numpyro.sample("points", MatchedParts(match, pose, PARTS), obs=points)


def masked_only_points(points, present):
    pose = numpyro.sample("pose", dist.Normal(jnp.zeros((1, P)), 1.0).to_event(2))
    match = numpyro.sample("match", PRIORS["permutation"])
    numpyro.sample("points", MatchedParts(match, pose, PARTS).mask(False), obs=points)


REFUSED = {
    "own density": (functools.partial(program, likelihood=OwnDensity), "'points': OwnDensity"),
    "own prior": (functools.partial(program, prior=Halved(LOGITS)), "'match': found Halved"),
    "masked": (handlers.mask(program, mask=False), "'match': found MaskedDistribution"),
    "masked points": (masked_only_points, "'points': found MaskedDistribution"),
    "scaled": (handlers.scale(program, scale=2.0), "'match': .* scale"),
    "scaled points": (scaled_points, "'points': .* scale"),
    "substituted": (handlers.substitute(program, {"match": np.eye(N)}), "'match': .* value"),
    "conditioned": (handlers.condition(program, {"match": np.eye(N)}), "'match': .* value"),
    "hidden": (no_match, "'points': .* no site 'match'"),
    "twice": (two_likelihoods, "'points': .* 'again'"),
    "plain": (plain_student, r"'points': found StudentT.* MatchedParts\(.*noise="),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_sum_would_get_wrong_is_refused_by_name(what):
    this, sentence = REFUSED[what]
    with pytest.raises(InputError, match=f"^site {sentence}"):
        density(marginal(this), pose=POSE)


def test_state_does_not_outlive_a_run():
    """The same handler is run many times; a match of one run is not the match of the next."""
    count = iter(range(2))

    def once(points, present):
        return (program if next(count) == 0 else no_match)(points, present)

    this = marginal(once)
    density(this, pose=POSE)
    with pytest.raises(InputError, match="no site 'match'"):
        density(this, pose=POSE)


# --- the witness --------------------------------------------------------------------------------


class OneTable(MatchedParts):
    """A table that is not what `log_prob` uses, though `log_prob` is the common one."""

    def pair_log_likelihood(self, points):
        return super().pair_log_likelihood(points) + 0.1 * jnp.sum(jnp.asarray(self.match) == 0)


def factor(pose, match):
    numpyro.factor("order", jnp.where(jnp.isnan(match[0, 0]), 0.0, match[0, 0]))


WITNESSED = {
    "table": (functools.partial(program, likelihood=OneTable), "'points'"),
    "factor": (functools.partial(program, further=factor), "'order'"),
}


@pytest.mark.parametrize("what", WITNESSED)
def test_the_program_testifies_against_the_table(what):
    this, name = WITNESSED[what]
    assert np.isfinite(density(marginal(this), pose=POSE))  # nothing else would notice
    with pytest.raises(InputError, match=rf"^site {name}: .* -?\d+\.\d+, .* -?\d+\.\d+;"):
        check_table(this, SCENE)


def test_outer_handlers_are_no_concern_of_the_table():
    """Scaling after the sum tempers the marginal likelihood, which is well defined."""
    scaled = handlers.scale(marginal(program), scale=2.0)
    np.testing.assert_allclose(
        density(scaled, pose=POSE), 2 * density(marginal(program), pose=POSE)
    )
