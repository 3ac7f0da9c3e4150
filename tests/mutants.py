"""Mutants: small faults put into the code on purpose, each of which a named test has to notice.

`python -m tests.mutants` applies the lines of `mutants.tsv` one after another to a copy of the
tree and runs the test of each. A mutant that its test passes has survived: the test says less than
it should. Words as arguments choose the lines that contain one of them.
"""

import argparse
import csv
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import tests.conftest  # noqa: F401  # the folder of compiled code, before JAX looks for it

ROOT = Path(__file__).parents[1]
COPIED = ("models", "guides", "inference", "capsules", "tests", "pyproject.toml")
MINUTES = 5
"""Time of the processor after which a test counts as failed: it does not end."""
NO_ANSWER = 70
"""Exit code of a process that could not run its tests."""


class Mutant(NamedTuple):
    """A line of the list."""

    file: str
    old: str
    """Text that occurs once in the file."""
    new: str
    test: str
    """What pytest is called with."""

    def __str__(self) -> str:
        return f"{self.file}: {self.old!r} -> {self.new!r} ({self.test})"


def mutants() -> list[Mutant]:
    """All lines of the list."""
    with open(Path(__file__).with_suffix(".tsv"), newline="") as file:
        heading, *lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    assert tuple(heading) == Mutant._fields
    return [Mutant(*line) for line in lines]


def survivors(chosen: Iterable[Mutant], tree: Path) -> Iterator[Mutant]:
    """Put each into the tree, run its test, take it back; yields those that went unnoticed."""
    for mutant in chosen:
        path = tree / mutant.file
        sound = path.read_text()
        path.write_text(sound.replace(mutant.old, mutant.new))
        began = time.monotonic()
        noticed = not passes([mutant.test], tree)
        path.write_text(sound)
        seconds = time.monotonic() - began
        print(f"{'killed' if noticed else 'SURVIVED'} in {seconds:.0f} s  {mutant}", flush=True)
        if not noticed:
            yield mutant


def passes(names: list[str], tree: Path) -> bool:
    """Whether tests pass there, in a process of their own that has the libraries already."""
    child = os.fork()
    if child == 0:  # which is never to come back from here
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (60 * MINUTES, 60 * MINUTES + 9))
            os._exit(_run(names, tree))
        finally:
            os._exit(NO_ANSWER)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    # Tests failed, nothing could be imported, or the time was up; all else is no answer.
    if code not in (0, 1, 2, -signal.SIGXCPU):
        sys.exit(f"{(tree / 'log').read_text()}\npytest ended with {code}: {' '.join(names)}")
    return code == 0


def _run(names: list[str], tree: Path) -> int:
    with open(tree / "log", "wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    os.chdir(tree)
    sys.path[0] = str(tree)
    sys.dont_write_bytecode = True  # its date is in seconds: a mutant may have that of the last
    options = ["-x", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider"]
    options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *names]))


def copied(tree: Path) -> None:
    """Copy all that the tests need."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)


def main() -> None:
    """Try mutants, list the survivors, and fail if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only lines that contain one of these")
    words = parser.parse_args().words
    chosen = [x for x in mutants() if not words or any(word in str(x) for word in words)]
    importlib.import_module("numpyro")  # once for all of them
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # nothing was computed here
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copied(tree)
        if not passes(sorted({x.test for x in chosen}), tree):
            sys.exit("some of these tests fail without any mutant; mend them first")
        left = list(survivors(chosen, tree))
    print(f"{len(chosen) - len(left)} of {len(chosen)} mutants were killed")
    for mutant in left:
        print(f"survived: {mutant}")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
