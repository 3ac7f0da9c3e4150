"""One step of each kernel, from exact draws of the posterior, leaves the posterior as it is.

Exact draws are of two kinds. With tempering all chains have the scene `SCENE`, and every match is
listed in plain numpy; p(points | pose, match)^beta is a likelihood of beta times the precision.
Where a continuous site has a prior each chain has a scene of its own: sites and points drawn from
the program together, of which the sites are an exact draw given the points. Either way a mean over
chains is the same before and after a step, and the change of it has a known standard error.
"""

import functools
import itertools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from scipy import stats
from scipy.special import logsumexp

from inference import gibbs, nuts
from inference.conditions.sets import possible_values
from inference.mcmc.gibbs import GibbsState, GibbsTarget
from inference.mcmc.nuts import NutsState, NutsTarget
from inference.mcmc.slices import slice_draw
from inference.variational.beginnings import Beginnings
from models.constellation import sized_constellation
from models.distributions.likelihood import MatchedParts
from models.distributions.match import MixtureMatch, PermutationMatch
from models.distributions.match_priors import point_count, presence_logits
from models.scenes import Scene, make_scene
from models.templates import shapes, stack
from tests import oracle_inference

pytestmark = pytest.mark.long

PARTS = jax.tree.map(np.asarray, stack(shapes("triangle", "triangle")))
N, K, P = PARTS.num_parts, 2, 4
COUNT = 3
SCENE = make_scene(np.array([[0.5, 0.4], [-0.6, 0.1], [0.2, -0.7]]), N)
MEANS = np.array([[0.0, 0.0, 0.3, 0.0], [0.4, 0.3, -0.2, 0.5]])
LOGITS = np.random.default_rng(0).normal(size=(N, N))
LOGITS[COUNT:] = LOGITS[COUNT]  # dummies are alike
PRECISION = 20.0
BETAS = (0.0, 0.3, 1.0)
NUM_CHAINS = 2500
LEVEL = 4.5
"""Standard errors that a mean may change by; there are some 700 of them in all."""
MIN_SWAP_RATE = 0.05
"""Or neighbours that never exchange would pass."""


# --- programs -------------------------------------------------------------------------------------


def observed(prior, pose, points, present, precision):
    match = numpyro.sample("match", prior)
    likelihood = MatchedParts(match, pose, PARTS, precision=precision, present=present)
    return numpyro.sample("points", likelihood, obs=points)


def poses(mean, scale=1.0):
    with numpyro.plate("object", K):
        prior = dist.MultivariateNormal(jnp.asarray(mean), scale**2 * jnp.eye(P))
        return numpyro.sample("pose", prior)


def visible(present, visibility):
    """Which objects are there, the number of points, and which parts they may be."""
    with numpyro.plate("object", K):
        there = numpyro.sample("there", dist.Bernoulli(jnp.array([0.4, 0.6])))
    count = None if present is None else present.sum()
    count = numpyro.sample("count", point_count(there, visibility, PARTS.owner), obs=count)
    present = jnp.arange(N) < count if present is None else present
    return PermutationMatch(presence_logits(there, visibility, present, PARTS.owner)), present


def plain(points=None, present=None):
    return observed(PermutationMatch(LOGITS), poses(MEANS), points, present, PRECISION)


def discrete(points=None, present=None):
    """Of each object whether it is there, and of all of them which component their prior has."""
    component = numpyro.sample("component", dist.Categorical(np.array([0.3, 0.7])))
    match_prior, present = visible(present, 0.7)
    pose = poses(jnp.asarray(MEANS)[component], jnp.array([1.0, 0.6])[component])
    return observed(match_prior, pose, points, present, PRECISION)


def scalars(points=None, present=None):
    """A visibility, and a scale of poses and noise, beside a discrete site."""
    visibility = numpyro.sample("visibility", dist.Beta(5.0, 5.0))
    scale = numpyro.sample("scale", dist.Gamma(4.0, 5.0))
    match_prior, present = visible(present, visibility)
    return observed(match_prior, poses(MEANS, scale), points, present, 8.0 / scale**2)


def mixture(points=None, present=None):
    """With a Gamma precision and Dirichlet part probabilities."""
    precision = numpyro.sample("precision", dist.Gamma(3.0, 0.5))
    part_probs = numpyro.sample("part_probs", dist.Dirichlet(jnp.array([3.0, 2, 2, 1, 1, 1])))
    match_prior = MixtureMatch(jnp.broadcast_to(jnp.log(part_probs), (N, N)))
    present = SCENE.present if present is None else present
    return observed(match_prior, poses(MEANS), points, present, precision)


sized = functools.partial(
    sized_constellation,
    parts=PARTS,
    presence_prob=0.4,
    visibility=0.5,
    sizes=(0.5, 0.8),
    noise=1.0,
)
"""Objects of some kind, which their poses and their noise depend on, and a Gamma precision."""


# --- exact draws, (chains, rungs, ...) by site, and the points of each chain ----------------------


class Case(NamedTuple):
    """Values of the discrete sites, and what a program has given them."""

    values: dict
    log_prob: float
    """Of the values, and of the number of points."""
    pose_mean: np.ndarray
    pose_scale: float
    match_logits: np.ndarray


def cases_of(program):
    if program is plain:
        return [Case({}, 0.0, MEANS, 1.0, LOGITS)]
    cases = []
    for component, *there in itertools.product((0, 1), repeat=1 + K):
        log_prob = np.log((0.3, 0.7)[component])
        log_prob += stats.bernoulli([0.4, 0.6]).logpmf(there).sum()
        available = np.array(there, bool)[PARTS.owner]
        log_prob += stats.binom(available.sum(), 0.7).logpmf(COUNT)
        logits = np.tile(np.where(available, np.log(0.3), 0.0), (N, 1))
        logits[:COUNT] = np.where(available, np.log(0.7), -np.inf)
        mean = np.tile(MEANS[component], (K, 1))
        values = {"component": component, "there": np.array(there)}
        cases.append(Case(values, log_prob, mean, (1.0, 0.6)[component], logits))
    return [case for case in cases if case.log_prob > -np.inf]


class Listed(NamedTuple):
    """A posterior as a mixture of Normals, one for each value and match of the points."""

    values: dict
    match: np.ndarray
    log_weight: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray

    def draw(self, rng, count):
        probs = np.exp(self.log_weight - logsumexp(self.log_weight))
        term = rng.choice(len(probs), count, p=probs)
        noise = rng.normal(size=(count, K, P, 1))
        pose = self.mean[term] + (np.linalg.cholesky(self.covariance)[term] @ noise)[..., 0]
        sites = {name: x[term] for name, x in self.values.items()}
        return sites | {"pose": pose, "match": self.match[term]}


MATCHES = np.array(list(itertools.permutations(range(N), COUNT)))
"""The part of each point."""


def log_match_prior(logits):
    """Of each of `MATCHES`; dummies are alike, and have the parts that are left."""
    unused = np.array([np.setdiff1d(np.arange(N), match) for match in MATCHES])
    score = logits[np.arange(COUNT), MATCHES].sum(axis=1) + logits[-1, unused].sum(axis=1)
    return score - logsumexp(score)


@functools.cache
def listed(program, beta):
    terms = []
    for case in cases_of(program):
        log_prior = log_match_prior(case.match_logits)
        for match in np.flatnonzero(log_prior > -np.inf):
            pairs = list(enumerate(MATCHES[match])) if beta > 0 else []
            objects = [object_given(case, k, pairs, beta) for k in range(K)]
            log_density, mean, covariance = map(np.array, zip(*objects, strict=True))
            row = np.append(MATCHES[match], np.full(N - COUNT, -1))
            log_weight = case.log_prob + log_prior[match] + log_density.sum()
            terms.append((case.values, row, log_weight, mean, covariance))
    return Listed(*jax.tree.map(lambda *x: np.stack(x), *terms))


def object_given(case, k, pairs, beta):
    """Log density of the points that object k has, and mean and covariance of its pose."""
    problem = oracle_inference.Problem(
        SCENE.points,
        np.ones(SCENE.points.shape, bool),
        PARTS.F,
        PARTS.offset,
        PARTS.variance / (PRECISION * beta) if beta else PARTS.variance,
        PARTS.feature_mask,
        PARTS.owner,
        case.pose_mean,
        np.tile(case.pose_scale**2 * np.eye(P), (K, 1, 1)),
        case.match_logits,
    )
    own = tuple((m, n) for m, n in pairs if PARTS.owner[n] == k)
    return oracle_inference.object_posterior(problem, k, own)


def of_one_scene(program, betas, seed):
    rng = np.random.default_rng(seed)
    rungs = [listed(program, beta).draw(rng, NUM_CHAINS) for beta in betas]
    sites = {name: np.stack([x[name] for x in rungs], axis=1) for name in rungs[0]}
    return sites, np.broadcast_to(SCENE.points, (NUM_CHAINS, *SCENE.points.shape))


def with_beta_outside_of_the_sum(program, betas, seed):
    """The same for NUTS, which samples p(pose) (sum over matches)^beta, by resampling."""
    rng, by_rung = np.random.default_rng(seed), []
    for beta in betas:
        pose = listed(program, beta).draw(rng, 10 * NUM_CHAINS)["pose"]
        log_likelihood, log_prior = log_likelihoods(pose), log_match_prior(LOGITS)
        log_weight = beta * logsumexp(log_prior + log_likelihood, axis=1)
        log_weight -= logsumexp(log_prior + beta * log_likelihood, axis=1)
        weight = np.exp(log_weight - log_weight.max())
        assert weight.sum() ** 2 / (weight**2).sum() > 2 * NUM_CHAINS
        by_rung.append(pose[rng.choice(len(pose), NUM_CHAINS, p=weight / weight.sum())])
    points = np.broadcast_to(SCENE.points, (NUM_CHAINS, *SCENE.points.shape))
    return {"pose": np.stack(by_rung, axis=1)}, points


def log_likelihoods(pose):
    """At each pose under each match, (draws, matches), up to a constant."""
    predicted = np.einsum("ndp,cnp->cnd", PARTS.F, pose[:, PARTS.owner]) + PARTS.offset
    shift = SCENE.points[:COUNT, None] - predicted[:, None]
    table = -0.5 * PRECISION * (shift**2 / PARTS.variance).sum(axis=-1)
    return table[:, np.arange(COUNT), MATCHES].sum(axis=-1)


@functools.cache
def of_own_scenes(program, betas, seed):
    """Sites and points at once, of scenes of as many points as the one scene has."""

    @jax.jit
    @jax.vmap
    def draw(key):
        sites = handlers.trace(handlers.seed(program, key)).get_trace()
        return {name: s["value"] for name, s in sites.items() if s["type"] == "sample"}

    drawn = draw(jax.random.split(jax.random.key(seed), 10 * NUM_CHAINS))
    drawn = {name: np.asarray(x) for name, x in drawn.items()}
    fits = np.flatnonzero(drawn.pop("count", np.full(len(drawn["pose"]), COUNT)) == COUNT)
    assert len(fits) >= NUM_CHAINS
    drawn = {name: x[fits[:NUM_CHAINS]] for name, x in drawn.items()}
    points = np.where(SCENE.present[:, None], drawn.pop("points"), 0.0)
    drawn["match"] = drawn["match"].argmax(axis=-1)
    return {name: x[:, None] for name, x in drawn.items()}, points


# --- steps ----------------------------------------------------------------------------------------


def target_of(kind, program, betas, **settings):
    scene = jax.tree.map(jnp.asarray, Scene(**SCENE.observed))
    table = jax.tree.map(jnp.asarray, possible_values(program, SCENE))
    return kind(program, scene, jnp.asarray(betas), table, **settings)


def at_points(target, points):
    return replace(target, scene=target.scene._replace(points=points))


@functools.cache
def compiled(step):
    """A step of all chains, each at points of its own."""

    def own_step(key, state, points, target):
        return step(key, state, at_points(target, points))

    return jax.jit(jax.vmap(own_step, in_axes=(0, 0, 0, None)))


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, 0, None))
def nuts_begin(values, points, target):
    spread = jnp.tile(0.3 * jnp.eye(P), (K, 1, 1))
    return nuts.init(Beginnings(values, spread), at_points(target, points))


def stepped(step, keys, state, points, target):
    after, info = compiled(step)(keys, state, points, target)
    # Or a second step would be compiled for itself.
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    if len(target.betas) > 1:
        assert np.nanmean(info.swap.accept_prob, axis=0).min() > MIN_SWAP_RATE
    return after


def gibbs_step(program, betas, sites, points, seed):
    """Sites before and after, of all replicas."""
    target = target_of(GibbsTarget, program, betas)
    turn = jnp.arange(len(points)) % 2  # of the even pairs, of the odd pairs
    state = GibbsState({name: jnp.asarray(x) for name, x in sites.items()}, turn)
    keys = jax.random.split(jax.random.key(seed), len(points))
    after = stepped(gibbs.step, keys, state, points, target)
    dummies = ~SCENE.present
    before, after = (jax.tree.map(np.array, dict(s.sites)) for s in (state, after))
    for own in (before, after):
        own["match"][..., dummies] = -1
    return before, after


def nuts_step(program, betas, sites, points, seed):
    """Unconstrained values before and after, of all replicas, at a fixed step size."""
    target = target_of(NutsTarget, program, betas, max_tree_depth=3)
    latent = {name: jnp.asarray(x) for name, x in sites.items() if x.dtype == float}
    rungs = [
        nuts_begin(
            {name: x[:, i] for name, x in latent.items()},
            points,
            replace(target, betas=target.betas[i : i + 1]),
        )
        for i in range(len(betas))
    ]
    place, adaptation = jax.tree.map(
        lambda *x: jnp.concatenate(x, axis=1), *((s.place, s.adaptation) for s in rungs)
    )
    size = jnp.full_like(adaptation.step_size, 0.6)
    turn = jnp.arange(len(points)) % 2
    state = NutsState(place, adaptation._replace(step_size=size), turn)
    keys = jax.random.split(jax.random.key(seed), len(points))
    after = stepped(nuts.step, keys, state, points, target)
    before, after = (s.place.z | {"energy": s.place.potential_energy} for s in (state, after))
    return jax.tree.map(np.asarray, (before, after))


KERNELS = {
    "gibbs": (gibbs_step, mixture, (1.0,), of_own_scenes),
    "gibbs, tempered": (gibbs_step, plain, BETAS, of_one_scene),
    "gibbs, discrete": (gibbs_step, discrete, BETAS, of_one_scene),
    "gibbs, sized": (gibbs_step, sized, (1.0,), of_own_scenes),
    "gibbs, scalars": (gibbs_step, scalars, (1.0,), of_own_scenes),
    "nuts": (nuts_step, mixture, (1.0,), of_own_scenes),
    "nuts, tempered": (nuts_step, plain, BETAS, with_beta_outside_of_the_sum),
}
"""A step, a program, betas, and exact draws."""

LONG = ("gibbs, sized", "gibbs, scalars")


def statistics(sites, points):
    """Moments of all sites, of poses with points, and which points are of one object."""
    columns = []
    for name, x in sites.items():
        if name == "match":
            owner = np.where(x >= 0, PARTS.owner[x], -1)
            columns += [owner[..., i] == owner[..., j] for i, j in ((0, 1), (0, 2), (1, 2))]
            columns += [owner[..., 0] == 0, *np.moveaxis(x[..., :3, None] == np.arange(N), 1, 0)]
        else:
            x = x.astype(float)
            columns += [x, x**2, np.abs(x)]
    if "match" in sites:
        columns.append(np.log1p(distance(sites, points)))
    centre = points[:, SCENE.present].mean(axis=1)[:, None, None]
    columns += [sites["pose"][..., :2] * centre, sites["pose"] * points[:, 0, :1, None, None]]
    return np.concatenate([x.reshape(len(points), -1) for x in columns], axis=1)


def distance(sites, points):
    """Sum of squares between the points and the parts that they are matched with."""
    predicted = np.einsum("ndp,crnp->crnd", PARTS.F, sites["pose"][:, :, PARTS.owner])
    matched = np.take_along_axis(predicted, sites["match"][..., None].clip(0), axis=2)
    shift = (points[:, None] - matched)[:, :, SCENE.present]
    return (shift**2).sum(axis=(2, 3))


def scores(name, seed=0):
    """Change of each mean in standard errors, and the share of chains that moved, by site."""
    step, program, betas, draws = KERNELS[name]
    sites, points = draws(program, betas, seed)
    before, after = step(program, betas, sites, points, seed + 1000)
    change = statistics(after, points).astype(float) - statistics(before, points)
    moved = {n: np.mean(after[n] != x, axis=0).max() for n, x in before.items()}
    spread = np.maximum(change.std(axis=0), 1e-12)
    return change.mean(axis=0) / spread * np.sqrt(len(points)), moved


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in KERNELS]
)
def test_a_step_leaves_the_posterior_as_it_is(name):
    found, moved = scores(name)
    assert min(moved.values()) > 0.03, moved
    assert np.abs(found).max() < LEVEL


def test_slices_have_the_density_that_they_are_given():
    """Of two Normals 3 apart, with weights .3 and .7, from many draws of it at once."""
    rng = np.random.default_rng(0)
    second = rng.random(20_000) < 0.7
    start = jnp.asarray(rng.normal(size=20_000) + 3.0 * second)

    def log_density(u):
        return jnp.logaddexp(jnp.log(0.3) - u**2 / 2, jnp.log(0.7) - (u - 3.0) ** 2 / 2)

    drawn = np.asarray(slice_draw(jax.random.key(0), log_density, start))
    assert np.mean(drawn != np.asarray(start)) == 1.0
    for power, wanted in ((1, 2.1), (2, 7.3)):
        assert abs(np.mean(drawn**power) - wanted) < 5 * np.std(drawn**power) / np.sqrt(20_000)
    assert abs(np.mean(drawn > 1.5) - np.mean(np.asarray(start) > 1.5)) < 0.02
