"""Functions of observations, which are arrays or tensors, or dicts of them."""

from collections.abc import Callable
from typing import Any

import torch as th


def map_observations(function: Callable[..., Any], *observations: Any) -> Any:
    """:return: the function's result for the arrays, or, in a dict, for those of each key"""
    if isinstance(observations[0], dict):
        return {key: function(*(part[key] for part in observations)) for key in observations[0]}
    return function(*observations)


def rows_of(observations: Any, rows: slice | th.Tensor) -> Any:
    """:return: these rows of observations of shape ``(n, ...)``, in the same form"""
    return map_observations(lambda part: part[rows], observations)
