"""Convert a result of any method to ArviZ's InferenceData or DataTree, with named dimensions.

posterior             pose (object, pose_dim); discrete sites with an entry for each object, such as
                      presence (object); other sites as they are; match (point, part) on request
log_likelihood        points (point): log p(point | all other points, draw), match summed out
observed_data         points (point, feature)
constant_data         owner (part): the object of each part, "background" for slots of clutter
prior, prior_predictive, posterior_predictive
sample_stats          lp, the log density of the program with the match summed out, and the
                      statistics of the sampler
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from inference.diagnostics.posterior_draws import draws_of
from inference.posterior import symmetry
from inference.posterior.arviz_api import Data, Group, make_data
from inference.posterior.densities import (
    Draws,
    flat,
    likelihood_at,
    log_joint,
    log_likelihood_by_point,
    match_matrix,
    prior_draws,
    replicate,
)
from inference.posterior.relabel import Frame, frame_of
from inference.posterior.relabel import relabel as relabel_draws
from inference.result import Result
from models.errors import InputError
from models.geometry import pose_names
from models.program.sites import Program, trace_sites
from models.program.versions import as_it_stands
from models.scenes import Scene
from models.templates import SHAPES, Parts, object_names, shapes, stack

BACKGROUND = "background"
"""The owner of slots for clutter."""


def to_arviz(
    result: Result,
    program: Program,
    rng_key: Array,
    *,
    num_samples: int = 1000,
    num_chains: int = 4,
    relabel: bool = True,
    reference: Result | Frame | None = None,
    names: Sequence[str] | None = None,
    predictive: bool = True,
    match: bool = False,
) -> Data:
    """Convert a result for one scene to ArviZ's format.

    That is an InferenceData with ArviZ 0.23 and a DataTree with ArviZ 1.x; the groups, the names
    and the numbers are the same.

    Args:
        result: a result of a method that samples, approximates or sums.
        program: the program that was inferred; it gives the densities and predictions.
        rng_key: key for all draws.
        num_samples, num_chains: number of draws and chains to make from a variational or exact
            result; samplers have their own draws. The prior has one chain of `num_samples`.
        relabel: bring draws that differ by a symmetry of the program, such as a swap of identical
            objects, into one frame. False keeps them as they were drawn.
        reference: what to relabel to: a result for the same scene, or a frame. Default: `result`.
        names: names of the objects; by default their shapes, numbered where shapes repeat.
        predictive: draw from the prior, and replicate the points under prior and posterior. False
            leaves these groups out, which is quicker; R-hat, LOO and comparisons do not need them.
        match: include the match in `posterior` and `prior`, as zeros and ones for each pair of a
            point and a part. These are many numbers, which flood `az.summary`.
    """
    draw_key, prior_key, points_key, again_key = jax.random.split(rng_key, 4)
    draws = draws_of(program, result, draw_key, num_samples, num_chains)
    scene = result.scene
    program = as_it_stands(program, scene)
    if relabel:
        if not isinstance(reference, Frame):
            reference = frame_of(program, result if reference is None else reference)
        draws = relabel_draws(symmetry.find(program, scene), reference, draws)
    shape = draws["pose"].shape[:2]
    drawn = flat(draws)
    present = np.asarray(scene.present)

    def by_chain(values: Float[np.ndarray, "draws *rest"]) -> Float[np.ndarray, "c d *rest"]:
        return np.asarray(values).reshape(*shape, *values.shape[1:])

    lp = by_chain(log_joint(program, scene, drawn))
    by_point = by_chain(log_likelihood_by_point(program, scene, drawn)[:, present])
    parts = likelihood_at(program, scene, {}).parts
    coords = coordinates(parts, present, names)
    dims = {"pose": ["object", "pose_dim"], "match": ["point", "part"], "part_probs": ["part"]} | {
        name: ["object"] for name in _sites_of_objects(program, scene)
    }
    points = {"points": ["point", "feature"]}
    owner = np.array([*coords["object"], BACKGROUND])[parts.owner]
    observed = np.asarray(scene.points)[present]
    groups = {
        "posterior": Group(_sites(draws, present, match), dims, _attributes(result, relabel)),
        "sample_stats": Group({"lp": lp} | dict(result.sample_stats or {}), {}),
        "log_likelihood": Group({"points": by_point}, {"points": ["point"]}),
        "observed_data": Group({"points": observed}, points),
        "constant_data": Group({"owner": owner}, {"owner": ["part"]}),
    }
    if predictive:
        prior = prior_draws(program, scene, prior_key, num_samples)
        again = by_chain(replicate(program, scene, drawn, again_key)[:, present])
        replicated = replicate(program, scene, prior, points_key)[None][:, :, present]
        prior_sites = _sites({name: x[None] for name, x in prior.items()}, present, match)
        groups |= {
            "prior": Group(prior_sites, dims),
            "prior_predictive": Group({"points": replicated}, points),
            "posterior_predictive": Group({"points": again}, points),
        }
    return make_data(groups, coords)


def _sites_of_objects(program: Program, scene: Scene) -> list[str]:
    """Latent sites with a number for each object: those in the plate of the poses."""
    sites = trace_sites(program, scene)
    plates = {frame.name for frame in sites["pose"]["cond_indep_stack"]} if "pose" in sites else {}
    return [
        name
        for name, site in sites.items()
        if name != "pose"
        and not site["is_observed"]
        and [f.size for f in site["cond_indep_stack"] if f.name in plates]
        == [*np.shape(site["value"])]
    ]


def coordinates(
    parts: Parts, present: np.ndarray, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Names for objects and parts, and the numbers of the rows that are points."""
    names = _shape_names(parts) if names is None else list(names)
    if len(names) != parts.num_objects or len(set(names)) != len(names):
        raise InputError(
            f"`names` must have {parts.num_objects} different names, one for each object of the "
            f"program, got {names}"
        )
    owner, owners = np.asarray(parts.owner), [*names, BACKGROUND]
    number = [int(np.sum(owner[:n] == k)) for n, k in enumerate(owner)]
    return {
        "object": names,
        "part": [f"{owners[k]}, part {i}" for k, i in zip(owner, number, strict=True)],
        "point": np.flatnonzero(present),
        "pose_dim": pose_names(np.asarray(parts.F)),
        "feature": np.arange(parts.num_features),
    }


def _shape_names(parts: Parts) -> list[str]:
    """Name objects after their shape in `models.templates`, others "object"."""
    known = {name: np.asarray(stack(shapes(name)).F) for name in SHAPES}
    owner, F = np.asarray(parts.owner), np.asarray(parts.F)

    def name_of(k: int) -> str:
        own = F[owner == k]
        return next(
            (n for n, f in known.items() if f.shape == own.shape and np.allclose(f, own)), "object"
        )

    return object_names([name_of(k) for k in range(parts.num_objects)])


def _sites(draws: Draws, present: np.ndarray, match: bool) -> Mapping[str, np.ndarray]:
    """Sites for ArviZ: the match, if included, as zeros and ones for the rows that are points."""
    sites = {name: np.asarray(x) for name, x in draws.items() if name != "match"}
    if match:
        matrix = match_matrix(np.asarray(draws["match"]))[..., present, :]
        sites["match"] = matrix.astype(np.int8)
    return sites


def _attributes(result: Result, relabelled: bool) -> dict[str, Any]:
    known = {"elbo": result.elbo, "log_evidence": result.log_evidence}
    return {
        "method": result.method,
        "relabelled": int(relabelled),
        "inference_seconds": float(result.seconds),
    } | {name: float(value) for name, value in known.items() if value is not None}
