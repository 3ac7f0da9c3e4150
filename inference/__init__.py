"""How it is computed: one file for each method, all ending in `run`, all returning a `Result`."""
