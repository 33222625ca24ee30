"""Gradients of weights sharded by ``fully_shard``, summed over logical processes in the order of ``GradientSum``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from pytorch_accel_lite.extending import Ranks
from pytorch_accel_lite.extension_tools.data_and_batches import share_bounds
from pytorch_accel_lite.extension_tools.modules_and_devices import are_sharded
from pytorch_accel_lite.extensions.logical.gradient_sum import Node, TreeSum, view_as_bytes
from pytorch_accel_lite.extensions.sharding import mesh_infos, shard_dim

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` has sharded the model, or modules in it."""
    return bool(sharded_modules(model))


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules that have weights which ``fully_shard`` has sharded."""
    if not are_sharded(model.parameters()):
        return []
    from torch.distributed.fsdp import FSDPModule  # takes a second to import

    return [module for module in model.modules() if isinstance(module, FSDPModule) and mesh_infos(module)]


class ShardedGradients:
    """Adds up the gradients of sharded modules over the logical processes of a step.

    Each process computes as many logical processes as the others, one after another: those that lack one compute a
    filler, whose gradients are ignored. After each, the processes exchange the slices of their gradients instead
    of reducing them. Each adds up its own slice in the tree of ``GradientSum``, so that the sums have the bits of one
    process, and gives it to torch as the result of the last reduction; those before give negative zeros, which change
    no bit of what they are added to. An exchange takes as much traffic as a reduction.

    A single process has nothing to exchange: its gradients are in ``GradientSum``.

    Args:
        model: the model, with modules sharded by ``fully_shard``
        ranks: the processes that hold the shards
        count: number of logical processes
    """

    def __init__(self, model: nn.Module, ranks: Ranks, count: int) -> None:
        self._fsdp_modules = sharded_modules(model)
        self._reshard()
        self._modules = self._fsdp_modules if ranks.world_size > 1 else []
        self._ranges = [range(*share_bounds(count, rank, ranks.world_size)) for rank in range(ranks.world_size)]
        self._sums = [
            _SliceSum(_slices_of(module, ranks.world_size), ranks.rank, self._ranges) for module in self._modules
        ]
        self._sharded = {
            id(p) for module in self._modules for p in cast(nn.Module, module).parameters() if hasattr(p, "device_mesh")
        }

    @property
    def is_needed(self) -> bool:
        """Whether processes compute each share together."""
        return bool(self._modules)

    def without(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters whose gradients are not added up here."""
        return [parameter for parameter in parameters if id(parameter) not in self._sharded]

    def _reshard(self) -> None:
        """Reshard the model, as a forward pass without a backward pass leaves some parameters unsharded."""
        for module in self._fsdp_modules:
            module.reshard()

    def take_over(self, cleanup: ExitStack) -> None:
        """Replace torch's reduce-scatter of the modules until the run ends."""
        for module, sums in zip(self._modules, self._sums, strict=True):
            module.set_custom_reduce_scatter(cast(Any, sums))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            cleanup.callback(_give_back, module)

    def begin_step(self) -> None:
        """Begin a step, in which every share is reduced, also within an accumulation window."""
        self._reshard()
        for module, sums in zip(self._modules, self._sums, strict=True):
            module.set_requires_gradient_sync(True, recurse=False)
            sums.begin_step()

    def begin_share(self, is_filler: bool) -> None:
        """Begin the computation of a share.

        Args:
            is_filler: whether it has no samples
        """
        for sums in self._sums:
            sums.is_filler = is_filler

    def end_step(self) -> None:
        """End a step.

        Raises:
            RuntimeError: if a module had gradients in some of the shares only
        """
        for module, sums in zip(self._modules, self._sums, strict=True):
            if sums.rounds not in (0, len(self._ranges[0])):
                raise RuntimeError(
                    f"{type(module).__name__}, a sharded part of the model, had gradients in {sums.rounds} of "
                    f"{len(self._ranges[0])} forward and backward passes of this step. With logical_processes, each "
                    "pass must use it once: call it in every forward pass, or do not shard it by itself."
                )


class _PlainReduction:
    """Torch's own reduce-scatter."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        work: dist.Work | None = dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        return work


class _SliceSum(_PlainReduction):
    """Replaces torch's reduce-scatter of the gradients of one sharded module.

    Args:
        slices: for each process, the index of its slice of the gradients
        rank: this process
        ranges: for each process, the numbers of its logical processes

    Attributes:
        rounds: number of exchanges in this step
        is_filler: whether the gradients of this process are ignored
    """

    def __init__(self, slices: list[int], rank: int, ranges: list[range]) -> None:
        self._slices = slices
        self._rank = rank
        self._ranges = ranges
        self.is_filler = False
        self.begin_step()

    def begin_step(self) -> None:
        self.rounds = 0
        self._trees = [TreeSum[torch.Tensor](torch.Tensor.add_) for _ in self._ranges]

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Exchange the slices of a share, and in the last round of a step return the sum of all."""
        if self.is_filler:  # zero times its loss would not do, which may be infinite
            _fill_with_negative_zeros(input_tensor)
        parts = self._exchange(input_tensor)
        for numbers, tree, part in zip(self._ranges, self._trees, parts, strict=True):
            if self.rounds < len(numbers):
                tree.push(Node(0, numbers[self.rounds], part.clone()))
        self.rounds += 1
        # Where several processes have the same slice, as in HSDP, torch adds up what they return.
        is_first = self._slices.index(self._slices[self._rank]) == self._rank
        if self.rounds < len(self._ranges[0]) or not is_first:
            _fill_with_negative_zeros(output_tensor)
            return
        total = TreeSum[torch.Tensor](torch.Tensor.add_)
        for tree in self._trees:
            for node in tree.nodes:
                total.push(node)
        output_tensor.copy_(total.total())
        self._trees = []

    def _exchange(self, gradients: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the slice of this process of the gradients of each process."""
        count = max(self._slices) + 1
        if count < len(self._slices):
            pieces = gradients.chunk(count)
            gradients = torch.cat([pieces[number] for number in self._slices])
        received = torch.empty_like(gradients)
        dist.all_to_all_single(view_as_bytes(received), view_as_bytes(gradients))
        return received.chunk(len(self._slices))


def _fill_with_negative_zeros(tensor: torch.Tensor) -> None:
    """Fill a tensor with negative zeros, which change no bit of a sum."""
    tensor.zero_().neg_()


def _slices_of(module: FSDPModule, world_size: int) -> list[int]:
    """Return, for each process, the index of its slice of the gradients of a module.

    Raises:
        ValueError: if each process has the whole gradients, as torch then does no reduce-scatter
    """
    [info] = mesh_infos(module)
    dim = shard_dim(info)
    positions = info.mesh.mesh
    if positions.shape[dim] == 1:
        raise ValueError(
            f"logical_processes with {type(module).__name__} sharded over a mesh of shape {tuple(positions.shape)}: "
            "each shard is whole, so nothing is saved, and the sums would have other bits. Shard it over several "
            "processes, or pass the model without fully_shard."
        )
    slices = [0] * world_size
    for index in positions.new_ones(positions.shape).nonzero().tolist():
        slices[int(positions[tuple(index)])] = index[dim]
    return slices


def _give_back(module: FSDPModule) -> None:
    """Restore torch's reduce-scatter of a module."""
    module.set_custom_reduce_scatter(cast(Any, _PlainReduction()))
    module.set_gradient_divide_factor(cast(float, None))  # which is torch's default
    module.set_force_sum_reduction_for_comms(False)
