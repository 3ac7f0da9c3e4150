"""The likelihood of a scene's points, given the match (eq. p_X) and with the match summed out."""

import copy
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import validate_sample

from models.distributions.match import MixtureMatch, PermutationMatch, weighted_sum
from models.errors import InputError
from models.numerics.arrays import AnyArray
from models.numerics.permanent import log_cofactors, log_permanent
from models.templates import Parts

Noise = Callable[[Float[Array, "*shape"], Float[Array, "*shape"]], Distribution]
"""Returns the distribution of each feature, given location and scale."""


class MatchedParts(Distribution):
    """The points of a scene, given which part each of them is (eq. p_X).

        p(X | Y, Z) = prod_mn Normal(x_m | F_n y + m_n, D_n / (lambda beta))^z_mn

    All densities, here and with the match summed out, are computed from the table
    `pair_log_likelihood`, so a subclass that overrides it changes all of them.

    `log_prob` is linear in the match, so at a doubly stochastic matrix of match probabilities it is
    the expected log likelihood over matches. Features that a part does not have, or that were not
    seen, are ignored.

    Args:
        match: (..., N, N), a permutation matrix, an assignment of points to parts, or their mean.
        pose: (..., K, p), the pose of each object.
        parts: the parts of all objects; each has its own noise variance.
        precision: divides every variance except that of clutter. May be the value of a site
            (unknown noise).
        beta: the paper's annealing parameter; divides the same variances.
        present: which rows are points and which are dummies, (..., N), or which features of which
            rows were seen, (..., N, d). All of them by default.
        noise: a function of location and scale that returns the NumPyro distribution of each
            feature: `dist.Normal`, `dist.Laplace`, `functools.partial(dist.StudentT, 3.0)`. Clutter
            has it too, with its own location and scale. The closed-form methods require the Normal;
            nuts and automatic guides take any.
    """

    support = constraints.real_matrix
    pytree_data_fields = ("match", "pose", "parts", "precision", "beta", "present")
    pytree_aux_fields = ("noise",)

    def __init__(
        self,
        match: Float[Array, "*batch N N"],
        pose: Float[Array, "*batch K p"],
        parts: Parts,
        *,
        precision: ArrayLike = 1.0,
        beta: ArrayLike = 1.0,
        present: Bool[AnyArray, "*batch N"] | Bool[AnyArray, "*batch N d"] | None = None,
        noise: Noise = dist.Normal,
        validate_args: bool | None = None,
    ) -> None:
        for name, value in (("precision", precision), ("beta", beta)):
            if not isinstance(value, jax.core.Tracer) and not np.all(np.asarray(value) > 0):
                raise InputError(
                    f"the noise {name} must be positive, got {value}; the paper's precision is 1e4 "
                    "and its beta goes up to 1"
                )
        event_shape = (parts.num_parts, parts.num_features)
        self.match = match
        self.pose = pose
        self.parts = parts
        self.precision = precision
        self.beta = beta
        self.present = present if present is not None else np.ones(event_shape, bool)
        self.noise = noise
        batch_shape = jnp.broadcast_shapes(
            jnp.shape(match)[:-2],
            jnp.shape(pose)[:-2],
            jnp.shape(precision),
            jnp.shape(beta),
            seen_features(self.present, event_shape).shape[:-2],
        )
        super().__init__(batch_shape, event_shape, validate_args=validate_args)

    @property
    def seen(self) -> Bool[Array, "*batch N d"]:
        """Which features of which rows were observed."""
        return seen_features(self.present, self.event_shape)

    @property
    def noise_variance(self) -> Float[Array, "*batch parts features"]:
        """D / (precision beta), the squared scale of the noise; clutter keeps its own variance."""
        return self.parts.variance_at(self.precision * self.beta)

    def pair_log_likelihood(
        self, points: Float[Array, "*batch N d"]
    ) -> Float[Array, "*batch N parts"]:
        """Log density of each point as each part; zero in dummy rows (eq. log_rho_dummy)."""
        predicted = self.parts.predict(self.pose)[..., None, :, :]
        scale = jnp.sqrt(self.noise_variance)[..., None, :, :]
        values = jnp.where(self.seen, points, 0.0)[..., :, None, :]  # unseen values may be NaN
        log_density = self._features(predicted, scale).log_prob(values)
        counted = self.seen[..., :, None, :] & self.parts.feature_mask
        return jnp.where(counted, log_density, 0.0).sum(axis=-1)

    @validate_sample
    def log_prob(self, value: Float[Array, "*batch N d"]) -> Float[Array, "*batch"]:
        return weighted_sum(self.match, self.pair_log_likelihood(value))  # eq. p_X

    @property
    def mean(self) -> Float[Array, "*batch N d"]:
        """Expected points; zero where nothing is seen, NaN if the noise has no mean."""
        return self._at_points(self._of_parts.mean)

    @property
    def variance(self) -> Float[Array, "*batch N d"]:
        """Variance of the points, for a match of zeros and ones; NaN if the noise has none."""
        return self._at_points(self._of_parts.variance)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*shape N d"]:
        """Points around their parts, for a match of zeros and ones; zero where nothing is seen."""
        loc = jnp.broadcast_to(self._at_points(self.parts.predict(self.pose)), self.shape())
        variance = self._at_points(self.noise_variance)
        draws = self._features(loc, jnp.sqrt(jnp.where(variance > 0, variance, 1.0))).sample(
            key, sample_shape
        )
        return jnp.where(variance > 0, draws, 0.0)

    def given(self, match: Float[Array, "*more N N"]) -> Self:
        """This likelihood with another match."""
        other = copy.copy(self)
        other.match = match
        other._batch_shape = jnp.broadcast_shapes(self.batch_shape, jnp.shape(match)[:-2])
        return other

    @property
    def _of_parts(self) -> Distribution:
        """The distribution of a point at each part, (..., parts, features)."""
        return self._features(self.parts.predict(self.pose), jnp.sqrt(self.noise_variance))

    def _features(
        self, loc: Float[Array, "*shape features"], scale: Float[Array, "*shape features"]
    ) -> Distribution:
        noise = self.noise(loc, scale)
        shape = jnp.broadcast_shapes(jnp.shape(loc), jnp.shape(scale))
        if (noise.batch_shape, noise.event_shape) != (shape, ()):
            raise InputError(
                f"the noise must be a distribution of each feature by itself, batch shape {shape} "
                f"and event shape (), got {type(noise).__name__} with {noise.batch_shape} and "
                f"{noise.event_shape}; return it without to_event, as dist.Normal(loc, scale) is"
            )
        return noise

    def _at_points(self, of_parts: Float[Array, "*batch parts d"]) -> Float[Array, "*batch N d"]:
        """Values of parts, (parts, d), for the points matched with them; zero where unseen."""
        owned = jnp.where(self.parts.feature_mask, of_parts, 0.0)
        return jnp.where(self.seen, self.match @ owned, 0.0)


class MarginalParts(Distribution):
    """The points of a scene with the match summed out under its prior.

        p(X | Y) = sum_Z p(Z) p(X | Y, Z)

    For a prior over permutations this is a ratio of permanents, for a mixture a product over points
    of sums over parts.

    Args:
        match_prior: a match distribution of `models.distributions.match`.
        matched: the likelihood given the match; its own match is not used.
    """

    support = constraints.real_matrix
    pytree_data_fields = ("match_prior", "matched")

    def __init__(
        self,
        match_prior: Distribution,
        matched: MatchedParts,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.match_prior = match_prior
        self.matched = matched
        batch_shape = jnp.broadcast_shapes(match_prior.batch_shape, matched.batch_shape)
        super().__init__(batch_shape, matched.event_shape, validate_args=validate_args)

    def match_posterior(
        self, points: Float[Array, "*batch N d"]
    ) -> PermutationMatch | MixtureMatch:
        """p(Z | X, Y), from which exact match draws are recovered."""
        return self.match_prior.tilt(self.matched.pair_log_likelihood(points))

    @validate_sample
    def log_prob(self, value: Float[Array, "*batch N d"]) -> Float[Array, "*batch"]:
        log_sum = self.match_posterior(value).log_normalizer
        # No match is possible under a prior that forbids all of them.
        return jnp.where(jnp.isneginf(log_sum), -jnp.inf, log_sum - self.match_prior.log_normalizer)

    def log_prob_given_others(self, value: Float[Array, "*batch N d"]) -> Float[Array, "*batch N"]:
        """log p(x_m | all other points, pose) for each point m; zero in dummy rows.

        Under a prior over permutations the points are dependent even given the poses, because no
        two can be the same part; the likelihood is not a product of p(x_m | pose). Leave-one-out
        cross-validation needs the ratio of the likelihood to that of the scene with row m a dummy,
        whose permanent differs in one row.
        """
        posterior = self.match_posterior(value)
        if isinstance(posterior, MixtureMatch):
            seen, unseen = posterior.logits, self.match_prior.logits
            return logsumexp(seen, axis=-1) - logsumexp(unseen, axis=-1)
        cofactors = log_cofactors(posterior.logits)
        unseen = logsumexp(self.match_prior.log_weights + cofactors, axis=-1)
        return log_permanent(posterior.logits)[..., None] - unseen

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Float[Array, "*shape N d"]:
        match_key, noise_key = jax.random.split(key)
        match = self.match_prior.expand(self.batch_shape).sample(match_key, sample_shape)
        return self.matched.given(match).sample(noise_key)


def check_one_scene(likelihood: MatchedParts) -> None:
    """Refuse an object without parts or pose, and a precision or beta of each part.

    JAX takes the nearest pose for one that is missing, and NumPyro takes a precision of each part
    for a batch of scenes.
    """
    parts = likelihood.parts
    owners = set(np.asarray(parts.owner)[~np.asarray(parts.is_clutter)].tolist())
    if min(owners) < 0:
        raise InputError(
            f"site 'points': a part has the owner {min(owners)}; number the owners of the parts "
            "from 0 without a gap, as `stack` does"
        )
    if (shape := jnp.shape(likelihood.pose))[-2:-1] != (parts.num_objects,):
        raise InputError(
            f"site 'pose': a pose of shape {shape} for the {parts.num_objects} objects that own "
            "the parts of MatchedParts; give one pose for each object, (K, p), and each a part"
        )
    if without := set(range(parts.num_objects)) - owners:
        raise InputError(
            f"site 'points': object {min(without)} has no part; number the owners of the parts "
            "from 0 without a gap, as `stack` does"
        )
    for name in ("precision", "beta"):
        if shape := jnp.shape(getattr(likelihood, name)):
            raise InputError(
                f"site 'points': the {name} of MatchedParts must be one number, got shape {shape}; "
                "for noise of each part or feature give parts._replace(variance=...), of shape "
                f"{likelihood.event_shape}"
            )


def seen_features(
    present: Bool[AnyArray, "*batch N"] | Bool[AnyArray, "*batch N d"], event_shape: tuple[int, ...]
) -> Bool[Array, "*batch N d"]:
    """Expand a mask over rows, (..., N), to one over their features, (..., N, d).

    A mask (..., N, d) is returned unchanged. The last axis tells the two apart. It is ambiguous
    only when N = d; then a mask with a single axis is one over rows.
    """
    num_rows, num_features = event_shape
    shape = jnp.shape(present)
    numpy: Any = jnp
    if not isinstance(present, jax.core.Tracer):  # numpy compiles nothing
        numpy, present = np, np.asarray(present)
    present = present.astype(bool)  # of other numbers the bits would count
    if len(shape) >= 2 and shape[-2:] == (num_rows, num_features):
        return jnp.asarray(present)
    if shape[-1:] == (num_rows,):
        return jnp.asarray(numpy.broadcast_to(present[..., None], (*shape, num_features)))
    rows = f": {shape[0]} rows but the program has {num_rows} parts" if len(shape) == 1 else ""
    raise InputError(
        f"present must say which of the {num_rows} rows are points, shape (..., {num_rows}), or "
        f"which of their features were seen, (..., {num_rows}, {num_features}), got {shape}{rows}; "
        "pad the scene to one row for each part"
    )
