"""Which points may be which object: candidates for every kind of object, with their scores.

A basis of an object's parts, put on a tuple of points, fixes its pose; the pose predicts the other
parts, and each is met by the nearest point within a gate, or by none. What is met is fitted once
more and meets again. A candidate's score is the log marginal likelihood of its points on its parts,
pose integrated out: the number that exact inference sums over.

One scene at a time, to be mapped over a batch. Hypotheses are the last axis.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.stats import chi2

from models.numerics.linalg import (
    cholesky,
    condition,
    innovations,
    inverse_and_log_det,
    largest,
    total,
)
from models.program.batches import Reading
from models.program.reading import LinearGaussianModel
from models.templates import Parts

TIGHT = 1e-6
"""Variance of the noise that the first gate is made for, whatever that of the program is."""

OUTSIDE = 1e-6
"""Share of a part's own points that a gate shuts out."""

MAX_TUPLES = 1 << 14
"""Tuples of points that are tried as a basis, beyond which some are drawn at random."""

MAX_JUDGED = 1 << 12
"""Hypotheses of a kind that are judged closely where the gate is tight; of more, the most promising
ones."""

CELLS, AROUND = 512, 4
"""Cells of the table of the plane along each side, and around a point, where it is near."""

MAX_HYPOTHESES = 1 << 13
"""Tuples of points on bases of an object up to which a basis is larger than it need be."""


class Plan(NamedTuple):
    """What is fixed about the objects of a program, as the search needs it; plain numpy."""

    owner: Int[np.ndarray, " N"]
    kind: Int[np.ndarray, " K"]
    """Objects of one kind have the same template and pose prior, and share their candidates."""
    first: Int[np.ndarray, " kinds"]
    """The first object of each kind."""
    twin: Int[np.ndarray, " K"]
    """The first object that differs in nothing, the match prior included."""
    members: Int[np.ndarray, "K most"]
    """Parts of each object, padded with its first part."""
    valid: Bool[np.ndarray, "K most"]
    fewest: int
    """Points that fix a pose."""
    bases: tuple["Bases", ...]
    """Of all kinds, those with bases of the same size together."""

    @property
    def sizes(self) -> Int[np.ndarray, " K"]:
        """How many parts each object has."""
        return self.valid.sum(axis=1)

    @property
    def num_slots(self) -> int:
        """Slots for clutter."""
        return int((self.owner == len(self.kind)).sum())


class Bases(NamedTuple):
    """Parts of some kinds of objects that a tuple of points is put on."""

    kinds: Int[np.ndarray, " some"]
    parts: Int[np.ndarray, "some bases size"]
    """By place among the members; padded with the first basis."""
    valid: Bool[np.ndarray, "some bases"]


class Candidates(NamedTuple):
    """Ways in which objects of each kind may meet the points."""

    match: Int[Array, "kinds most C"]
    """The point of each part, -1 for none."""
    score: Float[Array, "kinds C"]
    """log p(points on those parts); -inf where there is no such candidate."""
    misfit: Float[Array, "kinds C"]
    """Half the squared distances of points from where their parts are, in units of the noise."""


def make_plan(
    readings: Sequence[Reading], log_prior: Float[np.ndarray, "S K"], more: int = 0
) -> Plan:
    """Kinds and bases; of bases that a symmetry of the template makes alike, the first.

    Args:
        readings: of the same scenes, at each state that an object may have.
        log_prior: log probability of each state.
        more: points of a basis beyond those that fix a pose, where hypotheses stay few.
    """
    skeleton, parts = readings[0].skeleton, readings[0].model.parts
    groups = skeleton.parts
    most = max(len(group) for group in groups)
    members = np.array([np.r_[g, np.repeat(g[0], most - len(g))] for g in groups])
    valid = np.arange(most) < np.array([len(g) for g in groups])[:, None]
    kinds = [_same(reading, groups) for reading in readings]
    kind_of = _firsts(len(groups), lambda j, k: all(same(j, k) for same in kinds))
    twin = _firsts(
        len(groups),
        lambda j, k: (
            kind_of[j] == kind_of[k]
            and np.array_equal(log_prior[:, j], log_prior[:, k])
            and all(
                np.array_equal(*(reading.model.match_logits[:, groups[i]] for i in (j, k)))
                for reading in readings
            )
        ),
    )
    first, kind = np.unique(kind_of, return_inverse=True)
    fewest = min(-(-skeleton.pose_dim // skeleton.num_features), *(len(g) for g in groups))
    is_fixed = not any(r.varies.parts.F or r.varies.parts.feature_mask for r in readings)
    listed = []
    for k in first:
        F, mask = (np.asarray(x)[groups[k], ..., 0] for x in (parts.F, parts.feature_mask))
        largest = min(fewest + more, len(groups[k]))
        for size in range(largest, fewest - 1, -1):
            every = list(itertools.combinations(range(len(groups[k])), size))
            every = _different(F * mask[..., None], mask, every) if is_fixed else every
            if len(every) * math.perm(len(skeleton.owner), size) <= MAX_HYPOTHESES:
                break
        listed.append(every)
    owner = np.array(skeleton.owner)
    return Plan(owner, kind, first, twin, members, valid, fewest, _by_size(listed))


def _by_size(listed: list[list[tuple[int, ...]]]) -> tuple[Bases, ...]:
    """Bases of all kinds, those of one size together, as arrays."""
    groups = []
    for size in sorted({len(every[0]) for every in listed}):
        kinds = np.array([i for i, every in enumerate(listed) if len(every[0]) == size])
        most = max(len(listed[i]) for i in kinds)
        padded = np.array([listed[i] + listed[i][:1] * (most - len(listed[i])) for i in kinds])
        valid = np.arange(most) < np.array([len(listed[i]) for i in kinds])[:, None]
        groups.append(Bases(kinds, padded, valid))
    return tuple(groups)


def _same(reading: Reading, groups: list[np.ndarray]) -> Callable[[int, int], bool]:
    """Whether two objects have the same template and pose prior at every scene."""
    model = reading.model
    of_parts = model.parts._replace(owner=np.zeros_like(model.parts.owner))

    def same(j: int, k: int) -> bool:
        return (
            len(groups[j]) == len(groups[k])
            and all(np.array_equal(x[groups[j]], x[groups[k]]) for x in of_parts)
            and np.array_equal(model.pose_mean[j], model.pose_mean[k])
            and np.array_equal(model.pose_covariance[j], model.pose_covariance[k])
        )

    return same


def _firsts(count: int, same: Callable[[int, int], bool]) -> Int[np.ndarray, " K"]:
    """For each object the first one that is the same."""
    return np.array([next(j for j in range(k + 1) if j == k or same(j, k)) for k in range(count)])


def _different(
    F: Float[np.ndarray, "n d p"], mask: Bool[np.ndarray, "n d"], bases: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Bases from which the template does not look the same.

    Where all parts are is a linear function of where the basis is. If the functions are the same
    but for the names of the parts, so are the hypotheses.
    """
    known: set[bytes] = set()
    kept = []
    for basis in bases:
        names = set()
        for order in itertools.permutations(basis):  # tuples of points come in every order
            inverse = np.linalg.pinv(F[list(order)].reshape(-1, F.shape[-1]))
            seen = np.concatenate([F @ inverse, mask[..., None]], axis=-1)
            rows = np.round(seen.reshape(len(F), -1), 6) + 0.0
            names.add(rows[np.lexsort(rows.T)].tobytes())
        if not names & known:
            kept.append(basis)
        known |= names
    return kept


def tuples_of_points(
    num_points: int, size: int, rng_seed: int = 0
) -> Int[np.ndarray, "tuples size"]:
    """All ordered tuples of different rows, or some of them at random if they are too many."""
    count = int(np.prod(num_points - np.arange(size)))
    if count <= MAX_TUPLES:
        return np.array(list(itertools.permutations(range(num_points), size)))
    rng = np.random.default_rng(rng_seed)
    return np.argsort(rng.random((MAX_TUPLES, num_points)), axis=1)[:, :size]


def find(
    model: LinearGaussianModel,
    plan: Plan,
    gate: Float[Array, "N d"],
    worth: Float[Array, "N N"],
    count: int,
    judged: int = MAX_JUDGED,
) -> Candidates:
    """The best candidates of every kind, each with and without any one of its points.

    Args:
        gate: variance of each feature of each part that points are met with.
        worth: what it is worth that a point is a part, before where the part is counts.
        count: candidates of each kind, before points are left out.
        judged: hypotheses of each kind that are judged closely; of more, the most promising ones.
    """
    found = []
    for kinds, basis, basis_valid in plan.bases:
        tuples = tuples_of_points(len(model.points), basis.shape[-1])
        of_kind = functools.partial(
            _of_kind, model, tuples, gate, worth, count, judged, plan.fewest
        )
        first = plan.first[kinds]
        own = (first, plan.members[first], plan.valid[first], basis, basis_valid)
        found.append(jax.lax.map(lambda own, f=of_kind: f(*own), jax.tree.map(jnp.asarray, own)))
    order = np.argsort(np.concatenate([bases.kinds for bases in plan.bases]))
    return jax.tree.map(lambda *x: jnp.concatenate(_padded(x))[order], *found)


def _padded(arrays: Sequence[Array]) -> list[Array]:
    """Arrays made as long as the longest along their last axis, with what is no candidate."""
    longest = max(x.shape[-1] for x in arrays)
    return [
        jnp.pad(
            x,
            [(0, 0)] * (x.ndim - 1) + [(0, longest - x.shape[-1])],
            constant_values=-1 if x.dtype == int else -jnp.inf,
        )
        for x in arrays
    ]


def _of_kind(
    model: LinearGaussianModel,
    tuples: Int[np.ndarray, "tuples size"],
    gate: Float[Array, "N d"],
    worth: Float[Array, "N N"],
    count: int,
    judged: int,
    fewest: int,
    k: Int[Array, ""],
    members: Int[Array, " most"],
    valid: Bool[Array, " most"],
    basis: Int[Array, "bases size"],
    basis_valid: Bool[Array, " bases"],
) -> Candidates:
    parts = jax.tree.map(lambda x: jnp.asarray(x)[members], model.parts)
    parts = parts._replace(feature_mask=parts.feature_mask & valid[:, None])
    allowed = valid & jnp.isfinite(model.match_logits[:, members]) & model.seen.any(axis=1)[:, None]
    near = functools.partial(_nearest, model, parts, allowed)

    # Hypotheses: every tuple of points as every basis.
    frames = _frames(model, parts, gate[members], k, basis)
    whole = (model.seen[:, None] | ~parts.feature_mask).all(axis=-1) & allowed
    sound = whole[tuples[None], basis[:, None]].all(axis=-1) & basis_valid[:, None]
    number = jnp.arange(sound.size)
    if sound.size > judged:
        number = _promising(model, parts, frames, basis, tuples, sound, judged)
    which, row = jnp.divmod(number, len(tuples))
    put = _put(model, parts, frames, basis, which, jnp.asarray(tuples)[row])
    met = near(put.predicted, put.spread, put.fixed)
    value = _value(model, parts, put, met, worth[:, members])
    value = jnp.where(sound[which, row], value, -jnp.inf)
    met, _, _ = _best_sets(met, value, len(model.points), count)

    # The best are fitted to all that they meet, and meet again.
    pose, covariance = _pose(model, parts, gate[members], k, met)
    predicted = jnp.einsum("ndp,ph->ndh", parts.F, pose) + parts.offset[..., None]
    left_open = jnp.einsum("ndp,pqh,ndq->ndh", parts.F, covariance, parts.F)
    again = near(predicted, gate[members][..., None] + left_open, jnp.full_like(met, -1))
    met = jnp.where((met >= 0).any(axis=0), again, -1)
    left_out = jnp.eye(len(members), dtype=bool)[:, :, None]
    fewer = jnp.where(left_out, -1, met[:, None]).reshape(len(members), -1)
    match = jnp.concatenate([met, fewer], axis=1)
    enough = (match >= 0).sum(axis=0) >= fewest
    score, misfit = log_marginal(model, k, members, match)
    score = jnp.where(enough, score, -jnp.inf)
    match, score, kept = _best_sets(match, score, len(model.points), match.shape[1])
    return Candidates(match, score, misfit[kept])


class Frames(NamedTuple):
    """For each basis what its points say of all parts; the pose's mean is linear in them."""

    linear: Float[Array, "bases most d size d"]
    at_zero: Float[Array, "bases most d"]
    """Where the parts are when the points of the basis are at the origin."""
    spread: Float[Array, "bases most d"]
    """How variable a part is given the basis, with the noise that the gate is made for."""
    variance: Float[Array, "bases most d"]
    """The same with the noise of the program."""
    mean: Float[Array, "bases size d"]
    """Where the basis is before it is seen, and the density of that."""
    inverse: Float[Array, "bases size*d size*d"]
    log_det: Float[Array, " bases"]
    counted: Float[Array, "bases size d"]


def _frames(
    model: LinearGaussianModel,
    parts: Parts,
    gate: Float[Array, "most d"],
    k: Int[Array, ""],
    basis: Int[Array, "bases size"],
) -> Frames:
    prior_precision, _ = inverse_and_log_det(model.pose_covariance[k])

    def one(basis: Int[Array, " size"]) -> Frames:
        F, mask = parts.F[basis], parts.feature_mask[basis]

        def left_open(variance: Float[Array, "most d"]) -> tuple[Array, Array]:
            precision = prior_precision + jnp.einsum("bdp,bd,bdq->pq", F, mask / variance[basis], F)
            covariance, _ = inverse_and_log_det(precision)  # eq. Lambda_k
            spread = jnp.einsum("ndp,pq,ndq->nd", parts.F, covariance, parts.F)
            return covariance, variance + spread

        covariance, spread = left_open(gate)
        gain = jnp.einsum("pq,bdq,bd->pbd", covariance, F, mask / gate[basis])
        pose = covariance @ (prior_precision @ model.pose_mean[k])  # eq. mu_k
        pose = pose - jnp.einsum("pbd,bd->p", gain, parts.offset[basis])
        rows = (F * mask[..., None]).reshape(-1, F.shape[-1])
        noise = jnp.where(mask, parts.variance[basis], 1.0).ravel()
        joint = jnp.einsum("ip,pq,jq->ij", rows, model.pose_covariance[k], rows) + jnp.diag(noise)
        return Frames(
            jnp.einsum("ndp,pbe->ndbe", parts.F, gain),
            parts.F @ pose + parts.offset,
            spread,
            left_open(parts.variance)[1],
            (parts.offset + parts.F @ model.pose_mean[k])[basis],
            *inverse_and_log_det(joint),
            mask.astype(float),
        )

    return jax.vmap(one)(basis)


class Put(NamedTuple):
    """Tuples of points as bases; hypotheses last."""

    predicted: Float[Array, "most d H"]
    """Where the parts are."""
    spread: Float[Array, "most d H"]
    """How variable that is, with the noise that the gate is made for."""
    variance: Float[Array, "most d H"]
    """The same with the noise of the program."""
    log_basis: Float[Array, " H"]
    """log p(points of the basis)."""
    fixed: Int[Array, "most H"]
    """The points of the basis, on their parts; -1 elsewhere."""


def _put(
    model: LinearGaussianModel,
    parts: Parts,
    frames: Frames,
    basis: Int[Array, "bases size"],
    which: Int[Array, " H"],
    tuples: Int[Array, "H size"],
) -> Put:
    """Tuples of points, each on the basis that `which` says."""
    own = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1)[..., which], frames)
    points = jnp.moveaxis(model.points[tuples], 0, -1)  # (size, d, H)
    size, features = points.shape[:2]
    predicted = own.at_zero + sum(
        own.linear[:, :, b, e] * points[b, e] for b in range(size) for e in range(features)
    )
    residual = ((points - own.mean) * own.counted).reshape(-1, len(which))
    energy = total(residual * total(own.inverse * residual[None], axis=1), axis=0)
    number = own.counted.sum(axis=(0, 1))
    log_basis = -0.5 * (energy + own.log_det + number * jnp.log(2 * jnp.pi))
    is_part = jnp.arange(len(parts.F))[:, None, None] == basis[which]  # (most, H, size)
    fixed = (is_part * (tuples + 1)).sum(axis=-1) - 1
    return Put(predicted, own.spread, own.variance, log_basis, fixed)


def _promising(
    model: LinearGaussianModel,
    parts: Parts,
    frames: Frames,
    basis: Int[Array, "bases size"],
    tuples: Int[np.ndarray, "tuples size"],
    sound: Bool[Array, "bases tuples"],
    judged: int,
) -> Int[Array, " judged"]:
    """The hypotheses of which most other parts are near some point, by a table of the plane.

    Geometric hashing, as the paper remarks: to look a place up takes no longer where points are
    many. Of places only the first two features are looked at.
    """
    seen = model.seen[:, :2].all(axis=1)
    points = model.points[:, :2]
    reach = jnp.sqrt(chi2.isf(OUTSIDE, 2) * frames.spread[..., :2].max(axis=-1))  # (bases, most)
    low = jnp.where(seen[:, None], points, jnp.inf).min(axis=0)
    high = jnp.where(seen[:, None], points, -jnp.inf).max(axis=0)
    cell = jnp.maximum((high - low).max() / (CELLS - 2 * AROUND - 1), reach.max() / (AROUND - 0.5))

    def place(x: Float[Array, "*shape 2"]) -> tuple[Int[Array, "*shape"], Bool[Array, "*shape"]]:
        across = jnp.floor((x - low) / cell).astype(jnp.int32) + AROUND
        inside = ((across >= 0) & (across < CELLS)).all(axis=-1)
        return across[..., 0] * CELLS + across[..., 1], inside

    # The table: how far, in cells, the middle of each cell is from the nearest point.
    steps = np.stack(np.meshgrid(*[np.arange(-AROUND, AROUND + 1)] * 2), axis=-1).reshape(-1, 2)
    corner = jnp.floor((points - low) / cell)
    apart = corner[:, None] + steps + 0.5 - ((points - low) / cell)[:, None]
    distance = jnp.where(seen[:, None], jnp.sqrt((apart**2).sum(axis=-1)), jnp.inf)
    cells = place(points)[0][:, None] + steps @ np.array([CELLS, 1])
    table = jnp.full(CELLS**2, jnp.inf, jnp.float32)
    table = table.at[cells].min(distance.astype(jnp.float32), mode="drop")
    put = jnp.moveaxis(points[tuples], 0, -1)  # (size, 2, tuples)

    def of_basis(own: tuple[Frames, Array, Array, Array]) -> Float[Array, " tuples"]:
        frame, basis, sound, reach = own
        predicted = frame.at_zero[:, :2, None] + sum(
            frame.linear[:, :2, b, e, None] * put[b, e] for b in range(len(put)) for e in (0, 1)
        )
        where, inside = place(jnp.moveaxis(predicted, 1, -1))
        far = table[jnp.where(inside, where, 0)] - np.sqrt(0.5)
        other = (jnp.arange(len(parts.F))[:, None] != basis).all(axis=1) & parts.feature_mask[:, 0]
        hit = other[:, None] & inside & (far <= (reach / cell)[:, None])
        return jnp.where(sound, total(hit.astype(jnp.float32), axis=0), -1.0)

    hits = jax.lax.map(of_basis, (frames, basis, sound, reach))
    _, best = jax.lax.top_k(hits.ravel(), judged)
    return best


def _value(
    model: LinearGaussianModel,
    parts: Parts,
    put: Put,
    match: Int[Array, "most H"],
    worth: Float[Array, "N most"],
) -> Float[Array, " H"]:
    """About the score of each hypothesis, relative to points that are each explained alone.

    Given the basis, the other points count as independent.
    """
    counted = model.seen[match] & parts.feature_mask[:, None]  # (most, H, d)
    residual = jnp.moveaxis(model.points[match], -1, 1) - put.predicted
    energy = residual**2 / put.variance + jnp.log(2 * jnp.pi * put.variance)
    log_density = -0.5 * total(jnp.where(jnp.moveaxis(counted, -1, 1), energy, 0.0), axis=1)
    others = jnp.where((match >= 0) & (put.fixed < 0), log_density, 0.0)
    numbers = np.arange(len(match))[:, None]
    others += jnp.where(match >= 0, worth[match, numbers], 0.0)
    return put.log_basis + total(others, axis=0)


def _pose(
    model: LinearGaussianModel,
    parts: Parts,
    gate: Float[Array, "most d"],
    k: Int[Array, ""],
    match: Int[Array, "most H"],
) -> tuple[Float[Array, "p H"], Float[Array, "p p H"]]:
    """The pose given the points on some parts, and its covariance (eqs. Lambda_k and mu_k)."""
    weight = (parts.feature_mask / gate)[:, None] * model.seen[match]
    weight = jnp.where((match >= 0)[..., None], weight, 0.0)
    prior_precision, _ = inverse_and_log_det(model.pose_covariance[k])
    precision = jnp.einsum("ndp,nhd,ndq->pqh", parts.F, weight, parts.F)
    covariance, _ = inverse_and_log_det(precision + prior_precision[..., None])
    votes = jnp.einsum(
        "ndp,nhd,nhd->ph", parts.F, weight, model.points[match] - parts.offset[:, None]
    )
    votes = votes + (prior_precision @ model.pose_mean[k])[:, None]
    return jnp.einsum("pqh,qh->ph", covariance, votes), covariance


def _nearest(
    model: LinearGaussianModel,
    parts: Parts,
    allowed: Bool[Array, "N most"],
    predicted: Float[Array, "most d H"],
    spread: Float[Array, "most d #H"],
    fixed: Int[Array, "most H"],
) -> Int[Array, "most H"]:
    """The point that meets each part, -1 for none, or the one that is fixed."""
    weight = parts.feature_mask[..., None] / spread
    limit = jnp.asarray(chi2.isf(OUTSIDE, np.arange(1, parts.num_features + 1)))
    seen = model.seen[:, None] & parts.feature_mask  # (N, most, d)
    squared = sum(
        model.seen[:, None, j, None]
        * (weight[:, j] * (model.points[:, None, j, None] - predicted[:, j]) ** 2)
        for j in range(parts.num_features)
    )  # (N, most, H)
    slack = limit[jnp.maximum(seen.sum(axis=-1) - 1, 0)][..., None] - squared
    slack = jnp.where(allowed[..., None], slack, 0.0)
    closest = largest(slack, axis=0)
    match = jnp.where(fixed >= 0, fixed, jnp.argmax(slack, axis=0))
    closest = jnp.where(fixed >= 0, jnp.inf, closest)
    # A point that two parts would have goes to the one that it is closer to.
    rival = match[:, None] == match[None]
    first = np.tri(len(match), k=-1, dtype=bool)[..., None]
    closer = (closest[None] > closest[:, None]) | ((closest[None] == closest[:, None]) & first)
    met = (closest > 0) & ~(rival & closer).any(axis=1)
    return jnp.where(met, match, -1)


def _best_sets(
    match: Int[Array, "most H"], value: Float[Array, " H"], num_points: int, count: int
) -> tuple[Int[Array, "most C"], Float[Array, " C"], Int[Array, " C"]]:
    """The matches of the highest value, the best of each set of points; values and numbers."""
    codes = np.random.default_rng(0).integers(1 << 30, size=num_points)  # equal sums: equal sets
    value, best = best_few(value, min(8 * count, len(value)))
    match = match[:, best]
    code = jnp.where(match >= 0, jnp.asarray(codes)[match], 0).sum(axis=0)
    order = jnp.argsort(code, stable=True)  # of equal sets the best comes first
    again = jnp.append(False, code[order][1:] == code[order][:-1])
    value = value.at[order].set(jnp.where(again, -jnp.inf, value[order]))
    value, kept = best_few(value, min(count, len(value)))
    return jnp.where(jnp.isfinite(value), match[:, kept], -1), value, best[kept]


def best_few(value: Float[Array, " H"], count: int) -> tuple[Float[Array, " C"], Int[Array, " C"]]:
    """The largest values, and their numbers.

    Compared as 32-bit numbers, relative to the largest: XLA is some twenty times as fast with them.
    """
    below = value - jnp.maximum(value.max(), -1e30)
    _, best = jax.lax.top_k(below.astype(jnp.float32), count)
    return value[best], best


def log_marginal(
    model: LinearGaussianModel,
    k: Int[Array, ""],
    members: Int[Array, " most"],
    match: Int[Array, "most C"],
) -> tuple[Float[Array, " C"], Float[Array, " C"]]:
    """log p(points on the parts of object k), its pose integrated out, and the misfit.

    The features are observed one after another, as in `exact.permutations.object_grid`.
    """
    parts = jax.tree.map(lambda x: jnp.asarray(x)[members], model.parts)
    counted = parts.feature_mask[:, None] & model.seen[match] & (match >= 0)[..., None]
    scale = counted / jnp.sqrt(parts.variance)[:, None]  # (most, C, d)
    expected = parts.offset + parts.F @ model.pose_mean[k]
    residual = scale * (model.points[match] - expected[:, None])
    design = scale[..., None] * parts.F[:, None]  # (most, C, d, p)
    rows = jnp.moveaxis(design, 1, -1).reshape(-1, design.shape[-1], match.shape[1])
    steps = condition(cholesky(model.pose_covariance[k])[..., None], rows)
    observed = jnp.moveaxis(residual, 1, -1).reshape(-1, match.shape[1])
    z, mean = innovations(steps, observed, jnp.zeros((design.shape[-1], 1)))
    noise = jnp.where(counted, jnp.log(2 * jnp.pi * parts.variance)[:, None], 0.0)
    energy = 0.5 * (z**2).sum(axis=0)
    log_density = -energy - jnp.log(steps.deviation).sum(axis=0) - 0.5 * noise.sum(axis=(0, 2))
    prior_precision, _ = inverse_and_log_det(model.pose_covariance[k])
    of_pose = 0.5 * total(mean * total(prior_precision[..., None] * mean, axis=1), axis=0)
    return log_density, energy - of_pose
