"""Speed and memory against a reference, within one run: `python -m benchmarks`."""

from benchmarks.measurements import (
    cavi,
    endurance,
    exact,
    latency,
    memory,
    methods,
    throughput,
    walk,
)
from benchmarks.report import Benchmark, speed

MEASUREMENTS: dict[str, Benchmark] = {
    name: speed(name, module.rows)
    for name, module in {
        "cavi": cavi,
        "endurance": endurance,
        "exact": exact,
        "latency": latency,
        "memory": memory,
        "methods": methods,
        "throughput": throughput,
        "walk": walk,
    }.items()
}
