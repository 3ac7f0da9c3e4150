"""What is approximated: the mean-field family, its coordinate updates, its closed-form ELBO."""

from guides.guide import mean_field_guide

__all__ = ["mean_field_guide"]
