"""What the project takes from ArviZ, under one set of names for ArviZ 0.23 and 1.x.

ArviZ 1.x is three packages, of which arviz-base and arviz-stats are needed here, and keeps results
in xarray's DataTree in place of InferenceData. All of it is imported where it is used: the import
is slow, and the commands start without it.
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
    """Names of the dimensions of a variable, without chain and draw."""
    attrs: Mapping[str, Any] | None = None


def make_data(groups: Mapping[str, Group], coords: Mapping[str, Any]) -> Data:
    """Groups of variables as ArviZ's data structure; coordinates are shared by all groups."""
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
    """`az.summary`, without its warnings for what never changes.

    An entry of `match` that is the same in all draws has no R-hat: 0 / 0, of which NumPy warns.
    Its R-hat is NaN here as it is there.
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
    """Effective number of draws in the bulk of the distribution."""
    return float(_statistics().ess(values))


def mcse(values: Chains) -> float:
    """Standard error of the mean of the draws."""
    return float(_statistics().mcse(values, method="mean"))


def pareto_k(log_weights: Float[np.ndarray, " draws"]) -> float:
    """Shape of the tail of some importance weights."""
    if not _is_new():
        import arviz as az

        return float(az.psislw(log_weights.copy())[1])
    from arviz_stats.base import array_stats

    return float(array_stats.psislw(-log_weights)[1])  # which negates what it is given


def _statistics() -> Any:
    if _is_new():
        import arviz_stats

        return arviz_stats
    import arviz

    return arviz


def _is_new() -> bool:
    """Whether ArviZ 1.x is there, as a whole or as its parts alone."""
    try:
        import arviz
    except ImportError:
        return True
    return not hasattr(arviz, "InferenceData")
