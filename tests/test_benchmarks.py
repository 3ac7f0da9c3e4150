"""The benchmarks can be started, and say what there is."""

from benchmarks.__main__ import BENCHMARKS, FIGURES, main


def test_an_unknown_benchmark_is_named(capsys):
    assert main(["magic"]) == 2
    said = capsys.readouterr().out
    assert "no benchmark 'magic'" in said
    assert all(name in said for name in BENCHMARKS | FIGURES)
