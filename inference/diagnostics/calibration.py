"""Simulation-based calibration: is a method right on average over scenes of its own program?

Poses are drawn from the prior, a scene is drawn given them, and the method infers the poses. If its
draws come from the posterior, the true pose is one more such draw, so its rank among them is
uniform. If q is too narrow, the truth is too often at the ends; if it is too wide, in the middle.
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
        """P-values of a chi-square test that the ranks of each pose dimension are uniform.

        A rank r is spread evenly over [r, r + 1], so `bins` need not divide `num_samples` + 1.
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

    Truth and draws are first relabelled into the frame of the method's result. Otherwise a q in one
    of many equivalent modes would fail only because of the names it chose.

    Args:
        program: a program whose priors do not depend on the points.
        method: a function of program, scene and `rng_key`.
        present: which rows of a scene are points.
        num_features: number of features of a point.
        num_samples: number of draws among which each truth is ranked; chains are thinned to it.
        together: pass all scenes to the method at once, as a batch. Much faster, for methods that
            take batches (`cavi.run`, `svi.run`).
    """
    present = np.asarray(present)
    if present.ndim != 1 or not present.any():
        raise InputError(
            "`present` must be a vector that says which rows of a scene are points, with at least "
            f"one True, got {present.tolist()}; try np.ones(N, bool)"
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
