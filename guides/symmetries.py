"""Symmetries of a program: exchanges of parts that do not change its density.

A square may be turned in four ways, and two squares may be swapped: matches that differ in such a
way explain every scene equally well. The symmetries are found from the program as it is read
(`models.program.reading`): mean and covariance of all parts under the pose prior, the match prior,
and the density of all other sites. So they respect an edited prior that tells two objects apart.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpyro.handlers import seed, substitute, trace

from models.distributions.likelihood import MatchedParts
from models.numerics.arrays import AnyArray
from models.numerics.permanent import log_permanent
from models.program.reading import LinearGaussianModel, conditions, read
from models.program.sites import Program, placeholder, trace_sites
from models.scenes import Scene
from models.templates import pose_of_part

PROBES = 4
"""Number of draws from the program at which it is read."""


class Symmetries(NamedTuple):
    """Ways to lay one object on another, and the group of matches that they generate.

    A slot for clutter counts as an object of one part. The group has every permutation of objects
    of one kind, each laid on its place in every possible way.
    """

    part: Int[np.ndarray, "ways N"]
    """For each part of the source object, the part of the target on which it lies, else -1."""
    source: Int[np.ndarray, " ways"]
    target: Int[np.ndarray, " ways"]
    owner: Int[np.ndarray, " N"]
    """The object of each part; each slot for clutter is an object of its own."""

    @property
    def kinds(self) -> list[Int[np.ndarray, " members"]]:
        """Objects that can take each other's place."""
        first = np.array([self.target[self.source == k].min() for k in range(self.num_objects)])
        return [np.flatnonzero(first == k) for k in np.unique(first)]

    @property
    def num_objects(self) -> int:
        """Number of objects, including one for each slot for clutter."""
        return int(self.owner.max()) + 1

    @property
    def order(self) -> int:
        """The number of elements of the group."""
        ways = np.zeros((self.num_objects,) * 2)
        np.add.at(ways, (self.source, self.target), 1)
        counts = [log_permanent(jnp.log(ways[np.ix_(some, some)])) for some in self.kinds]
        return round(float(np.exp(sum(counts))))

    def log_orbit_prob(
        self,
        log_probs: Float[Array, "M N"],
        part: Int[AnyArray, " M"],
        present: Bool[AnyArray, " M"],
    ) -> Float[Array, ""]:
        """Log of the total probability of all matches that are equivalent to the given one.

        Points are independent, so the sum over ways factorises over objects. The sum over
        permutations of objects is a permanent for each kind.

        Args:
            log_probs: log probability of each point being each part.
            part: the part of each point, the match.
        """
        laid = jnp.asarray(self.part)[:, part]
        own = (laid >= 0) & present
        chosen = jnp.take_along_axis(log_probs[None], jnp.maximum(laid, 0)[..., None], axis=2)
        by_way = jnp.where(own, chosen[..., 0], 0.0).sum(axis=1)
        table = jnp.full((self.num_objects,) * 2, -jnp.inf, by_way.dtype)
        highest = table.at[self.source, self.target].max(by_way)
        shifted = jnp.exp(by_way - highest[self.source, self.target])
        sums = jnp.zeros_like(table).at[self.source, self.target].add(shifted)
        table = highest + jnp.log(jnp.where(sums > 0, sums, 1.0))
        return sum((log_permanent(table[np.ix_(some, some)]) for some in self.kinds), jnp.zeros(()))


def find(program: Program) -> Symmetries:
    """Find the symmetries of a program."""
    probes = [_probe(program, jax.random.key(i)) for i in range(PROBES)]
    pieces = [_pieces(program, probe) for probe in probes]
    owner, num_poses = _objects(pieces[0])
    groups = [np.flatnonzero(owner == k) for k in range(owner.max() + 1)]
    ways = []
    for j, source in enumerate(groups):
        for k, target in enumerate(groups):
            is_slot = [x >= num_poses for x in (j, k)]
            if len(source) != len(target) or is_slot[0] != is_slot[1]:
                continue
            others = pieces
            if j != k and not is_slot[0]:
                others = [_pieces(program, _swapped(probe, j, k, num_poses)) for probe in probes]
            if all(_same_rest(a, b) for a, b in zip(pieces, others, strict=True)):
                both = list(zip(pieces, others, strict=True))
                for places in _ways(both, source, target):
                    part = np.full(len(owner), -1)
                    part[source] = places
                    ways.append((part, j, k))
    part, source, target = (np.array(x) for x in zip(*ways, strict=True))
    return Symmetries(part, source, target, owner)


class _Probe(NamedTuple):
    """A scene of the program and the values of its conditions."""

    scene: Scene
    given: dict[str, Any]


class _Pieces(NamedTuple):
    """What symmetries must preserve: numbers of parts, of pairs of parts, and all others."""

    of_part: Float[np.ndarray, "N features"]
    of_pair: Float[np.ndarray, "N N features"]
    rest: Float[np.ndarray, " numbers"]
    model: LinearGaussianModel


def _probe(program: Program, rng_key: Array) -> _Probe:
    sites = trace(seed(substitute(program, substitute_fn=_undrawn), rng_key)).get_trace()
    present = np.asarray(sites["points"]["fn"].seen.any(axis=-1))
    scene = Scene(np.asarray(sites["points"]["value"]), present)
    open_sites = conditions(trace_sites(program, scene))
    return _Probe(scene, {name: np.asarray(sites[name]["value"]) for name in open_sites})


def likelihood_of_program(program: Program) -> MatchedParts:
    """The distribution of the points of a program, without a scene."""
    sites = trace(seed(substitute(program, substitute_fn=_undrawn), jax.random.key(0))).get_trace()
    return sites["points"]["fn"]


def _undrawn(site: Any) -> Array | None:
    """Placeholders for the sites that are read in closed form, which need not be drawn."""
    return placeholder(site["fn"]) if site["name"] in ("pose", "match", "points") else None


def _swapped(probe: _Probe, j: int, k: int, num_objects: int) -> _Probe:
    """The probe with the conditions of two objects swapped."""
    order = np.arange(num_objects)
    order[[j, k]] = k, j
    given = {
        name: value[order] if np.shape(value)[:1] == (num_objects,) else value
        for name, value in probe.given.items()
    }
    return probe._replace(given=given)


def _pieces(program: Program, probe: _Probe) -> _Pieces:
    model = jax.tree.map(np.asarray, read(program, probe.scene, probe.given))
    parts = model.parts
    own = pose_of_part(parts.owner, model.num_objects)
    mask = parts.feature_mask
    F = parts.F * mask[..., None]
    mean = np.einsum("ndp,np->nd", F, model.pose_mean[own]) + parts.offset * mask
    covariance = np.einsum("ndp,npq,meq->nmde", F, model.pose_covariance[own], F)
    count = len(own)
    columns = np.where(np.isfinite(model.match_logits), model.match_logits, -1e30).T
    part_prior = np.zeros((count, 0)) if model.part_prior is None else model.part_prior[:, None]
    of_part = (mean, parts.variance * mask, mask, parts.type[:, None], columns, part_prior)
    rest = [model.log_constant]
    rest += [] if model.precision_prior is None else [*model.precision_prior]
    return _Pieces(
        np.concatenate([x.astype(float) for x in of_part], axis=1),
        covariance.reshape(count, count, -1),
        np.array(rest, float),
        model,
    )


def _objects(pieces: _Pieces) -> tuple[Int[np.ndarray, " N"], int]:
    """The object of each part, each slot for clutter its own, and the number of poses."""
    owner, num_poses = np.array(pieces.model.parts.owner), pieces.model.num_objects
    slots = np.flatnonzero(owner >= num_poses)
    owner[slots] = num_poses + np.arange(len(slots))
    return owner, num_poses


def _same_rest(first: _Pieces, second: _Pieces) -> bool:
    return np.allclose(first.rest, second.rest, rtol=1e-9, atol=1e-9)


def _ways(
    probes: Sequence[tuple[_Pieces, _Pieces]],
    source: Int[np.ndarray, " n"],
    target: Int[np.ndarray, " n"],
) -> Iterator[list[int]]:
    """Yield every way to lay the parts of one object on those of another."""

    def fits(n: int, place: int, laid: list[int]) -> bool:
        for first, second in probes:
            if not np.allclose(first.of_part[n], second.of_part[place]):
                return False
            before, there = [*source[: len(laid)], n], [*laid, place]
            if not np.allclose(first.of_pair[n, before], second.of_pair[place, there]):
                return False
        return True

    def extend(laid: list[int]) -> Iterator[list[int]]:
        if len(laid) == len(source):
            yield laid
            return
        for place in target:
            if place not in laid and fits(source[len(laid)], place, laid):
                yield from extend([*laid, int(place)])

    yield from extend([])
