"""The constellations experiment: the paper's tables, its claims, and better priors.

Scenes are drawn by the generator or, where the variable SCENES names a folder of the paper's test
sets, taken from there. All tables but `slots` compare partitions. One setting serves all levels of
noise, and no truth enters a choice.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool
from matplotlib.figure import Figure

from benchmarks.report import BUILD, WEIGHTS, Picture, Pieces, Table, difference, number, share
from capsules.experiments.constellations import (
    MAIN_BETA,
    Cell,
    Numbers,
    Scenes,
    run_cells,
    scene_sets,
    weights_of,
)
from capsules.experiments.paper import PARTITION, RERUN, RERUN_BETAS, SIGMAS, SLOTS, Row
from capsules.methods import TRAINED, infer
from capsules.store import Store
from inference.diagnostics.metrics import METRICS, Scores, paired_test, same_partition, score
from models.scenes import Scene

DRAWS, SEED = 512, 0
BETAS = (0.05, 0.01, 0.005)
RESTARTS, SEEDS = (1, 2, 5, 16), (0, 1, 2)
"""Of random starts, and of the random numbers for them."""

HEADINGS = ("", *(f"σ = {sigma:g}" for sigma in SIGMAS))
NAMES = {"ds": "GCM-DS", "gmm": "GCM-GMM", "ransac": "RANSAC", "ccae": "CCAE"}
SETTINGS = {
    "paper": "the text's settings",
    "published": "the published code's settings",
    "default": "our defaults",
}
ROUTING = {"em_routing": "EM routing", "dynamic_routing": "dynamic routing"}

Line = tuple[str, str, str]
"""A method, a preset and a prior: a row of a table."""

MAIN: tuple[Line, ...] = (
    *((method, preset, "uniform") for method in ("ds", "gmm", "ransac") for preset in SETTINGS),
    ("exact", "default", "uniform"),
)
PRIORS: tuple[Line, ...] = (
    ("ds", "default", "presence"),
    ("exact", "default", "presence"),
)
COLOURS = {
    ("exact", "presence"): "#0072B2",
    ("exact", "uniform"): "#56B4E9",
    ("ds", "presence"): "#D55E00",
    ("ds", "uniform"): "#E69F00",
    ("ransac", "uniform"): "#009E73",
}
"""Methods and priors of the picture."""
MARKERS = {"presence": "o", "uniform": "s"}


def main() -> Pieces:
    """The main table by both protocols, its paired tests, details of methods, and other priors."""
    tests = _tests()
    found = _computed("main", _cells((*MAIN, *PRIORS, *_routing())), tests)
    ccae = {s: some.ccae for s, some in tests.items() if some.ccae is not None}
    yield Table("accuracy", HEADINGS, _accuracies(found))
    yield Table("table1", HEADINGS, _main_rows(found, ccae, "partition"))
    yield Table("slots", HEADINGS, _main_rows(found, ccae, "slots"))
    yield Table("claims", HEADINGS, _claims(found, ccae))
    yield Table("ransac", HEADINGS, _ransac(found))
    yield Table("published", HEADINGS, _published(found))
    yield Table("routing", ("σ", "", *METRIC_TITLES), _routing_rows(found))
    yield Table("priors", HEADINGS, _prior_rows(found, tests))
    yield Picture("priors", draw(found))


def beta() -> Pieces:
    """The study of the initial beta, without noise."""
    tests = {0.0: _tests()[0.0]}
    cells = [
        Cell(method, preset, beta, 0.0)
        for beta in BETAS
        for method in ("ds", "gmm")
        for preset in SETTINGS
    ]
    found = _computed("beta", cells, tests)
    yield Table("beta", ("β₀", "", "GCM-DS", "GCM-GMM", "GCM-DS − GCM-GMM, SA"), _betas(found))


def starts() -> Pieces:
    """How many random starts replace one from the best parse, without noise."""
    scenes = _tests()[0.0].scenes
    headings = ("start of `ds`", "restarts", *METRIC_TITLES)
    yield Table("starts", headings, _starts(scenes))


def trained() -> Pieces:
    """CCAE and the amortised guide as we train them, on the scenes of the main table."""
    lines = [(method, "default", "uniform") for method in TRAINED]
    found = _computed("trained", _cells(lines), _tests())
    names = {"ccae": "CCAE, the small variant", "amortised": "amortised guide, alone"}
    rows = (
        [names[line[0]], *(_pair(scores) for scores in _by_sigma(found, line))] for line in lines
    )
    yield Table("trained", HEADINGS, rows)


def _tests() -> dict[float, Scenes]:
    folder = os.environ.get("SCENES")
    return scene_sets(None if folder is None else Path(folder), DRAWS, SEED)


def _cells(lines: Sequence[Line]) -> list[Cell]:
    return [_cell(line, sigma) for sigma in SIGMAS for line in lines]


def _cell(line: Line, sigma: float) -> Cell:
    method, preset, prior = line
    beta = MAIN_BETA if method in ("ds", "gmm") and prior == "uniform" else None
    weights = weights_of(method, sigma, WEIGHTS) if method in TRAINED else None
    return Cell(method, preset, beta, sigma, weights, prior)


def _routing() -> list[Line]:
    return [(method, "default", "uniform") for method in ROUTING]


def _computed(
    name: str, cells: Sequence[Cell], tests: Mapping[float, Scenes]
) -> dict[Cell, Numbers]:
    """The numbers of all cells; finished blocks are kept, so an interrupted study resumes."""
    store = Store(BUILD / "blocks" / name)

    def report(cell: Cell, done: int, in_all: int) -> None:
        print(f"block {done + 1} of {in_all}: {cell.name}", flush=True)

    with store.alone():
        return dict(run_cells(cells, tests, SEED, store, report))


def _by_sigma(
    found: Mapping[Cell, Numbers], line: Line, protocol: str = "partition"
) -> list[Scores]:
    return [found[_cell(line, sigma)][protocol] for sigma in SIGMAS]


# --- cells of tables ----------------------------------------------------------------------------

METRIC_TITLES = ("SA", "ARI", "VI", "scene accuracy")


def _pair(scores: Scores) -> str:
    """Scene accuracy with its standard error, and SA."""
    return f"{share(scores['scene_accuracy'])}, {number(scores['sa'].mean())}"


def _four(values: Sequence[float]) -> str:
    return " ".join(number(value) for value in values)


def _means(scores: Scores) -> str:
    return _four([float(scores[metric].mean()) for metric in METRICS])


def _printed(method: str, protocol: str = "partition") -> list[Row]:
    """The paper's numbers; its row of RANSAC is one of partitions under both protocols."""
    beta = MAIN_BETA if method in ("ds", "gmm") else None
    table = SLOTS if protocol == "slots" and method != "ransac" else PARTITION
    return [table[method, beta, sigma] for sigma in SIGMAS]


def _title(line: Line) -> str:
    method, preset, prior = line
    if prior != "uniform":
        return f"`{method}`, {prior} prior"
    return (
        f"`{method}`, uniform match prior"
        if method == "exact"
        else f"`{method}`, {SETTINGS[preset]}"
    )


# --- rows ---------------------------------------------------------------------------------------


def _accuracies(found: Mapping[Cell, Numbers]) -> Iterator[list[str]]:
    """Scene accuracy alone."""
    before = None
    for line in (*MAIN, *PRIORS):
        if line[0] in NAMES and line[0] != before and line[2] == "uniform":
            yield [f"{NAMES[line[0]]}, printed", *(number(row[3]) for row in _printed(line[0]))]
        before = line[0]
        yield [_title(line), *(share(x["scene_accuracy"]) for x in _by_sigma(found, line))]


def _main_rows(
    found: Mapping[Cell, Numbers], ccae: Mapping[float, Mapping[str, Scores]], protocol: str
) -> Iterator[list[str]]:
    """Scene accuracy and SA, each method below what the paper prints."""
    before = None
    for line in MAIN:
        if line[0] in NAMES and line[0] != before:
            printed = (f"{number(row[3])}, {number(row[0])}" for row in _printed(line[0], protocol))
            yield [f"{NAMES[line[0]]}, printed", *printed]
        before = line[0]
        yield [_title(line), *map(_pair, _by_sigma(found, line, protocol))]
    for line in _routing():
        yield [ROUTING[line[0]], *map(_pair, _by_sigma(found, line, protocol))]
    printed = (f"{number(row[3])}, {number(row[0])}" for row in _printed("ccae", protocol))
    yield ["CCAE, printed", *printed]
    if ccae:
        yield ["CCAE, its published predictions", *(_pair(ccae[s][protocol]) for s in SIGMAS)]


def _claims(
    found: Mapping[Cell, Numbers], ccae: Mapping[float, Mapping[str, Scores]]
) -> Iterator[list[str]]:
    """Paired t-tests of SA between methods under the same settings."""
    pairs = (("ds", "gmm"), ("ransac", "ds"))
    for preset, settings in SETTINGS.items():
        by_method = {m: _by_sigma(found, (m, preset, "uniform")) for m in ("ds", "gmm", "ransac")}
        if ccae:
            by_method["ccae"] = [ccae[sigma]["partition"] for sigma in SIGMAS]
        for first, second in ((("ds", "ccae"),) if ccae else ()) + pairs:
            tested = (
                _tested(one, other)
                for one, other in zip(by_method[first], by_method[second], strict=True)
            )
            yield [f"{NAMES[first]} − {NAMES[second]}, {settings}", *tested]


def _tested(first: Scores, second: Scores) -> str:
    """The mean difference of SA with its standard error, and the p-value of a paired t-test."""
    if np.array_equal(first["sa"], second["sa"]):
        return "the same"
    p = paired_test(first["sa"], second["sa"]).p
    apart = difference(first["sa"], second["sa"])
    return f"{apart}, p {'= ' + _p_value(p) if p >= 1e-12 else '< 1e-12'}"


def _p_value(p: float) -> str:
    return number(p, 2) if p >= 0.01 else f"{p:.0e}".replace("e-0", "e-")


def _ransac(found: Mapping[Cell, Numbers]) -> Iterator[list[str]]:
    yield ["printed", *map(_four, _printed("ransac"))]
    yield ["published code rerun", *(_four(RERUN["ransac", sigma]) for sigma in SIGMAS)]
    for preset, name in (
        ("paper", "`ransac.PAPER`, the text: distance below 0.1"),
        ("published", "`ransac.PUBLISHED`, the code: squared distance below 0.1"),
        ("default", "our defaults: all bases, refit"),
    ):
        yield [name, *map(_means, _by_sigma(found, ("ransac", preset, "uniform")))]


def _published(found: Mapping[Cell, Numbers]) -> Iterator[list[str]]:
    for method in ("ds", "gmm"):
        ours = _by_sigma(found, (method, "published", "uniform"))
        errors = (
            [float(scores[m].std() / np.sqrt(len(scores[m]))) for m in METRICS] for scores in ours
        )
        yield [f"{NAMES[method]}, rerun", *(_four(RERUN[method, sigma]) for sigma in SIGMAS)]
        yield [f"{NAMES[method]}, ours", *map(_means, ours)]
        yield ["standard error", *map(_four, errors)]
        yield [f"{NAMES[method]}, printed", *map(_four, _printed(method))]


def _routing_rows(found: Mapping[Cell, Numbers]) -> Iterator[list[str]]:
    for sigma in SIGMAS:
        for line in _routing():
            scores = found[_cell(line, sigma)]["partition"]
            first = f"{sigma:g}" if line == _routing()[0] else ""
            yield [first, ROUTING[line[0]], *(share(scores[metric]) for metric in METRICS)]


def _prior_rows(
    found: Mapping[Cell, Numbers], tests: Mapping[float, Scenes]
) -> Iterator[list[str]]:
    for line in (("ds", "default", "uniform"), ("exact", "default", "uniform"), *PRIORS):
        yield [_title(line), *map(_pair, _by_sigma(found, line))]
    for prior in ("uniform", "presence"):
        agree = (share(_agreement(tests[sigma].scenes, prior)) for sigma in SIGMAS)
        yield [f"`ds` has the exact partition, {prior} prior", *agree]


def _agreement(scenes: Scene, prior: str) -> Bool[np.ndarray, " scenes"]:
    """Whether coordinate ascent finds the most probable partition of its own program."""
    ascent, exact = (infer(method, scenes, SEED, prior=prior) for method in ("ds", "exact"))
    return same_partition(ascent.labels, exact.labels)


def _betas(found: Mapping[Cell, Numbers]) -> Iterator[list[str]]:
    for beta in BETAS:
        printed = (number(PARTITION[method, beta, 0.0][3]) for method in ("ds", "gmm"))
        yield [f"{beta:g}", "printed", *printed, ""]
        yield ["", "published code rerun", *_rerun(beta), ""]
        for preset, settings in SETTINGS.items():
            both = [found[Cell(m, preset, beta, 0.0)]["partition"] for m in ("ds", "gmm")]
            accuracies = (share(scores["scene_accuracy"]) for scores in both)
            yield ["", settings, *accuracies, _tested(*both)]


def _rerun(beta: float) -> tuple[str, str]:
    """Scene accuracy of GCM-DS and GCM-GMM in reruns of the published code, where there are any."""
    mean, error = RERUN_BETAS[beta]
    mixture = number(RERUN["gmm", 0.0][3]) if beta == MAIN_BETA else ""
    return f"{number(mean)} ± {number(error)}", mixture


def _starts(scenes: Scene) -> Iterator[list[str]]:
    for count in RESTARTS:
        options = {"init_strategy": "uniform", "num_restarts": count}
        rows = [_scores_of(scenes, seed, **options) for seed in SEEDS]
        means = (np.mean([row[metric].mean() for row in rows]) for metric in METRICS)
        low, *_, high = sorted(row["scene_accuracy"].mean() for row in rows)
        first = "uniform R, as in the paper" if count == RESTARTS[0] else ""
        *three, accuracy = (number(float(mean)) for mean in means)
        spread = f"{accuracy} ({number(low)} to {number(high)})"
        yield [first, str(count), *three, spread]
    scores = _scores_of(scenes, SEED)
    yield ["the best parse (default)", "1", *(number(scores[m].mean()) for m in METRICS)]


def _scores_of(scenes: Scene, seed: int, **options: object) -> Scores:
    return score(infer("ds", scenes, seed, **options))["partition"]


# --- the picture --------------------------------------------------------------------------------


def draw(found: Mapping[Cell, Numbers]) -> Figure:
    """Scene accuracy of methods and priors by noise, with standard errors."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(SIGMAS))
    for i, ((method, prior), colour) in enumerate(COLOURS.items()):
        right = [x["scene_accuracy"] for x in _by_sigma(found, (method, "default", prior))]
        mean, error = np.array([(x.mean(), x.std() / np.sqrt(len(x))) for x in right]).T
        offset = 0.09 * (i - (len(COLOURS) - 1) / 2)
        axes.errorbar(
            places + offset,
            mean,
            error,
            fmt=MARKERS[prior],
            color=colour,
            label=f"{method}, {prior} prior",
            capsize=3,
        )
    axes.set_xticks(places, [f"σ = {sigma:g}" for sigma in SIGMAS])
    axes.set(ylabel="share of scenes parsed correctly", ylim=(0, 1.03))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    return figure
