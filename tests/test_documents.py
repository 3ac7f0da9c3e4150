"""The documents name things that exist: files, links, modules, functions and options."""

import functools
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capsules
import guides
import inference
import models
from capsules.reference import Reference
from inference.result import Result

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = (models, guides, inference, capsules)
SOURCES = ("models", "guides", "inference", "capsules", "tests", "benchmarks")
OTHERS = {"az", "dist", "functools", "jax", "numpyro", "numpy", "np", "pose", "present"}
"""Modules and values that are not the project's."""
VALUES = {"result": Result, "problem": Reference}
"""Values that the pages speak of, by their types."""
FILE = re.compile(r".*\.(py|md|json|npz|png|csv|ipynb|eqx|lock|toml|svg|gif|yml)")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@each_page
def test_files_and_links_that_it_names_are_there(page):
    text = page.read_text()
    for path in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / path).exists(), path
    for path in re.findall(r"`((?:models|guides|inference|capsules|tests|docs)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path


@each_page
def test_code_that_it_names_is_there(page):
    """`module.name` has that attribute; a name with an underscore stands somewhere in the code."""
    for quoted in _quoted(page):
        name = re.match(r"[A-Za-z_][\w.]*", quoted)
        if name is None or FILE.fullmatch(quoted) or "/" in quoted:
            continue
        first, *rest = name.group().rstrip(".").split(".")
        if rest and first not in OTHERS:
            assert any(_has(thing, rest) for thing in _things(first)), quoted
        elif "_" in first or first.isupper():
            assert first in _words(), quoted


def test_a_name_that_does_not_exist_is_found():
    assert not any(_has(thing, ["log_normalizer"]) for thing in _things("sinkhorn"))
    assert any(_has(thing, ["log_bound"]) for thing in _things("sinkhorn"))
    assert not any(_has(thing, ["presence"]) for thing in _things("inference"))
    assert any(_has(thing, ["exact", "sample"]) for thing in _things("inference"))


def _quoted(page: Path) -> list[str]:
    """What stands in backticks outside of blocks of code."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@functools.cache
def _modules() -> dict[str, types.ModuleType]:
    """Every module of the project by its full name; those of optional packages too, if there."""
    found: dict[str, types.ModuleType] = {}
    for package in PACKAGES:
        found[package.__name__] = package
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not info.name.endswith("__main__"):
                found[info.name] = importlib.import_module(info.name)
    return found


def _things(name: str) -> list[Any]:
    """Modules, and objects of modules, that have this name."""
    modules = _modules()
    named = [module for full, module in modules.items() if full.split(".")[-1] == name]
    inside = [vars(module)[name] for module in modules.values() if name in vars(module)]
    return named + inside + [VALUES[name] for name in VALUES.keys() & {name}]


def _has(thing: Any, path: list[str]) -> bool:
    for name in path:
        fields = {**getattr(thing, "__annotations__", {})} if inspect.isclass(thing) else {}
        if not (hasattr(thing, name) or name in fields):
            return False
        thing = getattr(thing, name, None)
    return True


@functools.cache
def _words() -> set[str]:
    """Every identifier in the code of the project, and in the code that pages and notebooks run."""
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    code = [path.read_text() for path in [*files, ROOT / "Makefile"]]
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        code += ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    code += MATCHING
    return set(re.findall(r"[A-Za-z_]\w*", " ".join(code)))


def test_the_site_has_every_page():
    """`make docs` fails on a page that is left out; this says so before it is built."""
    site = (ROOT / "mkdocs.yml").read_text()
    for page in [*PAGES[1:], *(ROOT / "docs" / "api").glob("*.md")]:
        assert f" {page.relative_to(ROOT / 'docs')}\n" in site, page
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f" notebooks/{notebook.name}\n" in site, notebook


# --- the code of docs/matching.md ---------------------------------------------------------------

LINKAGE, *_ = MATCHING = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "matching.md").read_text(), re.DOTALL
)


def test_the_evidence_of_the_linkage_is_a_sum_over_all_linkages():
    """Every record of A is one of B that no other is, or nobody: by a list, without the others."""
    names: dict[str, Any] = {}
    exec(compile(LINKAGE.partition("mcmc = ")[0], "docs/matching.md", "exec"), names)
    logits = np.asarray(names["pairs"](0.8, 0.5))
    agree = np.asarray(names["agree"])
    total = 0.0
    for choice in itertools.product([*range(6), None], repeat=4):
        taken = [n for n in choice if n is not None]
        if len(set(taken)) == len(taken):
            ratio = [
                0.5 if n is None else 0.5 / 6 * np.prod(np.where(agree[m, n], 0.8 / 0.1, 0.2 / 0.9))
                for m, n in enumerate(choice)
            ]
            total += np.prod(ratio)
    found = names["PermutationMatch"](logits).log_normalizer
    assert float(found) == pytest.approx(np.log(total), abs=1e-10)


@pytest.mark.slow
def test_the_code_of_matching_does_what_the_page_says(capsys):
    names: dict[str, Any] = {}
    marginals = []
    for block in MATCHING:
        exec(compile(block, "docs/matching.md", "exec"), names)
        marginals.append(np.asarray(names["match"].mean(0)))
    assert (marginals[0][[0, 1, 2, 3], [2, 0, 4, 9]] > [0.9, 0.99, 0.99, 0.99]).all()
    assert (names["joined"] == names["order"]).all()
    assert names["by_draw"].shape == (100,)
    shown = capsys.readouterr().out
    assert "(1, 100, 1, 4)" in shown and "'points': ['pose', 'match'" in shown
