"""Gibbs sampling with exact blocks, and parallel tempering because the posterior has many modes.

Given the poses the match is drawn exactly (by the permanent's dynamic program, or row by row for a
mixture); given the match the poses are Normal, an unknown precision is Gamma and unknown part
probabilities are Dirichlet. Alone this seldom leaves a mode. With tempering, replicas of the chain
sample

    p(pose) p(match) p(points | pose, match)^beta

at a ladder of betas from 0, the prior, to 1, the posterior, and neighbours exchange their matches.
Poses are integrated out of the exchange and drawn anew after it, so that neighbours need to agree
about discrete things only and a ladder of a dozen rungs is enough. The ladder gives the log
evidence too.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import log_density
from scipy.optimize import brentq
from scipy.special import expit

from guides import meanfield
from guides.meanfield import PoseFactor, Precision
from inference.chains import beginnings, check_budget, run_chains
from inference.draws import as_chains, one_hot, owner_of, recover_match, result_of_draws
from inference.result import Result
from models.conjugacy import check_conjugate, check_program
from models.errors import InputError
from models.linalg import cholesky, total
from models.match import MixtureMatch
from models.permanent import sample_injection
from models.reading import Conjugate, Program, read
from models.scenes import Scene

Sites = dict[str, Array]
"""Values by site; `match` is the part of each row."""


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


class GibbsKernel(MCMCKernel):
    """A NumPyro kernel: `MCMC(GibbsKernel(program), ...).run(key, **scene.observed)`.

    Args:
        program: a NumPyro program that the closed forms hold for, as coordinate ascent wants it.
        betas: the ladder, rising, and 1 at last.
    """

    sample_field = "z"

    def __init__(
        self, program: Program, betas: Sequence[float] | Float[np.ndarray, " rungs"] = (1.0,)
    ) -> None:
        self.program = program
        self.betas = np.asarray(betas, float)
        rising = len(self.betas) and (np.diff(self.betas) > 0).all() and self.betas[0] >= 0
        if not rising or self.betas[-1] != 1:
            raise InputError(
                f"the betas of a ladder must rise from 0 or more to 1, got {list(betas)}; try "
                "inference.gibbs.ladder"
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
        if rng_key.ndim == (0 if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key) else 1):
            return self._init_chain(rng_key, init_params, Scene(*model_args, **model_kwargs))
        chains = functools.partial(self._init_chain, scene=Scene(*model_args, **model_kwargs))
        return jax.vmap(chains, in_axes=(0, None if init_params is None else 0))(
            rng_key, init_params
        )

    def sample(
        self, state: GibbsState, model_args: tuple[Any, ...], model_kwargs: dict[str, Any]
    ) -> GibbsState:
        """One sweep of every chain, if the state has several."""
        step = functools.partial(self._sweep, scene=Scene(*model_args, **model_kwargs))
        return step(state) if state.i.ndim == 0 else jax.vmap(step)(state)

    def _init_chain(self, key: Array, values: Sites | None, scene: Scene) -> GibbsState:
        model = read(self.program, scene)
        betas = jnp.asarray(self.betas)
        rungs = len(betas)
        key, prior_key = jax.random.split(key)
        sites = _prior_draw(prior_key, model) | (values or {})
        sites["match"] = jnp.arange(len(model.points))
        replicas = {name: jnp.broadcast_to(x, (rungs, *x.shape)) for name, x in sites.items()}
        ratio = jnp.full((rungs - 1, 2), jnp.nan, float)
        drawn = _visible(replicas, model)
        return GibbsState(jnp.zeros((), int), betas, drawn, replicas, ratio, ratio[:, 0], key)

    def _sweep(self, state: GibbsState, scene: Scene) -> GibbsState:
        single = read(self.program, scene)
        owner = owner_of(self.program, scene)
        model = jax.tree.map(lambda x: x[..., None], single)  # replicas are its axis of scenes
        betas = state.betas
        key, match_key, swap_key, *keys = jax.random.split(state.rng_key, 6)
        replicas = dict(state.replicas)
        replicas["match"] = _draw_match(match_key, model, owner, replicas, betas)
        replicas, pose, log_ratio, accept_prob = _exchange(
            swap_key, model, owner, replicas, betas, state.i
        )
        replicas["pose"] = _draw_pose(keys[0], pose)
        if single.precision_prior is not None:
            replicas["precision"] = _draw_precision(keys[1], model, owner, replicas, betas)
        if single.part_prior is not None:
            replicas["part_probs"] = _draw_part_probs(keys[2], single, replicas["match"])
        drawn = _visible(replicas, single)
        return GibbsState(state.i + 1, betas, drawn, replicas, log_ratio, accept_prob, key)


def ladder(program: Program, scene: Scene, rungs: int = 16) -> Float[np.ndarray, " rungs"]:
    """Betas for tempering: 0, and then from where the points begin to tell, geometrically to 1."""
    if rungs < 3:
        raise InputError(f"a ladder wants at least 3 rungs, got {rungs}; try 16")
    model = read(program, scene)
    F, owner = model.parts.F, np.asarray(model.parts.owner)
    precision: Any = 1.0
    if model.precision_prior is not None:
        precision = model.precision_prior[0] / model.precision_prior[1]
    spread = jnp.einsum("ndp,npq,ndq->nd", F, model.pose_covariance[owner], F)
    signal = jnp.where(model.parts.feature_mask, precision * spread / model.parts.variance, 0.0)
    smallest = 1.0 / max(float(signal.max()), 10.0)
    return np.concatenate([[0.0], np.geomspace(smallest, 1.0, rungs - 1)])


def run(
    program: Program,
    scene: Scene,
    key: Array | int = 0,
    *,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_draws: int = 1000,
    rungs: int = 16,
    start: Literal["vi", "prior"] = "vi",
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Draws from the posterior of one scene, all chains at once.

    With tempering the result has `log_evidence`, by bridging between neighbours, with its
    standard error in `details`, beside the betas and how often neighbours exchanged their matches.

    Args:
        program: a NumPyro program that the closed forms hold for, as coordinate ascent wants it; a
            mixture, a Gamma `precision` and Dirichlet `part_probs` are welcome.
        rungs: replicas of each chain; 1 for no tempering.
        start: begin at restarts of coordinate ascent, or at draws of the prior.
    """
    began = time.perf_counter()
    scene = check_budget(program, scene, num_chains, num_warmup, num_draws)
    check_program(program, scene)
    check_conjugate(program, scene)
    base_key = jax.random.key(key) if isinstance(key, int) else key
    begin_key, chain_key, match_key = jax.random.split(base_key, 3)
    betas = ladder(program, scene, rungs) if rungs > 1 else np.ones(1)
    values = beginnings(program, scene, begin_key, num_chains, start).values
    observed = scene.observed
    keys = jax.random.split(chain_key, num_chains)
    state = GibbsKernel(program, betas).init(keys, num_warmup, values, (), observed)
    advance = _compiled(program)
    collected = run_chains(
        lambda state, length: advance(state, observed, length),
        state,
        num_warmup,
        num_draws,
        progress,
    )
    draws = as_chains(collected.pop("z"))
    stats = as_chains(collected)
    log_ratio, accept_prob = stats.pop("log_ratio"), stats.pop("accept_prob")
    others = {name: x for name, x in draws.items() if name != "match"}
    _, match_probs = recover_match(program, scene, others, match_key)
    details: dict[str, Any] = {"betas": betas}
    evidence = None
    if len(betas) > 1:
        evidence, error = bridge(log_ratio)
        details |= {"log_evidence_error": error}
        details |= {"swap_rate": np.nanmean(accept_prob, axis=(0, 1))}
        stats["acceptance_rate"] = np.nanmean(accept_prob, axis=-1)
    result = result_of_draws(
        "gibbs",
        program,
        scene,
        draws,
        match_probs,
        stats,
        num_warmup + num_draws,
        log_evidence=evidence,
        details=details,
    )
    return replace(result, seconds=time.perf_counter() - began)


def bridge(
    log_ratio: Float[np.ndarray, "chains draws rungs-1 2"],
) -> tuple[Float[np.ndarray, ""], float]:
    """Log evidence and its standard error, by Bennett's acceptance ratio between neighbours.

    With f the log ratio of the upper density to the lower at draws of the lower one, and r at draws
    of the upper one, the log ratio c of their normalisers solves E[s(f - c)] = E[s(c - r)], s the
    logistic function. At beta = 0 the normaliser is one.

    The error is that of the sum over rungs, to first order: what each sweep adds to it is one
    series, all rungs together, since matches wander from rung to rung and their errors go together.
    Its effective sample size, over chains, says how many sweeps are worth an independent one.
    """
    evidence, influence = 0.0, np.zeros(log_ratio.shape[:2])
    for rung in range(log_ratio.shape[2]):
        lower, upper = log_ratio[:, :, rung, 0], log_ratio[:, :, rung, 1]

        def balance(c: float, lower: Any = lower, upper: Any = upper) -> float:
            return float(expit(lower - c).mean() - expit(c - upper).mean())

        ends = (min(lower.min(), upper.min()) - 1.0, max(lower.max(), upper.max()) + 1.0)
        c = float(brentq(balance, *ends))
        evidence += c
        up, down = expit(lower - c), expit(c - upper)
        slope = (up * (1 - up) + down * (1 - down)).mean()
        influence += (up - down) / slope
    import arviz as az  # slow to import, and the commands start without it

    error = 0.0 if np.ptp(influence) == 0 else float(az.mcse(influence, method="mean"))
    return np.asarray(evidence), error


@functools.lru_cache(maxsize=32)
def _compiled(program: Program) -> Callable[..., tuple[GibbsState, Any]]:
    """So many steps of all chains and what they collect, compiled once for each program."""
    kernel = GibbsKernel(program)

    @functools.partial(jax.jit, static_argnames="length")
    def advance(state: GibbsState, observed: dict[str, Array], length: int) -> tuple[Any, Any]:
        def log_joint(z: Sites) -> Float[Array, ""]:
            rows = len(z["match"])
            whole = z | {"match": one_hot(z["match"], rows)}
            return log_density(program, (), observed, whole)[0]

        def step(state: GibbsState, _: None) -> tuple[GibbsState, Any]:
            state = kernel.sample(state, (), observed)
            # The replica and not the draw: a dummy row has a part there, as the prior wants it.
            lp = jax.vmap(log_joint)({name: x[:, -1] for name, x in state.replicas.items()})
            names = ("z", "log_ratio", "accept_prob")
            return state, {name: getattr(state, name) for name in names} | {"lp": lp}

        return jax.lax.scan(step, state, length=length)

    return advance


def _prior_draw(key: Array, model: Conjugate) -> Sites:
    pose_key, precision_key, part_key = jax.random.split(key, 3)
    noise = jax.random.normal(pose_key, model.pose_mean.shape)
    factor = jnp.moveaxis(cholesky(jnp.moveaxis(model.pose_covariance, 0, 2)), 2, 0)
    sites = {"pose": model.pose_mean + jnp.einsum("kpq,kq->kp", factor, noise)}
    if model.precision_prior is not None:
        concentration, rate = model.precision_prior
        sites["precision"] = jax.random.gamma(precision_key, concentration) / rate
    if model.part_prior is not None:
        sites["part_probs"] = jax.random.dirichlet(part_key, model.part_prior)
    return sites


def _visible(replicas: Sites, model: Conjugate) -> Sites:
    """What is collected: the last replica."""
    last = {name: x[-1] for name, x in replicas.items()}
    return last | {"match": jnp.where(model.seen.any(axis=1), last["match"], -1)}


def _precision(replicas: Sites, betas: Float[Array, " rungs"]) -> Precision:
    """The noise precision of each replica; one where it is fixed, within the parts' variance."""
    value = replicas.get("precision", jnp.ones_like(betas))
    return Precision(value, jnp.log(value), jnp.zeros_like(betas))


def _log_likelihood(
    model: Conjugate, owner: Int[np.ndarray, " N"], replicas: Sites, betas: Float[Array, " rungs"]
) -> Float[Array, "N N rungs"]:
    """Log density of each point as each part at the poses of each replica."""
    energy = _energy(model, owner, replicas["pose"])
    return meanfield.expected_log_likelihood(model, energy, _precision(replicas, betas))


def _energy(
    model: Conjugate, owner: Int[np.ndarray, " N"], pose: Float[Array, "rungs K p"]
) -> Float[Array, "N N rungs"]:
    mean = jnp.moveaxis(pose, 0, 2).swapaxes(0, 1)
    certain = jnp.zeros((mean.shape[0], *mean.shape))
    return meanfield.expected_energy(model, owner, PoseFactor(mean, certain, jnp.zeros(())))


def _draw_match(
    key: Array,
    model: Conjugate,
    owner: Int[np.ndarray, " N"],
    replicas: Sites,
    betas: Float[Array, " rungs"],
) -> Int[Array, "rungs N"]:
    """Match given poses, exactly."""
    logits = jnp.moveaxis(model.match_logits, 2, 0)
    if "part_probs" in replicas:
        logits = jnp.log(replicas["part_probs"])[:, None, :]
    likelihood = jnp.moveaxis(_log_likelihood(model, owner, replicas, betas) * betas, 2, 0)
    if model.match_family is MixtureMatch:
        return jax.random.categorical(key, logits + likelihood)
    return sample_injection(key, logits + likelihood)


def _matched(match: Int[Array, "rungs N"]) -> Float[Array, "N N rungs"]:
    return jnp.moveaxis(one_hot(match, match.shape[-1]), 0, 2)


def _integrated(
    model: Conjugate,
    owner: Int[np.ndarray, " N"],
    replicas: Sites,
    betas: Float[Array, " rungs"],
) -> tuple[Float[Array, " rungs"], PoseFactor]:
    """Log of the integral of p(pose) p(points | pose, match)^beta, and the poses given the match.

    At the posterior of the poses the ELBO is that integral.
    """
    match, noise = _matched(replicas["match"]), _precision(replicas, betas)
    scaled = Precision(betas * noise.mean, noise.log_mean, noise.kl)
    pose = meanfield.update_pose(model, owner, match, scaled)  # eqs. Lambda_k and mu_k
    energy = meanfield.expected_energy(model, owner, pose)
    log_likelihood = meanfield.expected_log_likelihood(model, energy, noise)
    expected = betas * meanfield.matrix_sum(match * log_likelihood)
    return expected - meanfield.pose_kl(model, pose), pose


def _exchange(
    key: Array,
    model: Conjugate,
    owner: Int[np.ndarray, " N"],
    replicas: Sites,
    betas: Float[Array, " rungs"],
    turn: Int[Array, ""],
) -> tuple[Sites, PoseFactor, Float[Array, "rungs-1 2"], Float[Array, " rungs-1"]]:
    """Neighbours swap all but their poses, even pairs and odd pairs in turn.

    Returns the replicas, their poses given the match, and what `GibbsState` says of the exchange.
    """
    rungs = len(betas)
    steps = np.arange(rungs - 1)
    # Every replica at its own beta, then all but the last at the beta above, all but the first at
    # the beta below; the poses after the exchange are among these.
    which = np.concatenate([np.arange(rungs), steps, steps + 1])
    where = np.concatenate([np.arange(rungs), steps + 1, steps])
    every = jax.tree.map(lambda x: x[which], replicas)
    log_integral, pose = _integrated(model, owner, every, betas[where])
    own, above, below = jnp.split(log_integral, (rungs, 2 * rungs - 1))
    log_accept = jnp.minimum(above + below - own[:-1] - own[1:], 0.0)
    its_turn = steps % 2 == turn % 2
    swap = its_turn & (jnp.log(jax.random.uniform(key, steps.shape)) < log_accept)
    from_above, from_below = jnp.append(swap, False), jnp.append(False, swap)
    place = jnp.arange(rungs)
    source = place + from_above - from_below
    evaluated = jnp.where(from_above, 2 * rungs - 1 + place, place)
    evaluated = jnp.where(from_below, rungs + place - 1, evaluated)
    moved = jax.tree.map(lambda x: x[source], replicas)
    pose = jax.tree.map(lambda x: x[..., evaluated], pose)
    accept_prob = jnp.where(its_turn, jnp.exp(log_accept), jnp.nan)
    log_ratio = jnp.stack([above - own[:-1], own[1:] - below], axis=1)
    return moved, pose, log_ratio, accept_prob


def _draw_pose(key: Array, pose: PoseFactor) -> Float[Array, "rungs K p"]:
    """Poses given the match."""
    noise = jax.random.normal(key, pose.mean.shape)
    drawn = pose.mean + total(cholesky(pose.covariance) * noise, axis=1)
    return jnp.moveaxis(drawn, (0, 1, 2), (2, 1, 0))


def _draw_precision(
    key: Array,
    model: Conjugate,
    owner: Int[np.ndarray, " N"],
    replicas: Sites,
    betas: Float[Array, " rungs"],
) -> Float[Array, " rungs"]:
    """Precision given match and poses: half a count and half the square of each feature met."""
    assert model.precision_prior is not None
    match = _matched(replicas["match"])
    counted = model.seen[:, None] & model.parts.feature_mask[None]
    features = meanfield.matrix_sum(match * counted.sum(axis=2))
    energy = meanfield.matrix_sum(match * _energy(model, owner, replicas["pose"]))
    concentration, rate = model.precision_prior
    drawn = jax.random.gamma(key, concentration + 0.5 * betas * features)
    return drawn / (rate + 0.5 * betas * energy)


def _draw_part_probs(
    key: Array, model: Conjugate, match: Int[Array, "rungs N"]
) -> Float[Array, "rungs N"]:
    """Part probabilities given the match: a count for each point that a part has."""
    assert model.part_prior is not None
    met = one_hot(match, match.shape[-1]) * model.seen.any(axis=1)[:, None]
    return jax.random.dirichlet(key, model.part_prior + met.sum(axis=1))
