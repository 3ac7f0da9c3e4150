"""Timing: the best of a few repetitions, after compilation."""

import time
from collections.abc import Callable
from typing import Any

import jax


def best_time(function: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds of the fastest call, waiting for JAX to finish; the first call is not counted."""
    jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return min(times)


def row(what: str, plain: float, ours: float, unit: float = 1e-3) -> tuple[str, str, str, str]:
    """A row of the table, in milliseconds."""
    ratio = plain / ours
    shown = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"
    return (what, f"{plain / unit:,.3f} ms", f"{ours / unit:,.4f} ms", shown)
