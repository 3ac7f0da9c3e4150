"""How it is computed: methods that end in `run(program, scene, ...)` and return a `Result`."""

from inference import exact, ransac
from inference.diagnostics.to_arviz import to_arviz
from inference.mcmc import gibbs, nuts
from inference.proposals import map_parse
from inference.result import Result
from inference.variational import cavi, svi

__all__ = ["Result", "cavi", "exact", "gibbs", "map_parse", "nuts", "ransac", "svi", "to_arviz"]
