"""The sites of a program, traced at one scene."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import Distribution, biject_to, constraints
from numpyro.distributions.util import is_identically_one
from numpyro.handlers import seed, trace
from numpyro.primitives import Messenger

from models.distributions.match import DoublyStochasticMatch, MixtureMatch, PermutationMatch
from models.errors import InputError
from models.scenes import Scene

Program = Callable[..., Any]
"""A NumPyro program of a scene's `points` and `present`, with sites `pose`, `match`, `points`."""

Site = dict[str, Any]
Values = Mapping[str, Any]
"""Values by site."""

MATCH_FAMILIES = (DoublyStochasticMatch, PermutationMatch, MixtureMatch)


class Unknown(NamedTuple):
    """Latent sites whose placeholders are abstract: whatever depends on them is abstract too."""

    zero: Array
    """A zero that is traced."""
    names: Collection[str] | None = None
    """All of them by default."""


def with_unknown(look: Callable[[Array], Any]) -> None:
    """Call a function with the zero of an `Unknown`."""

    def traced(zero: Array) -> Array:
        look(zero)
        return zero

    jax.vmap(traced)(jax.device_put(np.zeros(1)))


def trace_sites(
    program: Program, scene: Scene, given: Values | None = None, unknown: Unknown | None = None
) -> dict[str, Site]:
    """The sample sites of a program at a scene; latent ones have `given` values or placeholders."""
    sites = trace_all(program, scene, given, unknown)
    return {name: site for name, site in sites.items() if site["type"] == "sample"}


def trace_all(
    program: Program, scene: Scene, given: Values | None = None, unknown: Unknown | None = None
) -> dict[str, Site]:
    """All sites of a program at a scene, with plates, parameters and deterministic sites."""
    observed = scene.observed
    _check_signature(program, observed)
    values = _Given(program, dict(given or {}), unknown)
    try:
        with numpyro.validation_enabled(False):
            sites = trace(seed(values, jax.random.key(0))).get_trace(**observed)
        for site in sites.values():
            if site["type"] == "sample":
                _check_arguments(site["fn"])
        return sites
    except InputError:
        raise
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise InputError(
            f"{_used_in_python(program, observed)}: the program branches in Python on its value, "
            f"or takes it for a plain number or a numpy array ({str(error).splitlines()[0]}); use "
            "jnp.where, jax.lax.cond and functions of jax.numpy"
        ) from error
    except (TypeError, ValueError, IndexError) as error:
        raise InputError(
            f"the program cannot be run ({error}); look in it for NaN, a number out of range, or "
            "shapes that do not fit"
        ) from error


def _used_in_python(program: Program, observed: Mapping[str, Any]) -> str:
    """The first latent site, or argument of the program, that cannot be abstract."""
    plain = {n: np.ones(x.shape, x.dtype) if is_traced(x) else x for n, x in observed.items()}

    def sites(zero: Array, unknown: str) -> dict[str, Site]:
        values = _Given(program, {}, Unknown(zero, (unknown,)))
        arguments = dict(plain)
        if unknown in plain:
            arguments[unknown] = (plain[unknown] + zero).astype(plain[unknown].dtype)
        return trace(seed(values, jax.random.key(0))).get_trace(**arguments)

    latent: list[str] = []
    anything = contextlib.suppress(Exception)  # what is wrong otherwise is not the question here
    with anything, numpyro.validation_enabled(False), jax.ensure_compile_time_eval():
        found = sites(jnp.zeros(()), "").items()
        latent = [n for n, s in found if s["type"] == "sample" and not s["is_observed"]]
        for name in (*latent, *plain):
            try:
                with_unknown(functools.partial(sites, unknown=name))
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                return f"site {name!r}" if name in latent else f"the scene's {name}"
    return f"one of the sites {', '.join(map(repr, latent))}" if latent else "a site or the scene"


def log_prob_of(site: Site) -> Float[Array, ""]:
    """The log density of a site, with its scale, as NumPyro computes it.

    Compiled once for each kind of distribution, whatever its numbers are, if the result is sure to
    be the same.
    """
    found, value = site["fn"], site["value"]
    scale = None if is_identically_one(site["scale"]) else site["scale"]
    pieces = list(nested(found))
    if found.support is None or not all(map(_is_known, pieces)):
        return _log_prob(found, value, scale)
    if is_traced((found, value)):
        if any(isinstance(piece, dist.MaskedDistribution) for piece in pieces):
            return _log_prob(found, value, scale)  # masked values may be outside the support
        return _compiled_log_prob(found, value, scale, bool(found._validate_args))
    # Values outside the support are left to NumPyro.
    inside = bool(np.all(found.support(np.asarray(value))))
    return (_compiled_log_prob if inside else _log_prob)(found, value, scale)


def _is_known(found: Distribution) -> bool:
    """Whether the pytree of a distribution is complete; that of a user's own class may not be."""
    pieces = (found, *getattr(found, "transforms", ()))
    known = ("numpyro.", "models.distributions.")
    return all(type(piece).__module__.startswith(known) for piece in pieces)


def _log_prob(
    found: Distribution, value: Any, scale: Any, check_support: bool = False
) -> Float[Array, ""]:
    """The log density of a value.

    Args:
        check_support: give a value outside the support a density of zero. NumPyro does so too, but
            a distribution passed to compiled code as a pytree loses that.
    """
    log_prob = found.log_prob(value)
    if check_support:
        log_prob = jnp.where(found.support(value), log_prob, -jnp.inf)
    return jnp.sum(log_prob if scale is None else scale * log_prob)


def _compiled_log_prob(
    found: Distribution, value: Any, scale: Any, check_support: bool = False
) -> Float[Array, ""]:
    """`_log_prob`, compiled, with the distribution's numbers as arguments in the order of names.

    NumPyro's own order is that of a set and differs between processes, so code that an earlier
    process compiled would not be found in the cache.
    """
    leaves, tree = jax.tree.flatten(found)
    numbered = jax.tree.unflatten(tree, range(len(leaves)))
    order = tuple(jax.tree.leaves(_by_name(numbered)))
    return _ordered_log_prob([leaves[i] for i in order], value, scale, tree, order, check_support)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _ordered_log_prob(
    numbers: list[Any],
    value: Any,
    scale: Any,
    tree: Any,
    order: tuple[int, ...],
    check_support: bool,
) -> Float[Array, ""]:
    leaves = [number for _, number in sorted(zip(order, numbers, strict=True), key=itemgetter(0))]
    return _log_prob(jax.tree.unflatten(tree, leaves), value, scale, check_support)


def _by_name(found: Any) -> Any:
    """A distribution as a nested dictionary of its fields."""
    if not _is_distribution(found):
        return found
    names, (values, _) = type(found).gather_pytree_data_fields(), found.tree_flatten()
    return {name: _by_name(value) for name, value in zip(names, values, strict=True)}


def nested(found: Distribution) -> Iterator[Distribution]:
    """Yield a distribution and all distributions inside it."""
    yield found
    for part in jax.tree.leaves(found, is_leaf=lambda x: x is not found and _is_distribution(x)):
        if _is_distribution(part):
            yield from nested(part)


def _is_distribution(x: Any) -> bool:
    return isinstance(x, Distribution)


def described(prior: Distribution) -> str:
    """The type and shape of a distribution in words, as in "a Normal of shape (3, 4)"."""
    article = "an" if type(without_shape(prior)).__name__[0] in "AEIOU" else "a"
    shape = f" of shape {prior.shape()}" if prior.shape() else ""
    return f"{article} {type(without_shape(prior)).__name__}{shape}"


def without_shape(prior: Distribution) -> Distribution:
    """The base distribution of a prior, without `expand`, `to_event` and plates."""
    while isinstance(prior, dist.ExpandedDistribution | dist.Independent):
        prior = prior.base_dist
    return prior


def placeholder(prior: Distribution) -> Array:
    """An arbitrary value of a latent site, cheaper than a draw."""
    shape = prior.shape()
    if isinstance(without_shape(prior), MATCH_FAMILIES):
        return jax.device_put(np.ones(shape))  # compiles nothing, as jnp.asarray may
    if prior.support is not None and prior.support.is_discrete:
        if not prior.has_enumerate_support or is_traced(prior.support):
            return jnp.asarray(np.zeros(shape, int))
        values = prior.enumerate_support(expand=False)
        return jnp.broadcast_to(values[0], shape)
    transform = biject_to(prior.support)
    return transform(jax.device_put(np.full(transform.inverse_shape(shape), 0.5)))


class _Given(Messenger):
    """Effect handler: set latent sites to given values, or to placeholders."""

    def __init__(self, fn: Program, values: dict[str, Any], unknown: Unknown | None) -> None:
        self.values, self.unknown = values, unknown
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        if msg["value"] is not None:
            raise InputError(
                f"site {msg['name']!r}: its value is fixed by handlers.substitute, which keeps its "
                "prior as if it had been drawn; fix it with handlers.condition, or in the program"
            )
        name = msg["name"]
        given = name in self.values  # as JAX arrays: a program may use `pose.at[1].add(...)`
        value = jnp.asarray(self.values[name]) if given else placeholder(msg["fn"])
        if not given and self.unknown is not None:
            zero, names = self.unknown
            if names is None or name in names:
                value = value + zero.astype(value.dtype)
        msg["value"] = value


def _check_arguments(found: Distribution) -> None:
    """NumPyro's own check of a distribution's arguments, on numpy arrays.

    NumPyro checks JAX arrays operation by operation. Each operation is compiled once for each
    shape, which took half the time of a first answer.
    """
    for part in nested(found):
        for name, value in part.get_args().items() if part._validate_args else ():
            constraint = part.arg_constraints[name]
            if constraints.is_dependent(constraint) or is_traced(value):
                continue
            if not _holds(constraint, jax.tree.map(np.asarray, value)):
                raise ValueError(f"{type(part).__name__} distribution got invalid {name} parameter")


def _holds(constraint: Any, value: Any) -> bool:
    try:
        return bool(np.all(constraint(value)))
    except np.linalg.LinAlgError:  # NaN has no eigenvalues
        return False


def is_traced(value: Any) -> bool:
    """Whether some number of a pytree is abstract."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


def _check_signature(program: Program, observed: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(program)
    except ValueError:  # not a Python function
        return
    try:
        signature.bind(**observed)
    except TypeError as error:
        raise InputError(
            f"the program does not take the scene's {', '.join(observed)} ({error}); a program is "
            "a function of `points` and `present`"
        ) from error
