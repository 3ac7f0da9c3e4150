"""Whether a program still says what it said when code was compiled for it.

Compiled code is kept under the program it was made of, told apart by identity. But a function may
refer to things outside of it, a global number or another function, and these may have changed since
then, as in a notebook where a cell is edited and only that cell is run again.
"""

import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from models.program.sites import Program, trace_all
from models.scenes import Layout, Scene

_REMEMBERED = 512

_SEEN: OrderedDict[Program, tuple[Program, dict[Layout, str]]] = OrderedDict()
"""For each program the object that stands for it, and what it says of scenes of some layouts."""


def as_it_stands(program: Program, scene: Scene) -> Program:
    """The program itself or, where it no longer says what it said, another object for it.

    Under the other object nothing is known or compiled yet.
    """
    stands_for_it, said = _SEEN.get(program, (program, {}))
    says = _text(program, scene)
    if said.get(scene.layout, says) != says:
        stands_for_it, said = partial(program), {}
    _SEEN[program] = stands_for_it, said | {scene.layout: says}
    _SEEN.move_to_end(program)
    while len(_SEEN) > _REMEMBERED:
        _SEEN.popitem(last=False)
    return stands_for_it


def _text(program: Program, scene: Scene) -> str:
    """All that a program computes, with every number in full."""
    latent = {
        name: jnp.asarray(site["value"])
        for name, site in trace_all(program, scene).items()
        if site["type"] == "sample" and not site["is_observed"]
    }

    def computed(observed: dict[str, Any], latent: dict[str, Any]) -> dict[str, Any]:
        sites = trace_all(program, Scene(**observed), latent)
        found = {}
        for name, site in sites.items():
            if site["type"] == "sample":
                found[name] = site["value"], site["scale"], site["fn"].log_prob(site["value"])
            elif site["type"] == "deterministic":
                found[name] = site["value"]
        return found

    jaxpr = jax.make_jaxpr(computed)(scene.observed, latent)
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        numbers = [str(np.asarray(x)) for x in _constants(jaxpr)]
        text = "\n".join([str(jaxpr), *numbers, str(sorted(latent))])
    return re.sub(r"0x[0-9a-f]+", "", text)  # addresses


def _constants(part: Any) -> Iterator[Any]:
    """Arrays that a program refers to, also from within functions that it compiles itself."""
    if isinstance(part, ClosedJaxpr):
        yield from part.consts
        yield from _constants(part.jaxpr)
    elif isinstance(part, Jaxpr):
        for equation in part.eqns:
            yield from _constants(tuple(equation.params.values()))
    elif isinstance(part, tuple | list):
        for piece in part:
            yield from _constants(piece)
