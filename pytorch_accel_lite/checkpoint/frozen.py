"""Leaving frozen weights out of what is saved, and checking that a model that loads it has the same ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytorch_accel_lite.base.inspection import sums_of_bits
from pytorch_accel_lite.checkpoint.weights import full_state_dict, listed, without_compile


def fingerprints(tensors: Mapping[str, Any]) -> dict[str, int]:
    """Return a number for each tensor, by name, that changes with any of its bits.

    Skips tensors without values, and sparse ones. A collective operation if they are sharded.
    """
    found = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor) and _has_values(value)}
    whole = (full_state_dict(value, keep=True) for value in found.values())  # one at a time
    return dict(zip(found, sums_of_bits(whole), strict=True))


def _has_values(tensor: torch.Tensor) -> bool:
    return not (tensor.is_meta or is_lazy(tensor)) and tensor.layout is torch.strided


def model_fingerprints(model: nn.Module) -> dict[str, int]:
    """Return the fingerprints of all parameters of a model. A collective operation if they are sharded."""
    return fingerprints(_parameters(model))


def check_has_trainable(model: nn.Module) -> None:
    """Check that a model has something to save once its frozen parameters are left out.

    :raises ValueError: if all of its parameters are frozen
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"trainable_only=True would leave out all weights: no parameter of {type(model).__name__} requires a "
            "gradient. Save all weights, or unfreeze the parameters that were trained."
        )


def leave_out_frozen(
    model: nn.Module, state: dict[str, Any], created: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Remove the frozen parameters from the full state of a model, and return their fingerprints by name.

    Buffers stay, as training changes them even if everything around them is frozen.

    :param created: fingerprints of weights that the loading program will create itself, such as pretrained ones; other
        weights stay. By default, all frozen parameters are removed.
    """
    frozen = {name for name, parameter in _parameters(model).items() if not parameter.requires_grad}
    if created is not None:
        now = fingerprints({name: state[name] for name in frozen})
        frozen = {name for name, number in now.items() if created.get(name) == number}
    # Quantised weights have further entries, such as "weight.absmax".
    names = [name for name in state if name in frozen or not frozen.isdisjoint(_owners(name))]
    return fingerprints({name: state.pop(name) for name in names})


def describe_other_weights(model: nn.Module, left_out: Mapping[str, int], source: str | os.PathLike[str]) -> str:
    """Describe which weights of a model are not those that were left out; empty if it has all of them.

    A collective operation if they are sharded.
    """
    own = {name: value for name, value in _parameters(model).items() if name in left_out}
    found = fingerprints(own)
    others = [name for name, number in left_out.items() if found.get(name, number) != number]
    if not others:
        return ""
    return (
        f"{os.fspath(source)!r} holds only what was trained, and the frozen weights of {type(model).__name__} are not "
        f"those that it was trained with. They differ in {listed(others)}."
    )


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return without_compile(dict(model.named_parameters(remove_duplicate=False)))


def _owners(name: str) -> set[str]:
    """Return all proper prefixes of a name: ``a`` and ``a.b`` of ``a.b.c``."""
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}
