"""Inference: methods with `run(program, scene, ...)` that return a `Result`, and `learn`."""

from inference import exact, ransac
from inference.diagnostics.to_arviz import to_arviz
from inference.learning import learn
from inference.mcmc import gibbs, nuts
from inference.proposals import map_parse
from inference.result import Result
from inference.variational import cavi, svi

__all__ = [
    "Result",
    "cavi",
    "exact",
    "gibbs",
    "learn",
    "map_parse",
    "nuts",
    "ransac",
    "svi",
    "to_arviz",
]
