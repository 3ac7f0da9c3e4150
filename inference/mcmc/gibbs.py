"""Gibbs sampling with exact blocks, and parallel tempering because the posterior has many modes.

Given the poses the match is drawn exactly (by the permanent's dynamic program, or row by row for a
mixture); given the match the poses are Normal, an unknown precision is Gamma and unknown part
probabilities are Dirichlet. Without tempering this seldom leaves a mode. With tempering, replicas
of the chain sample

    p(pose) p(match) p(points | pose, match)^beta

at a ladder of betas from 0, the prior, to 1, the posterior, and neighbours exchange their matches.
Poses are integrated out of the exchange and drawn again after it, so they do not hinder it and a
dozen rungs are enough. The ladder also gives the log evidence.

Discrete conditions, such as which objects are present, are drawn together with the match: first
their joint value with the match summed out, then the match given this value. Poses of absent
objects come from the prior. An object with a pose from the prior has hardly a point near it, so at
beta = 1 values seldom change; at beta = 0 they are drawn independently, and neighbours exchange
them with matches. Continuous scalars with other priors than a Gamma on the precision (a noise
scale, a scale of the poses, a visibility) are slice sampled with the poses integrated out.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpyro.distributions.constraints import Constraint
from numpyro.infer.util import log_density
from scipy.special import logsumexp

from inference.conditions.listing import Conditions, list_conditions
from inference.conditions.quadrature import Lattice
from inference.conditions.sets import possible_values
from inference.mcmc.chains import Budget, Sampler, Target, run_chains
from inference.mcmc.conditionals import (
    Sites,
    draw_discrete,
    draw_match,
    draw_part_probs,
    draw_pose,
    draw_precision,
    draw_scalars,
    integrated,
)
from inference.mcmc.tempering import Swap, exchange, ladder
from inference.posterior.draws import one_hot, owner_of
from inference.result import Report, Result, method
from inference.variational.beginnings import Beginnings
from models.errors import ConjugacyError
from models.program.batches import Reading, read_scenes
from models.program.reading import FACTORS, LinearGaussianModel, conditions, read
from models.program.sites import Program, described, trace_sites
from models.program.versions import as_it_stands
from models.scenes import Scene


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GibbsTarget(Target):
    """A target of Gibbs sampling."""

    factors: frozenset[str] = field(default=FACTORS, metadata={"static": True})
    """Sites that are drawn in closed form; all further latent sites are conditions."""

    @property
    def supports(self) -> dict[str, Constraint]:
        """Supports of the continuous conditions."""
        left_open = conditions(trace_sites(self.program, self.scene), self.table, self.factors)
        return {name: prior.support for name, prior in left_open.items()}

    def pieces(self, given: Sites) -> LinearGaussianModel:
        """Read the program at values of the conditions; arrays have the replicas last."""
        at = functools.partial(read, self.program, self.scene, factors=self.factors)
        if not given:
            return jax.tree.map(lambda x: x[..., None], at())
        return jax.vmap(lambda own: at(given=own), out_axes=-1)(given)


class GibbsState(NamedTuple):
    """The state of a chain."""

    sites: Sites
    """Values of every replica, rungs first; `match` is the part of each row."""
    turn: Int[Array, ""]
    """Number of sweeps so far: even and odd pairs of neighbours take turns in exchanges."""


class GibbsInfo(NamedTuple):
    """Diagnostics of a sweep."""

    lp: Float[Array, ""]
    """Log joint density of the replica at beta = 1."""
    swap: Swap


def init(begins: Beginnings, target: GibbsTarget) -> GibbsState:
    """Set all replicas to the values of one chain; the first sweep draws the match."""
    sites = begins.values | {"match": jnp.arange(len(target.scene.points))}
    rungs = len(target.betas)
    replicas = {name: jnp.broadcast_to(x, (rungs, *jnp.shape(x))) for name, x in sites.items()}
    return GibbsState(replicas, jnp.zeros((), int))


def step(rng_key: Array, state: GibbsState, target: GibbsTarget) -> tuple[GibbsState, GibbsInfo]:
    """One sweep: draw every site of every replica; neighbours exchange all sites but the poses."""
    betas, table, supports = target.betas, target.table, target.supports
    owner = owner_of(target.program, target.scene)
    value_key, match_key, swap_key, scalar_key, *keys = jax.random.split(rng_key, 7)
    sites = dict(state.sites)

    def values(names: Iterable[str]) -> Sites:
        return {name: sites[name] for name in names}

    if table:
        scalars = values(supports)
        sites |= draw_discrete(value_key, target.pieces, owner, sites, betas, scalars, table)
    model = target.pieces(values((*table, *supports)))
    sites["match"] = draw_match(match_key, model, owner, sites, betas)
    sites, pose, swap = exchange(swap_key, model, owner, sites, betas, state.turn)
    if supports:
        others = values(table)
        sites |= draw_scalars(scalar_key, target.pieces, owner, sites, betas, supports, others)
    if table or supports:  # conditions have changed since the last reading
        model = target.pieces(values((*table, *supports)))
    if supports:
        _, pose = integrated(model, owner, sites, betas)
    sites["pose"] = draw_pose(keys[0], pose)
    if model.precision_prior is not None:
        sites["precision"] = draw_precision(keys[1], model, owner, sites, betas)
    if model.part_prior is not None:
        sites["part_probs"] = draw_part_probs(keys[2], model, sites["match"])
    state = GibbsState(sites, state.turn + 1)
    last = draw(state, target)
    last["match"] = one_hot(last["match"], len(last["match"]))
    lp, _ = log_density(target.program, (), target.scene.observed, last)
    return state, GibbsInfo(lp, swap)


def draw(state: GibbsState, target: GibbsTarget) -> Sites:
    """The sites of the replica at beta = 1."""
    return {name: x[-1] for name, x in state.sites.items()}


@method
def run(
    program: Program,
    scene: Scene,
    rng_key: Array,
    *,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_samples: int = 1000,
    num_temperatures: int = 16,
    init_strategy: Literal["vi", "prior"] = "vi",
    progress_bar: bool | Report = False,
) -> Result:
    """Draw from the posterior of one scene.

    With tempering the result has `log_evidence` and its standard error, estimated by bridging
    between neighbours; `details` has the betas and the rate of exchanges between neighbours.

    Args:
        program: a NumPyro program for which the closed forms hold, as for coordinate ascent. It
            may have a mixture prior, a Gamma `precision`, Dirichlet `part_probs`, finite discrete
            sites and up to two further continuous scalars.
        num_temperatures: number of replicas of each chain; 1 for no tempering.
        init_strategy: begin at draws from q after coordinate ascent, or from the prior.
    """
    budget = Budget(
        num_chains, num_warmup, num_samples, num_temperatures, init_strategy, progress_bar
    )
    budget.check(scene)
    listed, factors = _checked(program, scene)
    program = as_it_stands(program, scene)

    def betas(values: Sites) -> Float[np.ndarray, " rungs"]:
        given = {name: values[name] for name in (*listed.values, *listed.continuous)}
        return ladder(program, scene, num_temperatures, given, factors)

    sampler = Sampler(
        "gibbs",
        init,
        step,
        draw,
        betas,
        functools.partial(GibbsTarget, factors=factors),
        lambda: _log_data(program, scene, listed, factors),
    )
    return run_chains(sampler, program, scene, rng_key, budget)


def _checked(program: Program, scene: Scene) -> tuple[Conditions, frozenset[str]]:
    """Check that the closed forms hold, and return the conditions and the closed-form sites.

    A Gamma precision on which more than the noise depends is a condition.
    """
    try:
        return _conditions(program, scene, FACTORS), FACTORS
    except ConjugacyError:
        factors = FACTORS - {"precision"}
        if "precision" not in conditions(trace_sites(program, scene), None, factors):
            raise
        return _conditions(program, scene, factors), factors


def _conditions(program: Program, scene: Scene, factors: frozenset[str]) -> Conditions:
    alone = Scene(**scene.batch().observed)
    found = read_scenes(program, alone, None, factors)
    if isinstance(found, Reading):
        return Conditions({}, {})
    listed = list_conditions(found)
    count = listed.num_values
    given, _ = listed.given(np.arange(count), np.full((count, len(listed.continuous)), 0.5))
    again = read_scenes(program, alone.take(np.zeros(count, int)), given, factors)
    if not isinstance(again, Reading):
        name, prior = next(iter(again.items()))
        raise ConjugacyError(
            name, f"{described(prior)} beside further conditions", "sites that are always there"
        )
    return listed


def _log_data(program: Program, scene: Scene, listed: Conditions, factors: frozenset[str]) -> float:
    """Log probability of all data other than the points, marginal over the conditions."""
    possible = possible_values(program, scene)
    listed = listed._replace(values=possible)
    alone = Scene(**scene.batch().observed)

    def log_prob(nodes: Float[np.ndarray, "nodes axes"]) -> Float[np.ndarray, " nodes"]:
        count = listed.num_values
        value, node = np.tile(np.arange(count), len(nodes)), np.repeat(nodes, count, axis=0)
        given, log_jacobian = listed.given(value, node)
        reading = read_scenes(program, alone.take(np.zeros(len(value), int)), given, factors)
        assert isinstance(reading, Reading)
        by_value = np.asarray(reading.model.log_constant) + log_jacobian
        return logsumexp(by_value.reshape(len(nodes), count), axis=1)

    if not listed.continuous:
        return float(log_prob(np.zeros((1, 0)))[0])
    lattice = Lattice([(-4.0, 4.0)] * len(listed.continuous), tolerance=1e-6)
    while nodes := lattice.wanted():
        lattice.learn(nodes, log_prob(lattice.place(nodes)).tolist())
    assert lattice.log_integral is not None
    return lattice.log_integral
