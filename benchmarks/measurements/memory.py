"""Peak memory of coordinate ascent on a large batch, measured in a process of its own."""

import subprocess
import sys
from collections.abc import Iterator

NUM_SCENES = 100_000

_SCRIPT = """
import resource
import jax
from inference import cavi
from models.constellation import constellation
from capsules.experiments.generator import sample_scenes

scenes = sample_scenes({draws}, seed=5).take(slice({scenes}))
result = cavi.run(constellation, scenes, jax.random.key(0), num_restarts=1)
assert len(result) == {scenes}
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, result.seconds)
"""


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Peak resident memory and scenes a second, one start each."""
    script = _SCRIPT.format(scenes=NUM_SCENES, draws=int(1.2 * NUM_SCENES))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    gibibytes, seconds = map(float, done.stdout.split())
    rate = NUM_SCENES / seconds
    yield (
        f"peak memory, {NUM_SCENES:,} scenes",
        "",
        f"{gibibytes:.2f} GiB",
        f"{rate:,.0f} scenes/s",
    )
