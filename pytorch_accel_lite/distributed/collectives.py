"""Communication between processes for use in steps and callbacks: methods of the trainer, called on every process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from pytorch_accel_lite.utils import remove_padding

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer

T = TypeVar("T")


def gather(self: Trainer, tensor: Any, padding_value: float | None = None, *, with_gradients: bool = False) -> Any:
    """Concatenate tensors from all processes along their first dimension. Call it on every process.

    With several processes, the result carries no gradients unless ``with_gradients=True``, and a backward pass through
    it raises an error. With one process, the input is returned unchanged.

    :param tensor: a tensor, or nested lists, tuples and dicts of tensors. The first dimension may differ between
        processes. Tensors without dimensions become a tensor with one element per process.
    :param padding_value: in each tensor, drop the rows in which every element has this value; may be NaN
    :param with_gradients: for losses over the samples of all processes, such as contrastive losses: gradients reach
        the rows of all processes and equal those of one process with the whole batch. Pass it for everything that
        enters such a loss, including targets: filler batches, which only keep a process in step with the others, are
        then left out.
    :raises RuntimeError: with gradients, in a step that may fail on a single process (``auto_microbatch``,
        ``SkipFailedBatchesCallback``)
    """
    run = self.current_run
    is_filler = run.batch is not None and run.batch.num_samples == 0
    if with_gradients and run.window.is_guarded and torch.is_grad_enabled():
        raise RuntimeError(
            "gather(with_gradients=True) does not work on several processes with auto_microbatch=True or "
            "SkipFailedBatchesCallback: a step that fails on one of them would leave the others waiting."
        )
    gathered = self.ranks.gather(tensor, with_gradients, counts=not (with_gradients and is_filler))
    if padding_value is None:
        return gathered
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda rows: remove_padding(rows, padding_value), gathered)


def barrier(self: Trainer) -> None:
    """Wait until every process has reached this point."""
    self.ranks.barrier()


def sync_buffers(self: Trainer, module: nn.Module) -> None:
    """Copy the buffers of a module from the first process to all others. Call it on every process."""
    self.ranks.copy_from_first(module.buffers())


def broadcast_object(self: Trainer, obj: T) -> T:
    """Return the first process's picklable object on every process. Call it on every process."""
    return self.ranks.broadcast_object(lambda: obj)


def all_gather_object(self: Trainer, obj: T) -> list[T]:
    """Return the picklable objects of all processes, ordered by rank. Call it on every process."""
    return self.ranks.all_gather_object(obj)


def tensor_to_numeric(self: Trainer, tensor: torch.Tensor, reduce: str | None = None) -> float | int:
    """Return a tensor with one element as a Python number.

    :param reduce: ``"sum"``, ``"mean"`` or ``"max"`` over all processes, which must then all call it; ``None`` for
        this process's own value
    """
    if reduce not in (None, "sum", "mean", "max"):
        raise ValueError(f"reduce={reduce!r} must be None, 'sum', 'mean' or 'max'.")
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
        raise ValueError(
            f"tensor={tensor!r} must be a tensor with one element. Reduce it first: with mean(), for example."
        )
    values = [tensor.item()] if reduce is None else self.all_gather_object(tensor.item())
    if reduce == "max":
        return max(values)
    return sum(values) / len(values) if reduce == "mean" else sum(values)
