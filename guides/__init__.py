"""Approximations: the mean-field family, its coordinate updates and ELBO; an amortised guide."""

from guides.guide import mean_field_guide

__all__ = ["mean_field_guide"]
