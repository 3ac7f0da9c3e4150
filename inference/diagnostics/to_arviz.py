"""A result of any method as ArviZ's InferenceData, with names for every dimension.

posterior             pose (object, pose_dim), match (point, part), discrete sites with an entry for
                      each object, such as presence, (object), other sites as they are
log_likelihood        points (point): log p(point | all other points, draw), match summed out
observed_data         points (point, feature)
constant_data         owner (part): the object of each part, "background" for slots of clutter
prior, prior_predictive, posterior_predictive
sample_stats          lp, the log density of the program with the match summed out, and what
                      the sampler itself says
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, Float

from inference.diagnostics.posterior_draws import draws_of
from inference.posterior import symmetry
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
from inference.posterior.relabel import Frame, frame_of, sites_of_objects
from inference.posterior.relabel import relabel as relabel_draws
from inference.result import Result
from models.errors import InputError
from models.program.sites import Program
from models.templates import SHAPES, Parts, object_names, shapes, stack

if TYPE_CHECKING:
    import arviz as az


BACKGROUND = "background"
"""What slots for clutter belong to, which is no object."""


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
) -> "az.InferenceData":
    """A result for one scene as InferenceData.

    Args:
        result: of any method that samples, approximates or sums.
        program: the program that was inferred; densities and predictions are read from it.
        rng_key: of whatever has to be drawn.
        num_samples, num_chains: of a variational or exact result, whose draws are made here, and
            `num_samples` in one chain of the prior. Samplers bring their own.
        relabel: bring draws that differ by a symmetry of the program, such as a swap of identical
            objects, into one frame. False keeps them as they were drawn.
        reference: what to relabel by: a result for the same scene, or a frame; by default the
            result itself.
        names: what to call the objects; by default the shapes that they have, or numbers.
        predictive: draw from the prior, and points anew from prior and posterior. False leaves
            these groups out, which is quicker; R-hat, LOO and comparisons do not need them.
    """
    import arviz as az  # slow to import, and the commands start without it

    draw_key, prior_key, points_key, again_key = jax.random.split(rng_key, 4)
    draws = draws_of(program, result, draw_key, num_samples, num_chains)
    scene = result.scene
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
    dims = {
        "pose": ["object", "pose_dim"],
        "match": ["point", "part"],
        "part_probs": ["part"],
        "owner": ["part"],
    } | {name: ["object"] for name in sites_of_objects(draws)}
    data = az.from_dict(
        posterior=_sites(draws, present),
        sample_stats={"lp": lp} | dict(result.sample_stats or {}),
        constant_data={"owner": np.array([*coords["object"], BACKGROUND])[parts.owner]},
        coords=coords,
        dims=dims,
    )
    # The same name has other dimensions in other groups.
    observed = {"points": np.asarray(scene.points)[present]}
    points = {"points": ["point", "feature"]}
    data.extend(az.from_dict(observed_data=observed, coords=coords, dims=points))
    if predictive:
        prior = prior_draws(program, scene, prior_key, num_samples)
        again = by_chain(replicate(program, scene, drawn, again_key)[:, present])
        anew = replicate(program, scene, prior, points_key)[None][:, :, present]
        prior_sites = _sites({name: x[None] for name, x in prior.items()}, present)
        data.extend(az.from_dict(prior=prior_sites, coords=coords, dims=dims))
        data.extend(
            az.from_dict(
                posterior_predictive={"points": again},
                prior_predictive={"points": anew},
                coords=coords,
                dims=points,
            )
        )
    data.extend(
        az.from_dict(log_likelihood={"points": by_point}, coords=coords, dims={"points": ["point"]})
    )
    data.posterior.attrs |= _attributes(result, relabel)
    return data


def summary(data: "az.InferenceData", **options: Any) -> Any:  # a pandas.DataFrame
    """`az.summary`, without its warnings for what never changes.

    An entry of `match` that is the same in all draws has no R-hat: 0 / 0, of which NumPy warns.
    Its R-hat is NaN here as it is there.
    """
    import arviz as az  # slow to import, and the commands start without it

    with np.errstate(divide="ignore", invalid="ignore"):
        return az.summary(data, **options)


def coordinates(
    parts: Parts, present: np.ndarray, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Names for objects and parts, and the numbers of the rows that are points."""
    names = _shape_names(parts) if names is None else list(names)
    if len(names) != parts.num_objects or len(set(names)) != len(names):
        raise InputError(
            f"wanted {parts.num_objects} different names for the objects, got {names}; give one "
            "for each object of the program"
        )
    owner, owners = np.asarray(parts.owner), [*names, BACKGROUND]
    number = [int(np.sum(owner[:n] == k)) for n, k in enumerate(owner)]
    return {
        "object": names,
        "part": [f"{owners[k]}, part {i}" for k, i in zip(owner, number, strict=True)],
        "point": np.flatnonzero(present),
        "pose_dim": np.arange(parts.pose_dim),
        "feature": np.arange(parts.num_features),
    }


def _shape_names(parts: Parts) -> list[str]:
    """The shapes of this project by name; another template is just an object."""
    known = {name: np.asarray(stack(shapes(name)).F) for name in SHAPES}
    owner, F = np.asarray(parts.owner), np.asarray(parts.F)

    def name_of(k: int) -> str:
        own = F[owner == k]
        return next(
            (n for n, f in known.items() if f.shape == own.shape and np.allclose(f, own)), "object"
        )

    return object_names([name_of(k) for k in range(parts.num_objects)])


def _sites(draws: Draws, present: np.ndarray) -> Mapping[str, np.ndarray]:
    """Sites as ArviZ takes them: the match as zeros and ones, for the points alone."""
    matrix = match_matrix(np.asarray(draws["match"]))[..., present, :]
    return {name: np.asarray(x) for name, x in draws.items()} | {"match": matrix.astype(np.int8)}


def _attributes(result: Result, relabelled: bool) -> dict[str, Any]:
    known = {"elbo": result.elbo, "log_evidence": result.log_evidence}
    return {
        "method": result.method,
        "relabelled": int(relabelled),
        "inference_seconds": float(result.seconds),
    } | {name: float(value) for name, value in known.items() if value is not None}
