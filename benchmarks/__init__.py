"""Speed, measured as ratios within one run on one machine: `python -m benchmarks`."""
