"""Initial values of Markov chains and automatic guides: draws from q, or from the prior.

The posterior of a scene is sharp (a precision of 1e4) and has many modes, so chains that begin at
the prior seldom find it. By default each chain begins at a draw from q after coordinate ascent from
its own parse, drawn by weight, given the best values of the program's conditions. If ascent ends
more than `CLOSE` nats below the best, the chain takes the q of another one. This requires a
conjugate program; otherwise `stand_in` makes a similar conjugate program, good enough to begin
from.
"""

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float, Int
from numpyro.handlers import block
from numpyro.primitives import Messenger

from inference.conditions.sets import (
    at_first,
    conditioned,
    continuous,
    discrete,
    possible_values,
)
from inference.posterior.poses import is_site, latents_at, num_latents, pose_sites, prior_draws
from inference.proposals.propose import CLOSE
from inference.variational import cavi
from models.distributions.likelihood import MatchedParts
from models.errors import InputError
from models.program.batches import Reading, read_scenes
from models.program.marginal import pose_of
from models.program.sites import Program
from models.scenes import Scene

_PRIOR_DRAWS = 255


class Beginnings(NamedTuple):
    """Initial values of the latent sites of chains, and the uncertainty of the poses there."""

    values: dict[str, Float[Array, "chains ..."]]
    covariance: Float[Array, "chains blocks size size"]
    """Covariance of the unconstrained sites on which poses depend: a block for the pose of each
    object or, for computed poses, one block for all these sites in the order of their names."""


def beginnings(
    program: Program,
    scene: Scene,
    key: Array,
    num_chains: int,
    start: Literal["vi", "prior"] = "vi",
) -> Beginnings:
    """Initial values for each chain: draws from the prior and, with "vi", poses drawn from q.

    If a program computes its poses, the sites on which they depend begin at the least-squares fit
    to the drawn poses.
    """
    if start not in ("vi", "prior"):
        raise InputError(f"there is no start {start!r}; choose 'vi' or 'prior'")
    prior_key, vi_key, pose_key = jax.random.split(key, 3)
    observed = dict(scene.observed)
    given = at_first(possible_values(program, scene))
    if start == "vi":
        nearby, best = _nearby(program, scene, vi_key)
        given |= best
    values = prior_draws(program, observed, prior_key, num_chains, given)
    names = pose_sites(program, scene)
    if names == ("pose",):
        unit = jnp.eye(values["pose"].shape[-1])
        covariance = jnp.broadcast_to(unit, (*values["pose"].shape, len(unit)))
    else:
        unit = jnp.eye(num_latents(program, observed, names, values))
        covariance = jnp.broadcast_to(unit, (num_chains, 1, *unit.shape))
    if start == "vi":
        copies = Scene(**scene.batch().take(np.zeros(num_chains, int)).observed)
        # Condition on the best values of the conditions instead of mixing over them.
        found = cavi.run(
            conditioned(nearby, best), copies, vi_key, num_restarts=1, init_strategy="draws"
        )
        found = found.take(_close(np.asarray(found.elbo)))
        covariance = jnp.asarray(found.pose_covariance)
        pose = dist.MultivariateNormal(found.pose_mean, covariance).sample(pose_key)
        if names == ("pose",):
            values = values | {"pose": pose}
        else:
            more_key = jax.random.fold_in(prior_key, 1)
            prior = prior_draws(program, observed, more_key, _PRIOR_DRAWS, discrete(given))
            values, joint = latents_at(program, observed, names, values, prior, pose, covariance)
            covariance = joint[:, None]
    return Beginnings(values, covariance)


def _close(elbo: Float[np.ndarray, " chains"]) -> Int[np.ndarray, " chains"]:
    """For each chain, the index of the run at which it begins.

    It is the chain's own run if this is close to the best; otherwise the close runs take turns.
    Runs are not chosen in proportion to exp(elbo): ELBOs of two modes are off by nats, and chains
    that all begin in one mode have an R-hat of 1, however much weight the other mode has.
    """
    is_close = elbo >= elbo.max() - CLOSE
    kept = np.flatnonzero(is_close)
    return np.where(is_close, np.arange(len(elbo)), np.resize(kept, len(elbo)))


def _nearby(program: Program, scene: Scene, key: Array) -> tuple[Program, dict[str, Any]]:
    """The program if coordinate ascent takes it, else its stand-in; and values of its conditions.

    These are the values under which coordinate ascent explains the scene best.
    """
    if is_site(program, scene):
        for nearby in (program, _stand_in(program, computes_pose=False)):
            # It may not be conjugate, or have conditions that cannot be integrated over.
            with contextlib.suppress(InputError):
                return nearby, _best_conditions(nearby, scene, key)
    nearby = _stand_in(program, computes_pose=True)  # which no factor, prior or noise depends on
    return nearby, _best_conditions(nearby, scene, key)


def _best_conditions(program: Program, scene: Scene, key: Array) -> dict[str, Any]:
    if isinstance(read_scenes(program, Scene(**scene.batch().observed)), Reading):
        return {}
    found = cavi.run(program, Scene(**scene.observed), key)
    return {name: jnp.asarray(x) for name, x in found.conditions.items()}


class stand_in(Messenger):  # lower case, as NumPyro's handlers are
    """Effect handler: turns a program into a similar conjugate one.

    The pose prior becomes Normal with the same median and interquartile range. The noise becomes
    Normal with the same scale. All further continuous sites are fixed at their prior medians.
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or msg["name"] == "match":
            return
        if isinstance(msg["fn"], MatchedParts):
            msg["fn"] = _with_normal_noise(msg["fn"], msg["fn"].pose)
        elif not (msg["is_observed"] or msg["fn"].support.is_discrete):
            prior = msg["fn"]
            draws = prior.sample(jax.random.key(0), (_PRIOR_DRAWS,))
            low, median, high = jnp.quantile(draws, jnp.array([0.25, 0.5, 0.75]), axis=0)
            if msg["name"] == "pose":
                msg["fn"] = dist.Normal(median, (high - low) / 1.349).to_event(prior.event_dim)
            else:
                msg["value"], msg["stop"] = median, True


class computed_stand_in(Messenger):
    """Effect handler: `stand_in` for a program that does more with its poses than place parts.

    It may compute the poses from other sites, or have a factor, a noise or a match prior that
    depends on them. The program's own continuous sites are fixed at their prior medians, and with
    them whatever depends on them.

    Args:
        pose: given to the likelihood in place of the computed pose.
        medians: values for all continuous latent sites.
    """

    def __init__(
        self, fn: Program | None, pose: Float[Array, "K p"], medians: Mapping[str, Array]
    ) -> None:
        self.pose, self.medians = pose, medians
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "deterministic" and msg["name"] == "pose":
            msg["stop"] = True  # hide it: the stand-in has a sample site of this name
        elif msg["type"] == "sample" and isinstance(msg["fn"], MatchedParts):
            msg["fn"] = _with_normal_noise(msg["fn"], self.pose)
        elif msg["type"] == "sample" and msg["name"] in self.medians and not msg["is_observed"]:
            msg["value"], msg["stop"] = self.medians[msg["name"]], True


def _with_normal_noise(given: MatchedParts, pose: Float[Array, "K p"]) -> MatchedParts:
    return MatchedParts(
        given.match,
        pose,
        given.parts,
        precision=given.precision,
        beta=given.beta,
        present=given.present,
    )


def _prior_moments(
    program: Program, observed: dict[str, Any]
) -> tuple[Float[Array, "K p"], Float[Array, "K p p"], dict[str, Array]]:
    """Prior mean and covariance of each object's pose, and medians of all continuous sites."""

    def pose_at(values: dict[str, Array]) -> Float[Array, "K p"]:
        return pose_of(program, Scene(**observed), values)

    with block():  # hide the sites of these draws from the surrounding program
        draws = prior_draws(program, observed, jax.random.key(0), _PRIOR_DRAWS)
        pose = jax.vmap(pose_at)(draws)
    mean = pose.mean(axis=0)
    covariance = jnp.einsum("skp,skq->kpq", pose - mean, pose - mean) / (_PRIOR_DRAWS - 1)
    size = jnp.trace(covariance, axis1=-2, axis2=-1)[:, None, None]
    covariance += (1e-6 * size + 1e-12) * jnp.eye(pose.shape[-1])  # entries may be constant
    medians = {name: jnp.median(x, axis=0) for name, x in continuous(draws).items()}
    return mean, covariance, medians


@functools.lru_cache(maxsize=32)  # one object per program, because methods compile by identity
def _stand_in(program: Program, computes_pose: bool) -> Program:
    if not computes_pose:
        return stand_in(program)
    moments = jax.jit(functools.partial(_prior_moments, program))  # runs at every trace

    def nearby(**observed: Any) -> Any:
        mean, covariance, medians = moments(observed)
        pose = numpyro.sample("pose", dist.MultivariateNormal(mean, covariance))
        return computed_stand_in(program, pose, medians)(**observed)

    return nearby
