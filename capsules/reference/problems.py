"""The problems of the registry: which program, and how the points of the scene were made.

A scene is made once, from a seed, and kept in the data file with six decimals; the kept scene is
the problem. The choice covers what makes inference hard or easy: few and many points, whole objects
and missing parts, identical objects, sharp and blurred noise, overlapping objects, clutter.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from capsules.reference.programs import parts_of

POSES = np.array(
    [[0.5, 0.2, 0.4, 0.1], [-0.5, -0.3, 0.2, 0.3], [0.1, 0.6, -0.2, 0.25]],
)
"""Poses of the objects in order, under similarities."""

CLOSE = np.array([[0.05, 0.0, 0.4, 0.1], [-0.05, 0.05, 0.3, 0.3], [0.0, 0.1, -0.2, 0.25]])
"""Poses of objects on top of each other."""

LINEAR = np.array([[0.5, 0.2, 0.4, 0.1, 0.0, 0.3], [-0.5, -0.3, 0.2, -0.1, 0.2, 0.4]])
"""Poses under affine maps."""


class Definition(NamedTuple):
    """How a problem is made."""

    description: str
    program: str
    arguments: dict[str, Any]
    noise: float
    """Standard deviation of the noise of the points."""
    seed: int
    seen: tuple[int, ...] | None = None
    """Parts that are seen; all by default."""
    poses: Float[np.ndarray, "K p"] = POSES
    clutter: int = 0
    """Points that belong to no object, Normal(0, I)."""


TRIANGLE = {"objects": ["triangle"]}
SQUARE = {"objects": ["square"]}
TRIANGLES = {"objects": ["triangle", "triangle"]}
BOTH = {"objects": ["square", "triangle"]}
PAPER = {"objects": ["square", "triangle", "square"]}

SHARP = {"precision": 1e3}
BLURRED = {"precision": 20.0}

DEFINITIONS: dict[str, Definition] = {
    # --- uniform match prior ----------------------------------------------------------------
    "triangle": Definition("One triangle, whole.", "uniform", TRIANGLE | SHARP, 0.03, 0),
    "triangle-blurred": Definition(
        "One triangle under noise as large as a part of it.", "uniform", TRIANGLE | BLURRED, 0.2, 1
    ),
    "triangle-missing": Definition(
        "Two of three vertices.", "uniform", TRIANGLE | SHARP, 0.03, 2, (0, 2)
    ),
    "square": Definition(
        "One square, which lies on itself in four ways.", "uniform", SQUARE | SHARP, 0.03, 3
    ),
    "square-missing": Definition(
        "Three vertices of a square.", "uniform", SQUARE | SHARP, 0.03, 4, (0, 1, 2)
    ),
    "two-triangles": Definition(
        "Two triangles, whole: two modes that are copies.", "uniform", TRIANGLES | SHARP, 0.03, 5
    ),
    "two-triangles-five": Definition(
        "One vertex is missing.", "uniform", TRIANGLES | SHARP, 0.03, 6, (0, 1, 2, 3, 4)
    ),
    "two-triangles-four": Definition(
        "Two vertices are missing, one of each.",
        "uniform",
        TRIANGLES | SHARP,
        0.03,
        7,
        (0, 1, 3, 4),
    ),
    "two-triangles-one": Definition(
        "Only the first is seen; the other keeps its prior where it has no point.",
        "uniform",
        TRIANGLES | SHARP,
        0.03,
        8,
        (0, 1, 2),
    ),
    "two-triangles-blurred": Definition(
        "Hundreds of matches have weight.", "uniform", TRIANGLES | BLURRED, 0.2, 9
    ),
    "two-triangles-close": Definition(
        "On top of each other.", "uniform", TRIANGLES | {"precision": 200.0}, 0.07, 10, None, CLOSE
    ),
    "two-triangles-sharp": Definition(
        "The paper's precision.", "uniform", TRIANGLES | {"precision": 1e4}, 0.01, 11
    ),
    "square-and-triangle": Definition(
        "A square and a triangle, whole.", "uniform", BOTH | SHARP, 0.03, 12
    ),
    "square-and-triangle-missing": Definition(
        "A vertex of each is missing.", "uniform", BOTH | SHARP, 0.03, 13, (0, 1, 2, 4, 5)
    ),
    "square-and-triangle-close": Definition(
        "On top of each other, blurred.", "uniform", BOTH | BLURRED, 0.2, 14, None, CLOSE
    ),
    "paper": Definition(
        "Two squares and a triangle, all eleven points, the paper's precision.",
        "uniform",
        PAPER | {"precision": 1e4},
        0.01,
        15,
    ),
    "paper-noisy": Definition(
        "The same with more noise than the program expects.",
        "uniform",
        PAPER | {"precision": 1e4},
        0.03,
        16,
        (0, 1, 2, 3, 4, 5, 6, 7, 8),
    ),
    # --- other pose designs -----------------------------------------------------------------
    "translation": Definition(
        "A square and a triangle that only move.",
        "uniform",
        BOTH | {"design": "translation"} | SHARP,
        0.03,
        17,
        None,
        POSES[:, :2],
    ),
    "affine": Definition(
        "Two sheared triangles: any three points are one.",
        "uniform",
        TRIANGLES | {"design": "affine"} | SHARP,
        0.03,
        18,
        None,
        LINEAR,
    ),
    # --- mixture: points may share a part ---------------------------------------------------
    "triangle-mixture": Definition("One triangle.", "mixture", TRIANGLE | SHARP, 0.03, 19),
    "triangle-mixture-blurred": Definition("Blurred.", "mixture", TRIANGLE | BLURRED, 0.2, 20),
    "two-triangles-mixture": Definition(
        "Two triangles, five points.", "mixture", TRIANGLES | SHARP, 0.03, 21, (0, 1, 2, 3, 4)
    ),
    # --- presence: it is unknown which objects are present --------------------------------------
    "two-triangles-presence": Definition(
        "Both are there, one vertex is missing.",
        "presence",
        TRIANGLES | SHARP | {"visibility": 0.9},
        0.03,
        22,
        (0, 1, 2, 3, 4),
    ),
    "two-triangles-presence-one": Definition(
        "One is there; which of the two is not to be known.",
        "presence",
        TRIANGLES | SHARP | {"visibility": 0.9},
        0.03,
        23,
        (0, 1, 2),
    ),
    "square-and-triangle-presence": Definition(
        "Only the square is there, and all of it.",
        "presence",
        BOTH | SHARP | {"visibility": 0.9},
        0.03,
        24,
        (0, 1, 2, 3),
    ),
    "paper-presence": Definition(
        "A square and a triangle of the paper's three objects, all parts seen.",
        "presence",
        PAPER | {"precision": 3e3, "visibility": 1.0},
        0.02,
        25,
        (0, 1, 2, 3, 4, 5, 6),
    ),
    # --- clutter ------------------------------------------------------------------------------
    "triangle-clutter": Definition(
        "A triangle and a stray point, two slots, uniform match prior.",
        "uniform",
        TRIANGLE | SHARP | {"clutter": 2},
        0.03,
        26,
        (0, 1, 2),
        POSES,
        1,
    ),
    "triangle-clutter-presence": Definition(
        "The same where the program knows how often a slot is in use.",
        "presence",
        TRIANGLE | SHARP | {"clutter": 2, "visibility": 0.9, "clutter_prob": 0.3},
        0.03,
        27,
        (0, 1, 2),
        POSES,
        1,
    ),
    "square-and-triangle-clutter": Definition(
        "Two objects, one part of each missing, and a stray point.",
        "presence",
        BOTH | SHARP | {"clutter": 1, "visibility": 0.9, "clutter_prob": 0.5},
        0.03,
        28,
        (0, 1, 2, 4, 5),
        POSES,
        1,
    ),
    # --- typed parts --------------------------------------------------------------------------
    "two-triangles-typed": Definition(
        "Each point is known to be a first, second or third vertex.",
        "typed",
        TRIANGLES | SHARP,
        0.03,
        29,
    ),
    "two-triangles-typed-close": Definition(
        "The same on top of each other, blurred, one vertex missing.",
        "typed",
        TRIANGLES | BLURRED,
        0.2,
        30,
        (0, 1, 2, 3, 4),
        CLOSE,
    ),
    # --- unknown noise ------------------------------------------------------------------------
    "triangle-unknown-precision": Definition(
        "Gamma prior on the precision.",
        "unknown_precision",
        TRIANGLE | {"concentration": 2.0, "rate": 2e-3},
        0.03,
        31,
    ),
    "two-triangles-unknown-precision": Definition(
        "The same with two objects.",
        "unknown_precision",
        TRIANGLES | {"concentration": 2.0, "rate": 2e-3},
        0.03,
        32,
    ),
    "triangle-unknown-noise": Definition(
        "Half-Normal prior on the standard deviation.",
        "unknown_noise",
        TRIANGLE | {"scale": 0.1},
        0.03,
        33,
    ),
}


def make_scene(definition: Definition) -> dict[str, list[Any]]:
    """The points of a problem, in random order, and their types if the program has types."""
    rng = np.random.default_rng(definition.seed)
    arguments = definition.arguments
    parts = parts_of(tuple(arguments["objects"]), arguments.get("design", "similarity"))
    poses = definition.poses[: parts.num_objects]
    whole = np.asarray(parts.predict(poses))
    whole = whole + definition.noise * rng.normal(size=whole.shape)
    seen = np.arange(len(whole)) if definition.seen is None else np.array(definition.seen)
    stray = rng.normal(size=(definition.clutter, whole.shape[1]))
    order = rng.permutation(len(seen) + definition.clutter)
    scene = {"points": np.round(np.concatenate([whole[seen], stray])[order], 6).tolist()}
    if definition.program == "typed":
        owner = np.asarray(parts.owner)
        types = np.arange(len(owner)) - np.searchsorted(owner, owner)
        scene["point_type"] = types[seen][order].tolist()
    return scene
