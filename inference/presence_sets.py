"""Sets of present objects, for programs with a `presence` site: which are possible, and sums.

The site is a Bernoulli or, where present objects may be in one of several states (small or large,
say), a Categorical whose first value means that the object is absent. A set is a value of the site.
Given one, a program is an ordinary one.
"""

import itertools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int
from numpyro.infer.util import potential_energy

from inference.normalizer import data_log_prob, log_prior_normalizer
from models import AnyArray
from models.batches import skeleton
from models.errors import InputError
from models.marginal import marginal
from models.reading import Program, is_latent, placeholder, trace_sites
from models.scenes import Scene

MAX_SETS = 4096
"""Sets of present objects (and of their states) that are listed at most."""

Observed = dict[str, Any]
"""What a program is given; where `presence` has two axes, sets that are to be summed over."""


class Sets(NamedTuple):
    """Sets of present objects that can explain a scene."""

    flags: Int[AnyArray, "sets K"]
    log_prior: Float[AnyArray, " sets"]
    """Log probability of the set and of all that is observed but the points."""
    log_normalizer: Float[AnyArray, " sets"]
    """Log of the sum of the match prior's weights given the set."""


class Classes(NamedTuple):
    """Sets of present objects up to swaps of those that are alike."""

    flags: Int[np.ndarray, "sets K"]
    ways: Int[np.ndarray, " sets"]
    """How many sets each stands for."""
    log_prior: Float[np.ndarray, "scenes sets"]
    """At each scene, of all that it stands for; -inf where no match is possible."""
    alike: Float[np.ndarray, "K K"]
    """The matrix that averages over objects that are alike."""


def has_presence(program: Program, scene: Scene) -> bool:
    """Whether the program has a `presence` site that the scene leaves open."""
    return scene.presence is None and is_latent(program, scene, "presence")


def are_few(program: Program, scene: Scene, limit: int = MAX_SETS) -> bool:
    """Whether there are so few sets that all of them can be listed."""
    return len(states_of(program, scene)) ** _num_objects(program, scene) <= limit


def possible_sets(program: Program, scene: Scene) -> Sets:
    """All sets that can explain one scene; refused where there are none, or too many."""
    flags = _all_sets(program, scene)
    log_prior, log_normalizer = _log_constants(program, scene.batch(), flags)
    possible = np.isfinite(log_prior[0]) & np.isfinite(log_normalizer[0])
    if not possible.any():
        refuse_unexplained(scene.batch(), ~possible.any()[None])
    return Sets(flags[possible], log_prior[0, possible], log_normalizer[0, possible])


def with_sets(program: Program, scene: Scene) -> Scene:
    """The scene with, where the program leaves open which objects are there, all possible sets."""
    if not has_presence(program, scene):
        return scene
    return scene._replace(presence=possible_sets(program, scene).flags)


def classes_of(program: Program, scenes: Scene) -> Classes:
    """The sets that can explain some scene of a batch, those that are alike once."""
    template = np.array(skeleton(program, scenes.take(0).layout).alike)
    num_objects = len(template)
    sets = _all_sets(program, scenes.take(0))
    num_states = len(states_of(program, scenes.take(0)))
    log_data, normalizer = _log_constants(program, scenes, sets)
    for k, first in enumerate(template):  # alike only if a swap changes nothing
        order = np.arange(num_objects)
        order[[first, k]] = k, first
        swapped = _place(sets[:, order], num_states)
        if not all(np.allclose(x, x[:, swapped]) for x in (log_data, normalizer)):
            template[k] = k
    known: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for place, flags in enumerate(sets):
        known.setdefault(class_name(template, flags), []).append(place)
    chosen = np.array([places[0] for places in known.values()])
    ways = np.array([len(places) for places in known.values()])
    log_prior = np.where(np.isfinite(normalizer), log_data, -np.inf)[:, chosen] + np.log(ways)
    alike = (template[:, None] == template).astype(float)
    return Classes(sets[chosen], ways, log_prior, alike / alike.sum(axis=0))


def class_name(
    template: Int[np.ndarray, " K"], flags: Int[np.ndarray, " K"]
) -> tuple[tuple[int, int], ...]:
    """The same for sets that differ only in which of the objects with one template is in them."""
    return tuple(sorted(zip(template.tolist(), flags.tolist(), strict=True)))


def states_of(program: Program, scene: Scene) -> np.ndarray:
    """The values that the presence of an object can have, absence first."""
    site = trace_sites(program, scene, lambda site: placeholder(site, {}))["presence"]["fn"]
    values = np.asarray(site.enumerate_support(expand=False)).ravel()
    return values.astype(bool) if len(values) == 2 else values


def refuse_unexplained(scenes: Scene, unexplained: np.ndarray) -> None:
    """Say so if no set explains some scenes."""
    if unexplained.any():
        size = int(scenes.present.sum(axis=1)[unexplained][0])
        raise InputError(
            f"no set of present objects explains a scene of {size} points under this program; "
            "give its parts a visibility below 1, or use a program with a uniform match prior"
        )


def sets_are_open(observed: Observed) -> bool:
    """Whether `presence` stands for sets that are to be summed over."""
    return "presence" in observed and np.ndim(observed["presence"]) == 2


def at_first_set(observed: Observed) -> Observed:
    """What is observed with the first of the sets, where they are open: for what no set changes."""
    if not sets_are_open(observed):
        return observed
    return observed | {"presence": observed["presence"][0]}


def potential(program: Program, observed: Observed, z: dict[str, Array]) -> Float[Array, ""]:
    """Potential energy at unconstrained values, with match and, where open, presence summed out.

    -log sum_s p(s) p(pose | s) p(count | s) p(points | pose, s), each term the density of the
    program itself with `presence` given.
    """
    if not sets_are_open(observed):
        return potential_energy(marginal(program), (), observed, z)

    def of_set(flags: Array) -> Float[Array, ""]:
        return potential_energy(marginal(program), (), observed | {"presence": flags}, z)

    return -logsumexp(-jax.vmap(of_set)(observed["presence"]))


def _num_objects(program: Program, scene: Scene) -> int:
    return len(skeleton(program, scene.layout).alike)


def _all_sets(program: Program, scene: Scene) -> Int[np.ndarray, "sets K"]:
    """All of them, that of the last states first."""
    states, num_objects = states_of(program, scene), _num_objects(program, scene)
    if not are_few(program, scene):
        raise InputError(
            f"the program has {num_objects} objects, {len(states)}^{num_objects} sets of present "
            f"ones, more than the limit of {MAX_SETS}; use the method ds, which searches among "
            "them, or a program without a presence site"
        )
    return np.array(list(itertools.product(states[::-1], repeat=num_objects)))


def _place(sets: Int[np.ndarray, "sets K"], num_states: int) -> Int[np.ndarray, " sets"]:
    """Where sets stand in the list of all of them."""
    return (num_states - 1 - sets) @ num_states ** np.arange(sets.shape[1])[::-1]


def _log_constants(
    program: Program, scenes: Scene, sets: Int[np.ndarray, "sets K"]
) -> tuple[Float[np.ndarray, "scenes sets"], Float[np.ndarray, "scenes sets"]]:
    """Log probability of each set and of all data but the points, and of the match prior's sum."""
    found = [log_constants(program, scenes, flags) for flags in sets]
    log_data, normalizer = (np.stack(column, axis=1) for column in zip(*found, strict=True))
    return log_data, normalizer


def log_constants(
    program: Program, scenes: Scene, flags: Int[np.ndarray, "*scenes K"]
) -> tuple[Float[np.ndarray, " scenes"], Float[np.ndarray, " scenes"]]:
    """The same for one set, or one for each scene."""
    given = scenes._replace(presence=np.broadcast_to(flags, (len(scenes.points), flags.shape[-1])))
    return data_log_prob(program, given), log_prior_normalizer(program, given, or_bound=True)
