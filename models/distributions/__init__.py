"""Distributions of this model: the match, its constraints, the likelihood."""
