"""NUTS on the program with its match summed out, for any prior that has a density.

`models.marginal` leaves only continuous sites, whatever their priors. All chains are run at once,
and a match for each draw is recovered exactly afterwards. Without tempering NUTS does not cross
between modes: each chain stays in its own, and R-hat of the poses shows it. With tempering
(`inference.mcmc.tempering`) it does cross, and also gives the log evidence.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import block_diag
from jaxtyping import Array, Bool, Float, Int
from numpyro.infer.hmc import momentum_generator
from numpyro.infer.hmc_util import (
    HMCAdaptState,
    IntegratorState,
    build_tree,
    euclidean_kinetic_energy,
    velocity_verlet,
    warmup_adapter,
)
from numpyro.infer.util import constrain_fn, unconstrain_fn

from inference.conditions.sets import at_first, conditioned, continuous, possible_values, potential
from inference.mcmc.chains import Budget, Sampler, Target, Values, run_chains
from inference.mcmc.tempering import Swap, exchange_places, prior_ladder
from inference.posterior.poses import pose_sites
from inference.result import Report, Result, method
from inference.variational.beginnings import Beginnings
from models.errors import InputError
from models.program.marginal import check_table, marginal, tempered
from models.program.sites import Program
from models.program.versions import as_it_stands
from models.program.witness import check_program
from models.scenes import Scene

_Adapt = Callable[..., HMCAdaptState]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NutsTarget(Target):
    """A target of NUTS, with the settings of trajectories and their adaptation."""

    names: tuple[str, ...] = field(default=("pose",), metadata={"static": True})
    """The sites on which poses depend."""
    num_warmup: int = field(default=0, metadata={"static": True})
    """Number of steps in which step sizes and mass matrices are adapted."""
    max_tree_depth: int = field(default=10, metadata={"static": True})
    target_accept_prob: float = 0.8

    @property
    def given(self) -> Program:
        """The program at the first value of its discrete sites; it has only continuous sites."""
        return conditioned(marginal(self.program), at_first(self.table))

    def potential(self, z: Values, beta: Float[Array, ""]) -> Float[Array, ""]:
        """Potential energy at unconstrained values, with match and discrete sites summed out."""
        model = tempered(marginal(self.program), beta)
        return potential(model, self.scene.observed, self.table, z)


class NutsState(NamedTuple):
    """The state of a chain."""

    place: IntegratorState
    """Unconstrained values of the sites of every replica, their potential and its gradient."""
    adaptation: HMCAdaptState
    """Step size and mass matrix of every rung, and the running sums of their adaptation."""
    turn: Int[Array, ""]
    """Number of steps so far, for the adaptation schedule and the turns of exchanges."""


class NutsInfo(NamedTuple):
    """Diagnostics of a step: the trajectory at beta = 1, and the exchanges."""

    lp: Float[Array, ""]
    energy: Float[Array, ""]
    diverging: Bool[Array, ""]
    acceptance_rate: Float[Array, ""]
    n_steps: Int[Array, ""]
    tree_depth: Int[Array, ""]
    step_size: Float[Array, ""]
    swap: Swap | None
    """None without tempering."""


def init(begins: Beginnings, target: NutsTarget) -> NutsState:
    """Set all replicas to the values of one chain, with a mass matrix from its pose covariance."""
    z = unconstrain_fn(target.given, (), target.scene.observed, continuous(begins.values))

    def replica(beta: Float[Array, ""]) -> tuple[IntegratorState, HMCAdaptState]:
        energy, gradient = jax.value_and_grad(target.potential)(z, beta)
        place = IntegratorState(z=z, potential_energy=energy, z_grad=gradient)
        mass = _inverse_mass(z, target.names, begins.covariance, beta)
        begin, _ = _adapter(target)
        adaptation = begin(place, jax.random.key(0), jnp.ones(()), inverse_mass_matrix=mass)
        return place, adaptation._replace(rng_key=None)  # needed only to search for a step size

    return NutsState(*jax.vmap(replica)(target.betas), jnp.zeros((), int))


def step(rng_key: Array, state: NutsState, target: NutsTarget) -> tuple[NutsState, NutsInfo]:
    """One step: neighbours exchange their states, then every replica moves along a trajectory."""
    betas, (place, adaptation, turn) = target.betas, state
    swap_key, move_key = jax.random.split(rng_key)
    swap = None
    if len(betas) > 1:
        place, swap = exchange_places(swap_key, target.potential, place, betas, turn)
    _, adapt = _adapter(target)

    def move(
        key: Array, place: IntegratorState, adaptation: HMCAdaptState, beta: Float[Array, ""]
    ) -> tuple[IntegratorState, HMCAdaptState, NutsInfo]:
        momentum_key, tree_key = jax.random.split(key)
        kinetic = euclidean_kinetic_energy
        momentum = momentum_generator(place.z, adaptation.mass_matrix_sqrt, momentum_key)
        tree = build_tree(
            velocity_verlet(lambda z: target.potential(z, beta), kinetic)[1],
            kinetic,
            place._replace(r=momentum),
            adaptation.inverse_mass_matrix,
            adaptation.step_size,
            tree_key,
            max_tree_depth=target.max_tree_depth,
        )
        place = IntegratorState(tree.z_proposal, None, tree.z_proposal_pe, tree.z_proposal_grad)
        rate = tree.sum_accept_probs / tree.num_proposals
        adaptation = jax.lax.cond(
            turn < target.num_warmup,
            lambda: adapt(turn, rate, place, adaptation),
            lambda: adaptation,
        )
        info = NutsInfo(
            -place.potential_energy,
            tree.z_proposal_energy,
            tree.diverging,
            rate,
            tree.num_proposals,
            jnp.ceil(jnp.log2(tree.num_proposals + 1)).astype(int),
            adaptation.step_size,
            None,
        )
        return place, adaptation, info

    keys = jax.random.split(move_key, len(betas))
    place, adaptation, info = jax.vmap(move)(keys, place, adaptation, betas)
    info = jax.tree.map(lambda x: x[-1], info)._replace(swap=swap)
    return NutsState(place, adaptation, turn + 1), info


def draw(state: NutsState, target: NutsTarget) -> Values:
    """Constrained values of the continuous sites of the replica at beta = 1."""
    z = jax.tree.map(lambda x: x[-1], state.place.z)
    return constrain_fn(target.given, (), target.scene.observed, z)


@method
def run(
    program: Program,
    scene: Scene,
    rng_key: Array,
    *,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_samples: int = 500,
    max_tree_depth: int | None = None,
    target_accept_prob: float = 0.8,
    num_temperatures: int = 1,
    init_strategy: Literal["vi", "prior"] = "vi",
    progress_bar: bool | Report = False,
) -> Result:
    """Draw from the posterior of one scene.

    With tempering the result has `log_evidence` with its standard error (see `run_chains`), unless
    more than one step in a hundred diverges.

    Args:
        program: any NumPyro program with sites `match` and `points`, and with poses that are a site
            `pose` or computed from other sites (`inference.posterior.poses`). It may have further
            continuous sites. A gradient costs 2^N N sums, so N = 11 parts are quick and 20 the
            limit. Discrete sites, such as a `presence`, are summed out and drawn afterwards; the
            cost is multiplied by the number of their possible joint values.
        max_tree_depth: depth of a trajectory; by default 10, and 6 with tempering. Between prior
            and posterior a density has wide and narrow regions. A deep tree would spend its time on
            crossing wide regions in steps that fit narrow ones; exchanges are quicker.
        target_accept_prob: target of the step size adaptation. Closer to 1 gives smaller steps and
            fewer divergences.
        num_temperatures: number of replicas of each chain; 1 for no tempering. Whole states are
            exchanged, so NUTS takes more replicas than Gibbs sampling: 12 to 16 for two objects,
            growing with the square root of the number of pose dimensions and the logarithm of the
            precision. If a `swap_rate` in `details` is below 0.2, there are too few.
        init_strategy: begin at draws from q after coordinate ascent, with a mass matrix from q; or
            at draws from the prior, from which few chains find the posterior at a precision of 1e4.
    """
    budget = Budget(
        num_chains, num_warmup, num_samples, num_temperatures, init_strategy, progress_bar
    )
    budget.check(scene)
    program = _checked(program, scene, num_temperatures, target_accept_prob)
    depth = (10 if num_temperatures == 1 else 6) if max_tree_depth is None else max_tree_depth
    target = functools.partial(
        NutsTarget,
        names=pose_sites(program, scene),
        num_warmup=num_warmup,
        max_tree_depth=depth,
        target_accept_prob=target_accept_prob,
    )
    sampler = Sampler(
        "nuts",
        init,
        step,
        draw,
        lambda values: prior_ladder(program, scene, num_temperatures),
        target,
    )
    return run_chains(sampler, program, scene, rng_key, budget)


def _checked(
    program: Program, scene: Scene, num_temperatures: int, target_accept_prob: float
) -> Program:
    """The program as it stands, if its match can be summed out and the settings are possible."""
    check_program(program, scene)
    program = as_it_stands(program, scene)
    table = possible_values(program, scene)
    check_table(program, scene, at_first(table))
    if not 0 < target_accept_prob < 1:
        raise InputError(f"target_accept_prob must lie between 0 and 1, got {target_accept_prob}")
    if num_temperatures > 1 and table:
        raise InputError(
            f"site {next(iter(table))!r} is discrete, and NUTS can sum over it only without "
            f"tempering, got num_temperatures {num_temperatures}; set 1, or use the method gibbs"
        )
    return program


def _adapter(target: NutsTarget) -> tuple[_Adapt, _Adapt]:
    """Stan's adaptation of step size and dense mass matrix: the functions that init and update."""
    return warmup_adapter(
        target.num_warmup, dense_mass=True, target_accept_prob=target.target_accept_prob
    )


def _inverse_mass(
    z: dict[str, Array],
    names: tuple[str, ...],
    covariance: Float[Array, "blocks size size"],
    beta: Float[Array, ""],
) -> Float[Array, "sites sites"]:
    """Inverse mass matrix: the covariance for the sites of the pose, the identity for all others.

    Sites are in the order in which `z` is raveled. Below beta = 1 the covariance is wider; at
    beta = 0 it has unit scale.
    """
    scale = jnp.trace(covariance, axis1=1, axis2=2)[:, None, None] / covariance.shape[-1]
    wider = covariance / (beta + (1 - beta) * scale)
    owner = np.repeat(sorted(z), [z[name].size for name in sorted(z)])
    place = np.flatnonzero(np.isin(owner, names))
    return jnp.eye(len(owner)).at[np.ix_(place, place)].set(block_diag(*wider))
