"""The benchmarks can be started, say what there is, and write what they find."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import __main__ as command
from benchmarks import results
from benchmarks.measurements import MEASUREMENTS
from benchmarks.report import Picture, Table, difference, number, share, show
from benchmarks.studies import STUDIES, Study


def test_an_unknown_benchmark_is_named(capsys):
    assert command.main(["magic"]) == 2
    said = capsys.readouterr().out
    assert "no benchmark 'magic'" in said
    assert all(name in said for name in [*MEASUREMENTS, *STUDIES])


def test_a_name_stands_for_its_pieces(capsys, monkeypatch):
    """Rows are printed as they come, so that those before a failure are not lost."""

    def failing():
        def rows():
            yield "first", "2"
            raise KeyboardInterrupt

        yield Table("failing", ("a", "b"), rows())

    def working():
        yield Table("working", ("a",), [("last",)])

    pieces = {"other": failing, "one-b": working, "one-a": failing}
    monkeypatch.setattr(command, "MEASUREMENTS", pieces)
    with pytest.raises(KeyboardInterrupt):
        command.main(["one"])
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.splitlines()[2:] == ["| last |"]
    assert second.splitlines()[2:] == ["| first | 2 |"]


def test_pieces_become_files(tmp_path):
    figure = Figure(figsize=(1, 1))
    pieces = iter([Table("one", ("a",), [("b",)]), Picture("two", figure)])
    assert show(pieces, tmp_path) == ["one.md", "two.png"]
    assert (tmp_path / "one.md").read_text() == "| a |\n| --- |\n| b |\n"
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.8821, ".882"), (-0.0046, "−.005"), (-0.0001, ".000"), (1, "1"), (-10.5, "−10.500")],
)
def test_numbers_have_no_zero_before_the_point(value, shown):
    assert number(value) == shown


def test_shares_have_standard_errors():
    """The error of a mean of 4 of 16 is sqrt(.25 * .75 / 16)."""
    right = np.arange(16) < 4
    assert share(right) == ".250 ± .108"
    assert share(np.ones(16, bool)) == "1"
    assert difference(right, ~right) == "−.500 ± .217"
    assert difference(~right, right) == "+.500 ± .217"


def test_a_study_waits_for_its_networks_and_for_silence(monkeypatch):
    studies = {"a": Study("a"), "b": Study("b", after=("a",)), "timed": Study("c", alone=True)}
    monkeypatch.setattr(results, "STUDIES", studies)
    assert results.may_start("a", set(), set())
    assert not results.may_start("b", set(), set())
    assert results.may_start("b", {"a"}, set())
    assert not results.may_start("timed", set(), {"a"})
    assert not results.may_start("a", set(), {"timed"})


def test_every_study_has_its_source_and_knows_those_before_it():
    for name, study in STUDIES.items():
        assert study.path.exists(), name
        assert STUDIES.keys() >= set(study.after), name
