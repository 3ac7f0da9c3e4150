"""The functions that the project uses from ArviZ, under the same names for ArviZ 0.23 and 1.x.

ArviZ 1.x is three packages, of which arviz-base and arviz-stats are needed here; it stores results
in xarray's DataTree instead of InferenceData. ArviZ is imported inside functions because the import
is slow and most commands do not need it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

Chains = Float[np.ndarray, "chains draws"]
Data = Any
"""An `arviz.InferenceData` (ArviZ 0.23) or an `xarray.DataTree` (1.x)."""


class Group(NamedTuple):
    """A group of variables."""

    variables: Mapping[str, Any]
    dims: Mapping[str, Sequence[str]]
    """Names of the dimensions of each variable, without chain and draw."""
    attrs: Mapping[str, Any] | None = None


def make_data(groups: Mapping[str, Group], coords: Mapping[str, Any]) -> Data:
    """Make ArviZ's data structure from groups of variables, which share coordinates."""
    if not _is_new():
        import arviz as az

        data = az.InferenceData()
        for name, group in groups.items():
            named: dict[str, Any] = {name: group.variables}
            data.extend(az.from_dict(**named, coords=coords, dims=group.dims))
            data[name].attrs.update(group.attrs or {})
        return data
    from arviz_base import from_dict
    from xarray import DataTree

    def dataset(name: str, group: Group) -> Any:
        tree = from_dict({name: dict(group.variables)}, coords=coords, dims=group.dims)
        return tree[name].to_dataset().assign_attrs(group.attrs or {})

    return DataTree.from_dict({name: dataset(name, group) for name, group in groups.items()})


def summary(data: Data, **options: Any) -> Any:  # a pandas.DataFrame
    """`az.summary` without NumPy's warnings for constants, such as many entries of `match`.

    Their R-hat is 0 / 0; it is NaN here as in `az.summary`.
    """
    if _is_new():
        from arviz_stats import summary as table
    else:
        from arviz import summary as table

    with np.errstate(divide="ignore", invalid="ignore"):
        return table(data, **options)


def rhat(values: Chains) -> float:
    """Rank-normalised split R-hat."""
    return float(_statistics().rhat(values))


def ess(values: Chains) -> float:
    """Bulk effective sample size."""
    return float(_statistics().ess(values))


def mcse(values: Chains) -> float:
    """Monte Carlo standard error of the mean of the draws."""
    return float(_statistics().mcse(values, method="mean"))


def pareto_k(log_weights: Float[np.ndarray, " draws"]) -> float:
    """Pareto k of importance weights, the shape of their tail."""
    if not _is_new():
        import arviz as az

        return float(az.psislw(log_weights.copy())[1])
    from arviz_stats.base import array_stats

    return float(array_stats.psislw(-log_weights)[1])  # psislw negates its argument


def _statistics() -> Any:
    if _is_new():
        import arviz_stats

        return arviz_stats
    import arviz

    return arviz


def _is_new() -> bool:
    """Whether ArviZ 1.x is installed, as a whole or only its component packages."""
    try:
        import arviz
    except ImportError:
        return True
    return not hasattr(arviz, "InferenceData")
