"""What all tests share: compiled code, repeatable hypothesis runs and the published test sets."""

import ctypes
import functools
import gc
import importlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The suite compiles thousands of small programs once each: this halves the time that XLA takes.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1",
)
# And what one test process or notebook has compiled the others, and the next run, need not;
# commands leave the configuration alone where there is a folder for it.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

from jax._src.interpreters import mlir  # after the settings above

# One MLIR context for all programs: a context of its own takes each one 1.2 MB and some ms.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)

MAX_MAPS, MAX_BYTES = 30_000, 1_700_000_000
"""Pieces of memory of a process, of which Linux allows 65,530, and all of it: compiled code, which
takes several pieces each, is dropped beyond. What is needed again is read from the cache."""

FIRST = (
    "test_notebooks.py",
    "test_edits.py",
    "test_cavi.py",
    "test_meanfield.py",
    "test_against_exact.py",
)
"""What takes longest; begun last, one process would be waiting for it in the end."""

LOWERED = {
    "jax._src.pjit": ("_pjit_lower",),
    "jax._src.interpreters.pxla": ("_cached_lowering_to_hlo", "_cached_compilation"),
}
"""Caches of JAX that keep what every program was compiled from, needed no more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        ends = [item.path.name.endswith(end) for end in FIRST]
        return ends.index(True) if any(ends) else len(FIRST)

    items.sort(key=place)
    gc.freeze()  # what the imports made: no garbage, and slow to look through again and again


@pytest.fixture(scope="session")
def compiled() -> list[str]:
    """What was compiled since memory was given back."""
    import jax

    names: list[str] = []

    def note(event: str, duration: float, **about: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    give_back_memory()  # of what the import of all test files has compiled
    return names


@pytest.fixture(autouse=True)
def bounded_memory(compiled: list[str]) -> Iterator[None]:
    """Below 2 GB instead of 5; what code was compiled from is not kept."""
    yield
    if len(compiled) > 50:
        compiled.clear()
        give_back_memory()
        if is_too_much():
            import jax

            jax.clear_caches()
            gc.collect()
            give_back_memory()


def is_too_much() -> bool:
    """Where Linux says nothing, nothing is too much."""
    process = Path("/proc/self")
    if not process.exists():
        return False
    resident = int((process / "statm").read_text().split()[1]) * resource.getpagesize()
    return resident > MAX_BYTES or len((process / "maps").read_bytes().splitlines()) > MAX_MAPS


def give_back_memory() -> None:
    """Without these names of JAX, or without glibc, the tests pass and take more memory."""
    for module, names in LOWERED.items():
        for name in names:
            cache = getattr(importlib.import_module(module), name, None)
            if hasattr(cache, "cache_clear"):
                cache.cache_clear()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the published test sets, which are not part of this repository."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the published test sets are not there ({folder})")
    return folder
