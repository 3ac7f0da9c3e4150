"""Check a variational result by importance weights of q against the program, match summed out.

The proposal is q(Y) averaged over the symmetries of the program. The evidence is a sum over all
copies of a mode: with a q in a single copy it would be log(copies) too low, with no sign of it in
the weights. Modes that are not copies need a q each, so a batch of local optima (`local_optima`) is
used as a mixture. Weights cannot reveal a mode that q never visits, so for the evidence the matches
near these optima (`inference.diagnostics.neighbours`) are added to the mixture.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, Float
from numpyro.distributions import biject_to
from scipy.special import logsumexp

from inference.diagnostics.neighbours import neighbouring_frames
from inference.diagnostics.posterior_draws import draws_of
from inference.posterior import symmetry
from inference.posterior.arviz_api import pareto_k
from inference.posterior.densities import flat, latent_supports, log_joint
from inference.posterior.poses import is_site
from inference.posterior.relabel import Frame
from inference.posterior.symmetry import Symmetry
from inference.result import Result
from inference.variational import cavi
from models.errors import InputError
from models.program.sites import Program
from models.program.versions import as_it_stands
from models.scenes import Scene

GOOD_K = 0.7
"""Pareto k below which importance weights can be relied on."""


class Trust(NamedTuple):
    """What importance weights say about a result."""

    pareto_k: float
    """Tail index of the weights: below 0.7 the proposal is close enough to the posterior, above 1
    the mean of the weights may not exist. The larger of the values for q alone and for the mixture
    that estimates the evidence."""
    log_evidence: float
    standard_error: float
    """Standard error of the log evidence, in nats."""
    effective_draws: float
    """Effective number of independent posterior draws."""
    log_weights: Float[np.ndarray, " draws"]
    covered: float | None = None
    """The share of the evidence that the weights of q alone find, small if q misses modes; None if
    no search for other modes was made."""

    @property
    def status(self) -> str:
        """One sentence on whether to believe it."""
        verdict = "can be relied on" if self.pareto_k < GOOD_K else "cannot be relied on"
        covered = "" if self.covered is None else f", of which q covers {self.covered:.0%}"
        return (
            f"Pareto k {self.pareto_k:.2f}, so the weights {verdict}; log evidence "
            f"{self.log_evidence:.3f} +- {self.standard_error:.3f}{covered}"
        )


def importance(
    program: Program,
    result: Result,
    rng_key: Array,
    num_samples: int = 2000,
    *,
    search: bool = True,
) -> Trust:
    """Weigh draws of q by the density of the program.

    A small k says that q is close to the posterior where q has mass. It cannot reveal a mode that q
    never visits. So the evidence is estimated by a mixture of q and the Normals of the matches that
    a search from q finds, and `covered` is the share of the evidence that q alone finds.

    Args:
        result: a variational result for one scene, or `local_optima` of one scene.
        search: False estimates the evidence by q alone, so it counts only the modes of q.
    """
    fit_key, draw_key, search_key, again_key = jax.random.split(rng_key, 4)
    scene = result.scene.take(0) if result.is_batch else result.scene
    program = as_it_stands(program, scene)

    def weighed(proposal: Proposal, key: Array) -> Trust:
        draws, log_q = proposal.draw(key, num_samples)
        return weigh(log_joint(program, scene, draws) - log_q)

    proposal = Proposal.fit(program, result, fit_key)
    alone = weighed(proposal, draw_key)
    if not search:
        return alone
    frames = neighbouring_frames(program, result, proposal.others.middle, search_key)
    whole = weighed(proposal.joined(program, scene, frames), again_key)
    return alone._replace(
        pareto_k=max(alone.pareto_k, whole.pareto_k),
        log_evidence=whole.log_evidence,
        standard_error=whole.standard_error,
        covered=float(np.exp(alone.log_evidence - whole.log_evidence)),
    )


def local_optima(program: Program, scene: Scene, rng_key: Array, num_restarts: int = 256) -> Result:
    """Run coordinate ascent from many random R; the result is a batch with one entry for each."""
    copies = scene.batch().take(np.zeros(num_restarts, int))
    return cavi.run(program, copies, rng_key, num_restarts=1, init_strategy="uniform")


def weigh(log_weights: Float[np.ndarray, " draws"]) -> Trust:
    """Pareto k, log evidence and effective number of draws from log weights."""
    count = len(log_weights)
    shifted = np.exp(log_weights - log_weights.max())
    mean = shifted.mean()
    return Trust(
        pareto_k=pareto_k(log_weights),
        log_evidence=float(logsumexp(log_weights) - np.log(count)),
        standard_error=float(shifted.std(ddof=1) / mean / np.sqrt(count)),
        effective_draws=float(shifted.sum() ** 2 / (shifted**2).sum()),
        log_weights=log_weights,
    )


class Proposal(NamedTuple):
    """A mixture of Normals for the poses, averaged over symmetries, and one Normal for the rest."""

    frames: tuple[Frame, ...]
    weights: Float[np.ndarray, " frames"]
    symmetry: Symmetry
    others: "_Others"

    @classmethod
    def fit(cls, program: Program, result: Result, key: Array) -> "Proposal":
        """Make a proposal from the runs of a variational result; other sites use the best run."""
        if result.elbo is None:
            raise InputError(
                f"importance weights require a variational result, got one from {result.method!r}; "
                "use ds or svi, or compare the draws of this method with theirs"
            )
        best = result.take(int(np.argmax(result.elbo)))
        if not is_site(program, best.scene):
            raise InputError(
                "importance weights require a latent site 'pose', but this program computes its "
                "pose from other sites; compare the draws of svi with those of nuts instead"
            )
        group = symmetry.find(program, best.scene)
        supports = latent_supports(program, best.scene)
        drawn = flat(draws_of(program, best, key)) if supports else {}
        others = _Others.fit(supports, drawn)
        means = np.asarray(result.pose_mean).reshape(-1, *best.pose_mean.shape)
        covariances = np.asarray(result.pose_covariance).reshape(-1, *best.pose_covariance.shape)
        frames = [Frame(means[i], covariances[i]) for i in np.argsort(-np.atleast_1d(result.elbo))]
        return cls((), np.zeros(0), group, others).joined(program, best.scene, frames)

    def joined(self, program: Program, scene: Scene, more: Sequence[Frame]) -> "Proposal":
        """Add Normals for the poses and weight each by the evidence of its mode."""
        frames = _without_repeats([*self.frames, *more], self.symmetry)
        middle = {name: np.stack([x] * len(frames)) for name, x in self.others.middle.items()}
        means = {"pose": np.stack([frame.mean for frame in frames])}
        # The evidence of each mode is about p / q at its mean.
        at_mean = log_joint(program, scene, middle | means)
        log_q = [log_mean_density(f, self.symmetry, f.mean[None])[0] for f in frames]
        weights = _defensive(at_mean - np.array(log_q))
        return self._replace(frames=tuple(frames), weights=weights)

    def draw(
        self, key: Array, num_samples: int
    ) -> tuple[dict[str, np.ndarray], Float[np.ndarray, " draws"]]:
        """Draws of all latent sites other than the match, and their log density."""
        which_key, pose_key, other_key = jax.random.split(key, 3)
        uniform = (np.arange(num_samples) + float(jax.random.uniform(which_key))) / num_samples
        which = np.minimum(np.searchsorted(np.cumsum(self.weights), uniform), len(self.frames) - 1)
        mean = np.stack([frame.mean for frame in self.frames])[which]
        factor = np.linalg.cholesky(np.stack([frame.covariance for frame in self.frames]))[which]
        noise = np.asarray(jax.random.normal(pose_key, mean.shape))
        # Drawing from one copy of a mode is enough: the density averages over all copies.
        pose = mean + np.einsum("nkpq,nkq->nkp", factor, noise)
        by_frame = [log_mean_density(frame, self.symmetry, pose) for frame in self.frames]
        log_density = logsumexp(by_frame, b=self.weights[:, None], axis=0)
        others, others_log_density = self.others.draw(other_key, num_samples)
        return {"pose": pose} | others, log_density + others_log_density


def log_mean_density(
    frame: Frame, group: Symmetry, pose: Float[np.ndarray, "draws K p"]
) -> Float[np.ndarray, " draws"]:
    """Log of the density of poses in a frame, averaged over the symmetry group.

    The turns are summed for each pair of objects first; then only the permutations of objects of
    one kind are left to sum over.
    """
    by_turn = {
        (source, target): logsumexp(
            [frame.log_density(target, turn(pose[:, source])) for turn in turns], axis=0
        )
        for (source, target), turns in group.turns.items()
    }
    kinds = [np.flatnonzero(group.kinds == kind).tolist() for kind in np.unique(group.kinds)]
    log_density = np.full(len(pose), -np.log(group.order))
    for members in kinds:
        terms = [
            sum(by_turn[pair] for pair in zip(members, targets, strict=True))
            for targets in itertools.permutations(members)
        ]
        log_density += logsumexp(terms, axis=0)
    return log_density


def _without_repeats(frames: list[Frame], group: Symmetry) -> list[Frame]:
    """Drop frames that repeat an earlier one, up to a symmetry."""
    means = np.stack([frame.mean for frame in frames])
    peaks = np.array([log_mean_density(frame, group, frame.mean[None])[0] for frame in frames])
    left, kept = np.arange(len(frames)), []
    while len(left):
        first = frames[left[0]]
        log_q = log_mean_density(first, group, means[left])
        kept.append(first)
        other_place = log_q[1:] < log_q[0] - 0.5
        other_size = np.abs(peaks[left[1:]] - log_q[0]) > 0.5
        left = left[1:][other_place | other_size]
    return kept


def _defensive(log_weights: Float[np.ndarray, " frames"]) -> Float[np.ndarray, " frames"]:
    """Mixture weights with a lower bound, so that a wrong one cannot spoil the estimate."""
    weights = np.exp(log_weights - logsumexp(log_weights))
    return 0.9 * weights + 0.1 / len(weights)


class _Others(NamedTuple):
    """A Normal over the latent sites other than poses and match, in unconstrained space."""

    supports: dict[str, Any]
    mean: Float[np.ndarray, " q"]
    covariance: Float[np.ndarray, "q q"]
    middle: dict[str, np.ndarray]
    """The median of each site."""

    @classmethod
    def fit(cls, supports: dict[str, Any], draws: Mapping[str, np.ndarray]) -> "_Others":
        if not supports:
            return cls({}, np.zeros(0), np.zeros((0, 0)), {})
        free = [
            np.asarray(biject_to(support).inv(jnp.asarray(draws[name])))
            for name, (support, _) in supports.items()
        ]
        table = np.concatenate([x.reshape(len(x), -1) for x in free], axis=1)
        middle = {name: np.median(draws[name], axis=0) for name in supports}
        return cls(supports, table.mean(axis=0), np.atleast_2d(np.cov(table.T)), middle)

    def draw(
        self, key: Array, num_samples: int
    ) -> tuple[dict[str, np.ndarray], Float[np.ndarray, " draws"] | float]:
        if not self.supports:
            return {}, 0.0
        normal = scipy.stats.multivariate_normal(self.mean, self.covariance)
        noise = np.asarray(jax.random.normal(key, (num_samples, len(self.mean))))
        table = self.mean + noise @ np.linalg.cholesky(self.covariance).T
        log_density, start, values = normal.logpdf(table), 0, {}
        for name, (support, shape) in self.supports.items():
            transform = biject_to(support)
            free_shape = transform.inverse_shape(shape)
            size = int(np.prod(free_shape))
            free = jnp.asarray(table[:, start : start + size]).reshape(num_samples, *free_shape)
            values[name] = np.asarray(transform(free))
            jacobian = np.asarray(transform.log_abs_det_jacobian(free, values[name]))
            log_density = log_density - jacobian.reshape(num_samples, -1).sum(axis=1)
            start += size
        return values, log_density
