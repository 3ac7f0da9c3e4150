"""README and docs show what `make results` wrote, and no other measured numbers.

A number is taken for a measured one if it has two or more decimals, an error, a per cent sign or a
unit of time, or is a rate. Code, settings in backticks and formulas are left out.
"""

import json
import re

import pytest

from benchmarks.pages import PAGES, PLACE, filled
from benchmarks.report import RESULTS
from benchmarks.studies import STUDIES

MEASURED = re.compile(
    r"""(?<![\w.,^*/-])[+−-]?
    (?:\d*\.\d{2,}                                                  # two or more decimals
    |\d[\d,.]*(?=\ ?(?:%|±|(?:ms|s|nats|MiB|seconds|minutes)\b))    # with a unit or an error
    |\d[\d,.]*(?=\ (?:scenes|draws)\ (?:a|per)\ ))                  # a rate
    (?![\w])""",
    re.VERBOSE,
)
NUMBER = re.compile(r"\d*\.?\d[\d,]*")

GIVEN = {
    "README.md": {
        "0.06": "the scales of objects in the generator",
        "-22.902": "the example's output, held by tests/test_readme.py",
        "8.87": "log(N^N / N!) for N = 11",
        "3.47": "log 32",
    },
}
"""Numbers of the pages that are not measured, with what they are."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def manifest():
    return json.loads((RESULTS / "manifest.json").read_text())["studies"]


def test_every_study_was_run_and_every_file_is_one_of_a_study():
    assert manifest().keys() == STUDIES.keys()
    written = [file for study in manifest().values() for file in study["files"]]
    assert len(written) == len(set(written))
    there = {path.name for path in RESULTS.iterdir()} - {"manifest.json"}
    assert there == set(written)


def test_every_file_is_shown():
    shown = {name for page in PAGES for name in re.findall(r"results/([\w.-]+)", page.read_text())}
    there = {path.name for path in RESULTS.iterdir()} - {"manifest.json"}
    assert there <= shown


@each_page
def test_tables_are_those_of_the_results(page):
    assert filled(page.read_text()) == page.read_text(), "run python -m benchmarks.pages"


@each_page
def test_pictures_are_those_of_the_results(page):
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+\.png)\)", page.read_text())
    for picture in pictures:
        assert (page.parent / picture).resolve().parent == RESULTS, picture


@each_page
def test_measured_numbers_are_in_the_results(page):
    """Of the prose, in a table of the results that the page shows; of other tables, none."""
    text = page.read_text()
    shown = {number for place in PLACE.finditer(text) for number in NUMBER.findall(place[3])}
    given = GIVEN.get(page.name, {})
    found = [number for number in measured(text) if number.strip("+−-").rstrip(",.") not in shown]
    assert [number for number in found if number not in given] == []


def test_numbers_that_no_study_made_are_found():
    page = "It takes 37 ms, is right on .987 ± .004, or 12 %, and has -0.53 nats at `1.25`.\n"
    assert measured(page) == ["37", ".987", ".004", "12", "-0.53"]
    table = "| a | b |\n| --- | --- |\n| 1 | .25 |\n"
    assert measured(table) == [".25"]
    assert measured(f"<!-- results/one.md -->\n\n{table}") == []


def measured(text: str) -> list[str]:
    """The numbers of a page that look measured, but for those in tables of the results."""
    for left_out in (
        PLACE.pattern,
        r"```.*?```",
        r"`[^`]*`",
        r"^    .*$",
        r"\]\([^)]*\)",
        r"<[^>]*>",
    ):
        text = re.sub(
            left_out, " ", text, flags=re.DOTALL * left_out.startswith("```") | re.MULTILINE
        )
    return MEASURED.findall(text)
