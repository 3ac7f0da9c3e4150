"""The walk of one `capsules infer --method ds`: files, traces of the program, checks of the scene.

What somebody reads who follows a call through the code. Files are counted once any function of
theirs is called; what runs while a file is imported does not count.
"""

import collections
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
PACKAGES = ("models", "guides", "inference", "capsules")
MOST = {"files": 18, "traces of the program": 4, "checks of the scene": 1}


def walk() -> tuple[list[str], dict[str, int]]:
    """The files in the order in which they are entered, and the counts of `MOST` and of changes."""
    from capsules.cli import main
    from capsules.experiments.generator import sample_scenes
    from capsules.files.outputs import save_scenes

    files: list[str] = []
    calls: collections.Counter[str] = collections.Counter()
    changes, before = 0, ""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal changes, before
        code = frame.f_code
        if event != "call" or code.co_name == "<module>" or not code.co_filename.startswith(inside):
            return
        name = str(Path(code.co_filename).relative_to(ROOT))
        files.extend([name] if name not in files else [])
        changes += name != before
        before = name
        calls[f"{name}:{code.co_qualname}"] += 1

    inside = tuple(str(ROOT / package) for package in PACKAGES)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "scenes.npz"
        save_scenes(path, sample_scenes(2, seed=0))
        asked = ["capsules", "infer", str(path), "--method", "ds"]
        with contextlib.suppress(SystemExit), mock.patch("sys.argv", asked):
            main()  # imports what a call imports
        sys.setprofile(note)
        try:
            with contextlib.suppress(SystemExit), mock.patch("sys.argv", asked):
                main()
        finally:
            sys.setprofile(None)
    counts = {
        "files": len(files),
        "traces of the program": calls["models/constellation.py:constellation"],
        "checks of the scene": calls["models/scenes.py:check_scene"],
    }
    return files, counts | {"changes of file": changes}


def rows() -> Iterator[tuple[str, str, str, str]]:
    """A row for each count, with the most that it may be."""
    files, counts = walk()
    for name, count in counts.items():
        most = MOST.get(name)
        yield (
            f"one `infer --method ds`: {name}",
            "" if most is None else f"at most {most}",
            str(count),
            "" if most is None else f"{count / most:.2f}",
        )
    print("\n".join(files))
