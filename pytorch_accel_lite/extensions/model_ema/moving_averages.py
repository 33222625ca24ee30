"""An exponential moving average of a model's weights and buffers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.modules_and_devices import is_frozen_and_quantised, local_shard, reshard
from pytorch_accel_lite.extension_tools.runs_and_steps import replaced

_kind_of = attrgetter("dtype", "device", "requires_grad")
#: An averaged tensor, the tensor of the model, and whether that is trained.
Pair = tuple[torch.Tensor, torch.Tensor, bool]


class ModelEma(nn.Module):
    """A copy of a model whose weights and buffers are an exponential moving average of the model's.

    After each update, ``average = decay * average + (1 - decay) * value``, for all floating-point parameters and
    buffers together (as ``average + (1 - decay) * (value - average)`` for parameters that are trained, which is one
    operation and rounds less). Other tensors, such as counts, are copied. Rounding errors do not accumulate: the
    average of a value that does not change does not change either. Therefore, buffers and frozen parameters in half
    precision are averaged in float32. Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging"
    (1992), in the exponential form of TensorFlow's ``ExponentialMovingAverage``.

    Args:
        model: the model, not wrapped for distributed training
        decay: fraction of the average that is kept at each update, from 0 to 1
        warmup: whether to increase the decay from 0.1 as ``min(decay, (1 + n) / (10 + n))`` with the number n of
            updates, so that the first weights are forgotten quickly (as in TensorFlow if given the number of updates)

    Attributes:
        module: the averaged model, in evaluation mode
        num_updates: number of updates of the average so far
    """

    _cached: SortedPairs | None = None

    def __init__(self, model: nn.Module, decay: float = 0.9999, warmup: bool = False) -> None:
        super().__init__()
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise ValueError(f"decay={decay!r} must be a number from 0 to 1.")
        _warn_of_rounding(model, decay)
        self.module = self._copy(model)
        self.decay = decay
        self.warmup = warmup
        self.num_updates = 0

    def _copy(self, model: nn.Module) -> nn.Module:
        # Quantised weights are never trained. Modules with 8-bit weights hold parts of them (CB), of which the copy
        # needs its own.
        quantised = filter(is_frozen_and_quantised, model.parameters())
        shared = {id(weight): weight for weight in quantised if not hasattr(weight, "CB")}
        module = copy.deepcopy(model, shared).eval().requires_grad_(False)
        for buffer in module.buffers():  # elements of an expanded buffer share memory
            buffer.data = buffer.contiguous()
        return module

    def update(self, model: nn.Module) -> None:
        """Update the average from the model, after each update of the model."""
        with torch.no_grad():
            if type(self).update_fn is ModelEma.update_fn:
                self._update_together(model)
            else:
                self._update_one_by_one(model)
        vars(self)["num_updates"] += 1  # assigning attributes of a module takes ten times as long

    @property
    def _next_decay(self) -> float:
        return min(self.decay, (1 + self.num_updates) / (10 + self.num_updates)) if self.warmup else self.decay

    def _update_one_by_one(self, model: nn.Module) -> None:
        with replaced(self, decay=self._next_decay):
            for average, value, _ in self._pairs(model):
                is_count = not (average.is_floating_point() or average.is_complex())
                average.copy_(value if is_count else self.update_fn(average, value.to(average.device)))

    def _update_together(self, model: nn.Module) -> None:
        decay = self._next_decay
        pairs = self._sorted_pairs(model)
        for average, value in pairs.counts:
            average.copy_(value)
        if decay == 0:
            for averages, values in filter(any, (pairs.learned, *pairs.others.values())):
                torch._foreach_copy_(averages, values)
        elif decay < 1:
            if pairs.learned[0]:
                torch._foreach_lerp_(*pairs.learned, 1 - decay)
            for dtype, (averages, values) in pairs.others.items():
                # Buffers may be infinite, as in masks; lerp would make them NaN.
                weight, added = _factors(decay, dtype)
                if dtype.itemsize > 2:
                    torch._foreach_mul_(averages, weight)
                    torch._foreach_add_(averages, values, alpha=added)
                    continue
                for average, value in zip(averages, values, strict=True):
                    torch.add(average.float().mul_(weight), value, alpha=added, out=average)

    def _sorted_pairs(self, model: nn.Module) -> SortedPairs:
        pairs = self._cached
        if pairs is None or not pairs.match(model):
            pairs = vars(self)["_cached"] = SortedPairs(model, self.module, self._pairs(model))
        return pairs

    def __getstate__(self) -> dict[str, object]:
        """Return the state for copying and pickling, without the tensors of the model."""
        return {**vars(self), "_cached": None}

    def update_fn(self, ema_model_weights: torch.Tensor, updated_model_weights: torch.Tensor) -> torch.Tensor:
        """Return the new average of one tensor. An override changes the rule.

        It is called for each tensor of floating-point or complex numbers. ``self.decay`` is then the decay of this
        update, which is smaller during the warm-up.
        """
        return self.decay * ema_model_weights + (1 - self.decay) * updated_model_weights

    def set(self, model: nn.Module) -> None:
        """Restart the average from the model's current weights and buffers."""
        with torch.no_grad():
            for average, value, _ in self._pairs(model):
                average.copy_(value)
        self.num_updates = 0

    def _pairs(self, model: nn.Module) -> Iterator[Pair]:
        """Yield the tensors of the average and of the model side by side, except for quantised weights."""
        _follow_buffers(self.module, model)
        averages, values = (dict(chain(each.named_parameters(), each.named_buffers())) for each in (self.module, model))
        by_name = averages.keys() == values.keys()  # unless the model is wrapped: then in their order
        averaged = [averages[name] for name in values] if by_name else [*averages.values()]
        pairs = zip(averaged, values.values(), [value.requires_grad for value in values.values()], strict=True)
        return (pair for pair in pairs if not is_frozen_and_quantised(pair[1]))


def _follow_buffers(average: nn.Module, model: nn.Module) -> None:
    """Give an average the buffers that a forward pass of the model has set, or given another shape, such as caches."""
    for part, of_model in zip(average.modules(), model.modules(), strict=True):
        for name, buffer in of_model._buffers.items():
            averaged = part._buffers.get(name)
            if buffer is None or averaged is None or averaged.shape != buffer.shape:
                part._buffers[name] = None if buffer is None else buffer.detach().clone()


def _warn_of_rounding(model: nn.Module, decay: float) -> None:
    """Warn if the dtype of the trained weights, and so of the average, is too coarse for the change by one update."""
    trained = (p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point())
    coarsest = max(trained, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
    if 0 < 1 - decay < torch.finfo(coarsest).eps:
        warn_outside(
            f"decay={decay}: the average is kept in {str(coarsest).removeprefix('torch.')}, like the weights, where "
            f"changes by {1 - decay:.2g} of a difference are lost in rounding, so it hardly moves. Lower the decay, or "
            "keep the weights in float32 and train with Accelerator(mixed_precision='bf16')."
        )


def _factors(decay: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return ``decay`` and ``1 - decay`` such that both are exact in a type, or in float32 if that is wider.

    Otherwise their rounded sum is not exactly 1, and each update would change even an average that equals the value.
    """
    resolution = 2 / min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    added = round((1 - decay) * resolution) / resolution
    return 1 - added, added


class SortedPairs:
    """The tensors of an average and of its model, in lists for an update.

    Collecting and sorting the tensors takes longer than the update of a small model, so the lists are reused as long as
    both modules have the same tensors.

    Args:
        model: the model that is averaged
        average: the module that holds the average
        pairs: for each tensor: the average, the value in the model, and whether it is a trained parameter

    Attributes:
        learned: averages, and the trained parameters of the model
        others: averages, and other floating-point tensors of the model, by type
        counts: pairs of tensors of other types, which are copied
    """

    def __init__(self, model: nn.Module, average: nn.Module, pairs: Iterable[Pair]) -> None:
        self.learned: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self.others: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self.counts: list[tuple[torch.Tensor, torch.Tensor]] = []
        are_converted = False
        for averaged, value, is_learned in pairs:
            dtype = averaged.dtype
            if not (dtype.is_floating_point or dtype.is_complex):
                self.counts.append((averaged, value))
                continue
            if value.dtype is not dtype or value.device != averaged.device:
                value = value.to(averaged.device, dtype)
                are_converted = True
            averages, values = self.learned if is_learned else self.others.setdefault(dtype, ([], []))
            averages.append(averaged)
            values.append(value)
        parts = [] if are_converted else [*model.modules(), *average.modules()]
        self._tables: list[dict[str, Any]] = []
        for part in parts:
            self._tables += [part._parameters, part._buffers, part._modules]
        self._tensors = [*chain(*self.learned, *chain(*self.others.values()))]
        self._before = self._identities()

    def match(self, model: nn.Module) -> bool:
        """Whether the lists still have all tensors of the average and the model, with the same types and devices."""
        is_of_model = bool(self._tables) and self._tables[0] is model._parameters
        return is_of_model and self._before == self._identities()

    def _identities(self) -> tuple[list[int], list[object]]:
        """Return the identities of the modules' contents, and the kinds of the tensors."""
        tensors = chain.from_iterable(map(dict.values, self._tables))
        return [*map(id, tensors)], [*map(_kind_of, self._tensors)]


class ShardedEma(ModelEma):
    """A ``ModelEma`` of a sharded model.

    Attributes:
        module: holds the averaged weights, with the names and the sharding of the model's weights. It cannot be called:
            use the model itself within ``in_place_of()``.
    """

    def _copy(self, model: nn.Module) -> nn.Module:
        reshard(model)
        return _copy_of_tensors(model, {})

    def _pairs(self, model: nn.Module) -> Iterator[Pair]:
        reshard(model)
        return (
            (local_shard(average), local_shard(value), learned) for average, value, learned in super()._pairs(model)
        )

    def _sorted_pairs(self, model: nn.Module) -> SortedPairs:
        return SortedPairs(model, self.module, self._pairs(model))  # not reused: local shards are new tensors each time

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights for a block, then restore its weights exactly."""
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


def _copy_of_tensors(module: nn.Module, copies: dict[int, nn.Module | nn.Parameter]) -> nn.Module:
    """Return a module with copies of another module's tensors, in the same order, but no behaviour.

    Args:
        copies: the copies so far, by the ``id`` of the originals, so that shared tensors stay shared
    """
    copy = nn.Module()
    copies[id(module)] = copy
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if id(parameter) not in copies:
            copies[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
        copy.register_parameter(name, copies[id(parameter)])  # type: ignore[arg-type]
    persistent = module.state_dict().keys()
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        copy.register_buffer(name, buffer.detach().clone(), persistent=name in persistent)
    for name, child in module.named_children():
        copy.add_module(name, copies.get(id(child)) or _copy_of_tensors(child, copies))  # type: ignore[arg-type]
    return copy.eval()
