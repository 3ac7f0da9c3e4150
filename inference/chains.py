"""Markov chains: where they begin, and how they are run.

A scene's posterior is sharp (a precision of 1e4) and has many modes, so chains that begin at the
prior seldom arrive. By default they begin at draws of q from restarts of coordinate ascent, a
restart for each chain. That needs a conjugate program; where the program is not, `stand_in` is a
conjugate program nearby, good enough to begin from.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.handlers import seed, trace
from numpyro.primitives import Messenger

from inference import cavi
from inference.presence_sets import at_first_set, has_presence, with_sets
from models.conjugacy import check_conjugate
from models.errors import ConjugacyError, InputError
from models.marginal import marginal
from models.reading import Program
from models.scenes import Scene, check_scene

RESTARTS = 8
"""Runs of coordinate ascent for each chain, the best of which it begins at."""

_CHUNK = 100  # steps between two reports of progress, at most
_QUANTILE_DRAWS = 255


class Beginnings(NamedTuple):
    """Where chains begin: a value of each latent site, and the covariance of q's poses there."""

    values: dict[str, Float[Array, "chains ..."]]
    pose_covariance: Float[Array, "chains K p p"]


def beginnings(
    program: Program,
    scene: Scene,
    key: Array,
    num_chains: int,
    start: Literal["vi", "prior"] = "vi",
) -> Beginnings:
    """A beginning for each chain: a draw of the prior or, for poses, of q after a restart."""
    if start not in ("vi", "prior"):
        raise InputError(f"there is no start {start!r}; choose 'vi' or 'prior'")
    prior_key, vi_key, pose_key = jax.random.split(key, 3)
    given = at_first_set(with_sets(program, scene).observed)

    def prior_draw(key: Array) -> dict[str, Array]:
        sites = trace(seed(marginal(program), key)).get_trace(**given)
        return {
            name: site["value"]
            for name, site in sites.items()
            if site["type"] == "sample" and not site["is_observed"]
        }

    values = jax.vmap(prior_draw)(jax.random.split(prior_key, num_chains))
    size = values["pose"].shape[-1]
    covariance = jnp.broadcast_to(jnp.eye(size), (*values["pose"].shape, size))
    if start == "vi":
        copies = Scene(**scene.batch().take(np.zeros(num_chains, int)).observed)
        if has_presence(program, scene):  # q given the best set, not mixed over sets
            mixed = cavi.run(program, copies, vi_key, restarts=RESTARTS)
            best = np.stack([sets[0][0] for sets in mixed.details["presence_sets"]])
            copies = copies._replace(presence=best)
        nearby = conjugate(program, copies.take(0))
        found = cavi.run(nearby, copies, vi_key, restarts=RESTARTS)
        covariance = jnp.asarray(found.pose_covariance)
        q = dist.MultivariateNormal(found.pose_mean, covariance)
        values = values | {"pose": q.sample(pose_key)}
    return Beginnings(values, covariance)


def conjugate(program: Program, scene: Scene) -> Program:
    """The program itself if the closed forms hold for it, else its stand-in."""
    try:
        check_conjugate(program, scene)
    except ConjugacyError:
        program = _stand_in(program)
        check_conjugate(program, scene)
    return program


class stand_in(Messenger):  # lower case, as NumPyro's handlers are
    """Effect handler: a conjugate program near this one.

    The pose prior becomes Normal, with the median and the quartiles that it had, and all further
    latent sites are fixed at the median of their priors.
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or msg["is_observed"] or msg["name"] == "match":
            return
        prior = msg["fn"]
        draws = prior.sample(jax.random.key(0), (_QUANTILE_DRAWS,))
        low, median, high = jnp.quantile(draws, jnp.array([0.25, 0.5, 0.75]), axis=0)
        if msg["name"] == "pose":
            msg["fn"] = dist.Normal(median, (high - low) / 1.349).to_event(prior.event_dim)
        else:
            msg["value"], msg["stop"] = median, True


@functools.lru_cache(maxsize=32)  # methods compile once for each program, told apart by identity
def _stand_in(program: Program) -> Program:
    return stand_in(program)


def run_chains(
    advance: Callable[[Any, int], tuple[Any, Any]],
    state: Any,
    num_warmup: int,
    num_draws: int,
    progress: Callable[[int, int], None] | None,
) -> Any:
    """What `advance(state, length)` collects after the warm-up, as numpy, (draws, ...)."""
    common = math.gcd(num_warmup, num_draws)
    length = max(n for n in range(1, _CHUNK + 1) if common % n == 0)
    total, kept = num_warmup + num_draws, []
    for done in range(0, total, length):
        state, collected = advance(state, length)
        if done >= num_warmup:
            kept.append(jax.tree.map(np.asarray, collected))
        if progress is not None:
            jax.block_until_ready(state)
            progress(done + length, total)
    return jax.tree.map(lambda *pieces: np.concatenate(pieces), *kept)


def check_budget(
    program: Program, scene: Scene, num_chains: int, num_warmup: int, num_draws: int
) -> Scene:
    """The scene, once it is clear that chains can be run on it."""
    scene = check_scene(scene)
    if scene.is_batch:
        raise InputError("chains are for one scene, got a batch; use scene.take(i)")
    if num_chains < 1 or num_warmup < 0 or num_draws < 4:
        raise InputError(
            f"wanted at least one chain, no less than 0 steps of warm-up and at least 4 draws, got "
            f"{num_chains}, {num_warmup} and {num_draws}; try 4, 500 and 500"
        )
    return scene
