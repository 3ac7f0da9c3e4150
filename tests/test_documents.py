"""The documents name things that exist: files, links, modules, functions and options."""

import functools
import importlib
import inspect
import pkgutil
import re
import types
from pathlib import Path
from typing import Any

import pytest

import capsules
import guides
import inference
import models
from inference.result import Result

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = (models, guides, inference, capsules)
SOURCES = ("models", "guides", "inference", "capsules", "tests", "benchmarks", "notebooks")
OTHERS = {"az", "dist", "functools", "jax", "numpyro", "numpy", "np", "pose", "present"}
"""Modules and values that are not the project's."""
FILE = re.compile(r".*\.(py|md|json|npz|png|csv|ipynb|eqx|lock|toml|svg|gif)")

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
    return named + inside + [Result] * (name == "result")


def _has(thing: Any, path: list[str]) -> bool:
    for name in path:
        fields = {**getattr(thing, "__annotations__", {})} if inspect.isclass(thing) else {}
        if not (hasattr(thing, name) or name in fields):
            return False
        thing = getattr(thing, name, None)
    return True


@functools.cache
def _words() -> set[str]:
    """Every identifier in the code of the project."""
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    files += [*(ROOT / "notebooks").glob("*.ipynb"), ROOT / "Makefile"]
    return set(re.findall(r"[A-Za-z_]\w*", " ".join(path.read_text() for path in files)))
