"""Options that several commands have, each with one sentence of help."""

from pathlib import Path
from typing import Annotated

import typer

Clutter = Annotated[
    int,
    typer.Option(
        help="Largest number of points that belong to no object; best with --prior presence.",
        min=0,
    ),
]
Index = Annotated[
    int, typer.Option(help="Number of the scene in a scene file, from 0, not counting empty ones.")
]
LearnedFile = Annotated[
    Path | None,
    typer.Option(
        "--learned",
        metavar="FILE",
        help="Numbers of the model from `capsules learn`; other options take precedence.",
    ),
]
OtherShapes = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="The objects of the model, and of a scene that is drawn.",
        show_default="the model's own: square,triangle,square",
    ),
]
Method = Annotated[
    str,
    typer.Option(
        help="The method: ds, gmm, ransac, map, exact, svi, nuts or gibbs; to compare with, "
        "em_routing, dynamic_routing, ccae or amortised."
    ),
]
Precision = Annotated[
    float | None,
    typer.Option(
        help="Precision of the noise that the model assumes.",
        show_default="the model's own: 1e4, under the prior presence 3e3",
    ),
]
Prior = Annotated[str, typer.Option(help="The prior: uniform (the paper's), presence, or sized.")]
Preset = Annotated[
    str,
    typer.Option(
        help="Settings of the method: default (our own), paper (those of its text), or published "
        "(those of the code published with it)."
    ),
]
Restarts = Annotated[
    int | None,
    typer.Option(help="Largest number of runs for each scene.", show_default="the preset's own"),
]
Rungs = Annotated[
    int | None,
    typer.Option(
        help="Replicas of each chain of gibbs and nuts, for tempering; 1 for none.",
        show_default="gibbs 12, nuts 1",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the methods' random numbers.")]
Shapes = Annotated[str, typer.Option(metavar="NAMES", help="The objects of the model.")]
Visibility = Annotated[
    float | None,
    typer.Option(
        help="Probability that a part of a present object is seen; with --prior presence or sized.",
        show_default="1",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Weights for ccae and amortised, made by `capsules train`."),
]
