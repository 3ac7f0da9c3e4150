"""Reading the registry, and making its entries."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from capsules.reference.problems import DEFINITIONS, Definition, make_scene
from capsules.reference.programs import program_of
from inference import exact
from inference.result import Result
from models.errors import InputError
from models.program.sites import Program
from models.scenes import Scene
from models.scenes import make_scene as padded

FILE = Path(__file__).with_name("posteriors.json")
SCHEMA = Path(__file__).with_name("schema.json")

DIGITS = 12
"""Significant digits of the numbers in the file."""

NUM_PARTITIONS = 5
"""How many of the most probable partitions are kept."""


@dataclass(frozen=True)
class Reference:
    """A problem and its posterior.

    Identical objects can be swapped, and a square can be turned: marginals and moments are averages
    over all such copies of a mode, under the names that objects have in the program. Partitions are
    the same in all copies.
    """

    name: str
    description: str
    program: Program
    """A NumPyro program of `points`, `present` and, with types, `point_type`."""
    scene: Scene
    """Points first, then dummy rows, one row for each part."""
    method: str
    """How the numbers were computed."""
    log_evidence: float
    log_evidence_error: float
    """Standard error if it was sampled, 0 if it is exact."""
    match_probs: Float[np.ndarray, "M N"]
    """Probability of each point being each part."""
    pose_mean: Float[np.ndarray, "K p"]
    pose_covariance: Float[np.ndarray, "K p p"]
    partitions: list[tuple[Int[np.ndarray, " M"], float]]
    """The most probable groupings of the points, best first: labels, with K for clutter."""
    sites: dict[str, Any]
    """Posterior means of further sites; for discrete ones the probability of being positive."""
    command: str
    """The command that computes it again."""


def names() -> list[str]:
    """The names of all problems."""
    return list(_file()["posteriors"])


def load(name: str) -> Reference:
    """A problem of the registry by its name, with its posterior."""
    entries = _file()["posteriors"]
    if name not in entries:
        raise InputError(
            f"there is no reference posterior {name!r}; choose from {', '.join(entries)}"
        )
    entry = entries[name]
    found = entry["posterior"]
    program = program_of(entry["program"], **entry["arguments"])
    return Reference(
        name=name,
        description=entry["description"],
        program=program,
        scene=scene_of(entry["scene"], program),
        method=entry["method"],
        log_evidence=found["log_evidence"],
        log_evidence_error=found["log_evidence_error"],
        match_probs=np.array(found["match_probs"]),
        pose_mean=np.array(found["pose_mean"]),
        pose_covariance=np.array(found["pose_covariance"]),
        partitions=[(np.array(p["labels"]), p["probability"]) for p in found["partitions"]],
        sites={site: np.array(value)[()] for site, value in found["sites"].items()},
        command=entry["command"],
    )


def scene_of(entry: dict[str, Any], program: Any) -> Scene:
    """A scene of the file, padded to one row for each part of its program."""
    num_parts = program.keywords["parts"].num_parts
    scene = padded(np.array(entry["points"]), num_parts)
    if "point_type" not in entry:
        return scene
    types = np.zeros(num_parts, int)
    types[: len(entry["point_type"])] = entry["point_type"]
    return scene._replace(point_type=types)


def make_entry(name: str) -> dict[str, Any]:
    """Compute an entry of the file from its definition."""
    definition: Definition = DEFINITIONS[name]
    program = program_of(definition.program, **definition.arguments)
    scene = make_scene(definition)
    result = exact.run(program, scene_of(scene, program))
    return {
        "description": definition.description,
        "program": definition.program,
        "arguments": definition.arguments,
        "scene": scene,
        "method": result.method,
        "command": f"python -m capsules.reference {name}",
        "posterior": posterior_of(result),
    }


def posterior_of(result: Result) -> dict[str, Any]:
    """The numbers of a result that the file keeps."""
    present = np.asarray(result.scene.present)
    listed = result.partitions or []
    return {
        "log_evidence": _rounded(result.log_evidence),
        "log_evidence_error": _rounded(result.log_evidence_error or 0.0),
        "match_probs": _rounded(result.match_probs[present]),
        "pose_mean": _rounded(result.pose_mean),
        "pose_covariance": _rounded(result.pose_covariance),
        "partitions": [
            {"labels": np.asarray(labels)[present].tolist(), "probability": _rounded(probability)}
            for labels, probability in listed[:NUM_PARTITIONS]
        ],
        "sites": {site: _rounded(result.details[site]) for site in _sites(result)},
    }


def _sites(result: Result) -> list[str]:
    """Sites of which the result has a posterior mean."""
    known = ("presence", "precision", "sigma")
    return [site for site in known if site in result.details]


def _rounded(values: Any) -> Any:
    array = np.asarray(values, float)
    if array.ndim:
        return [_rounded(x) for x in array]
    return float(f"{float(array):.{DIGITS}g}")


@functools.cache
def _file() -> dict[str, Any]:
    return json.loads(FILE.read_text())
