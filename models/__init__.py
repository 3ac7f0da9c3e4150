"""The model: pose designs, templates, match distributions, likelihood and programs.

Importing this package switches JAX to 64-bit floats, here and nowhere else. At a noise precision of
1e4 the log likelihoods of a scene differ by thousands of nats, and the checks of this project
compare evidences to 1e-9; float32 has only seven digits. The whole inference loop takes about 1.3
times as long as in 32 bits.
"""

import numpyro

numpyro.enable_x64()

from models.constellation import (
    CLUTTERED,
    PARTS,
    cluttered_constellation,
    constellation,
    pose_kinds,
    presence_constellation,
    published_mixture,
    sized_constellation,
    uniform_match,
    uniform_probs,
)
from models.distributions.likelihood import MarginalParts, MatchedParts
from models.distributions.match import (
    DoublyStochasticMatch,
    MixtureMatch,
    PermutationMatch,
    doubly_stochastic,
)
from models.distributions.match_priors import point_count, presence_logits, typed_probs
from models.errors import ConjugacyError, InputError
from models.faces import GEOMETRIC, FactorAnalyser, face_parts, faces, faces_program
from models.geometry import (
    affine,
    affine_camera,
    oriented_similarity,
    similarity,
    similarity_pose,
    translation,
)
from models.numerics.sinkhorn import log_sinkhorn
from models.program.marginal import marginal, tempered
from models.scenes import Scene, check_scene, join, make_scene
from models.templates import SHAPES, Parts, normalise, object_names, shapes, stack, with_clutter

__all__ = [
    "CLUTTERED",
    "GEOMETRIC",
    "PARTS",
    "SHAPES",
    "ConjugacyError",
    "DoublyStochasticMatch",
    "FactorAnalyser",
    "InputError",
    "MarginalParts",
    "MatchedParts",
    "MixtureMatch",
    "Parts",
    "PermutationMatch",
    "Scene",
    "affine",
    "affine_camera",
    "check_scene",
    "cluttered_constellation",
    "constellation",
    "doubly_stochastic",
    "face_parts",
    "faces",
    "faces_program",
    "join",
    "log_sinkhorn",
    "make_scene",
    "marginal",
    "normalise",
    "object_names",
    "oriented_similarity",
    "point_count",
    "pose_kinds",
    "presence_constellation",
    "presence_logits",
    "published_mixture",
    "shapes",
    "similarity",
    "similarity_pose",
    "sized_constellation",
    "stack",
    "tempered",
    "translation",
    "typed_probs",
    "uniform_match",
    "uniform_probs",
    "with_clutter",
]
