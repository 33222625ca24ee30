"""Modules inside their wrappers: unwrapping models, and the names in their states."""

from __future__ import annotations

import re

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.base.types import StateDict

_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")  # a whole part of a name


def without_adapters(model: nn.Module) -> nn.Module:
    """Return the model inside adapters (PEFT); a model without adapters is returned as it is."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


def unwrap(model: nn.Module, keep_torch_compile: bool = True) -> nn.Module:
    """Return the model without its ``DistributedDataParallel`` wrapper.

    Unlike Accelerate's function, it modifies no wrapper, so it can be used in the middle of a run.

    Args:
        keep_torch_compile: whether to keep the wrapper of ``torch.compile``
    """
    while True:
        inner = getattr(model, "_orig_mod", None) if "_orig_mod" in getattr(model, "_modules", ()) else None
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner, nn.Module) and (not keep_torch_compile or isinstance(inner, DistributedDataParallel)):
            model = inner
        else:
            return model


def without_compile(state: StateDict) -> StateDict:
    """Remove the prefixes of ``torch.compile`` from the names in a state."""
    return {_COMPILED.sub("", key): value for key, value in state.items()}
