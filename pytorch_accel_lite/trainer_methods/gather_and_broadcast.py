"""Methods of the trainer for communication between processes in steps and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from pytorch_accel_lite.base.types import Tree
from pytorch_accel_lite.distributed.lost_processes import naming_call
from pytorch_accel_lite.distributed.message_encoding import decode, encode
from pytorch_accel_lite.distributed.ranks import Ranks
from pytorch_accel_lite.run.run import TrainerLike

T = TypeVar("T")


def gather(
    self: TrainerLike, tensor: Tree, padding_value: float | None = None, *, with_gradients: bool = False
) -> Tree:
    """Concatenate tensors from all processes along their first dimension. Call it on every process.

    With several processes, the result carries no gradients unless ``with_gradients=True``, and a backward pass through
    it raises an error. With one process, the input is returned unchanged.

    In the last step of an epoch or an evaluation, a process without samples computes a filler batch, whose rows repeat
    samples. They are in the result, unlike in that of ``accelerator.gather_for_metrics()``.

    Args:
        tensor: a tensor, or nested lists, tuples and dicts of tensors. The first dimension may differ between
            processes. Tensors without dimensions become a tensor with one element per process.
        padding_value: in each tensor, drop the rows in which every element has this value; may be NaN
        with_gradients: for losses over the samples of all processes, such as contrastive losses: gradients reach the
            rows of all processes, and equal the gradients of one process with the full batch. Pass it for every input
            of such a loss, including targets, so that filler batches, which only keep a process in step with the
            others, are left out.

    Raises:
        ValueError: on all processes, if their tensors differ in more than the first dimension
        RuntimeError: with gradients, in a step that may fail on a single process (``auto_microbatch``,
            ``SkipFailedBatchesCallback``); in the forward and backward passes of one of several shares
    """
    run = self.current_run
    self.division.check_gather()
    is_filler = run.batch is not None and run.batch.is_filler
    if with_gradients and run.window.is_guarded and torch.is_grad_enabled():
        raise RuntimeError(
            "gather(with_gradients=True) does not work on several processes with auto_microbatch=True or "
            "SkipFailedBatchesCallback: a step that fails on one of them would leave the others waiting."
        )
    gathered = _gather_over_data_ranks(self, tensor, with_gradients, counts=not (with_gradients and is_filler))
    if padding_value is None:
        return gathered
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda rows: remove_padding(rows, padding_value), gathered)


def barrier(self: TrainerLike) -> None:
    """Wait until every process has reached this point."""
    with naming_call(self.ranks, "barrier()"):
        self.ranks.barrier()


def sync_buffers(self: TrainerLike, module: nn.Module) -> None:
    """Copy the buffers of a module from the first process to all others. Call it on every process."""
    with naming_call(self.ranks, "sync_buffers()"):
        self.ranks.copy_from_first(module.buffers())


def broadcast_object(self: TrainerLike, obj: T, source: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return the picklable object of one process on every process. Call it on every process.

    Tensors of a GPU arrive on the CPU.

    Args:
        source: rank, in the job, of the process with the object
        group: the processes that take part, which all call this method; ``None`` for all processes of the job
    """
    with naming_call(self.ranks, "broadcast_object()"):
        if group is not None:
            messages = [encode(obj) if dist.get_rank() == source else None]
            dist.broadcast_object_list(messages, source, group)
            return cast(T, decode(cast(torch.Tensor, messages[0])))
        if source not in range(self.ranks.world_size):
            raise ValueError(f"source={source!r} must be a rank of the job: 0 to {self.ranks.world_size - 1}.")
        if source:
            return cast(T, self.ranks.all_gather_object(obj if self.ranks.rank == source else None)[source])
        return self.ranks.result_of_first(lambda: obj)


def all_gather_object(self: TrainerLike, obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the picklable objects of all processes, ordered by rank. Call it on every process.

    With several processes, tensors of a GPU arrive on the CPU.

    Args:
        group: the processes that take part, which all call this method; ``None`` for all processes of the job
    """
    with naming_call(self.ranks, "all_gather_object()"):
        if group is None:
            return self.ranks.all_gather_object(obj)
        messages: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(messages, encode(obj), group)
        return [decode(message) for message in messages]


def tensor_to_numeric(self: TrainerLike, tensor: Tree, reduce: str | None = None) -> Tree:
    """Return a tensor as a Python number, or as nested lists of numbers if it has several elements.

    Args:
        tensor: a tensor, or nested lists, tuples and dicts of tensors
        reduce: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"`` of all elements on all processes, which must then all call
            it, even with a tensor that has none; ``None`` for this process's own values
    """
    if reduce not in (None, "sum", "mean", "max", "min"):
        raise ValueError(f"reduce={reduce!r} must be None, 'sum', 'mean', 'max' or 'min'.")
    for leaf in torch.utils._pytree.tree_leaves(tensor):
        if not isinstance(leaf, torch.Tensor):
            raise ValueError(f"tensor={leaf!r} must be a tensor, or nested lists, tuples and dicts of tensors.")
    return torch.utils._pytree.tree_map(partial(_to_numeric, self, reduce), tensor)


def _to_numeric(trainer: TrainerLike, reduce: str | None, tensor: torch.Tensor) -> Tree:
    if reduce is None:
        return tensor.item() if tensor.numel() == 1 else tensor.tolist()
    apply = torch.sum if reduce == "mean" else getattr(torch, reduce)
    count = tensor.numel()
    own = None if not count else tensor.item() if count == 1 else apply(tensor).item()  # one element keeps its type
    gathered = [(value, size) for value, size in trainer.data_ranks.all_gather_object((own, count)) if size]
    if not gathered and reduce == "sum":
        return 0
    if not gathered:
        raise ValueError(f"There is no {reduce} of tensors without elements on all processes.")
    values, counts = zip(*gathered, strict=True)
    if reduce == "mean":
        return sum(values) / sum(counts)
    combine: dict[str, Callable[[Iterable[float]], float]] = {"sum": sum, "max": max, "min": min}
    return combine[reduce](values)


def _gather_over_data_ranks(trainer: TrainerLike, data: Tree, with_gradients: bool, counts: bool) -> Tree:
    """Concatenate tensors over the ranks along their first dimension.

    Args:
        counts: ``False`` for rows of a filler batch, which ranks with real rows do not receive
    """
    ranks = trainer.data_ranks
    if ranks.world_size == 1:
        return data
    leaves, structure = torch.utils._pytree.tree_flatten(data)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"gather() takes tensors, or nested lists, tuples and dicts of them, not {leaf!r}.")
    leaves = [leaf if leaf.ndim else leaf[None] for leaf in leaves]
    rows = ", ".join(f"{leaf.dtype} of shape {tuple(leaf.shape[1:])}" for leaf in leaves)
    layout = f"{' '.join(str(structure).split())} with rows of {rows}"
    with naming_call(ranks, "gather()"):
        gathered = ranks.all_gather_object(([len(leaf) for leaf in leaves], counts, layout))
    lengths, counting, layouts = zip(*gathered, strict=True)
    for rank, other in enumerate(layouts):
        if other != layouts[0]:
            raise ValueError(
                f"gather() was given {layouts[0]} on rank 0, but {other} on rank {rank}. Only the number of rows may "
                "differ: nest the tensors in the same way, convert them to one dtype, and pad them to one shape."
            )
    apply = _Gather.apply if with_gradients else _GatherConstant.apply
    per_leaf = zip(leaves, zip(*lengths, strict=True), strict=True)
    return torch.utils._pytree.tree_unflatten(
        [apply(leaf, leaf_lengths, counting, ranks) for leaf, leaf_lengths in per_leaf], structure
    )


def _gather_pieces(ranks: Ranks, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensors of all ranks, which have these lengths and agree in the other dimensions."""
    longest = max(lengths)
    if len(tensor) < longest:
        tensor = torch.cat([tensor, tensor.new_zeros((longest - len(tensor), *tensor.shape[1:]))])
    tensor = tensor.contiguous()
    pieces = [torch.empty_like(tensor) for _ in lengths]
    dist.all_gather(pieces, tensor, group=ranks.device_group)
    return [piece[:length] for piece, length in zip(pieces, lengths, strict=True)]


class _Gather(torch.autograd.Function):
    """Gathers the rows of all ranks. The gradient of a row is the sum of its gradients over all ranks.

    A rank whose rows do not count receives all rows, including its own, but contributes nothing to any gradient. Its
    loss has zero weight, but may be NaN because of the duplicate rows.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, lengths: Sequence[int], counting: Sequence[bool], ranks: Ranks
    ) -> torch.Tensor:
        counted = [length if counts else 0 for length, counts in zip(lengths, counting, strict=True)]
        ctx.ranks = ranks
        ctx.counts = counting[ranks.rank]
        ctx.begin = sum(counted[: ranks.rank])
        ctx.local_shape = tensor.shape
        ctx.shape = sum(counted), *tensor.shape[1:]
        pieces = _gather_pieces(ranks, tensor, lengths)
        return torch.cat([piece for piece, counts in zip(pieces, counting, strict=True) if counts or not ctx.counts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.counts:
            ctx.ranks.sum_on_device(gradient.new_zeros(ctx.shape))
            return gradient.new_zeros(ctx.local_shape), None, None, None
        total = ctx.ranks.sum_on_device(gradient.clone(memory_format=torch.contiguous_format))
        return total[ctx.begin : ctx.begin + ctx.local_shape[0]], None, None, None


class _GatherConstant(_Gather):
    """Gathers the rows of all ranks as constants; a backward pass through them raises an error."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            "A loss was computed from the result of trainer.gather(), which has no gradients. Pass with_gradients=True "
            "to train through the rows of all processes, or gather tensor.detach() if they are meant to be constant."
        )


def remove_padding(padded_tensor: torch.Tensor, pad_value: float) -> torch.Tensor:
    """Return a tensor without the rows in which every element equals ``pad_value``, which may be NaN."""
    is_padding = padded_tensor.isnan() if pad_value != pad_value else padded_tensor == pad_value
    return padded_tensor[~is_padding.flatten(1).all(1) if padded_tensor.ndim > 1 else ~is_padding]
