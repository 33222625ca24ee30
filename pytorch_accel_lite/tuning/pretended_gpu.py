"""Letting a CPU compute like a GPU, as far as the memory of fake tensors is concerned."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

#: What autocast computes in float32 on GPUs, but not on CPUs, and what takes memory.
_IN_FLOAT32 = {
    functional.cross_entropy,
    functional.nll_loss,
    functional.log_softmax,
    functional.softmax,
    functional.layer_norm,
    functional.group_norm,
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.kl_div,
    torch.log_softmax,
    torch.softmax,
    torch.Tensor.log_softmax,
    torch.Tensor.softmax,
}


class PretendedGpu(TorchFunctionMode):
    """Calls functions in the way that takes as much memory on a CPU as their usual way takes on a GPU.

    Attention with dropout does not materialise its weights there, and autocast computes more functions in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        kwargs = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        elif func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(map(_in_float32, args))
            kwargs = {name: _in_float32(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _in_float32(value: Any) -> Any:
    is_reduced = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_reduced else value
