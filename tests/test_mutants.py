"""The list of mutants fits the code: each can be applied, and its test is there."""

import pytest

from tests.mutants import ROOT, mutants


@pytest.mark.parametrize("mutant", mutants(), ids=lambda x: f"{x.file}: {x.old}")
def test_a_mutant_can_be_applied(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    path, _, name = mutant.test.partition("::")
    assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()


def test_no_mutant_is_listed_twice():
    assert len({mutant[:3] for mutant in mutants()}) == len(mutants())
