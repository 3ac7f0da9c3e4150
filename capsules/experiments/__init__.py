"""The constellations experiment of the paper: its scenes, runs and tables."""
