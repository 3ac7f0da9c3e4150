"""Gibbs sampling with exact blocks, and parallel tempering because the posterior has many modes.

Given the poses the match is drawn exactly (by the permanent's dynamic program, or row by row for a
mixture); given the match the poses are Normal, an unknown precision is Gamma and unknown part
probabilities are Dirichlet. Alone this seldom leaves a mode. With tempering, replicas of the chain
sample

    p(pose) p(match) p(points | pose, match)^beta

at a ladder of betas from 0, the prior, to 1, the posterior, and neighbours exchange their matches.
Poses are integrated out of the exchange and drawn again after it, so that neighbours need to agree
about discrete things only and a ladder of a dozen rungs is enough. The ladder gives the log
evidence too.

Discrete conditions, such as which objects are present, are drawn together with the match: first
their joint value with the match summed out, then the match given it, and the poses of absent
objects from the prior. An object whose pose is a draw of the prior has hardly a point near it, so
at beta = 1 values seldom change; at beta = 0 they are drawn again, and neighbours exchange them
with matches. Continuous scalars with other priors than a Gamma on the precision (a noise scale, a
scale of the poses, a visibility) are drawn by slice sampling with the poses integrated out.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpyro.distributions import Distribution
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import log_density
from scipy.special import logsumexp

from inference.conditions.quadrature import Lattice
from inference.conditions.sets import Table, at_first, possible_values
from inference.conditions.solve import Conditions, list_conditions
from inference.mcmc.chains import check_budget, run_chains
from inference.mcmc.conditionals import (
    Sites,
    draw_discrete,
    draw_match,
    draw_part_probs,
    draw_pose,
    draw_precision,
    draw_scalars,
    integrated,
    prior_draw,
)
from inference.mcmc.tempering import bridge, exchange, ladder
from inference.method import Report, method, reporter
from inference.posterior.draws import as_chains, one_hot, owner_of, recover_match, result_of_draws
from inference.result import Result
from inference.variational.beginnings import beginnings
from models.errors import ConjugacyError, InputError
from models.program.batches import Reading, read_scenes
from models.program.reading import (
    FACTORS,
    LinearGaussianModel,
    Program,
    conditions,
    described,
    read,
    trace_sites,
)
from models.scenes import Scene


class GibbsState(NamedTuple):
    """Where a chain stands."""

    i: Int[Array, ""]
    betas: Float[Array, " rungs"]
    """The ladder."""
    z: Sites
    """The draw: the replica at beta = 1, with a match of -1 in dummy rows."""
    replicas: Sites
    """Every replica, rungs first."""
    log_ratio: Float[Array, "rungs-1 2"]
    """Log density at the upper of two neighbouring betas less that at the lower, of the match of
    the lower replica and of that of the upper one; poses integrated out."""
    accept_prob: Float[Array, " rungs-1"]
    """Probability of each exchange; NaN where it was not its turn."""
    rng_key: Array
    table: Table
    """Joint values of the discrete conditions that are possible."""


class GibbsKernel(MCMCKernel):
    """A NumPyro kernel: `MCMC(GibbsKernel(program), ...).run(key, **scene.observed)`.

    Args:
        program: a NumPyro program that the closed forms hold for, as coordinate ascent wants it.
        betas: the ladder, rising, and 1 at last.
        factors: sites that are drawn in closed form, as `models.program.reading.read` takes them;
            other further sites are conditions.
    """

    sample_field = "z"

    def __init__(
        self,
        program: Program,
        betas: Sequence[float] | Float[np.ndarray, " rungs"] = (1.0,),
        factors: frozenset[str] = FACTORS,
    ) -> None:
        self.program = program
        self.factors = factors
        self.betas = np.asarray(betas, float)
        rising = len(self.betas) and (np.diff(self.betas) > 0).all() and self.betas[0] >= 0
        if not rising or self.betas[-1] != 1:
            raise InputError(
                f"the betas of a ladder must rise from 0 or more to 1, got {list(betas)}; try "
                "inference.mcmc.tempering.ladder"
            )

    @property
    def model(self) -> Program:
        return self.program

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Sites | None,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any],
    ) -> GibbsState:
        """Chains that begin at `init_params`, values of sites, or at draws of the prior."""
        scene = _scene(model_args, model_kwargs)
        table = jax.tree.map(jnp.asarray, possible_values(self.program, scene))
        if rng_key.ndim == (0 if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key) else 1):
            return self._init_chain(rng_key, init_params, scene, table)
        chains = functools.partial(self._init_chain, scene=scene, table=table)
        return jax.vmap(chains, in_axes=(0, None if init_params is None else 0))(
            rng_key, init_params
        )

    def sample(
        self, state: GibbsState, model_args: tuple[Any, ...], model_kwargs: dict[str, Any]
    ) -> GibbsState:
        """One sweep of every chain, if the state has several."""
        step = functools.partial(self._sweep, scene=_scene(model_args, model_kwargs))
        return step(state) if state.i.ndim == 0 else jax.vmap(step)(state)

    def _init_chain(
        self, key: Array, values: Sites | None, scene: Scene, table: Table
    ) -> GibbsState:
        values = values or {}
        betas = jnp.asarray(self.betas)
        rungs = len(betas)
        scalars = self._scalars(scene, table)
        key, prior_key, *keys = jax.random.split(key, 2 + len(scalars))
        given = at_first(table)  # the first sweep draws them, given the poses
        for own_key, (name, prior) in zip(keys, scalars.items(), strict=True):
            given[name] = prior.sample(own_key)
        given = {name: jnp.asarray(values.get(name, x)) for name, x in given.items()}
        model = read(self.program, scene, given, self.factors)
        sites = prior_draw(prior_key, model) | given | values
        sites["match"] = jnp.arange(len(model.points))
        replicas = {name: jnp.broadcast_to(x, (rungs, *x.shape)) for name, x in sites.items()}
        ratio = jnp.full((rungs - 1, 2), jnp.nan, float)
        drawn = _visible(replicas, jax.tree.map(lambda x: x[..., None], model))
        i = jnp.zeros((), int)
        return GibbsState(i, betas, drawn, replicas, ratio, ratio[:, 0], key, table)

    def _sweep(self, state: GibbsState, scene: Scene) -> GibbsState:
        owner = owner_of(self.program, scene)
        betas, table = state.betas, state.table
        supports = {name: prior.support for name, prior in self._scalars(scene, table).items()}
        key, match_key, swap_key, *keys = jax.random.split(state.rng_key, 6)
        replicas = dict(state.replicas)

        def pieces(given: Sites) -> LinearGaussianModel:
            """At values of the conditions, replicas last."""
            if not given:
                single = read(self.program, scene, None, self.factors)
                return jax.tree.map(lambda x: x[..., None], single)
            at = functools.partial(read, self.program, scene, factors=self.factors)
            return jax.vmap(lambda own: at(given=own), out_axes=-1)(given)

        def at_replicas() -> LinearGaussianModel:
            return pieces({name: replicas[name] for name in (*table, *supports)})

        if table:
            value_key = jax.random.fold_in(match_key, 1)
            scalars = {name: replicas[name] for name in supports}
            replicas |= draw_discrete(value_key, pieces, owner, replicas, betas, scalars, table)
        replicas["match"] = draw_match(match_key, at_replicas(), owner, replicas, betas)
        replicas, pose, swap = exchange(swap_key, at_replicas(), owner, replicas, betas, state.i)
        if supports:
            scalar_key, others = jax.random.fold_in(match_key, 2), {n: replicas[n] for n in table}
            replicas |= draw_scalars(scalar_key, pieces, owner, replicas, betas, supports, others)
            _, pose = integrated(at_replicas(), owner, replicas, betas)
        replicas["pose"] = draw_pose(keys[0], pose)
        model = at_replicas()  # conditions were exchanged and drawn
        if model.precision_prior is not None:
            replicas["precision"] = draw_precision(keys[1], model, owner, replicas, betas)
        if model.part_prior is not None:
            replicas["part_probs"] = draw_part_probs(keys[2], model, replicas["match"])
        drawn = _visible(replicas, model)
        told = (swap.log_ratio, swap.accept_prob)
        return GibbsState(state.i + 1, betas, drawn, replicas, *told, key, table)

    def _scalars(self, scene: Scene, table: Table) -> dict[str, Distribution]:
        """Priors of the continuous conditions."""
        return conditions(trace_sites(self.program, scene), table, self.factors)


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
    """Draws from the posterior of one scene, all chains at once.

    With tempering the result has `log_evidence`, by bridging between neighbours, with its
    standard error; `details` has the betas and how often neighbours exchanged their matches.

    Args:
        program: a NumPyro program that the closed forms hold for, as coordinate ascent wants it; a
            mixture, a Gamma `precision`, Dirichlet `part_probs`, finite discrete sites and up to
            two further continuous scalars are welcome.
        num_temperatures: replicas of each chain; 1 for no tempering.
        init_strategy: begin at restarts of coordinate ascent, or at draws of the prior.
    """
    scene = check_budget(program, scene, num_chains, num_warmup, num_samples)
    listed, factors = _checked(program, scene)
    begin_key, chain_key, match_key = jax.random.split(rng_key, 3)
    values = beginnings(program, scene, begin_key, num_chains, init_strategy).values
    given = {name: values[name][0] for name in (*listed.values, *listed.continuous)}
    betas = ladder(program, scene, num_temperatures, given, factors)
    observed = scene.observed
    keys = jax.random.split(chain_key, num_chains)
    state = GibbsKernel(program, betas, factors).init(keys, num_warmup, values, (), observed)
    advance = _compiled(program, factors)
    collected = run_chains(
        lambda state, length: advance(state, observed, length),
        state,
        num_warmup,
        num_samples,
        reporter(progress_bar),
    )
    draws = as_chains(collected.pop("z"))
    stats = as_chains(collected)
    log_ratio, accept_prob = stats.pop("log_ratio"), stats.pop("accept_prob")
    others = {name: x for name, x in draws.items() if name != "match"}
    _, match_probs = recover_match(program, scene, others, match_key)
    details: dict[str, Any] = {"betas": betas}
    evidence = error = None
    if len(betas) > 1:
        evidence, error = bridge(log_ratio)
        # What the ladder starts from, at beta = 0, is the probability of all data but the points.
        evidence = evidence + _log_data(program, scene, listed, factors)
        details |= {"swap_rate": np.nanmean(accept_prob, axis=(0, 1))}
        stats["acceptance_rate"] = np.nanmean(accept_prob, axis=-1)
    return result_of_draws(
        "gibbs",
        program,
        scene,
        draws,
        match_probs,
        stats,
        num_warmup + num_samples,
        log_evidence=evidence,
        log_evidence_error=error,
        details=details,
    )


@functools.lru_cache(maxsize=32)
def _compiled(program: Program, factors: frozenset[str]) -> Callable[..., tuple[GibbsState, Any]]:
    """Some steps of all chains and what they collect, compiled once for each program."""
    kernel = GibbsKernel(program, factors=factors)

    @functools.partial(jax.jit, static_argnames="length")
    def advance(state: GibbsState, observed: dict[str, Array], length: int) -> tuple[Any, Any]:
        def log_joint(z: Sites) -> Float[Array, ""]:
            rows = len(z["match"])
            whole = z | {"match": one_hot(z["match"], rows)}
            return log_density(program, (), observed, whole)[0]

        def step(state: GibbsState, _: None) -> tuple[GibbsState, Any]:
            state = kernel.sample(state, (), observed)
            # The replica and not the draw: a dummy row has a part there, as the prior wants it.
            last = state.z | {"match": state.replicas["match"][:, -1]}
            lp = jax.vmap(log_joint)(last)
            names = ("z", "log_ratio", "accept_prob")
            return state, {name: getattr(state, name) for name in names} | {"lp": lp}

        return jax.lax.scan(step, state, length=length)

    return advance


def _scene(model_args: tuple[Any, ...], model_kwargs: dict[str, Any]) -> Scene:
    """What a program is given, as JAX arrays, which NumPyro's checks require beside traced ones."""
    return jax.tree.map(jnp.asarray, Scene(*model_args, **model_kwargs))


def _visible(replicas: Sites, model: LinearGaussianModel) -> Sites:
    """What is collected: the last replica."""
    last = {name: x[-1] for name, x in replicas.items()}
    return last | {"match": jnp.where(model.seen[..., -1].any(axis=1), last["match"], -1)}


def _checked(program: Program, scene: Scene) -> tuple[Conditions, frozenset[str]]:
    """The conditions of a program, once it is clear that the closed forms hold given them.

    Also returns the sites that are drawn in closed form. A Gamma precision that more depends on
    than the noise is a condition.
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
    """Log probability of all data but the points, summed over discrete conditions and integrated
    over continuous ones."""
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
