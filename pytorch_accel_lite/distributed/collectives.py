"""What steps and callbacks tell the other processes: methods of the trainer. To be called on every process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from pytorch_accel_lite.utils import remove_padding

if TYPE_CHECKING:
    from pytorch_accel_lite.trainer import Trainer

T = TypeVar("T")


def gather(self: Trainer, tensor: Any, padding_value: float | None = None, *, with_gradients: bool = False) -> Any:
    """Concatenate tensors of all processes along their first dimension. To be called on every process.

    On several processes, what is returned has no gradients unless ``with_gradients`` is given, and going backward
    through it is an error. One process is given back what it gave.

    :param tensor: a tensor, or nested lists, tuples and dicts of tensors, whose first dimension may differ from process
        to process. Tensors without dimensions become one with an element for each.
    :param padding_value: leave out rows that are this value throughout, of each tensor by itself; NaN is possible
    :param with_gradients: for losses over the samples of all processes (contrastive ones, say): their gradients reach
        the rows of all, and are those of one process with the whole batch. To be given for all that belongs to such
        a loss, targets too: then rows of a batch that only keeps its process in step with the others are left out
    :raises RuntimeError: with gradients, in a step that may fail on one process alone (``auto_microbatch``,
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
    """Wait until every process is here."""
    self.ranks.barrier()


def sync_buffers(self: Trainer, module: nn.Module) -> None:
    """Give all processes the first one's buffers of a module. To be called on every process."""
    self.ranks.copy_from_first(module.buffers())


def broadcast_object(self: Trainer, obj: T) -> T:
    """Return the first process's picklable object on every process. To be called on every process."""
    return self.ranks.broadcast_object(lambda: obj)


def all_gather_object(self: Trainer, obj: T) -> list[T]:
    """Return the picklable objects of all processes, in the order of their ranks. To be called on every process."""
    return self.ranks.all_gather_object(obj)


def tensor_to_numeric(self: Trainer, tensor: torch.Tensor, reduce: str | None = None) -> float | int:
    """Return a tensor of one element as a Python number.

    :param reduce: ``"sum"``, ``"mean"`` or ``"max"`` over all processes, which must all call it then; ``None``:
        this process's own
    """
    if reduce not in (None, "sum", "mean", "max"):
        raise ValueError(f"reduce={reduce!r} must be None, 'sum', 'mean' or 'max'.")
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
        raise ValueError(f"tensor={tensor!r} must be a tensor of one element. Reduce it first, by its mean() say.")
    values = [tensor.item()] if reduce is None else self.all_gather_object(tensor.item())
    if reduce == "max":
        return max(values)
    return sum(values) / len(values) if reduce == "mean" else sum(values)
