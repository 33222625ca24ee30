"""An exponential moving average of sharded weights: each process averages its own shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pytorch_accel_lite.base.modules import local, reshard
from pytorch_accel_lite.optimizers.weight_averages import ModelEma, SortedPairs, warn_of_rounding


class ShardedEma(ModelEma):
    """A :class:`~pytorch_accel_lite.optimizers.weight_averages.ModelEma` of a sharded model.

    :ivar module: holds the averaged weights under the names of the model's, sharded like those. It cannot be called:
        use the model itself within :meth:`in_place_of`.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, warmup: bool = False) -> None:
        nn.Module.__init__(self)
        warn_of_rounding(model, decay)
        reshard(model)
        self.module = _copy_of_tensors(model, {})
        self.decay = decay
        self.warmup = warmup
        self.num_updates = 0

    def _pairs(self, model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
        reshard(model)
        return ((local(average), local(value), learned) for average, value, learned in super()._pairs(model))

    def _sorted_pairs(self, model: nn.Module) -> SortedPairs:
        return SortedPairs(self._pairs(model))  # each time: local shards are made as they are asked for

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights for a block; afterwards it has exactly its own again."""
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    def _exchange(self, model: nn.Module) -> None:
        with torch.no_grad():
            for average, value, _ in self._pairs(model):
                before = value.clone()
                value.copy_(average)
                average.copy_(before)


def _copy_of_tensors(module: nn.Module, made: dict[int, nn.Module | nn.Parameter]) -> nn.Module:
    """Return a module that has copies of the tensors of another one, in the same order, but no behaviour.

    :param made: the copies so far, by the identity of what they are copies of: what is shared stays shared
    """
    copy = nn.Module()
    made[id(module)] = copy
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
        copy.register_parameter(name, made[id(parameter)])  # type: ignore[arg-type]
    persistent = module.state_dict().keys()
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        copy.register_buffer(name, buffer.detach().clone(), persistent=name in persistent)
    for name, child in module.named_children():
        copy.add_module(name, made.get(id(child)) or _copy_of_tensors(child, made))  # type: ignore[arg-type]
    return copy.eval()
