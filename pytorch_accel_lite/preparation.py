"""Giving the model and the optimizer to Accelerate for a run, and taking them back after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Where Accelerate adds nothing to an optimizer but bookkeeping, the user's own is stepped directly.
_PLAIN = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}
_MARKS = ("_is_accelerate_prepared", "_original_forward")


def unwrap(model: nn.Module, keep_torch_compile: bool = True) -> nn.Module:
    """Return the model without its ``DistributedDataParallel`` wrapper, and without ``torch.compile``'s if asked.

    Unlike Accelerate's function of this purpose it changes no wrapper, so it can be used in the middle of a run.
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner, nn.Module) and (not keep_torch_compile or isinstance(inner, DistributedDataParallel)):
            model = inner
        else:
            return model


class Preparation:
    """A model and an optimizer while Accelerate has them.

    :param training: prepare for training; otherwise only place the model and apply mixed precision
    :ivar model: the prepared model
    :ivar optimizer: the optimizer to step: the user's own where Accelerate adds nothing, else the prepared one
    :ivar is_plain: whether Accelerate adds nothing to backward pass and optimizer
    :ivar can_unwrap: whether the module inside the wrapper works alone (not with sharded weights)
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any, training: bool) -> None:
        self._accelerator = accelerator
        self._given = model, optimizer
        self._forward = vars(model).get("forward")
        # Its lists of what was prepared. free_memory() would empty them of what others prepared too, and collect
        # garbage, which takes longer than many a run.
        self._held = [(held, len(held)) for held in (accelerator._models, accelerator._optimizers)]
        self.can_unwrap = accelerator.distributed_type in _PLAIN
        self.is_plain = self.can_unwrap and accelerator.scaler is None
        if training or not self.can_unwrap:
            self.model, self.optimizer = accelerator.prepare(model, optimizer)
        else:
            self.model, self.optimizer = accelerator.prepare_model(model, evaluation_mode=True), optimizer
        if self.is_plain:
            self.optimizer = optimizer

    def can_rewrap(self, model: nn.Module) -> bool:
        """Whether :meth:`rewrap` can be used on the prepared model: not with sharded weights, nor once compiled."""
        inner = getattr(model, "_orig_mod", None)
        return self.can_unwrap and not isinstance(inner, DistributedDataParallel)

    def rewrap(self, model: nn.Module) -> nn.Module:
        """Return the model in a new ``DistributedDataParallel``, if it is in one.

        The wrapper averages the gradients of the parameters that were trained when it was made, and no others.
        """
        if not isinstance(model, DistributedDataParallel):
            return model
        handler = self._accelerator.ddp_handler
        for name in ("reducer", "logger"):  # takes the old one's hooks off the parameters
            delattr(model, name)
        wrapped = DistributedDataParallel(
            model.module,
            device_ids=model.device_ids,
            output_device=model.output_device,
            **({} if handler is None else handler.to_kwargs()),
        )
        if handler is not None:
            handler.register_comm_hook(wrapped)
        vars(wrapped)["_is_accelerate_prepared"] = True
        models = self._accelerator._models
        models[:] = [wrapped if held is model else held for held in models]
        if self.model is model:
            self.model = wrapped
        return wrapped

    def release(self, model: nn.Module) -> tuple[nn.Module, Any]:
        """Return the model, which a callback may have replaced, and the optimizer as the user knows them.

        Sharded engines (FSDP, DeepSpeed) stay as they are: their weights exist in no other form.
        """
        if not self.can_unwrap:
            return model, self.optimizer
        given, optimizer = self._given
        for module in (given, unwrap(given, keep_torch_compile=False)):
            for mark in _MARKS:
                vars(module).pop(mark, None)
        if self._forward is None:
            vars(given).pop("forward", None)
        else:
            vars(given)["forward"] = self._forward
        for held, length in self._held:
            del held[length:]
        released = unwrap(model)
        if vars(self.model).pop("_is_accelerate_prepared", None) and getattr(released, "_orig_mod", None) is given:
            released = given  # Accelerate itself had compiled it
        return released, optimizer


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode, and each of its modules back to its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
