"""Make a `Result` from the draws of a sampling method."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpyro.handlers import seed, trace

from inference.conditions.combine import ranked
from inference.conditions.sets import discrete_sites, possible_values
from inference.posterior import symmetry
from inference.posterior.arviz_api import rhat
from inference.posterior.densities import computed, flat, log_joint_by_value
from inference.posterior.relabel import frame_at_match, relabel
from inference.result import Result, grouping_of
from models.program.marginal import marginal, match_posterior
from models.program.sites import Program
from models.scenes import Scene

R_HAT = 1.05
"""Chains have converged if their largest R-hat is below this."""

_BATCH = 64  # draws whose match is drawn together


def recover_match(
    program: Program, scene: Scene, draws: dict[str, np.ndarray], key: Array
) -> tuple[Int[np.ndarray, "chains draws N"], Float[np.ndarray, "N N"]]:
    """Draw a match exactly for each draw of the other sites, and average the match probabilities.

    The average is over the exact conditional probabilities of all draws (Rao-Blackwell), which has
    a smaller error than the frequencies of the drawn matches.
    """
    chains, count = next(iter(draws.values())).shape[:2]
    flat = {name: x.reshape(chains * count, *x.shape[2:]) for name, x in draws.items()}
    recover, observed = _recover(program), Scene(**scene.observed)
    found = []
    for start in range(0, chains * count, _BATCH):  # batches of one size compile once
        some = np.arange(start, start + _BATCH) % (chains * count)
        keys = jax.random.split(jax.random.fold_in(key, start), _BATCH)
        drawn = recover(observed, {name: x[some] for name, x in flat.items()}, keys)
        found.append(jax.tree.map(np.asarray, drawn))
    match, match_probs = (
        np.concatenate(pieces)[: chains * count] for pieces in zip(*found, strict=True)
    )
    match = np.where(scene.present, match, -1)
    return match.reshape(chains, count, -1), match_probs.mean(axis=0)


def recover_discrete(
    program: Program, scene: Scene, draws: dict[str, np.ndarray], key: Array
) -> dict[str, np.ndarray]:
    """Draw all discrete sites but the match exactly, for each draw of the continuous sites."""
    table = possible_values(program, scene)
    if not table:
        return {}
    log_weight = log_joint_by_value(program, scene, flat(draws), table)
    chosen = jax.random.categorical(jax.random.fold_in(key, 1), log_weight)
    number = np.asarray(chosen).reshape(next(iter(draws.values())).shape[:2])
    return {name: np.asarray(x)[number] for name, x in table.items()}


def with_computed(
    program: Program, scene: Scene, draws: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Add the sites that the program computes from draws: `pose` and deterministic sites."""
    shape = draws["match"].shape[:2]
    found = computed(program, scene, flat(draws))
    return draws | {name: x.reshape(*shape, *x.shape[1:]) for name, x in found.items()}


@functools.lru_cache(maxsize=32)
def _recover(program: Program) -> Callable[..., tuple[Array, Array]]:
    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0, 0))
    def recover(scene: Scene, values: dict[str, Array], key: Array) -> tuple[Array, Array]:
        posterior = match_posterior(program, scene, values)
        return posterior.sample(key).argmax(axis=-1), posterior.mean

    return recover


def result_of_draws(
    method: str,
    program: Program,
    scene: Scene,
    draws: dict[str, np.ndarray],
    match_probs: Float[np.ndarray, "N N"],
    sample_stats: dict[str, np.ndarray],
    steps: int,
    *,
    converged: Any = None,
    **more: Any,
) -> Result:
    """Make a result with the moments of the draws and the most frequent partition.

    By default `converged` depends on the worst R-hat, as in `az.summary`, of the log density `lp`
    and of the relabelled poses (`inference.posterior.relabel`). So chains in modes that are images
    of each other under a symmetry count as converged; their poses must be relabelled before they
    are averaged. Chains in other modes do not, even if their log densities agree.
    """
    owner = owner_of(program, scene)
    pose = draws["pose"].reshape(-1, *draws["pose"].shape[2:])
    centred = pose - pose.mean(axis=0)
    details = more.pop("details", {})
    for name in discrete_sites(program, scene):
        details = details | _discrete_details(name, draws[name])
    if converged is None:
        r_hats = {
            "lp_r_hat": largest_r_hat(sample_stats["lp"]),
            "pose_r_hat": largest_r_hat(_in_one_frame(program, scene, draws, sample_stats["lp"])),
        }
        converged, details = max(r_hats.values()) < R_HAT, details | r_hats
    return Result(
        method=method,
        scene=scene,
        match_probs=match_probs,
        pose_mean=pose.mean(axis=0),
        pose_covariance=np.einsum("skp,skq->kpq", centred, centred) / (len(pose) - 1),
        labels=frequent_partition(draws["match"], owner, scene.present, pose.shape[-2]),
        owner=owner,
        converged=np.asarray(converged),
        steps=np.asarray(steps),
        draws=draws,
        sample_stats=sample_stats or None,
        details=details,
        **more,
    )


def _discrete_details(name: str, drawn: Int[np.ndarray, "chains draws ..."]) -> dict[str, Any]:
    """The frequency with which each entry of a site is positive, and its most frequent values."""
    values = drawn.reshape(-1, *drawn.shape[2:])
    distinct, counts = np.unique(values, axis=0, return_counts=True)
    return {
        name: (values > 0).mean(axis=0),
        f"{name}_sets": ranked(distinct, counts / len(values)),
    }


def largest_r_hat(values: Float[np.ndarray, "chains draws *rest"]) -> float:
    """Largest rank-normalised split R-hat; a variable with a single value in all chains has 1."""
    if len(values) == 1:  # compare the two halves of a single chain
        half = values.shape[1] // 2
        values = values[:, : 2 * half].reshape(2, half, *values.shape[2:])
    by_value = np.moveaxis(values.reshape(*values.shape[:2], -1), -1, 0)
    moving = [x for x in by_value if np.ptp(x) > 0]
    with np.errstate(divide="ignore", invalid="ignore"):  # chains that are constant by themselves
        r_hats = np.array([1.0, *(rhat(x) for x in moving)])
    return float(np.nan_to_num(r_hats, nan=np.inf).max())


def _in_one_frame(
    program: Program, scene: Scene, draws: dict[str, np.ndarray], log_density: np.ndarray
) -> Float[np.ndarray, "chains draws K p"]:
    """Poses, relabelled to the frame of the most probable draw."""
    best = np.unravel_index(log_density.argmax(), log_density.shape)
    values = {name: x[best] for name, x in draws.items() if name != "match"}
    frame = frame_at_match(program, scene, draws["match"][best], values)
    return relabel(symmetry.find(program, scene), frame, draws)["pose"]


def frequent_partition(
    match: Int[np.ndarray, "chains draws N"],
    owner: Int[np.ndarray, " N"],
    present: Bool[np.ndarray, " N"],
    num_objects: int,
) -> Int[np.ndarray, " N"]:
    """The most frequent partition of the draws, whatever the names of its objects in each draw.

    Its labels are the most frequent ones among the draws with this partition.
    """
    labels = np.where(present, owner[match.reshape(-1, match.shape[-1])], -1)
    distinct, counts = np.unique(labels, axis=0, return_counts=True)
    together = grouping_of(distinct, num_objects).reshape(len(distinct), -1)
    _, grouping = np.unique(together, axis=0, return_inverse=True)
    frequency = np.bincount(grouping.ravel(), weights=counts)
    in_best = grouping.ravel() == frequency.argmax()
    return distinct[np.where(in_best, counts, 0).argmax()]


def owner_of(program: Program, scene: Scene) -> Int[np.ndarray, " N"]:
    """The object that each part belongs to."""
    sites = trace(seed(marginal(program), jax.random.key(0))).get_trace(**scene.observed)
    return np.asarray(sites["points"]["fn"].matched.parts.owner)


def one_hot(match: Int[Array, "*batch N"], num_parts: int) -> Float[Array, "*batch N N"]:
    """The part of each row as a matrix of zeros and ones."""
    return jax.nn.one_hot(match, num_parts, dtype=jnp.result_type(float))
