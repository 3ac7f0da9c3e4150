"""What every method's `run` has: a scene that is checked once, the time, a progress bar."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Concatenate, ParamSpec

from inference.result import Result
from models.errors import InputError
from models.program.sites import Program
from models.scenes import Scene, check_scene

Settings = ParamSpec("Settings")
Report = Callable[[int, int], None]
"""Called with (done, in all) now and then."""


def method(
    run: Callable[Concatenate[Program, Scene, Settings], Result],
) -> Callable[Concatenate[Program, Scene, Settings], Result]:
    """Check the scene before `run`, and write down afterwards how many seconds it took.

    `run` may treat a single scene as a batch of one; what comes back is the result of that one.
    """

    @functools.wraps(run)
    def whole(
        program: Program, scene: Scene, *args: Settings.args, **settings: Settings.kwargs
    ) -> Result:
        began = time.perf_counter()
        key = args[0] if args else settings.get("rng_key")
        if isinstance(key, int):
            raise InputError(f"rng_key must be a JAX key, got {key}; give jax.random.key({key})")
        result = run(program, check_scene(scene), *args, **settings)
        if result.is_batch and not scene.is_batch:
            result = result.take(0)
        return replace(result, seconds=time.perf_counter() - began)

    return whole


def reporter(progress_bar: bool | Report) -> Report:
    """What to call while a method runs: a bar on the screen, nothing, or the function given."""
    if callable(progress_bar):
        return progress_bar
    if not progress_bar:
        return lambda done, total: None
    from tqdm.auto import tqdm  # slow to import in a notebook

    bar = tqdm()

    def report(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return report
