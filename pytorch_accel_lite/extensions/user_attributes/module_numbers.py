"""Numbers and tensors that modules hold in plain attributes, which are in no ``state_dict()`` and so in no state."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from pytorch_accel_lite.extending import TrainerLike

#: A number, or the identity and version of a tensor.
Mark: TypeAlias = float | tuple[int, int]


def marks_in_modules(trainer: TrainerLike) -> dict[str, Mark]:
    """Return what shows whether a number or tensor in the model and the loss function has changed, by path.

    Modules with ``get_extra_state()`` save what matters themselves.
    """
    roots = {"model": trainer.get_model(keep_torch_compile=False), "loss_func": trainer.loss_func}
    return {
        f"{root}.{part}.{name}".replace("..", "."): mark
        for root, whole in roots.items()
        if isinstance(whole, nn.Module)
        for part, module in whole.named_modules()
        if type(module).get_extra_state is nn.Module.get_extra_state
        for name, value in vars(module).items()
        if (mark := _mark_of(value)) is not None
    }


def _mark_of(value: object) -> Mark | None:
    if type(value) in (int, float):
        return value  # type: ignore[return-value]
    is_computed = isinstance(value, torch.Tensor) and value.grad_fn is not None  # from parameters, as by pruning
    if isinstance(value, torch.Tensor) and not is_computed and not value.is_inference():
        return id(value), value._version
    return None
