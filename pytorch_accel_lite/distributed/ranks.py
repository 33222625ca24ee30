"""Communication between the processes of a job, mostly on the CPU and safe for tensors of unequal length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.autograd.function import once_differentiable

T = TypeVar("T")


@cache
def _job_group(job: Any, purpose: str) -> Any:
    """Return a gloo group shared by all trainers of a job: torch never frees the threads and files of a group.

    :param job: the default process group of the job
    """
    return dist.new_group(backend="gloo")


class Ranks:
    """The processes of a job. With a single process, every method returns its input immediately.

    Several processes communicate through a separate gloo group, so that nothing here waits for a device or interferes
    with the collectives of the model. Creating an instance is a collective operation: all ranks must do it.

    :param purpose: name of the group; threads that communicate at the same time need different ones
    """

    def __init__(self, accelerator: Accelerator, purpose: str = "control") -> None:
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self._accelerator = accelerator
        self._group: Any = _job_group(dist.group.WORLD, purpose) if self.world_size > 1 else None

    def __repr__(self) -> str:
        return f"Ranks(rank={self.rank}, world_size={self.world_size})"

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up lists of numbers element by element, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Take the maximum of lists of numbers element by element, in float64."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation, group=self._group)
        return tensor.tolist()

    def sum_on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over the ranks in place, on its device and without waiting for the device."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def copy_from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy rank 0's values to all ranks, in place."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def run_together(self, action: Callable[[], T], only_first: bool = False) -> list[T]:
        """Run a function on every rank and return the results, in rank order.

        If it fails on one rank, all ranks raise: that rank its own error, the others one that quotes it. So no rank
        waits for one that has failed.

        :param only_first: whether to run it on rank 0 only
        """
        result: Any = None
        failure: Exception | None = None
        report: Exception | None = None
        if not only_first or self.rank == 0:
            try:
                result = action()
            except Exception as error:
                failure = error
                kind = OSError if isinstance(error, OSError) else RuntimeError
                report = kind(f"Rank {self.rank} failed: {type(error).__name__}: {error}")
        outcomes = self.all_gather_object((result, report))
        for problem in (failure, *(report for _, report in outcomes)):
            if problem is not None:
                raise problem
        return [value for value, _ in outcomes[: 1 if only_first else None]]

    def broadcast_object(self, make: Callable[[], T]) -> T:
        """Return the result of ``make`` on rank 0, the only rank that calls it."""
        return self.run_together(make, only_first=True)[0]

    def barrier(self) -> None:
        """Wait until every rank has reached this point."""
        if self.world_size > 1:
            dist.barrier(group=self._group)

    def gather(self, data: Any, with_gradients: bool = False, counts: bool = True) -> Any:
        """Concatenate tensors over the ranks along their first dimension; see :meth:`Trainer.gather`.

        :param counts: ``False`` for rows of a filler batch, which ranks with real rows do not receive
        """
        if self.world_size == 1:
            return data
        leaves, structure = torch.utils._pytree.tree_flatten(data)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(f"gather() takes tensors, or nested lists, tuples and dicts of them, not {leaf!r}.")
        leaves = [leaf if leaf.ndim else leaf[None] for leaf in leaves]
        given = self.all_gather_object(([len(leaf) for leaf in leaves], counts))
        counting = [of_rank for _, of_rank in given]
        lengths = zip(*(of_rank for of_rank, _ in given), strict=True)
        apply = _Gather.apply if with_gradients else _GatherConstant.apply
        gathered = [apply(leaf, of_ranks, counting, self) for leaf, of_ranks in zip(leaves, lengths, strict=True)]
        return torch.utils._pytree.tree_unflatten(gathered, structure)

    def gather_pieces(self, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which have these lengths and agree in the other dimensions."""
        longest = max(lengths)
        if len(tensor) < longest:
            tensor = torch.cat([tensor, tensor.new_zeros((longest - len(tensor), *tensor.shape[1:]))])
        pieces = self._accelerator.gather(tensor).unflatten(0, (self.world_size, longest))
        return [piece[:length] for piece, length in zip(pieces, lengths, strict=True)]


class _Gather(torch.autograd.Function):
    """Gathers the rows of all ranks; the gradient of a row is the sum of its gradients on all ranks.

    A rank whose rows do not count receives all rows, including its own, but contributes nothing to any gradient: its
    loss has zero weight, yet duplicate rows might have made it NaN.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, lengths: Sequence[int], counting: Sequence[bool], ranks: Ranks
    ) -> torch.Tensor:
        counts = counting[ranks.rank]
        counted = [length if of_rank else 0 for length, of_rank in zip(lengths, counting, strict=True)]
        ctx.own = slice(sum(counted[: ranks.rank]), sum(counted[: ranks.rank + 1])) if counts else None
        ctx.own_shape = tensor.shape
        ctx.shape = sum(counted), *tensor.shape[1:]
        ctx.ranks = ranks
        pieces = ranks.gather_pieces(tensor, lengths)
        return torch.cat([piece for piece, of_rank in zip(pieces, counting, strict=True) if of_rank or not counts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mine = (
            gradient.new_zeros(ctx.shape) if ctx.own is None else gradient.clone(memory_format=torch.contiguous_format)
        )
        total = ctx.ranks.sum_on_device(mine)
        return gradient.new_zeros(ctx.own_shape) if ctx.own is None else total[ctx.own], None, None, None


class _GatherConstant(_Gather):
    """Gathers the rows of all ranks as constants; a backward pass through them raises an error."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(
            "A loss was computed from the result of trainer.gather(), which has no gradients. Pass with_gradients=True "
            "to train through the rows of all processes, or gather tensor.detach() if they are meant to be constant."
        )
