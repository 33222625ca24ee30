"""Weights of mixtures: a number for each dataset, by name."""

from __future__ import annotations

from collections.abc import Mapping

from pytorch_accel_lite.extension_tools.arguments_and_errors import check_range, did_you_mean


def check_mixture_weights(
    weights: Mapping[str, float], names: list[str], may_be_zero: bool = False
) -> dict[str, float]:
    """Return the weights in the order of the datasets, after checking that each dataset has a positive one.

    Args:
        may_be_zero: whether some, but not all, may be 0
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a dict of numbers by name of the dataset, not {type(weights).__name__}.")
    for name, value in weights.items():
        if name not in names:
            existing = ", ".join(map(repr, names))
            raise ValueError(
                f"weights has {name!r}, which is not one of the datasets {existing}.{did_you_mean(str(name), names)}"
            )
        if not (may_be_zero and value == 0):
            check_range(f"weights[{name!r}]", value, above=0)
    for name in names:
        if name not in weights:
            raise ValueError(f"weights has nothing for the dataset {name!r}. Give it a weight, or leave it out.")
    if not any(weights.values()):
        raise ValueError(f"weights={dict(weights)!r} are all 0. Give at least one dataset a weight.")
    return {name: weights[name] for name in names}
