"""Measurements and studies: `python -m benchmarks`, `make results`."""
