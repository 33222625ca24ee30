"""The states of models and optimizers as one process would have them, also when their weights are sharded (FSDP2).

Sharded tensors are gathered, so what any number of processes saved, sharded or not, any other can load. The host memory
of a process that saves must hold all weights and the optimizer's state. Gathering is a collective: all processes call.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from pytorch_accel_lite.checkpoint.weights import canonical_state, fit_state


def full_state_dict(state: Any, keep: bool) -> Any:
    """Return a state with every sharded tensor made whole, in host memory.

    :param keep: ``False`` on processes that will not write it: there, sharded tensors become ``None``
    """

    def whole(tensor: torch.Tensor) -> torch.Tensor | None:
        if not hasattr(tensor, "full_tensor"):
            return tensor
        full = tensor.full_tensor()
        return full.to("cpu") if keep else None

    return tree_map_only(torch.Tensor, whole, state)


gathered = full_state_dict


def model_state(model: nn.Module, keep: bool = True) -> dict[str, Any]:
    """Return the whole state of a model by name."""
    return dict(full_state_dict(dict(canonical_state(model)), keep))


def fit_model_state(
    model: nn.Module, state: Mapping[str, Any], source: str | os.PathLike[str], strict: bool = True
) -> dict[str, Any]:
    """Return a whole state as ``model.load_state_dict`` takes it, also when the model is sharded; nothing is loaded.

    :raises ValueError: when it does not fit; lists missing and unexpected keys and differing shapes
    """
    own = model.state_dict()
    return {name: _sharded_like(own[name], value) for name, value in fit_state(model, state, source, strict).items()}


def load_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load the whole state of an optimizer, whose parameters may be sharded.

    :raises ValueError: when it does not fit the optimizer's groups and parameters
    """
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    sharded = {
        index: {
            # A step count is not sharded; what has the shape of the parameter is.
            name: _sharded_like(parameters[index], value) if getattr(value, "ndim", 0) else value
            for name, value in values.items()
        }
        if index in parameters
        else values
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": sharded})


def _sharded_like(own: Any, value: Any) -> Any:
    if not hasattr(own, "full_tensor") or not isinstance(value, torch.Tensor):
        return value
    from torch.distributed.tensor import distribute_tensor  # takes longer to import than all else here

    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)
