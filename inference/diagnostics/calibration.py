"""Simulation-based calibration: is a method right on average over scenes of its own program?

Poses are drawn from the prior, a scene is drawn with them, and the method infers it. If its draws
are from the posterior, the true pose is one more such draw, so its rank among them is uniform. A q
that is too narrow puts the truth at the ends too often, one that is too wide in the middle.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import scipy
from jaxtyping import Array, Bool, Float, Int

from inference.diagnostics.posterior_draws import draws_of
from inference.posterior import symmetry
from inference.posterior.densities import flat, prior_draws, replicate
from inference.posterior.relabel import frame_of, relabel, rename
from inference.result import Report, Result, reporter
from models.errors import InputError
from models.program.sites import Program
from models.program.versions import as_it_stands
from models.scenes import Scene

Method = Callable[[Program, Scene, Array], Result]
"""For example `cavi.run`, `nuts.run`, or a partial of one."""


class Calibration(NamedTuple):
    """Ranks of the true poses, 0 to `num_samples`, uniform if the method is calibrated."""

    ranks: Int[np.ndarray, "scenes K p"]
    num_samples: int

    def p_values(self, bins: int = 10) -> Float[np.ndarray, "K p"]:
        """Of a chi-square test that the ranks of each pose dimension are uniform.

        A rank is spread evenly over its own bin of 1 / (draws + 1), so bins of any number fit.
        """
        edges = np.linspace(0, self.num_samples + 1, bins + 1)
        expected = len(self.ranks) / bins
        covered = np.clip(edges[1:] - self.ranks[..., None], 0, 1) - np.clip(
            edges[:-1] - self.ranks[..., None], 0, 1
        )
        return scipy.stats.chisquare(covered.sum(axis=0), expected, axis=-1).pvalue


def calibrate(
    program: Program,
    method: Method,
    present: Bool[np.ndarray, " N"],
    rng_key: Array,
    *,
    num_features: int = 2,
    num_scenes: int = 100,
    num_samples: int = 99,
    together: bool = False,
    progress_bar: bool | Report = False,
) -> Calibration:
    """Ranks of true poses among the draws of a method, over scenes drawn from the program.

    Truth and draws are first brought into one frame, found from the scene by the method itself:
    without that a q in one of many equal modes would fail for its choice of names alone.

    Args:
        program: whose priors do not look at the points.
        method: a function of program, scene and `rng_key`.
        present: which rows of a scene are points.
        num_features: of a point.
        num_samples: draws that each truth is ranked among; chains are thinned to this number.
        together: give the method all scenes at once, as a batch, where it takes one (`cavi.run`,
            `svi.run`); much quicker.
    """
    present = np.asarray(present)
    if present.ndim != 1 or not present.any():
        raise InputError(
            f"wanted which rows of a scene are points, with at least one, got {present.tolist()}; "
            "try np.ones(N, bool)"
        )
    prior_key, points_key, draws_key, method_key = jax.random.split(rng_key, 4)
    keys = jax.random.split(method_key, num_scenes)
    blank = Scene(np.zeros((len(present), num_features)), present)
    program = as_it_stands(program, blank)
    truths = prior_draws(program, blank, prior_key, num_scenes)
    points = replicate(program, blank, truths, points_key)
    group = symmetry.find(program, blank)
    report, ranks = reporter(progress_bar), []
    if together:
        every = method(program, Scene(points, np.tile(present, (num_scenes, 1))), method_key)
    for i in range(num_scenes):
        result = every.take(i) if together else method(program, Scene(points[i], present), keys[i])
        drawn = draws_of(program, result, jax.random.fold_in(draws_key, i), num_samples, 1)
        frame = frame_of(program, result)
        poses = flat(relabel(group, frame, drawn))["pose"]
        poses = poses[np.linspace(0, len(poses) - 1, num_samples).round().astype(int)]
        truth = rename(group, frame, truths["pose"][[i]]).pose
        ranks.append((poses < truth).sum(axis=0))
        report(i + 1, num_scenes)
    return Calibration(np.stack(ranks), num_samples)
