"""Draws of the posterior, or of its approximation, from a result of any method."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.optimize import linear_sum_assignment

from guides import meanfield
from inference import exact
from inference.result import Result
from models.distributions.match import MixtureMatch
from models.errors import InputError
from models.program.reading import LinearGaussianModel, read
from models.program.sites import Program


def draws_of(
    program: Program,
    result: Result,
    rng_key: Array,
    num_samples: int = 1000,
    num_chains: int = 4,
) -> dict[str, np.ndarray]:
    """Draws by site, (chains, draws, ...); `match` is the part of each row, -1 in dummy rows.

    A sampling method has draws already. For an exact result they are drawn from the posterior, for
    a variational one from q. These draws are independent; they are divided into chains because
    ArviZ expects chains.
    """
    if result.is_batch:
        raise InputError("draws require one scene, got a result for a batch; use result.take(i)")
    if result.draws is not None:
        return _divided(result.draws, num_chains) if result.elbo is not None else result.draws
    count = num_samples * num_chains
    if result.method == "exact":
        drawn = exact.sample(program, result.scene, rng_key, count)
        independent = {"match": drawn.match, "pose": drawn.pose} | (drawn.conditions or {})
    elif result.elbo is not None:
        independent = _variational(program, result, rng_key, count)
    else:
        raise InputError(
            f"the method {result.method!r} has neither draws nor a distribution to draw from; use "
            "a method that samples (nuts, gibbs), approximates (ds, svi) or sums (exact)"
        )
    return _divided({name: np.asarray(x)[None] for name, x in independent.items()}, num_chains)


def _divided(draws: Mapping[str, np.ndarray], num_chains: int) -> dict[str, np.ndarray]:
    """Independent draws arranged in `num_chains` chains; a remainder is dropped."""
    flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in draws.items()}
    length = len(flat["pose"]) // num_chains
    return {
        name: x[: num_chains * length].reshape(num_chains, length, *x.shape[1:])
        for name, x in flat.items()
    }


def _variational(program: Program, result: Result, key: Array, count: int) -> dict[str, np.ndarray]:
    """Draws of every factor of the mean-field family; the factors are independent."""
    pose_key, match_key, precision_key, parts_key = jax.random.split(key, 4)
    noise = np.asarray(jax.random.normal(pose_key, (count, *result.pose_mean.shape)))
    factor = np.linalg.cholesky(result.pose_covariance)
    given = result.conditions
    for name, value in given.items():
        if np.issubdtype(np.asarray(value).dtype, np.floating):
            raise InputError(
                f"draws of {result.method} require a factor for every continuous site, but "
                f"{name!r} was integrated over; use nuts, gibbs, or svi with an automatic guide"
            )
    model = read(program, result.scene, given)
    drawn = {"pose": result.pose_mean + np.einsum("kpq,nkq->nkp", factor, noise)}
    rng = np.random.default_rng(np.asarray(jax.random.key_data(match_key)))
    of_rows = model.match_family is MixtureMatch
    match = (_draw_rows if of_rows else _draw_permutations)(rng, result.match_probs, count)
    drawn["match"] = np.where(result.scene.present, match, -1)
    probs = jnp.asarray(result.match_probs)
    if model.precision_prior is not None:
        concentration, rate = precision_factor(model, result)
        gamma = jax.random.gamma(precision_key, concentration, (count,))
        drawn["precision"] = np.asarray(gamma / rate)
    if model.part_prior is not None:
        concentration = meanfield.part_dirichlet(model, probs)
        drawn["part_probs"] = np.asarray(jax.random.dirichlet(parts_key, concentration, (count,)))
    return drawn


def precision_factor(model: LinearGaussianModel, result: Result) -> tuple[Array, Array]:
    """The Gamma factor of the noise precision given the other factors."""
    pose = meanfield.PoseFactor(
        jnp.moveaxis(jnp.asarray(result.pose_mean), 0, -1),
        jnp.moveaxis(jnp.asarray(result.pose_covariance), 0, -1),
        jnp.zeros(len(result.pose_mean)),  # not used by the energy
    )
    energy = meanfield.expected_energy(model, result.owner, pose)
    return meanfield.precision_gamma(
        model, jnp.asarray(result.match_probs), energy, jnp.asarray(1.0)
    )


def _draw_rows(
    rng: np.random.Generator, probs: Float[np.ndarray, "N N"], count: int
) -> Int[np.ndarray, "draws N"]:
    """Draw each row independently, the q of GCM-GMM."""
    return np.stack([rng.choice(len(row), count, p=row / row.sum()) for row in probs], axis=1)


def _draw_permutations(
    rng: np.random.Generator, probs: Float[np.ndarray, "N N"], count: int
) -> Int[np.ndarray, "draws N"]:
    """Draw permutations with mean R from its Birkhoff-von Neumann decomposition."""
    left, rows = probs / probs.sum(axis=1, keepdims=True), np.arange(len(probs))
    weights: list[float] = []
    columns: list[np.ndarray] = []
    while len(weights) < len(probs) ** 2 and left.max() > 1e-9:
        chosen = linear_sum_assignment(np.log(np.maximum(left, 1e-300)), maximize=True)[1]
        weights.append(left[rows, chosen].min())
        columns.append(chosen)
        left[rows, chosen] -= weights[-1]
    shares = np.array(weights) / np.sum(weights)
    return np.stack(columns)[rng.choice(len(shares), count, p=shares)]
