"""NUTS on the program with its match summed out, for any prior that has a density.

`models.marginal` leaves continuous sites only, whatever their priors. All chains are run
at once, and a match for each draw is recovered exactly afterwards. NUTS alone does not cross from
mode to mode: where a scene has several, every chain tells of its own, and R-hat of the poses shows
it. With tempering (`inference.mcmc.tempering`) it does, and gives the log evidence too.
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
    """A target of NUTS, with the settings of trajectories and of their adaptation."""

    names: tuple[str, ...] = field(default=("pose",), metadata={"static": True})
    """The sites that poses depend on."""
    num_warmup: int = field(default=0, metadata={"static": True})
    """Steps that step sizes and mass matrices are adapted in."""
    max_tree_depth: int = field(default=10, metadata={"static": True})
    target_accept_prob: float = 0.8

    @property
    def given(self) -> Program:
        """The program at the first value of its discrete sites, with continuous ones only."""
        return conditioned(marginal(self.program), at_first(self.table))

    def potential(self, z: Values, beta: Float[Array, ""]) -> Float[Array, ""]:
        """Potential energy of unconstrained values, match and discrete sites summed out."""
        model = tempered(marginal(self.program), beta)
        return potential(model, self.scene.observed, self.table, z)


class NutsState(NamedTuple):
    """Where a chain stands."""

    place: IntegratorState
    """Unconstrained values of the sites of every replica, their potential and its gradient."""
    adaptation: HMCAdaptState
    """Step size and mass matrix of every rung, and the sums that they are adapted by."""
    turn: Int[Array, ""]
    """Steps so far: the adaptation has a schedule, and exchanges take turns."""


class NutsInfo(NamedTuple):
    """Diagnostics of a step: of the trajectory at beta = 1, and of the exchanges."""

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
    """All replicas at the values of one chain, with the mass matrix that its poses suggest."""
    z = unconstrain_fn(target.given, (), target.scene.observed, continuous(begins.values))

    def replica(beta: Float[Array, ""]) -> tuple[IntegratorState, HMCAdaptState]:
        energy, gradient = jax.value_and_grad(target.potential)(z, beta)
        place = IntegratorState(z=z, potential_energy=energy, z_grad=gradient)
        mass = _inverse_mass(z, target.names, begins.covariance, beta)
        begin, _ = _adapter(target)
        adaptation = begin(place, jax.random.key(0), jnp.ones(()), inverse_mass_matrix=mass)
        return place, adaptation._replace(rng_key=None)  # only a search for step sizes needs one

    return NutsState(*jax.vmap(replica)(target.betas), jnp.zeros((), int))


def step(rng_key: Array, state: NutsState, target: NutsTarget) -> tuple[NutsState, NutsInfo]:
    """Neighbours exchange where they stand, and every replica moves along a trajectory."""
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
        program: any NumPyro program of sites `match` and `points`, with poses that are a site
            `pose` or computed from others (`inference.posterior.poses`), further continuous sites
            welcome. A gradient costs 2^N N sums, so N = 11 parts are quick and 20 the limit.
            Discrete sites, such as a `presence`, are summed out, at as many times the cost as they
            have possible joint values, and drawn afterwards.
        max_tree_depth: of a trajectory; by default 10, and 6 with tempering. Between prior and
            posterior a replica has wide and narrow places, and would spend all its time in crossing
            the wide ones in steps that fit the narrow ones. Exchanges get it there sooner.
        target_accept_prob: of the step size's adaptation. Closer to 1 means smaller steps and fewer
            divergent ones.
        num_temperatures: replicas of each chain for tempering; 1 for none. Whole states are
            exchanged, which takes more of them than Gibbs sampling: 12 to 16 for two objects, more
            by the root of the number of pose dimensions and by the logarithm of the precision. If
            a `swap_rate` in `details` is below 0.2, there are too few.
        init_strategy: begin at q after coordinate ascent, with the mass matrix that they
            suggest, or at draws of the prior. At a precision of 1e4 few chains find their way from
            the prior.
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
            f"site {next(iter(table))!r}: it is discrete, and NUTS sums over it at beta = 1 only, "
            f"got {num_temperatures} temperatures; take 1, or the method gibbs"
        )
    return program


def _adapter(target: NutsTarget) -> tuple[_Adapt, _Adapt]:
    """Stan's adaptation of a step size and a dense mass matrix: its beginning and its update."""
    return warmup_adapter(
        target.num_warmup, dense_mass=True, target_accept_prob=target.target_accept_prob
    )


def _inverse_mass(
    z: dict[str, Array],
    names: tuple[str, ...],
    covariance: Float[Array, "blocks size size"],
    beta: Float[Array, ""],
) -> Float[Array, "sites sites"]:
    """The covariance of the sites of the pose, and the identity for all others, as `z` is raveled.

    Below beta = 1 it is wider, and of unit scale at beta = 0.
    """
    scale = jnp.trace(covariance, axis1=1, axis2=2)[:, None, None] / covariance.shape[-1]
    wider = covariance / (beta + (1 - beta) * scale)
    owner = np.repeat(sorted(z), [z[name].size for name in sorted(z)])
    place = np.flatnonzero(np.isin(owner, names))
    return jnp.eye(len(owner)).at[np.ix_(place, place)].set(block_diag(*wider))
