"""Tables of an experiment: on the terminal, as Markdown and CSV, and as a figure."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from capsules.experiments.constellations import MAIN_BETA, Cell, Numbers, Scenes
from capsules.experiments.paper import PAPER, SIGMAS
from capsules.files.outputs import whole_file
from inference.diagnostics.metrics import METRICS, Scores, Summary, paired_test, summarise
from inference.plots.scenes import COLOURS, MARKERS, png, style

NAMES = {
    "ccae": "CCAE",
    "gmm": "GCM-GMM",
    "ds": "GCM-DS",
    "ransac": "RANSAC",
    "exact": "exact",
    "em_routing": "EM routing",
    "dynamic_routing": "dynamic routing",
    "amortised": "amortised",
}
TITLES = {
    "sa": "SA ↑",
    "ari": "ARI ↑",
    "vi": "VI ↓",
    "scene_accuracy": "scene acc. ↑",
}
PRESETS = {
    "paper": "the text's settings",
    "published": "the published code's settings",
    "default": "our defaults",
}
LINES = {"paper": "--", "published": "-.", "default": "-"}
CCAE = {"paper": "its predictions", "default": "trained by us"}
"""Labels of the presets for CCAE, which has only one setting."""


class Row(NamedTuple):
    """A row of a table: a method at an initial beta and a noise level."""

    method: str
    beta: float | None
    sigma: float
    paper: Sequence[float] | None
    ours: dict[str, dict[str, Summary]]
    """Our numbers by preset and metric."""

    def label(self, with_beta: bool) -> str:
        """The method's name in a figure, with its beta if asked for."""
        name = NAMES.get(self.method, self.method)
        beta = self.beta is not None and with_beta
        return f"{name.removeprefix('GCM-')} β₀={self.beta:g}" if beta else name


class Report(NamedTuple):
    """One table with its paired tests."""

    name: str
    title: str
    protocol: str
    rows: list[Row]
    tests: list[tuple[str, ...]]

    @property
    def by_beta(self) -> bool:
        """Whether the table is about different initial betas."""
        return len({row.beta for row in self.rows if row.beta is not None}) > 1


def write_tables(
    study: str, numbers: Mapping[Cell, Numbers], tests: Mapping[float, Scenes], folder: Path
) -> Iterator[Path]:
    """Print the tables of a study and write each in three formats; yields the files."""
    console = Console()
    for report in reports(study, numbers, tests):
        for table in terminal_tables(report):
            console.print(table)
        contents = {
            ".md": markdown(report).encode(),
            ".csv": comma_separated(report).encode(),
            ".png": png(plot_report(report)),
        }
        for suffix, content in contents.items():
            path = folder / f"{report.name}{suffix}"
            with whole_file(path) as file:
                file.write(content)
            yield path


def reports(
    study: str, numbers: Mapping[Cell, Numbers], tests: Mapping[float, Scenes]
) -> list[Report]:
    """The tables of a study; the main one is shown for each protocol separately."""
    main = {c: n for c, n in numbers.items() if c.beta in (None, MAIN_BETA)}
    betas = {c: n for c, n in numbers.items() if c.beta is not None}
    wanted = {
        "table1": [
            ("table1", "Main table", "slots", main),
            ("table1_partition", "Main table by partitions", "partition", main),
        ],
        "beta": [("beta", "Initial beta", "slots", betas)],
        "mask": [("mask", "Initial beta, ground-truth mask", "partition", betas)],
    }
    chosen = [s for s in wanted if study in (s, "all")]
    return [
        Report(name, title, protocol, _rows(cells, tests, protocol), _tests(cells, tests, protocol))
        for one in chosen
        for name, title, protocol, cells in wanted[one]
        if cells
    ]


def _rows(
    numbers: Mapping[Cell, Numbers], tests: Mapping[float, Scenes], protocol: str
) -> list[Row]:
    rows = []
    for sigma in SIGMAS:
        methods: set[tuple[str, float | None]] = {(c.method, c.beta) for c in numbers}
        for method, beta in sorted(methods | {("ccae", None)}, key=_place):
            cells = {
                c.preset: n
                for c, n in numbers.items()
                if (c.method, c.beta, c.sigma) == (method, beta, sigma)
            }
            scores = tests[sigma].ccae
            if method == "ccae" and scores is not None:
                cells = {"paper": scores} | cells
            ours = {preset: _summaries(n[protocol]) for preset, n in cells.items()}
            rows.append(Row(method, beta, sigma, PAPER[protocol].get((method, beta, sigma)), ours))
    return rows


def _place(row: tuple[str, float | None]) -> tuple[int, float]:
    """The sort key of a row: order in `NAMES`, then initial beta."""
    return (list(NAMES).index(row[0]) if row[0] in NAMES else len(NAMES), row[1] or 0.0)


def _summaries(scores: Scores) -> dict[str, Summary]:
    return {name: summarise(scores[name]) for name in METRICS}


def _tests(
    numbers: Mapping[Cell, Numbers], tests: Mapping[float, Scenes], protocol: str
) -> list[tuple[str, ...]]:
    """Paired t-tests between the methods at the main beta, on the paper's three metrics."""
    lines = []
    for sigma in SIGMAS:
        scores = {
            c.method: n[protocol]
            for c, n in numbers.items()
            if c.sigma == sigma and c.beta in (None, MAIN_BETA) and c.preset == "paper"
        }
        ccae = tests[sigma].ccae
        if ccae is not None:
            scores = {"ccae": ccae[protocol]} | scores
        names = list(scores)
        for i, first in enumerate(names):
            for second in names[i + 1 :]:
                found = [paired_test(scores[second][m], scores[first][m]) for m in METRICS[:3]]
                lines.append(
                    (
                        f"{sigma:g}",
                        f"{NAMES.get(second, second)} - {NAMES.get(first, first)}",
                        *(f"{test.difference:+.3f} (p = {test.p:.1g})" for test in found),
                    )
                )
    return lines


def lines_at(report: Report, sigma: float) -> Iterator[list[str]]:
    """The lines of a noise level: method, source, and each metric ± one standard error."""
    for row in report.rows:
        if row.sigma != sigma:
            continue
        label = row.label(report.by_beta)
        if row.paper is not None:
            yield [label, "paper", *(f"{x:.3f}" for x in row.paper)]
        for preset, summaries in row.ours.items():
            found = (summaries[name] for name in METRICS)
            what = (CCAE if row.method == "ccae" else PRESETS)[preset]
            yield [label, what, *(s.text() for s in found)]


def terminal_tables(report: Report) -> Iterator[Table]:
    """A table for each noise level; it fits into 80 characters."""
    for sigma in SIGMAS:
        title = f"{report.title}, protocol {report.protocol}, σ = {sigma:g}"
        table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        for heading in ("method", "settings", *TITLES.values()):
            table.add_column(heading, no_wrap=True)
        before = None
        for label, what, *cells in lines_at(report, sigma):
            what = what.removesuffix(" settings")
            short = (cell.replace("0.", ".") for cell in cells)
            table.add_row("" if label == before else label, what, *short)
            before = label
        yield table


def markdown(report: Report) -> str:
    """The report as a page, with standard errors."""
    lines = [f"# {report.title} (protocol `{report.protocol}`)", ""]
    lines += [
        "Means over scenes ± one standard error; the CSV file has 95 % bootstrap intervals too. "
        "*Paper* is what the paper prints; its row of RANSAC is one of partitions.",
        "",
    ]
    for sigma in SIGMAS:
        lines += [f"## σ = {sigma:g}", ""]
        lines += ["| method | | " + " | ".join(TITLES.values()) + " |", "| --- " * 6 + "|"]
        lines += ["| " + " | ".join(line) + " |" for line in lines_at(report, sigma)]
        lines.append("")
    if report.tests:
        lines += ["## Paired t-tests, the text's settings", "", "Mean difference over scenes.", ""]
        lines += ["| σ | methods | SA | ARI | VI |", "| --- " * 5 + "|"]
        lines += ["| " + " | ".join(line) + " |" for line in report.tests]
        lines.append("")
    return "\n".join(lines)


def comma_separated(report: Report) -> str:
    """One line for each number."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["protocol", "sigma", "method", "beta", "metric", "paper", "settings", *Summary._fields]
    )
    for row in report.rows:
        for i, metric in enumerate(METRICS):
            paper = "" if row.paper is None else row.paper[i]
            beta = "" if row.beta is None else row.beta
            start = [report.protocol, row.sigma, row.method, beta, metric, paper]
            for preset, summaries in row.ours.items():
                writer.writerow([*start, preset, *(f"{x:.6f}" for x in summaries[metric])])
    return text.getvalue()


def plot_report(report: Report) -> Figure:
    """A panel for each metric: against the noise, or against the initial beta at each noise."""
    by_beta = report.by_beta
    sigmas = SIGMAS if by_beta else (None,)
    with style():
        figure = Figure(figsize=(12, 3.1 * len(sigmas) + 0.6), layout="constrained")
        axes = figure.subplots(len(sigmas), len(METRICS), squeeze=False)
        for line, sigma in zip(axes, sigmas, strict=True):
            for i, (ax, title) in enumerate(zip(line, TITLES.values(), strict=True)):
                _panel(ax, [r for r in report.rows if sigma in (None, r.sigma)], i, by_beta)
                ax.set_title(title if sigma is None else f"{title}, σ = {sigma:g}")
                ax.set_xlabel("initial β" if by_beta else "template noise σ")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
        figure.suptitle(f"{report.title} (protocol {report.protocol})")
    return figure


def _panel(ax: Axes, rows: Sequence[Row], i: int, by_beta: bool) -> None:
    metric = METRICS[i]
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method]
        j = _place((method, None))[0]
        colour, marker = COLOURS[j % len(COLOURS)], MARKERS[j % len(MARKERS)]
        name = NAMES.get(method, method)
        x = np.array([row.beta if by_beta else row.sigma for row in own], float)
        if by_beta and method == "ccae":
            if own[0].paper is not None:
                ax.axhline(own[0].paper[i], color=colour, linewidth=1, label=f"{name}, paper")
            continue
        if all(row.paper is not None for row in own):
            y = [row.paper[i] for row in own if row.paper is not None]
            style: dict[str, Any] = {
                "linestyle": ":",
                "markerfacecolor": "none",
                "label": f"{name}, paper",
            }
            ax.plot(x, y, color=colour, marker=marker, **style)
        for preset, line in LINES.items():
            some = [row for row in own if preset in row.ours]
            if some:
                y = [row.ours[preset][metric].mean for row in some]
                error = [row.ours[preset][metric].standard_error for row in some]
                what = (CCAE if method == "ccae" else PRESETS)[preset]
                ax.errorbar(
                    x,
                    y,
                    error,
                    color=colour,
                    marker=marker,
                    linestyle=line,
                    label=f"{name}, {what}",
                )
    if by_beta:
        ax.set_xscale("log")
