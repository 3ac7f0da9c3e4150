"""What all tests share: repeatable hypothesis runs and the published test sets."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The suite compiles hundreds of small programs once each: this halves the time that XLA takes.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=1"
)
# And what one test process or notebook has compiled the others, and the next run, need not;
# commands leave the configuration alone where there is a folder for it.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the published test sets, which are not part of this repository."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the published test sets are not there ({folder})")
    return folder
