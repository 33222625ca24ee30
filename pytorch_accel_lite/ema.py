"""An exponential moving average of a model's weights and buffers."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn


class ModelEma(nn.Module):
    """A copy of a model whose weights and buffers are an exponential moving average of the model's.

    After each update, ``average = decay * average + (1 - decay) * value``, for all floating-point parameters and
    buffers together; others, such as counts, are copied. Polyak and Juditsky, "Acceleration of Stochastic Approximation
    by Averaging" (1992), in the exponential form of TensorFlow's ``ExponentialMovingAverage``.

    :param model: the model, not wrapped for distributed training
    :param decay: fraction of the average that is kept at each update, from 0 to 1
    :param warmup: whether to increase the decay from 0.1 as ``min(decay, (1 + n) / (10 + n))`` with the number n of
        updates, so that the first weights are forgotten quickly (as in TensorFlow if given the number of updates)
    :ivar module: the averaged model, in evaluation mode
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, warmup: bool = False) -> None:
        super().__init__()
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise ValueError(f"decay={decay!r} must be a number from 0 to 1.")
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        for buffer in self.module.buffers():  # elements of an expanded buffer share memory
            buffer.data = buffer.contiguous()
        self.decay = decay
        self.warmup = warmup
        self.num_updates = 0

    def update(self, model: nn.Module) -> None:
        """Update the average from the model, after each update of the model."""
        averages: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        overridden = type(self).update_fn is not ModelEma.update_fn
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates)) if self.warmup else self.decay
        with torch.no_grad():
            for average, value in self._pairs(model):
                if overridden:
                    average.copy_(self.update_fn(average, value.to(average.device)))
                elif average.is_floating_point() or average.is_complex():
                    averages.append(average)
                    is_alike = value.dtype is average.dtype and value.device == average.device
                    values.append(value if is_alike else value.to(average.device, average.dtype))
                else:
                    average.copy_(value)
            if averages and decay == 0:
                torch._foreach_copy_(averages, values)
            elif averages and decay < 1:  # lerp would turn infinities, as in masks, into NaN
                torch._foreach_mul_(averages, decay)
                torch._foreach_add_(averages, values, alpha=1 - decay)
        vars(self)["num_updates"] += 1  # assigning attributes of a module takes ten times as long

    def update_fn(self, ema_model_weights: torch.Tensor, updated_model_weights: torch.Tensor) -> torch.Tensor:
        """Return the new average of one tensor. Override it to change the rule; it is then applied tensor by tensor."""
        return self.decay * ema_model_weights + (1 - self.decay) * updated_model_weights

    def set(self, model: nn.Module) -> None:
        """Restart the average from the model's current weights and buffers."""
        with torch.no_grad():
            for average, value in self._pairs(model):
                average.copy_(value)
        self.num_updates = 0

    def _pairs(self, model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(_tensors_of(self.module), _tensors_of(model), strict=True)


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module, each once, without names, which take torch most of the time."""
    found: dict[int, torch.Tensor] = {}
    seen = set()
    left: list[nn.Module | None] = [module]
    while left:
        part = left.pop()
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            left += [*part._modules.values()][::-1]
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None:
                    found[id(tensor)] = tensor
    return list(found.values())
