"""Infer a scene file of any size in blocks, with bounded memory and stored answers.

The non-empty scenes of a file are cut into fixed blocks of `BLOCK` scenes, each with a random key
of its own. So an answer depends on the file and the settings, but not on where or in which order
blocks are computed. An entry of the store, `part-000000-...npz` and so on, holds the `Result` of a
block; `manifest.json` lists the entries once all are there. In memory are one block and the numbers
of the scenes in the file: `docs/scale.md`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from capsules.files.inputs import SceneFile
from capsules.files.outputs import check_output, whole_file
from capsules.methods import infer
from capsules.store import Entry, Store, digest, sealed
from inference.result import Report, Result
from models.scenes import Scene

BLOCK = 1024
"""Scenes of a block, which a method infers at a time and an entry holds."""

MANIFEST = "manifest.json"

_ARRAYS = ("match_probs", "pose_mean", "pose_covariance", "labels", "converged", "steps")
_OPTIONAL = ("elbo", "log_evidence", "log_evidence_error", "best_match", "explained")
_DETAIL = "detail_"


class Job(NamedTuple):
    """The arguments of `capsules.methods.infer`, the same for every scene."""

    method: str
    seed: int
    settings: Mapping[str, Any]
    """Options that change the answer: `prior`, `preset`, `precision`, `num_restarts`, ..."""
    devices: int = 1

    @property
    def all_options(self) -> dict[str, Any]:
        """All options of `infer`, including the number of devices."""
        return {**self.settings} | ({"devices": self.devices} if self.devices != 1 else {})


class Block(NamedTuple):
    """All that is needed to infer some scenes, here or on another machine."""

    job: Job
    number: int
    scenes: Scene

    def infer(self, progress_bar: bool | Report = False) -> Result:
        """The answers, with only those details that are arrays with a value for each scene."""
        seed = self.job.seed
        if self.number:  # the first block is what the method itself returns for the seed
            seed = int(np.random.SeedSequence([seed, self.number]).generate_state(1)[0])
        options = self.job.all_options
        result = infer(self.job.method, self.scenes, seed, progress_bar=progress_bar, **options)
        details = {
            name: value
            for name, value in result.details.items()
            if isinstance(value, np.ndarray) and value.dtype != object and len(value) == len(result)
        }
        given = {name: getattr(result, name) for name in (*_ARRAYS, *_OPTIONAL)}
        return Result(
            method=result.method, scene=result.scene, owner=result.owner, details=details, **given
        )


class Work:
    """The blocks of a file for one job, and the store of their answers, if any."""

    def __init__(
        self, job: Job, file: SceneFile, store: Store | None = None, limit: int | None = None
    ) -> None:
        """Find the blocks of the file; `limit` takes only its first scenes, counting empty ones."""
        self.job, self.file, self.store = job, file, store
        if store is not None:
            check_output(store.folder / MANIFEST, file.path)
        self.numbers = file.occupied(limit)
        self.entries = [] if store is None else [self._entry(store, i) for i in range(len(self))]

    def __len__(self) -> int:
        """The number of blocks."""
        return -(-len(self.numbers) // BLOCK)

    def numbers_of(self, block: int) -> Int[np.ndarray, " scenes"]:
        """The numbers in the file of a block's scenes."""
        return self.numbers[block * BLOCK : (block + 1) * BLOCK]

    def block(self, block: int) -> Block:
        """A block with its scenes."""
        return Block(self.job, block, self.file.take(self.numbers_of(block)))

    def missing(self) -> list[int]:
        """The blocks whose answers are not in the store."""
        if self.store is None:
            return list(range(len(self)))
        return [block for block, entry in enumerate(self.entries) if not self.store.has(entry)]

    def result(self, block: int, progress_bar: bool | Report = False) -> Result:
        """The answers of a block, read from the store, or computed and stored."""
        if self.store is None:
            return self.block(block).infer(progress_bar)
        entry = self.entries[block]
        arrays = self.store.read(entry)
        if arrays is not None:
            scenes = self.file.take(arrays.pop("scene"))
            return _result(self.job.method, scenes, arrays)
        result = self.block(block).infer(progress_bar)
        self.store.write(entry, packed(entry, self.numbers_of(block), result))
        return result

    def results(self) -> Iterator[Result]:
        """The answers of all blocks, one after another."""
        return (self.result(block) for block in range(len(self)))

    def write_manifest(self) -> None:
        """Write the job and the names of the entries that hold its answers."""
        assert self.store is not None
        numbers = [self.numbers_of(block) for block in range(len(self))]
        content = {
            "method": self.job.method,
            "seed": self.job.seed,
            "settings": self.job.settings,
            "scenes": len(self.numbers),
            "parts": [
                {"file": entry.path.name, "first": int(of[0]), "last": int(of[-1])}
                for entry, of in zip(self.entries, numbers, strict=True)
            ],
        }
        with whole_file(self.store.folder / MANIFEST) as file:
            file.write((json.dumps(content, indent=2) + "\n").encode())

    def _entry(self, store: Store, block: int) -> Entry:
        numbers, (method, seed, settings, _) = self.numbers_of(block), self.job
        data: dict[str, Any] = {"file": self.file.digest, "scenes": numbers.tolist()}
        asked: dict[str, Any] = {"method": method, "seed": seed, "settings": dict(settings)}
        for name in {"weights", "learned"} & set(settings):  # files, whose content counts
            data[name] = digest(np.fromfile(settings[name], np.uint8))
        return store.entry(f"part-{block:06d}", block=block, **asked, **data)


def packed(entry: Entry, numbers: Int[np.ndarray, " scenes"], result: Result) -> bytes:
    """The content of the entry that holds these answers."""
    arrays = {"scene": numbers, "owner": result.owner}
    arrays |= {name: getattr(result, name) for name in (*_ARRAYS, *_OPTIONAL)}
    arrays |= {_DETAIL + name: value for name, value in result.details.items()}
    return sealed(entry, {name: value for name, value in arrays.items() if value is not None})


def _result(method: str, scenes: Scene, arrays: dict[str, np.ndarray]) -> Result:
    """The result that an entry holds."""
    details = {n.removeprefix(_DETAIL): x for n, x in arrays.items() if n.startswith(_DETAIL)}
    fields: dict[str, Any] = {n: x for n, x in arrays.items() if not n.startswith(_DETAIL)}
    return Result(method=method, scene=scenes, details=details, **fields)
