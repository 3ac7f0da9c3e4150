"""Imports go one way: models <- guides <- inference <- tests, benchmarks."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "models": {"models"},
    "guides": {"models", "guides"},
    "inference": {"models", "guides", "inference"},
    "benchmarks": {"models", "guides", "inference", "benchmarks", "tests"},  # its references
}
FOLDERS = {*ALLOWED, "notebooks", "tests"}
SOURCES = sorted(path for folder in ALLOWED for path in (ROOT / folder).rglob("*.py"))


def imported_packages(source: str, package: str) -> set[str]:
    """Top-level names that a source file of a package imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(package if node.level else node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    ours = imported_packages(path.read_text(), package) & FOLDERS
    assert ours <= ALLOWED[package]


def test_the_oracle_is_independent():
    imported = imported_packages((ROOT / "tests" / "oracle.py").read_text(), "tests")
    assert not imported & {*FOLDERS, "jax", "numpyro", "scipy"}


def test_every_form_of_import_is_seen():
    source = """
import numpy, guides.family
from inference.cavi import run
def later():
    from . import sibling
    import tests.oracle as brute_force
"""
    assert imported_packages(source, "models") == {
        "numpy",
        "guides",
        "inference",
        "models",
        "tests",
    }
