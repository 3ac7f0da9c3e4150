"""Faces: accuracy and errors by the number of faces, a scene, and the appearance model.

The same as `capsules reproduce faces`, with fewer scenes and one more kind, and as `capsules faces
demo`.
"""

from benchmarks.report import BUILD, Picture, Pieces, Table
from capsules.faces.experiment import (
    CELLS,
    Cell,
    FaceStudy,
    blocks_of,
    explain,
    open_study,
    run_blocks,
)
from capsules.faces.report import plot_faces, plot_factors, plot_images, reports
from capsules.store import Store

KINDS = (*CELLS, Cell(10))
"""Those of the paper, and twice as many faces."""
NUM_SCENES, SEED = 100, 0
SHOWN = 4
"""Faces of the scene in the picture."""


def pieces() -> Pieces:
    """Pictures first: the tables take longer."""
    study = open_study()
    yield Picture("faces_images", plot_images(study.images))
    yield Picture("faces_factors", plot_factors(study))
    yield demonstration(study)
    store = Store(BUILD / "faces")
    with store.alone():
        blocks = blocks_of(study, KINDS, NUM_SCENES, SEED, store)
        numbers = run_blocks(study, blocks, SEED, store)
    accuracy, canvas, _, scores = reports(numbers)
    yield Table("faces", accuracy.heading, accuracy.rows)
    yield Table("faces_errors", canvas.heading, canvas.rows)
    yield Table("faces_scores", scores.heading, scores.rows)


def demonstration(study: FaceStudy) -> Picture:
    """The scene of `capsules faces demo`, explained by VI and by RANSAC."""
    scenes = study.scenes(1, SHOWN, SEED)
    return Picture("faces_demo", plot_faces(study, scenes, explain(study, scenes, SEED)))
