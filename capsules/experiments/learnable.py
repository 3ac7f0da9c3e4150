"""The numbers of the constellations programs that can be learnt, and programs that leave them open.

A program's argument is learnt as a `numpyro.param` of the same name. The pose prior has two,
`pose_mean` and `pose_covariance`; templates have one for each shape, which all objects of that
shape share. Templates are identified only up to a similarity, which the pose absorbs: they are
centred and have size one, and their turn is that of the initial shape.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from models.errors import InputError
from models.program.sites import Program
from models.templates import SHAPES, normalise, shapes, stack

TEMPLATE = "template_"
"""Prefix of the name of a template's vertices; the name of its shape follows."""

WHAT = ("precision", "pose", "presence", "visibility", "clutter", "templates")
"""What can be learnt, by the names of the command line."""

_SCALARS: dict[str, tuple[str, float, Any]] = {
    "precision": ("precision", 3e3, constraints.positive),
    "presence": ("presence_prob", 0.5, constraints.unit_interval),
    "visibility": ("visibility", 0.9, constraints.unit_interval),
    "clutter": ("clutter_prob", 0.5, constraints.unit_interval),
}

_POSE = 4
"""Dimensions of a pose."""


def leave_open(
    prior: Callable[..., Any],
    what: Sequence[str],
    objects: Sequence[str],
    clutter: int = 0,
    given: Mapping[str, Any] | None = None,
) -> Program:
    """Make a program with open numbers, which can be learnt.

    Args:
        prior: a program of `models.constellation`.
        what: the numbers to learn, names in `WHAT`.
        objects: shapes of its templates.
        clutter: slots for points that belong to no object.
        given: further arguments of the program, and initial values of what is learnt.
    """
    if unknown := [name for name in what if name not in WHAT]:
        raise InputError(f"{unknown[0]!r} cannot be learnt; choose from {', '.join(WHAT)}")
    known = dict(given or {})
    for name in what:
        argument = _SCALARS[name][0] if name in _SCALARS else "pose_prior"
        if name != "templates" and argument not in inspect.signature(prior).parameters:
            raise InputError(
                f"{name!r} cannot be learnt: the program {prior.__name__} has no {argument}; "
                "learn something else, or choose another prior"
            )
    for name in known:
        if name not in inspect.signature(prior).parameters:
            raise InputError(
                f"the program {prior.__name__} has no {name} to set; leave it out, or choose "
                "another prior"
            )
    if "clutter" in what and not clutter:
        raise InputError("'clutter' cannot be learnt without slots for it; give --clutter 3")

    def program(
        points: Float[Array, "N d"] | None = None, present: Any = None
    ) -> Float[Array, "N d"]:
        numbers = dict(known)
        for name, (argument, start, constraint) in _SCALARS.items():
            if name in what:
                begin = known.get(argument, start)
                numbers[argument] = numpyro.param(argument, begin, constraint=constraint)
        if "pose" in what:
            numbers["pose_mean"] = numpyro.param("pose_mean", jnp.zeros(_POSE))
            numbers["pose_covariance"] = numpyro.param(
                "pose_covariance", jnp.eye(_POSE), constraint=constraints.positive_definite
            )
        if "templates" in what:
            for shape in dict.fromkeys(objects):
                (vertices,) = shapes(shape)
                numbers[TEMPLATE + shape] = numpyro.param(TEMPLATE + shape, jnp.asarray(vertices))
        return prior(points, present, **arguments(prior, numbers, objects, clutter))

    return program


def check_numbers(numbers: Mapping[str, np.ndarray]) -> None:
    """Raise an InputError for numbers, as read from a file, that a program cannot have."""
    allowed: dict[str, tuple[tuple[int, ...], Any]]
    allowed = {argument: ((), constraint) for argument, _, constraint in _SCALARS.values()}
    allowed["pose_mean"] = (_POSE,), constraints.real_vector
    allowed["pose_covariance"] = (_POSE, _POSE), constraints.positive_definite
    for shape, vertices in SHAPES.items():
        allowed[TEMPLATE + shape] = vertices.shape, constraints.real
    for name, x in numbers.items():
        if name not in allowed:
            continue
        wanted, constraint = allowed[name]
        if x.dtype.kind != "f" or x.shape != wanted or not np.all(constraint(x)):
            raise InputError(
                f"{name} has shape {x.shape} and type {x.dtype}, but it must have shape {wanted}, "
                f"type float64 and values that are {str(constraint).lower()}; learn it again"
            )
    if len({"pose_mean", "pose_covariance"} & set(numbers)) == 1:
        raise InputError("pose_mean and pose_covariance must both be given; learn both again")


def arguments(
    prior: Callable[..., Any],
    numbers: Mapping[str, Any],
    objects: Sequence[str],
    clutter: int = 0,
) -> dict[str, Any]:
    """Turn learnt numbers into arguments of a program; those that it does not take are left out."""
    taken = inspect.signature(prior).parameters
    found = {name: x for name, x in numbers.items() if name in taken}
    if "pose_mean" in numbers and "pose_prior" in taken:
        found["pose_prior"] = dist.MultivariateNormal(
            numbers["pose_mean"], numbers["pose_covariance"]
        )
    own = [numbers.get(TEMPLATE + shape) for shape in objects]
    templates = [
        shapes(shape)[0] if vertices is None else normalise(vertices)
        for shape, vertices in zip(objects, own, strict=True)
    ]
    return found | {"parts": stack(templates, clutter=clutter)}
