"""The plan of a search: kinds of objects, and the bases on which tuples of points are put."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from models.program.batches import Reading, kinds, twins

MAX_TUPLES = 1 << 14
"""Largest number of tuples of points that are tried; if there are more, a random sample is."""


class Plan(NamedTuple):
    """The structure of a program's objects that the search needs; plain numpy."""

    owner: Int[np.ndarray, " N"]
    kind: Int[np.ndarray, " K"]
    """Objects of one kind have the same template and pose prior, and share their candidates."""
    first: Int[np.ndarray, " kinds"]
    """The first object of each kind."""
    twin: Int[np.ndarray, " K"]
    """The first object that is identical, including its match prior."""
    members: Int[np.ndarray, "K most"]
    """Parts of each object, padded with its first part."""
    valid: Bool[np.ndarray, "K most"]
    fewest: int
    """Number of points that fix a pose."""
    bases: Int[np.ndarray, "kinds bases size"]
    """Parts on which a tuple of points is put, as indices into members; padded with the first."""
    basis_valid: Bool[np.ndarray, "kinds bases"]

    @property
    def sizes(self) -> Int[np.ndarray, " K"]:
        """Number of parts of each object."""
        return self.valid.sum(axis=1)

    @property
    def num_slots(self) -> int:
        """Number of slots for clutter."""
        return int((self.owner == len(self.kind)).sum())


def make_plan(readings: Sequence[Reading], log_prior: Float[np.ndarray, "S K"]) -> Plan:
    """Make the plan; of bases that are equivalent by a symmetry of the template, keep the first.

    Args:
        readings: readings of the same scenes at each state that an object may have.
        log_prior: log probability of each state.
    """
    skeleton, parts = readings[0].skeleton, readings[0].model.parts
    groups = skeleton.parts
    most = max(len(group) for group in groups)
    members = np.array([np.r_[g, np.repeat(g[0], most - len(g))] for g in groups])
    valid = np.arange(most) < np.array([len(g) for g in groups])[:, None]
    kind_of = kinds(readings)
    first, kind = np.unique(kind_of, return_inverse=True)
    fewest = min(-(-skeleton.pose_dim // skeleton.num_features), *(len(g) for g in groups))
    is_fixed = not any(r.varies.parts.F or r.varies.parts.feature_mask for r in readings)
    listed = []
    for k in first:
        F, mask = (np.asarray(x)[groups[k], ..., 0] for x in (parts.F, parts.feature_mask))
        every = list(itertools.combinations(range(len(groups[k])), fewest))
        listed.append(_inequivalent(F * mask[..., None], mask, every) if is_fixed else every)
    numbers = [len(every) for every in listed]
    bases = np.array([own + own[:1] * (max(numbers) - len(own)) for own in listed])
    basis_valid = np.arange(max(numbers)) < np.array(numbers)[:, None]
    owner, twin = np.array(skeleton.owner), twins(readings, log_prior)
    return Plan(owner, kind, first, twin, members, valid, fewest, bases, basis_valid)


def _inequivalent(
    F: Float[np.ndarray, "n d p"], mask: Bool[np.ndarray, "n d"], bases: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Bases that are not equivalent to an earlier one by a symmetry of the template.

    The places of all parts are a linear function of the places of the basis. If two bases have the
    same function up to the names of parts, they give the same hypotheses.
    """
    known: set[bytes] = set()
    kept = []
    for basis in bases:
        names = set()
        for order in itertools.permutations(basis):  # tuples of points occur in every order
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
    """All ordered tuples of different rows, or a random sample if there are too many."""
    count = int(np.prod(num_points - np.arange(size)))
    if count <= MAX_TUPLES:
        return np.array(list(itertools.permutations(range(num_points), size)))
    rng = np.random.default_rng(rng_seed)
    return np.argsort(rng.random((MAX_TUPLES, num_points)), axis=1)[:, :size]
