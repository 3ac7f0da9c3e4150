"""How the house is kept: imports go one way, folders are small, public names have docstrings."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ("models", "guides", "inference", "capsules")
ALLOWED = {
    "models": {"models"},
    "guides": {"models", "guides"},
    "inference": {"models", "guides", "inference"},
    "capsules": {"models", "guides", "inference", "capsules"},
    "benchmarks": {*LIBRARY, "benchmarks", "tests"},  # its references
}
FOLDERS = {*ALLOWED, "notebooks", "tests"}
ORDER = (
    ("result",),
    ("conditions",),
    ("posterior",),
    ("exact",),
    ("proposals",),
    ("variational", "ransac"),
    ("learning",),
    ("mcmc",),
    ("diagnostics",),
    ("plots",),
)
"""Rooms of `inference`: each imports from itself and from rooms on earlier lines."""

LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
MAX_ENTRIES = 12
MAX_RUN = 60
SOURCES = sorted(path for folder in ALLOWED for path in (ROOT / folder).rglob("*.py"))
OF_LIBRARY = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in LIBRARY]
ROOMS = [
    path
    for path in SOURCES
    if path.relative_to(ROOT).parts[0] == "inference" and path != ROOT / "inference" / "__init__.py"
]


def imported_modules(source: str, package: str) -> set[str]:
    """Dotted names that a source file of a package imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = f"{package}.{node.module or ''}".strip(".") if node.level else node.module
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def imported_packages(source: str, package: str) -> set[str]:
    return {name.partition(".")[0] for name in imported_modules(source, package)}


def rooms_out_of_order(source: str, room: str) -> set[str]:
    """What a file in a room of `inference` imports and should not: later rooms, or its
    neighbours."""
    modules = (name.split(".") for name in imported_modules(source, f"inference.{room}"))
    rooms = {(*words, "")[1] for words in modules if words[0] == "inference"}
    return {other for other in rooms - {room} if LEVEL.get(other, len(ORDER)) >= LEVEL[room]}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    ours = imported_packages(path.read_text(), package) & FOLDERS
    assert ours <= ALLOWED[package]


@pytest.mark.parametrize("path", ROOMS, ids=name_of)
def test_rooms_of_inference_import_from_earlier_ones(path):
    room = path.relative_to(ROOT).parts[1].removesuffix(".py")
    assert room in LEVEL
    assert not rooms_out_of_order(path.read_text(), room)


def test_no_folder_is_crowded():
    for package in LIBRARY:
        for folder in (ROOT / package, *(ROOT / package).rglob("*/")):
            entries = [
                p for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
            ]
            assert len([p for p in entries if p.name != "__init__.py"]) <= MAX_ENTRIES, folder


NUMPYRO = {"log_prob", "mean", "sample", "process_message", "forward_shape", "inverse_shape"}
"""Methods that NumPyro documents, and that its subclasses have to have."""


def without_docstring(source: str) -> list[str]:
    """Public functions, classes and methods of a file that say nothing about themselves."""

    def missing(node: ast.Module | ast.ClassDef, prefix: str) -> list[str]:
        found = []
        for child in node.body:
            if not isinstance(child, ast.FunctionDef | ast.ClassDef) or child.name.startswith("_"):
                continue
            if not ast.get_docstring(child) and not (prefix and child.name in NUMPYRO):
                found.append(prefix + child.name)
            if isinstance(child, ast.ClassDef):
                found += missing(child, f"{child.name}.")
        return found

    return missing(ast.parse(source), "")


@pytest.mark.parametrize("path", OF_LIBRARY, ids=name_of)
def test_public_names_have_docstrings(path):
    assert not without_docstring(path.read_text())


def test_no_run_is_long():
    for path in OF_LIBRARY:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "run":
                assert node.end_lineno - node.lineno < MAX_RUN, path


def test_a_missing_docstring_is_seen():
    source = """
def sample(): pass
def _hidden(): pass
class Told:
    "What it is."
    def sample(self): pass
    def tilt(self): pass
    def said(self): "What it does."
class Untold: pass
"""
    assert without_docstring(source) == ["sample", "Told.tilt", "Untold"]


def test_the_oracle_is_independent():
    imported = imported_packages((ROOT / "tests" / "oracle.py").read_text(), "tests")
    assert not imported & {*FOLDERS, "jax", "numpyro", "scipy"}


def test_every_form_of_import_is_seen():
    source = """
import numpy, guides.family
from inference.variational.cavi import run
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


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from inference.mcmc.chains import run_chains", {"mcmc"}),
        ("from inference import mcmc, result", {"mcmc"}),
        ("import inference.plots.scenes", {"plots"}),
        ("from inference import ransac", {"ransac"}),
        ("from inference import to_arviz", {"to_arviz"}),  # the front door is for users
        ("def later():\n    from inference.diagnostics import metrics", {"diagnostics"}),
        (
            "from inference.posterior import draws\nfrom inference.variational.pool import engine",
            set(),
        ),
    ],
)
def test_a_wrong_order_is_seen(source, found):
    assert rooms_out_of_order(source, "variational") == found
