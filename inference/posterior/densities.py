"""Evaluate a program at draws: densities, densities of points, and replicated points.

Densities are those of the program with the match summed out. Draws are dictionaries by site with
one leading axis. They are evaluated in blocks of one size, so that each function compiles once for
a program and a shape of scene.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import log_density

from inference.conditions.sets import Table, conditioned, discrete_sites, possible_values
from models.distributions.likelihood import MarginalParts, MatchedParts
from models.errors import InputError
from models.program.marginal import marginal
from models.program.sites import Program, log_prob_of
from models.scenes import Scene

Draws = Mapping[str, np.ndarray]
"""Draws by site, all with the same leading axes."""

Values = dict[str, Array]

BLOCK = 128


def log_joint(program: Program, scene: Scene, draws: Draws) -> Float[np.ndarray, " draws"]:
    """log p(points, latent sites) at each draw, with the match summed out.

    Discrete sites are summed out too, unless the draws have all of them.
    """
    discrete = discrete_sites(program, scene)
    if not discrete.keys() <= draws.keys():
        others = {name: x for name, x in draws.items() if name not in discrete}
        table = possible_values(program, scene)
        return np.logaddexp.reduce(log_joint_by_value(program, scene, others, table), axis=1)
    return _in_blocks(_compiled(program, "joint"), _continuous(draws), scene)


def log_joint_by_value(
    program: Program, scene: Scene, draws: Draws, table: Table
) -> Float[np.ndarray, "draws values"]:
    """`log_joint` for each joint value of the discrete sites; draws are of the other sites."""
    return _in_blocks(_compiled(program, "joint by value"), _continuous(draws), scene, table)


def log_likelihood_by_point(
    program: Program, scene: Scene, draws: Draws
) -> Float[np.ndarray, "draws N"]:
    """log p(point | all other points, latent sites) at each draw, zero in dummy rows."""
    return _in_blocks(_compiled(program, "points"), _continuous(draws), scene)


def prior_draws(
    program: Program, scene: Scene, rng_key: Array, num_samples: int = 1000
) -> dict[str, np.ndarray]:
    """Draws of all latent sites from the prior; `match` is the part of each row.

    Discrete sites are drawn given all data other than the points, such as their number.
    """
    values, table = {"key": jax.random.split(rng_key, num_samples)}, possible_values(program, scene)
    drawn = _in_blocks(_compiled(program, "prior"), values, scene, table)
    match = np.where(scene.present, drawn["match"].argmax(axis=-1), -1)
    return drawn | {"match": match}


def marginal_prior_draws(
    program: Program, scene: Scene, rng_key: Array, num_samples: int = 1000
) -> dict[str, np.ndarray]:
    """`prior_draws` without the match, which is much faster."""
    values, table = {"key": jax.random.split(rng_key, num_samples)}, possible_values(program, scene)
    return _in_blocks(_compiled(program, "marginal prior"), values, scene, table)


def replicate(
    program: Program, scene: Scene, draws: Draws, rng_key: Array
) -> Float[np.ndarray, "draws N d"]:
    """Draw new points from the likelihood at the match of each draw; zero in dummy rows."""
    match = np.asarray(draws["match"])
    values = dict(draws) | {
        "match": match_matrix(match),
        "key": jax.random.split(rng_key, len(match)),
    }
    return _in_blocks(_compiled(program, "replicate"), values, scene)


def computed(program: Program, scene: Scene, draws: Draws) -> dict[str, np.ndarray]:
    """The values that the program computes at each draw: poses and all deterministic sites."""
    values = dict(draws) | {"match": match_matrix(np.asarray(draws["match"]))}
    return _in_blocks(_compiled(program, "computed"), values, scene)


def match_matrix(match: Int[np.ndarray, "*draws N"]) -> Float[np.ndarray, "*draws N N"]:
    """The part of each row as a matrix of zeros and ones; dummy rows are zero."""
    return (match[..., None] == np.arange(match.shape[-1])).astype(float)


def likelihood_at(program: Program, scene: Scene, values: Mapping[str, Any]) -> MatchedParts:
    """The program's likelihood at given values of latent sites; other sites are drawn."""
    no_match = {"match": np.eye(len(scene.points))}
    sites = _trace(program, scene, no_match | dict(values), jax.random.key(0))
    likelihood = sites["points"]["fn"] if "points" in sites else None
    if not isinstance(likelihood, MatchedParts):
        raise InputError(
            "the site 'points' must be a MatchedParts, whose match can be summed out, got a "
            f"{type(likelihood).__name__}; edit the program"
        )
    return likelihood


def points_of(program: Program, scene: Scene) -> Float[np.ndarray, "N d"]:
    """The observed value of the site `points`, which the program may have centred or scaled."""
    sites = _trace(marginal(program), scene, {}, jax.random.key(0))
    return np.asarray(sites["points"]["value"])


def latent_supports(program: Program, scene: Scene) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Support and shape of every latent site other than pose and match."""
    sites = _trace(marginal(program), scene, {}, jax.random.key(0))
    return {
        name: (site["fn"].support, site["fn"].shape())
        for name, site in sites.items()
        if site["type"] == "sample" and not site["is_observed"] and name != "pose"
    }


def flat(draws: Draws) -> dict[str, np.ndarray]:
    """Concatenate chains: one leading axis instead of (chains, draws)."""
    return {name: np.asarray(x).reshape(-1, *np.shape(x)[2:]) for name, x in draws.items()}


def _continuous(draws: Draws) -> dict[str, Any]:
    return {name: value for name, value in draws.items() if name != "match"}


def _trace(program: Program, scene: Scene, values: Mapping[str, Any], key: Array) -> dict[str, Any]:
    return trace(seed(_given(program, values), key)).get_trace(**scene.observed)


def _given(program: Program, values: Mapping[str, Any]) -> Program:
    """Fix latent sites of a program; values of sites that it computes itself are ignored."""

    def value_of(site: dict[str, Any]) -> Any:
        latent = site["type"] == "sample" and not site["is_observed"]
        return values.get(site["name"]) if latent else None

    return substitute(program, substitute_fn=value_of)


@functools.lru_cache(maxsize=64)
def _compiled(program: Program, what: str) -> Callable[..., Any]:
    def joint(values: Values, observed: Values, table: Table) -> Float[Array, ""]:
        return log_density(_given(marginal(program), values), (), observed, {})[0]

    def joint_by_value(values: Values, observed: Values, table: Table) -> Float[Array, " values"]:
        return jax.vmap(lambda own: joint(values | own, observed, {}))(table)

    def points(values: Values, observed: Values, table: Table) -> Float[Array, " N"]:
        sites = _trace(marginal(program), Scene(**observed), values, jax.random.key(0))
        by_point = sites["points"]["fn"].log_prob_given_others(sites["points"]["value"])
        return jnp.where(observed["present"], by_point, 0.0)

    def log_weight(own: Values, observed: Values, key: Array) -> Float[Array, ""]:
        """Log probability of values of the discrete sites and all data other than the points."""
        sites = _trace(conditioned(marginal(program), own), Scene(**observed), {}, key)
        others = (s for n, s in sites.items() if n != "points" and s["type"] == "sample")
        return sum((log_prob_of(s) for s in others if s["is_observed"]), jnp.zeros(()))

    def prior(values: Values, observed: Values, table: Table, of: Program = program) -> Values:
        key, drawn = values["key"], {}
        if table:
            key, value_key = jax.random.split(key)
            log_weights = jax.vmap(lambda own: log_weight(own, observed, key))(table)
            chosen = jax.random.categorical(value_key, log_weights)
            drawn = {name: x[chosen] for name, x in table.items()}
        sites = _trace(conditioned(of, drawn), Scene(**observed), {}, key)
        latent = (s for s in sites.values() if s["type"] == "sample" and not s["is_observed"])
        likelihood = sites["points"]["fn"]
        matched = likelihood.matched if isinstance(likelihood, MarginalParts) else likelihood
        pose = {"pose": matched.pose}  # whether it is a site or computed
        return pose | drawn | {site["name"]: site["value"] for site in latent}

    def replicated(values: Values, observed: Values, table: Table) -> Float[Array, "N d"]:
        latent = {name: value for name, value in values.items() if name != "key"}
        sites = _trace(program, Scene(**observed), latent, jax.random.key(0))
        return sites["points"]["fn"].sample(values["key"])

    def computed(values: Values, observed: Values, table: Table) -> Values:
        sites = _trace(program, Scene(**observed), values, jax.random.key(0))
        found = {n: s["value"] for n, s in sites.items() if s["type"] == "deterministic"}
        return found | {"pose": sites["points"]["fn"].pose}

    functions: dict[str, Callable[..., Any]] = {
        "joint": joint,
        "joint by value": joint_by_value,
        "points": points,
        "prior": prior,
        "marginal prior": functools.partial(prior, of=marginal(program)),
        "replicate": replicated,
        "computed": computed,
    }
    return jax.jit(jax.vmap(functions[what], in_axes=(0, None, None)))


def _in_blocks(
    function: Callable[..., Any], values: dict[str, Any], scene: Scene, table: Table | None = None
) -> Any:
    """Call a function on all draws, block by block; the last block is padded."""
    count = len(next(iter(values.values())))
    observed = {name: jnp.asarray(x) for name, x in scene.observed.items()}
    outputs = []
    for start in range(0, count, BLOCK):
        chosen = np.minimum(np.arange(start, start + BLOCK), count - 1)
        block = {name: jnp.asarray(x)[chosen] for name, x in values.items()}
        outputs.append(jax.tree.map(np.asarray, function(block, observed, table or {})))
    return jax.tree.map(lambda *blocks: np.concatenate(blocks)[:count], *outputs)
