"""Gibbs sampling of conditions: one sweep from exact draws of the posterior leaves it as it is.

Exact draws are those of exact inference at values of the conditions, each as often as it explains
the points. Bernoulli presence of whole objects, under its own name, is in
`tests.inference.conditions.test_sampling`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from inference import exact
from inference.mcmc.gibbs import GibbsKernel
from inference.mcmc.slices import slice_draw
from models.constellation import presence_logits
from models.distributions.likelihood import MatchedParts
from models.distributions.match import PermutationMatch
from models.scenes import make_scene
from models.templates import shapes, stack

PARTS = stack(shapes("triangle", "triangle"))
N, K, P = PARTS.num_parts, 2, 4
SCENE = make_scene(np.array([[0.5, 0.4], [-0.6, 0.1], [0.2, -0.7]]), N)
MEANS = np.array([[0.0, 0.0, 0.0, 0.0], [0.4, 0.3, -0.2, 0.5]])
NUM_DRAWS = 4000


def observed(logits, pose, points, present, precision=8.0):
    match = numpyro.sample("match", PermutationMatch(logits))
    likelihood = MatchedParts(match, pose, PARTS, precision=precision, present=present)
    return numpyro.sample("points", likelihood, obs=points)


def seen(there, visibility, present):
    """The number of points, and which parts they may be."""
    possible = (there > 0)[PARTS.owner].sum()
    count = None if present is None else present.sum()
    numpyro.sample("count", dist.Binomial(possible, visibility), obs=count)
    return presence_logits(there > 0, visibility, present, PARTS.owner)


def discrete(points=None, present=None):
    """Of each object whether it is there, and of all of them which component their prior has."""
    component = numpyro.sample("component", dist.Categorical(np.array([0.3, 0.7])))
    with numpyro.plate("object", K):
        there = numpyro.sample("there", dist.Bernoulli(0.4))
        prior = dist.MultivariateNormal(jnp.asarray(MEANS)[component], jnp.eye(P))
        pose = numpyro.sample("pose", prior)
    return observed(seen(there, 0.7, present), pose, points, present)


def pose_scale(points=None, present=None):
    scale = numpyro.sample("pose_scale", dist.HalfNormal(1.0))
    with numpyro.plate("object", K):
        pose = numpyro.sample("pose", dist.Normal(jnp.zeros(P), scale).to_event(1))
    return observed(jnp.zeros((N, N)), pose, points, present, precision=100.0)


def sigma(points=None, present=None):
    scale = numpyro.sample("sigma", dist.HalfNormal(0.5))
    with numpyro.plate("object", K):
        pose = numpyro.sample("pose", dist.Normal(jnp.zeros(P), 1.0).to_event(1))
    return observed(jnp.zeros((N, N)), pose, points, present, precision=scale**-2)


def visibility(points=None, present=None):
    """The match prior's normaliser depends on it, and a discrete site is beside it."""
    chance = numpyro.sample("visibility", dist.Beta(5.0, 5.0))
    with numpyro.plate("object", K):
        there = numpyro.sample("there", dist.Bernoulli(0.4))
        pose = numpyro.sample("pose", dist.Normal(jnp.zeros(P), 1.0).to_event(1))
    return observed(seen(there, chance, present), pose, points, present)


GRIDS = {
    "discrete": (discrete, None, None),
    "pose_scale": (pose_scale, "pose_scale", np.linspace(0.005, 4.0, 100)),
    "sigma": (sigma, "sigma", np.exp(np.linspace(-12.0, 1.0, 130))),
    "visibility": (visibility, "visibility", np.linspace(0.005, 0.995, 60)),
}
"""A program, its continuous condition, and a grid that the posterior of it is fine on."""


@functools.cache
def exact_draws(name):
    """Draws by site, the continuous condition from a piecewise constant density on its grid."""
    program, site, grid = GRIDS[name]
    if site is None:
        return by_site(exact.sample(program, SCENE, jax.random.key(0), NUM_DRAWS))
    fixed = [handlers.condition(program, data={site: value}) for value in grid]
    evidence = np.array([exact.run(at, SCENE).log_evidence for at in fixed])
    weight = np.exp(evidence - evidence.max()) * np.gradient(grid)
    assert weight[0] < 1e-3 * weight.max()
    assert weight[-1] < 1e-3 * weight.max()
    counts = np.random.default_rng(0).multinomial(NUM_DRAWS, weight / weight.sum())
    drawn = []
    for node in np.flatnonzero(counts):
        own = by_site(exact.sample(fixed[node], SCENE, int(node), NUM_DRAWS))
        own = {name: x[: counts[node]] for name, x in own.items()}
        drawn.append(own | {site: np.full(counts[node], grid[node])})
    return {name: np.concatenate([own[name] for own in drawn]) for name in drawn[0]}


def by_site(drawn):
    match, pose, values = drawn
    return {"match": match, "pose": pose} | (values or {})


def swept(name, draws, program=None):
    """The draws after one sweep of a chain from each of them."""
    program = program or GRIDS[name][0]
    kernel = GibbsKernel(program)
    begin = {site: jnp.asarray(x) for site, x in draws.items() if site != "match"}
    keys = jax.random.split(jax.random.key(1), NUM_DRAWS)
    state = kernel.init(keys, 0, begin, (), SCENE.observed)
    sweep = jax.jit(lambda state: kernel.sample(state, (), SCENE.observed).z)
    return jax.tree.map(np.asarray, sweep(state))


def statistics(draws):
    """First and second moments of all sites, and pairs of points that are of one object."""
    owner = np.where(draws["match"] >= 0, np.asarray(PARTS.owner)[draws["match"]], -1)
    pairs = [(owner[:, i] == owner[:, j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    columns = [np.stack(pairs, axis=1)]
    for name in sorted(draws.keys() - {"match"}):
        x = draws[name].reshape(NUM_DRAWS, -1).astype(float)
        columns += [x, x**2, np.abs(x)]
    return np.concatenate(columns, axis=1)


def largest_score(before, after):
    """The largest change of a mean in standard errors, of draws before and after in pairs."""
    change = statistics(after) - statistics(before)
    spread = np.maximum(change.std(axis=0), 1e-12)
    return np.abs(change.mean(axis=0) / spread * np.sqrt(NUM_DRAWS)).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_a_sweep_leaves_the_posterior_as_it_is(name):
    before = exact_draws(name)
    after = swept(name, before)
    for site in after.keys() - {"match", "pose"}:
        assert np.mean(after[site] != before[site]) > 0.03, f"{site} does not move"
    assert largest_score(before, after) < 4.5


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
