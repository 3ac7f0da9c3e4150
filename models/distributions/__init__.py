"""Distributions of this model: the match, its constraints, the likelihood."""

from models.distributions import divergences, transforms  # noqa: F401  registered with NumPyro
