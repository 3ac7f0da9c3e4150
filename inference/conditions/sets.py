"""Sets of present objects, for programs with a `presence` site: which are possible, and sums.

The site is a Bernoulli or, where present objects may be in one of several states (small or large,
say), a Categorical whose first value means that the object is absent. A set is a value of the site.
Given one, a program is an ordinary one.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int
from numpyro.infer.util import potential_energy

from inference.conditions.solve import list_conditions, refuse_impossible
from inference.evidence import log_prior_normalizer
from models.numerics.arrays import AnyArray
from models.program.batches import Reading, read_scenes
from models.program.reading import Program, trace_sites
from models.program.reading import conditions as conditions_of
from models.scenes import Scene

Observed = dict[str, Any]
"""What a program is given; where `presence` has two axes, sets that are to be summed over."""


class Sets(NamedTuple):
    """Sets of present objects that can explain a scene."""

    flags: Int[AnyArray, "sets K"]
    log_prior: Float[AnyArray, " sets"]
    """Log probability of the set and of all that is observed but the points."""
    log_normalizer: Float[AnyArray, " sets"]
    """Log of the sum of the match prior's weights given the set."""


def has_presence(program: Program, scene: Scene) -> bool:
    """Whether the program has a `presence` site that the scene leaves open."""
    if scene.presence is not None:
        return False
    sites = trace_sites(program, scene)
    return "presence" in sites and not sites["presence"]["is_observed"]


def possible_sets(program: Program, scene: Scene) -> Sets:
    """All sets that can explain one scene; refused where there are none, or too many."""
    left_open = conditions_of(trace_sites(program, scene))
    flags = list_conditions({"presence": left_open["presence"]}).values["presence"]
    copies = scene.batch().take(np.zeros(len(flags), int))
    reading = read_scenes(program, copies, {"presence": flags})
    assert isinstance(reading, Reading)
    normalizer = log_prior_normalizer(reading, copies.present, or_bound=True)
    log_prior = np.broadcast_to(np.asarray(reading.model.log_constant), len(flags))
    possible = np.isfinite(log_prior) & np.isfinite(normalizer)
    refuse_impossible(scene.batch(), possible.any()[None])
    return Sets(flags[possible], log_prior[possible], normalizer[possible])


def with_sets(program: Program, scene: Scene) -> Scene:
    """The scene with, where the program leaves open which objects are there, all possible sets."""
    if not has_presence(program, scene):
        return scene
    return scene._replace(presence=possible_sets(program, scene).flags)


def sets_are_open(observed: Observed) -> bool:
    """Whether `presence` stands for sets that are to be summed over."""
    return "presence" in observed and np.ndim(observed["presence"]) == 2


def at_first_set(observed: Observed) -> Observed:
    """What is observed with the first of the sets, where they are open: for what no set changes."""
    if not sets_are_open(observed):
        return observed
    return observed | {"presence": observed["presence"][0]}


def potential(program: Program, observed: Observed, z: dict[str, Array]) -> Float[Array, ""]:
    """Potential energy at unconstrained values, with presence summed out where it is open.

    -log sum_s p(s) p(pose | s) p(count | s) p(points | pose, s), each term the density of the
    program itself with `presence` given.

    Args:
        program: one whose match is summed out, `models.marginal(...)`.
    """
    if not sets_are_open(observed):
        return potential_energy(program, (), observed, z)

    def of_set(flags: Array) -> Float[Array, ""]:
        return potential_energy(program, (), observed | {"presence": flags}, z)

    return -logsumexp(-jax.vmap(of_set)(observed["presence"]))
