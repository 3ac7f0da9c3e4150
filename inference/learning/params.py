"""The `numpyro.param` sites of a program: read their values, and set others."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpyro.distributions import biject_to, constraints
from numpyro.handlers import substitute

from models.errors import InputError
from models.numerics.arrays import AnyArray
from models.program.sites import Program, trace_all
from models.scenes import Scene

LARGEST = 1e8
"""Upper bound of positive parameters: without noise a precision would grow without bound."""

Values = dict[str, Any]


class Params(NamedTuple):
    """The parameters of a program, as one unconstrained vector."""

    start: Values
    """The initial values in the program."""
    constraint: dict[str, Any]
    size: dict[str, int]
    """Number of unconstrained values of each parameter."""

    def flat(self, values: Mapping[str, Any]) -> Float[np.ndarray, " n"]:
        """Values as one unconstrained vector."""
        parts = [
            np.ravel(biject_to(self.constraint[name]).inv(jnp.asarray(values[name], float)))
            for name in self.start
        ]
        return np.concatenate(parts)

    def values(self, flat: Float[AnyArray, " n"]) -> Values:
        """The constrained values of an unconstrained vector, which may be traced by JAX."""
        found, place = {}, 0
        for name, value in self.start.items():
            transform = biject_to(self.constraint[name])
            shape = transform.inverse_shape(np.shape(value))
            found[name] = transform(flat[place : place + self.size[name]].reshape(shape))
            place += self.size[name]
        return found

    def names(self) -> list[str]:
        """The parameter that each entry of the vector belongs to."""
        return [name for name, size in self.size.items() for _ in range(size)]

    def highest(self) -> Float[np.ndarray, " n"]:
        """Upper bounds on the vector: positive parameters are at most `LARGEST`."""
        is_positive = {n: c is constraints.positive for n, c in self.constraint.items()}
        return np.array([np.log(LARGEST) if is_positive[n] else np.inf for n in self.names()])


def params_of(program: Program, scene: Scene) -> Params:
    """Find the parameters of a program by tracing it at one scene."""
    sites = {n: s for n, s in trace_all(program, scene).items() if s["type"] == "param"}
    if not sites:
        raise InputError(
            "there is nothing to learn: the program has no numpyro.param; write, say, "
            'precision = numpyro.param("precision", 1e3, constraint=constraints.positive) in it'
        )
    start = {name: np.asarray(site["value"], float) for name, site in sites.items()}
    constraint = {n: s["kwargs"].get("constraint", constraints.real) for n, s in sites.items()}
    for name, value in start.items():
        if not np.all(constraint[name](value)):
            raise InputError(
                f"the parameter {name!r} begins at {value}, which its constraint "
                f"{constraint[name]} does not allow; give it another value in the program"
            )
    size = {
        name: int(np.prod(biject_to(constraint[name]).inverse_shape(np.shape(value))))
        for name, value in start.items()
    }
    return Params(start, constraint, size)


def at(program: Program, values: Mapping[str, Any]) -> Program:
    """The program with its parameters at some values."""
    return substitute(program, data={name: jnp.asarray(x) for name, x in values.items()})


class Movable:
    """A program with changing parameters that stays the same Python object.

    Caches by program, such as the confirmation by the witness, then last for all rounds. The
    program is traced again for each call, so each call uses the current values.
    """

    def __init__(self, program: Program, params: Params) -> None:
        self._values: Values = {}
        self._program = substitute(program, data=self._values)
        self._values_of = jax.jit(params.values)

    def at(self, flat: Float[np.ndarray, " n"]) -> Program:
        """The program, set to these unconstrained parameters."""
        self._values.update(self._values_of(flat))
        return self._program
