"""Exchanges over the meshes of sharded tensors, also once processes of these are lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pytorch_accel_lite.distributed.ranks import Ranks


@dataclass(frozen=True)
class Holders:
    """The processes that are left of those in the meshes. Together, they hold every shard.

    Args:
        ranks: lets them communicate
        positions: for each of them, its rank in the meshes
    """

    ranks: Ranks
    positions: Sequence[int]


_holders: Holders | None = None


def use_holders(holders: Holders | None) -> None:
    """Let the processes that are left exchange shards in place of the meshes, which have lost some.

    Args:
        holders: those that are left; ``None`` if all are
    """
    global _holders
    _holders = holders


def current_holders() -> Holders | None:
    """Return the processes that exchange shards in place of the meshes; ``None`` if all processes are left."""
    return _holders


def add_up_along(mesh: DeviceMesh, dim: int, tensor: torch.Tensor) -> None:
    """Add up a tensor over the shards along a dimension of a mesh, in place. Call it on every process.

    Args:
        tensor: the same on processes that have copies of a shard
    """
    if _holders is None:
        dist.all_reduce(tensor, group=mesh.get_group(dim))
        return
    shards = [int((mesh.mesh == position).nonzero()[0, dim]) for position in _holders.positions]
    own = _holders.ranks.rank
    if shards.index(shards[own]) < own:  # another one adds the same
        tensor.zero_()
    _holders.ranks.sum_on_device(tensor)
