"""Tools for posteriors: densities, symmetries, relabelling, draws."""
