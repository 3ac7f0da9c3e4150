"""List the conditions of a program: joint values of the discrete ones, and the continuous ones."""

import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from numpyro.distributions import Distribution, biject_to

from models.errors import ConjugacyError, InputError
from models.numerics.arrays import padded
from models.program.batches import Open
from models.program.reading import FACTORS
from models.program.sites import described

MAX_VALUES = 4096
"""Largest number of joint values of the discrete conditions that is listed."""

MAX_INTEGRATED = 2
"""Largest number of continuous conditions that are integrated over."""


class Conditions(NamedTuple):
    """The values of the discrete conditions of a program, and its continuous conditions."""

    values: dict[str, np.ndarray]
    """Joint values of the discrete sites, (values, ...) each."""
    continuous: dict[str, Distribution]

    @property
    def num_values(self) -> int:
        """Number of joint values of the discrete sites."""
        return len(next(iter(self.values.values()))) if self.values else 1

    def given(
        self, value: Int[np.ndarray, " runs"], node: Float[np.ndarray, "runs axes"]
    ) -> tuple[dict[str, np.ndarray], Float[np.ndarray, " runs"]]:
        """Values of all sites at joint value `value` and unconstrained `node`; log Jacobians."""
        sites = {name: x[value] for name, x in self.values.items()}
        count = len(value)
        log_jacobian = np.zeros(count)
        for (name, prior), column in zip(self.continuous.items(), node.T, strict=True):
            transform = biject_to(prior.support)
            u = jnp.asarray(column[padded(count)])
            x = transform(u)
            log_jacobian += np.asarray(transform.log_abs_det_jacobian(u, x))[:count]
            sites[name] = np.asarray(x)[:count]
        return sites, log_jacobian


def list_conditions(left_open: Open) -> Conditions:
    """List all joint values of the discrete conditions; raise an error if there are too many.

    Each entry takes its last value first, so for presence the list begins with all present.
    """
    discrete = {name: fn for name, fn in left_open.items() if _is_discrete(name, fn)}
    continuous = {name: fn for name, fn in left_open.items() if name not in discrete}
    for name, prior in continuous.items():
        if prior.shape() != () and name in FACTORS:
            raise InputError(
                f"site {name!r} is {described(prior)}, but this method integrates over scalars "
                "only; fix the site in the program, or use a method that has a factor for it "
                "(gmm, gibbs, svi)"
            )
        if prior.shape() != ():
            raise ConjugacyError(
                name,
                f"a further latent site, {described(prior)}",
                "further sites to be discrete or scalars",
            )
    if len(continuous) > MAX_INTEGRATED:
        raise ConjugacyError(
            list(continuous)[MAX_INTEGRATED],
            f"{len(continuous)} continuous sites to be integrated over ({', '.join(continuous)})",
            f"at most {MAX_INTEGRATED}",
        )
    if (count := count_values(left_open)) > MAX_VALUES:
        raise InputError(
            f"the discrete sites {', '.join(discrete)} have {count:,} joint values, "
            f"more than the limit of {MAX_VALUES:,}; use fewer sites or objects or, for a site "
            "that says which objects are present, the method ds, which searches among the values"
        )
    states = [_states(fn) for fn in discrete.values()]
    sizes = [math.prod(fn.shape()) for fn in discrete.values()]
    entries = [list(x)[::-1] for x, size in zip(states, sizes, strict=True) for _ in range(size)]
    table = np.array(list(itertools.product(*entries))) if entries else np.zeros((1, 0))
    columns = np.split(table, np.cumsum(sizes)[:-1], axis=1) if sizes else []
    values = {
        name: column.reshape(-1, *fn.shape()).astype(own.dtype)
        for (name, fn), column, own in zip(discrete.items(), columns, states, strict=True)
    }
    return Conditions(values, continuous)


def _is_discrete(name: str, prior: Distribution) -> bool:
    if prior.support is None or not prior.support.is_discrete:
        return False
    if not prior.has_enumerate_support or prior.event_shape:
        raise ConjugacyError(
            name, f"{described(prior)}, which has no finite list of values", "a finite one"
        )
    return True


def _states(prior: Distribution) -> np.ndarray:
    """The support of one entry of a discrete site."""
    return np.asarray(prior.enumerate_support(expand=False)).ravel()


def count_values(left_open: Open) -> int:
    """Number of joint values of the discrete conditions."""
    discrete = (fn for name, fn in left_open.items() if _is_discrete(name, fn))
    return math.prod(len(_states(fn)) ** math.prod(fn.shape()) for fn in discrete)
