"""Gradients of an accumulation window: those of its mean loss over samples, however they were batched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator

from pytorch_accel_lite.devices import accumulation_dtype
from pytorch_accel_lite.distributed import Ranks

NOTHING = nullcontext()
Count = int | float | torch.Tensor
_NO_GRADIENT = -1
_DENSE = 0  # a sparse gradient has at least one sparse dimension


class GradientWindow:
    """Weighs the micro-batches of one update, so that their gradients add up to those of the whole window.

    Each loss is a mean over a number of items (samples, or ``num_items_in_batch``). It is scaled by its share of a
    *nominal* window, in which every micro-batch of every rank has the same size; just before clipping, the
    gradients are multiplied by nominal/true size, which is 1 for all but ragged windows. That is exact for
    micro-batches of unequal size, a short last window and any number of ranks, whose gradients DDP averages.

    :param device: where gradients are
    :param steps: micro-batches of each rank in a full window
    :param batch_size: samples in a nominal micro-batch of one rank
    """

    def __init__(self, ranks: Ranks, device: torch.device, steps: int, batch_size: int) -> None:
        self._ranks = ranks
        self._device = device
        self.steps = steps
        self._batch_size = batch_size
        self._nominal: Count = 0
        self._true: Count = 0
        #: Whether micro-batches have been added since the last update.
        self.is_open = False
        #: Whether batches are split into parts, which are weighed then even on one process.
        self.is_split = False
        #: Items in a nominal micro-batch, fixed at the first batch that returns ``num_items_in_batch``.
        self.items_per_batch: float | None = None

    def scale(self, loss: torch.Tensor, num_samples: int, total_samples: int, items: Count | None) -> torch.Tensor:
        """Return the loss weighted by its share of the window.

        :param num_samples: samples of this rank's micro-batch; 0 for a batch that only keeps ranks in step
        :param total_samples: samples of this micro-batch over all ranks
        :param items: what the loss is a mean over, when these are not samples
        """
        self.is_open = True
        if self.steps == 1 and self._ranks.world_size == 1 and not self.is_split:
            return loss
        local: Count = num_samples
        nominal: float = self._batch_size
        if items is None:
            self._true = self._true + total_samples
        else:
            local = _as_weight(items) if num_samples else 0
            nominal = self._nominal_items(local)
            self._true = self._true + local
        self._nominal = nominal * self.steps * self._ranks.world_size
        return loss * (local / (nominal * self.steps))

    @property
    def counts(self) -> tuple[Count, Count, bool]:
        """What has been added since the last update; to be restored after a step that failed."""
        return self._nominal, self._true, self.is_open

    @counts.setter
    def counts(self, counts: tuple[Count, Count, bool]) -> None:
        self._nominal, self._true, self.is_open = counts

    def _nominal_items(self, items: Count) -> float:
        if self.items_per_batch is None:  # once in a run: the only read of the device
            self.items_per_batch = max(self._ranks.sum([float(items)])[0] / self._ranks.world_size, 1.0)
        return self.items_per_batch

    def finish(self, optimizer: Any) -> None:
        """Correct the gradients when the window's true size differs from the nominal one, and begin the next."""
        nominal = self._nominal
        true = self._true
        self.is_open = False
        self._nominal = self._true = 0
        if self.items_per_batch is not None and self._ranks.world_size > 1:
            device = self._device
            mine = torch.zeros(
                (), dtype=accumulation_dtype(device), device=device
            )  # a number is not copied there: that waits
            true = self._ranks.sum_on_device(mine + _as_weight(true))
        if not isinstance(true, torch.Tensor) and true == nominal:
            return
        factor: Any = nominal / true
        gradients = [p.grad for p in optimized_parameters(optimizer) if p.grad is not None]
        dense = [g for g in gradients if g.layout == torch.strided]
        if dense:
            torch._foreach_mul_(dense, factor)
        for gradient in gradients:
            if gradient.layout != torch.strided:
                gradient.mul_(factor)


def gradient_sync(accelerator: Accelerator, model: torch.nn.Module, ends_window: bool) -> AbstractContextManager[Any]:
    """Within a window, gradients stay on their rank; they are averaged once, at its end."""
    accelerator.sync_gradients = ends_window
    if ends_window or accelerator.num_processes == 1:
        return NOTHING
    return accelerator.no_sync(model)  # type: ignore[no-any-return]


def average_gradients(parameters: Iterable[torch.nn.Parameter], ranks: Ranks) -> None:
    """Average gradients over the ranks, as ``DistributedDataParallel`` does. A rank that has none counts as zero."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    kinds = [_NO_GRADIENT if p.grad is None else p.grad.sparse_dim() if p.grad.is_sparse else _DENSE for p in trained]
    gradients: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter, kind in zip(trained, map(int, ranks.max(kinds)), strict=True):
        if kind > _DENSE:
            parameter.grad = ranks.sum_on_device(_as_sparse(parameter, kind)) / ranks.world_size
        elif kind == _DENSE:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for group in gradients.values():
        flat = ranks.sum_on_device(torch.cat([gradient.flatten() for gradient in group])).div_(ranks.world_size)
        parts = flat.split([gradient.numel() for gradient in group])  # type: ignore[no-untyped-call]
        torch._foreach_copy_(group, [part.view_as(gradient) for part, gradient in zip(parts, group, strict=True)])


def _as_sparse(parameter: torch.nn.Parameter, sparse_dim: int) -> torch.Tensor:
    """Return a gradient with so many sparse dimensions, as it has on another rank."""
    gradient = parameter.grad
    if gradient is None:
        indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_empty(0, *parameter.shape[sparse_dim:])
        gradient = torch.sparse_coo_tensor(indices, values, parameter.shape)
    elif not gradient.is_sparse:
        gradient = gradient.to_sparse(sparse_dim)
    return gradient.coalesce()


def optimized_parameters(optimizer: Any) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of all groups of an optimizer."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def parameters_not_in_model(model: torch.nn.Module, optimizer: Any) -> list[torch.nn.Parameter]:
    """Return what an optimizer trains that is not the model's: parameters of the loss function, say."""
    own = {id(parameter) for parameter in model.parameters()}
    return [parameter for parameter in optimized_parameters(optimizer) if id(parameter) not in own]


def updated_parameters(model: torch.nn.Module, optimizer: Any) -> list[torch.nn.Parameter]:
    """Return what an update changes: the optimizer's parameters; the model's too, where it works on copies of them."""
    optimized = list(optimized_parameters(optimizer))
    own = set(map(id, model.parameters()))
    return optimized if any(id(p) in own for p in optimized) else [*model.parameters(), *optimized]


def clip_norm(accelerator: Accelerator, parameters: list[torch.nn.Parameter], norm: float) -> Any:
    """Clip gradients by their total norm, and return what it was."""
    if any(hasattr(parameter, "device_mesh") for parameter in parameters):
        # Accelerate compares them with the parameters of each model that it knows, which fails where it knows several.
        accelerator.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(parameters, norm)
    return accelerator.clip_grad_norm_(parameters, norm)


def clear_gradients(optimizer: Any) -> None:
    """Clear the gradients as ``optimizer.zero_grad()`` does, which takes 20 times as long unless it is overridden."""
    if getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _as_weight(count: Count) -> Count:
    """Return a count as float64 where that exists: dividing whole numbers would give float32."""
    return count.to(accumulation_dtype(count.device)) if isinstance(count, torch.Tensor) else count
