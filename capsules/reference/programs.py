"""The programs of the registry, each small enough to be written again in another language.

All share the paper's pose prior, pose_k ~ Normal(0, I), and the noise Normal(0, 1 / precision).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int

from models.constellation import constellation, presence_constellation
from models.distributions.likelihood import MatchedParts
from models.distributions.match import PermutationMatch
from models.distributions.match_priors import typed_probs
from models.errors import InputError
from models.geometry import DESIGNS
from models.program.sites import Program
from models.templates import Parts, shapes, stack

Points = Float[Array, "N d"]
Present = Bool[Array, " N"]


def uniform(points: Points, present: Present, *, parts: Parts, precision: float) -> Points:
    """match ~ uniform over permutations of N rows and N parts; missing points are dummy rows."""
    return constellation(
        points, present, match_prior="permutation", parts=parts, precision=precision
    )


def mixture(points: Points, present: Present, *, parts: Parts, precision: float) -> Points:
    """match ~ each point one of the N parts, independently of the other points."""
    return constellation(points, present, match_prior="mixture", parts=parts, precision=precision)


def presence(
    points: Points,
    present: Present,
    *,
    parts: Parts,
    precision: float,
    visibility: float,
    clutter_prob: float = 0.5,
) -> Points:
    """presence_k ~ Bernoulli(1/2); parts of present objects are seen with probability `visibility`.

    If the parts have slots for clutter, each is used with probability `clutter_prob`.
    """
    return presence_constellation(
        points,
        present,
        parts=parts,
        precision=precision,
        visibility=visibility,
        clutter_prob=clutter_prob,
    )


def typed(
    points: Points,
    present: Present,
    point_type: Int[Array, " N"],
    *,
    parts: Parts,
    precision: float,
) -> Points:
    """match ~ uniform over permutations that match points only with parts of their own type.

    The type of a part is its place in its template: the first, the second, ....
    """
    first = jnp.asarray([list(parts.owner).index(k) for k in parts.owner])
    part_type = jnp.arange(parts.num_parts) - first
    logits = jnp.log(typed_probs(point_type, present, part_type))
    with numpyro.plate("object", parts.num_objects):
        normal = dist.MultivariateNormal(jnp.zeros(parts.pose_dim), jnp.eye(parts.pose_dim))
        pose = numpyro.sample("pose", normal)
    match = numpyro.sample("match", PermutationMatch(logits))
    likelihood = MatchedParts(match, pose, parts, precision=precision, present=present)
    return numpyro.sample("points", likelihood, obs=points)


def unknown_precision(
    points: Points, present: Present, *, parts: Parts, concentration: float, rate: float
) -> Points:
    """precision ~ Gamma(concentration, rate), and a uniform match."""
    precision = numpyro.sample("precision", dist.Gamma(concentration, rate))
    return uniform(points, present, parts=parts, precision=precision)


def unknown_noise(points: Points, present: Present, *, parts: Parts, scale: float) -> Points:
    """sigma ~ HalfNormal(scale), precision = sigma^-2, and a uniform match."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(scale))
    return uniform(points, present, parts=parts, precision=sigma**-2)


PROGRAMS: dict[str, Callable[..., Any]] = {
    program.__name__: program
    for program in (uniform, mixture, presence, typed, unknown_precision, unknown_noise)
}


@functools.cache  # methods compile once for each program, told apart by identity
def _program(
    name: str, objects: tuple[str, ...], design: str, clutter: int, numbers: Any
) -> Program:
    return functools.partial(
        PROGRAMS[name], parts=parts_of(objects, design, clutter), **dict(numbers)
    )


def program_of(
    name: str,
    *,
    objects: list[str],
    design: str = "similarity",
    clutter: int = 0,
    **numbers: float,
) -> Program:
    """A program with its templates and its numbers.

    Args:
        name: a name in `PROGRAMS`.
        objects: the shape of each object, a name in `models.SHAPES`.
        design: the pose design, a name in `models.geometry.DESIGNS`.
        clutter: slots for points that belong to no object.
        numbers: all other arguments of the program.
    """
    if name not in PROGRAMS:
        raise InputError(f"there is no program {name!r}; choose from {', '.join(PROGRAMS)}")
    return _program(name, tuple(objects), design, clutter, tuple(sorted(numbers.items())))


@functools.cache
def parts_of(objects: tuple[str, ...], design: str = "similarity", clutter: int = 0) -> Parts:
    """Templates of some shapes, and slots for clutter."""
    return stack(shapes(*objects), DESIGNS[design], clutter=clutter)
