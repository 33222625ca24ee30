"""What the processes synchronise of gradients and buffers beside ``DistributedDataParallel``, and when it does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from pytorch_accel_lite.base.modules import local_shard
from pytorch_accel_lite.distributed.ranks import Ranks

_NO_GRADIENT = -1  # stands for the number of sparse dimensions, which is 0 for a dense gradient


def average_gradients(
    parameters: Iterable[torch.nn.Parameter], ranks: Ranks, update: Sequence[int] = (), num_parameters: int = 0
) -> None:
    """Average gradients over the ranks, like ``DistributedDataParallel``. A missing gradient counts as zero.

    Args:
        update: numbers that identify the update, if ranks may be at different updates
        num_parameters: the largest number of parameters that an update may have

    Raises:
        RuntimeError: on all ranks, if they are at different updates
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    sparse_dims = [_NO_GRADIENT if p.grad is None else local_shard(p.grad).sparse_dim() for p in trained]
    padding = [_NO_GRADIENT] * (num_parameters - len(trained))
    negated = [-number for number in update]  # the maxima of these are the negated minima
    maxima = list(map(int, ranks.max([*update, *negated, *sparse_dims, *padding])))
    if maxima[: len(update)] != [-number for number in maxima[len(update) : 2 * len(update)]]:
        raise RuntimeError(
            "The processes are at different updates: train_step must call update() equally often, and in the same "
            "order, on every process. Where a process has nothing to learn from, pass a loss of zero: 0 * loss."
        )
    gradients: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter, sparse_dim in zip(trained, maxima[2 * len(update) :], strict=False):
        if sparse_dim > 0:
            parameter.grad = ranks.sum_on_device(_as_sparse(parameter, sparse_dim)) / ranks.world_size
        elif sparse_dim == 0:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.setdefault(parameter.grad.dtype, []).append(local_shard(parameter.grad))
    for group in gradients.values():
        flat = ranks.sum_on_device(_flatten_dense_tensors(group))  # type: ignore[no-untyped-call]
        flat.div_(ranks.world_size)
        torch._foreach_copy_(group, _unflatten_dense_tensors(flat, group))  # type: ignore[no-untyped-call]


def _as_sparse(parameter: torch.nn.Parameter, sparse_dim: int) -> torch.Tensor:
    """Return a gradient as a sparse tensor with as many sparse dimensions as on another rank."""
    gradient = parameter.grad
    if gradient is None:
        indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_empty(0, *parameter.shape[sparse_dim:])
        gradient = torch.sparse_coo_tensor(indices, values, parameter.shape)
    elif not gradient.is_sparse:
        gradient = gradient.to_sparse(sparse_dim)
    return gradient.coalesce()


def sync_ddp_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Copy rank 0's buffers to all ranks, as ``DistributedDataParallel`` does before its next forward pass.

    Until then, running statistics, such as those of batch norm, reflect each rank's own last batch.
    """
    if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
        ranks.copy_from_first(model.buffers())


_NOTHING = nullcontext()


def no_sync_within_window(
    accelerator: Accelerator, model: nn.Module, ends_window: bool
) -> AbstractContextManager[None]:
    """Return a context for the backward pass on a batch, in which gradients are reduced only if it ends a window.

    Also sets ``accelerator.sync_gradients``, which stays set after the context.
    """
    accelerator.sync_gradients = ends_window
    if ends_window or accelerator.num_processes == 1:
        return _NOTHING
    return accelerator.no_sync(model)  # type: ignore[no-any-return]
