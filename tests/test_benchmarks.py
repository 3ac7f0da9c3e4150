"""The benchmarks can be started, and say what there is."""

import pytest

from benchmarks.__main__ import BENCHMARKS, FIGURES, main


def test_an_unknown_benchmark_is_named(capsys):
    assert main(["magic"]) == 2
    said = capsys.readouterr().out
    assert "no benchmark 'magic'" in said
    assert all(name in said for name in BENCHMARKS | FIGURES)


def test_a_name_stands_for_its_pieces(capsys, monkeypatch):
    """Rows are printed as they come, so that those before a failure are not lost."""

    def failing():
        yield ("first", "1", "2", ".5")
        raise KeyboardInterrupt

    pieces = {"other": failing, "one-b": lambda: [("last", "", "3", "")], "one-a": failing}
    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", pieces)
    with pytest.raises(KeyboardInterrupt):
        main(["one"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == ["| last |  | 3 |  |", "| first | 1 | 2 | .5 |"]
