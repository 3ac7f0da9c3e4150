"""Run every study of the documentation: `python -m benchmarks.results [FOLDER]`.

Tables and pictures go to FOLDER, `build/results` by default, with a manifest that records commit,
versions, machine, seconds and files. Each study runs in a process of its own, two at a time, with a
log in `build/logs`. Studies that measure time run alone. A study that is complete for the present
source is not run again, so an interrupted run resumes. Scenes of the main tables are drawn by the
generator or, if the variable SCENES names a folder of the paper's test sets, taken from there.

In the documentation a table stands below a comment with the name of its file. If FOLDER is
`docs/results`, the pages are filled in again (`benchmarks/pages.py`).
"""

import contextlib
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.pages import fill_pages
from benchmarks.report import BUILD, RESULTS, ROOT, show
from benchmarks.studies import STUDIES
from capsules.files.outputs import whole_file
from capsules.store import source

PACKAGES = ("jax", "numpyro", "numpy", "scipy", "arviz", "equinox", "optax", "scikit-learn")
TOGETHER = 2


def main(folder: Path) -> int:
    """Run what is not complete; the exit code is 1 if a study failed."""
    folder.mkdir(parents=True, exist_ok=True)
    (BUILD / "logs").mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(BUILD / "cache"))
    path = folder / "manifest.json"
    made = json.loads(path.read_text())["studies"] if path.exists() else {}
    states = {name: digest(name) for name in STUDIES}
    done = {
        name
        for name, entry in made.items()
        if entry["source"] == states.get(name)
        and all((folder / file).exists() for file in entry["files"])
    }
    pending = [name for name in STUDIES if name not in done]
    print(f"{len(done)} of {len(STUDIES)} studies are complete.", flush=True)
    running: dict[Future[dict[str, Any]], str] = {}
    failed: set[str] = set()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(TOGETHER, context, max_tasks_per_child=1) as pool:
        while pending or running:
            for name in [one for one in pending if may_start(one, done, set(running.values()))]:
                if may_start(name, done, set(running.values())):
                    pending.remove(name)
                    running[pool.submit(run, name, folder)] = name
                    print(f"{name}: started, log in build/logs/{name}.log", flush=True)
            if not running:  # what is left waits for a study that failed
                failed |= set(pending)
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future)
                if error := future.exception():
                    failed.add(name)
                    print(f"{name}: failed with {error!r}; see its log", flush=True)
                    continue
                done.add(name)
                made[name] = future.result() | {"source": states[name]}
                print(f"{name}: {made[name]['seconds']} s, {len(done)} done", flush=True)
                content = {**provenance(), "studies": {n: made[n] for n in STUDIES if n in made}}
                with whole_file(path) as file:
                    file.write((json.dumps(content, indent=2) + "\n").encode())
    if failed:
        print(f"not complete: {', '.join(sorted(failed))}", file=sys.stderr)
        return 1
    if folder.resolve() == RESULTS:
        fill_pages()
    return 0


def may_start(name: str, done: set[str], running: set[str]) -> bool:
    """Whether a study may start beside those that run."""
    study = STUDIES[name]
    quiet = not running if study.alone else not any(STUDIES[one].alone for one in running)
    return quiet and len(running) < TOGETHER and done.issuperset(study.after)


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run a study, with its output in its log: how long it took, and its files."""
    began = time.monotonic()
    with (BUILD / "logs" / f"{name}.log").open("w") as log, contextlib.redirect_stdout(log):
        files = show(STUDIES[name].run(), folder)
    return {"seconds": round(time.monotonic() - began), "files": files}


def digest(name: str) -> str:
    """A digest of what a study depends on: the source, its own and what it shares, the scenes."""
    total = hashlib.sha256(source().encode())
    paths = {
        ROOT / "benchmarks" / "report.py",
        *(ROOT / "benchmarks" / "measurements").glob("*.py"),
    }
    for one in (name, *STUDIES[name].after):
        paths |= with_imports(STUDIES[one].path)
    if "SCENES" in os.environ:
        paths |= set(Path(os.environ["SCENES"]).glob("constellations_*.npz"))
    for path in sorted(paths):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def with_imports(path: Path) -> set[Path]:
    """The source of a study, and of the studies that it imports."""
    named = re.findall(r"^from benchmarks\.studies\.(\w+) import", path.read_text(), re.MULTILINE)
    return {path}.union(*(with_imports(path.with_name(f"{name}.py")) for name in named))


def provenance() -> dict[str, Any]:
    """What made the results. Changes of the documentation do not make the commit dirty."""
    commit = asked_git("describe", "--always", "--abbrev=12")
    if asked_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs"):
        commit += "-dirty"
    return {
        "command": "make results",
        "scenes": "the paper's test sets" if "SCENES" in os.environ else "drawn by the generator",
        "commit": commit,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def asked_git(*command: str) -> str:
    """What git says, nothing where it is not there."""
    asked = ["git", "-C", str(ROOT), *command]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else BUILD / "results"))
