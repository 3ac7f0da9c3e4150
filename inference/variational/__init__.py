"""Variational inference: coordinate ascent with restarts, and gradient steps."""
