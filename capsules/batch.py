"""A file of scenes worked off in chunks: any number of them in bounded memory, to be gone on with.

Scenes are inferred in blocks that are always the same, `BLOCK` of the file's scenes with points,
each with a random key of its own. So an answer depends on the file and the settings, and not on how
many blocks go into a part of the output, nor on who works it off: several processes take every
so-manieth chunk each, and share nothing but the folder they write to.

In the folder, `part-000000.npz` and so on hold what a `Result` holds, for a chunk of scenes, and
appear whole or not at all; `manifest.json` says what was asked and, when all parts are there, that
they are. Memory is that of one block in the method and of one chunk of answers, and the numbers of
the scenes in the file: `docs/scale.md`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

import guides
import models
from capsules.files.scenes import SceneFile, whole_file
from capsules.methods import infer
from inference.method import Report, reporter
from inference.result import Result, join_results
from models.errors import InputError
from models.scenes import Scene

BLOCK = 1024
"""Scenes that a method gets at a time."""

CHUNK = 8 * BLOCK
"""Scenes of a part, unless it is said otherwise."""

VERSION = 4
"""To be raised where a change of the code makes stored answers stale."""

MANIFEST = "manifest.json"

_ARRAYS = ("match_probs", "pose_mean", "pose_covariance", "labels", "converged", "steps")
_OPTIONAL = ("elbo", "log_evidence", "best_match", "explained")
_DETAIL = "detail_"


class Job(NamedTuple):
    """What is asked of every scene: the arguments of `capsules.methods.infer`."""

    method: str
    seed: int
    settings: Mapping[str, Any]
    """Those that change the answer: `prior`, `preset`, `precision`, `num_restarts`, ..."""
    devices: int = 1

    @property
    def all_options(self) -> dict[str, Any]:
        """The options of `infer`, with how it is computed."""
        return {**self.settings} | ({"devices": self.devices} if self.devices != 1 else {})


class Work:
    """The chunks of a file for one job, and the folder that their answers are kept in, if any."""

    def __init__(
        self,
        job: Job,
        file: SceneFile,
        folder: Path | None = None,
        *,
        chunk: int | None = None,
        limit: int | None = None,
        fresh: bool = False,
    ) -> None:
        """Look at the file and the folder.

        Args:
            folder: where an earlier run of the same job may have left some parts; without one,
                nothing is kept.
            chunk: scenes of a part, rounded up to whole blocks; those of an earlier run go before.
            limit: only the first so many scenes of the file, empty ones counted.
            fresh: remove what is in the folder first.
        """
        if chunk is not None and chunk < 1:
            raise InputError(f"a chunk wants at least one scene, got {chunk}; try {CHUNK}")
        self.job, self.file, self.folder = job, file, folder
        self.numbers = file.occupied(limit)
        self.chunk = -(-(chunk or CHUNK) // BLOCK) * BLOCK
        if folder is not None:
            self._open(folder, fresh)

    def __len__(self) -> int:
        """Chunks."""
        return -(-len(self.numbers) // self.chunk)

    def share(self, process: int = 0, processes: int = 1) -> range:
        """The chunks that one of several processes takes."""
        return range(process, len(self), processes)

    def scenes_of(self, chunk: int) -> Int[np.ndarray, " scenes"]:
        """The numbers, in the file, of a chunk's scenes."""
        return self.numbers[chunk * self.chunk : (chunk + 1) * self.chunk]

    def place(self, chunk: int) -> Path | None:
        """The file of a chunk's answers."""
        return None if self.folder is None else self.folder / f"part-{chunk:06d}.npz"

    def is_done(self, chunk: int) -> bool:
        path = self.place(chunk)
        return path is not None and path.exists()

    def results(
        self,
        chunks: Sequence[int],
        progress_bar: bool | Report = False,
    ) -> Iterator[Result]:
        """The answers of some chunks: computed and kept, or read where they are there."""
        for chunk in chunks:
            if self.is_done(chunk):
                yield self.load(chunk)
            else:
                yield self.run(chunk, progress_bar)

    def run(self, chunk: int, progress_bar: bool | Report = False) -> Result:
        """Infer the scenes of a chunk, and keep the answers."""
        numbers = self.scenes_of(chunk)
        first_block = chunk * self.chunk // BLOCK
        progress, answers = reporter(progress_bar), []
        for block, start in enumerate(range(0, len(numbers), BLOCK), first_block):
            some = numbers[start : start + BLOCK]

            def report(done: int, total: int, before: int = start, size: int = len(some)) -> None:
                progress(before + size * done // total, len(numbers))

            answers.append(_only_arrays(self._infer(self.file.take(some), block, report)))
            report(1, 1)
        result = join_results(answers)
        if (path := self.place(chunk)) is not None:
            with whole_file(path) as out:
                np.savez_compressed(out, allow_pickle=False, **_arrays(result, numbers))
        return result

    def load(self, chunk: int) -> Result:
        """The answers of a chunk that is done."""
        path, numbers = self.place(chunk), self.scenes_of(chunk)
        assert path is not None
        try:
            # numpy does not close a file of its own that turns out to be damaged
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            if not np.array_equal(arrays.pop("scene"), numbers):
                raise ValueError("it is of other scenes")
            return _result(self.job.method, self.file.take(numbers), arrays)
        except InputError:
            raise
        except Exception as error:  # a damaged file makes numpy and zipfile raise nearly anything
            raise InputError(
                f"cannot read {path} ({error}); remove it, and the same command computes it anew"
            ) from error

    def finish(self) -> int:
        """Write the manifest if every part is there; says how many are missing."""
        missing = [chunk for chunk in range(len(self)) if not self.is_done(chunk)]
        if not missing and self.folder is not None:
            _write_json(self.folder / MANIFEST, self._manifest() | self._summary())
        return len(missing)

    def _infer(self, scenes: Scene, block: int, progress: Report) -> Result:
        seed = self.job.seed
        if block:  # the first is what one gets from the method itself
            seed = int(np.random.SeedSequence([seed, block]).generate_state(1)[0])
        return infer(self.job.method, scenes, seed, progress_bar=progress, **self.job.all_options)

    def _open(self, folder: Path, fresh: bool) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if fresh:
                for path in (folder / MANIFEST, *folder.glob("part-*.npz")):
                    path.unlink(missing_ok=True)
            known = folder / MANIFEST
            earlier = json.loads(known.read_text()) if known.exists() else None
        except OSError as error:
            raise InputError(
                f"cannot write to {folder} ({error.strerror}); choose another --out"
            ) from error
        except ValueError as error:
            raise InputError(
                f"cannot read {folder / MANIFEST} ({error}); start anew with --fresh"
            ) from error
        if not isinstance(earlier, dict):
            if any(folder.glob("part-*.npz")):
                raise InputError(
                    f"{folder} holds parts of which no {MANIFEST} says what they are; choose "
                    "another --out, or start anew with --fresh"
                )
            _write_json(known, self._manifest() | {"complete": False})
            return
        self.chunk = earlier.get("chunk", self.chunk)
        ours = json.loads(json.dumps(self._manifest()))
        if other := [name for name, value in ours.items() if earlier.get(name) != value]:
            raise InputError(
                f"{folder} holds the answers of another job, with another {' and '.join(other)}; "
                "choose another --out, or start anew with --fresh"
            )

    def _manifest(self) -> dict[str, Any]:
        """All that the answers depend on."""
        return {
            "version": VERSION,
            "method": self.job.method,
            "seed": self.job.seed,
            "settings": {name: _plain(value) for name, value in self.job.settings.items()},
            "scenes": len(self.numbers),
            "contents": self.file.fingerprint,
            "code": _code(),
            "block": BLOCK,
            "chunk": self.chunk,
        }

    def _summary(self) -> dict[str, Any]:
        parts, sums = [], dict.fromkeys(("converged", "elbo", "log_evidence"), 0.0)
        for chunk in range(len(self)):
            path, numbers = self.place(chunk), self.scenes_of(chunk)
            assert path is not None
            with np.load(path, allow_pickle=False) as stored:
                found = set(stored.files)
                for name in sums:
                    sums[name] += float(stored[name].sum()) if name in found else np.nan
            ends = {"first": int(numbers[0]), "last": int(numbers[-1]), "scenes": len(numbers)}
            parts.append({"file": path.name} | ends)
        means = {n: total / len(self.numbers) for n, total in sums.items() if not np.isnan(total)}
        return {"complete": True, "mean": means, "parts": parts}


def read_results(folder: Path, file: SceneFile) -> Iterator[Result]:
    """The answers that `capsules infer --all` has left in a folder, a chunk at a time."""
    stated = json.loads((folder / MANIFEST).read_text())
    job = Job(stated["method"], stated["seed"], stated["settings"])
    work = Work(job, file, folder)
    yield from (work.load(chunk) for chunk in range(len(work)) if work.is_done(chunk))


def _only_arrays(result: Result) -> Result:
    """Of the details, those that are an array with a value for each scene."""
    details = {
        name: value
        for name, value in result.details.items()
        if isinstance(value, np.ndarray) and value.dtype != object and len(value) == len(result)
    }
    given = {name: getattr(result, name) for name in (*_ARRAYS, *_OPTIONAL)}
    return Result(
        method=result.method, scene=result.scene, owner=result.owner, details=details, **given
    )


def _arrays(result: Result, numbers: Int[np.ndarray, " scenes"]) -> dict[str, np.ndarray]:
    """What is written of a result."""
    arrays = {name: getattr(result, name) for name in (*_ARRAYS, *_OPTIONAL)}
    details = {_DETAIL + name: value for name, value in result.details.items()}
    stored = {"scene": numbers, "owner": result.owner} | arrays | details
    return {name: value for name, value in stored.items() if value is not None}


def _result(method: str, scenes: Scene, arrays: dict[str, np.ndarray]) -> Result:
    """A result from what was written of it."""
    details = {n.removeprefix(_DETAIL): x for n, x in arrays.items() if n.startswith(_DETAIL)}
    fields: dict[str, Any] = {n: x for n, x in arrays.items() if not n.startswith(_DETAIL)}
    return Result(method=method, scene=scenes, details=details, **fields)


def _code() -> str:
    """A digest of the model files: an edited prior is another job."""
    digest = hashlib.sha256()
    for package in (models, guides):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with whole_file(path) as out:
        out.write((json.dumps(content, indent=2) + "\n").encode())
