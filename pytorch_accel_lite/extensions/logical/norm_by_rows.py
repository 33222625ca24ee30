"""The total norm of gradients, in an order of sums that does not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pytorch_accel_lite.extending import Ranks
from pytorch_accel_lite.extension_tools.modules_and_devices import local_shard
from pytorch_accel_lite.extension_tools.processes import current_holders

#: A mesh, and the dimension along which a tensor is sharded.
_Sharding: TypeAlias = tuple[DeviceMesh, int]


def norm_by_rows(gradients: Iterable[torch.Tensor], ranks: Ranks) -> torch.Tensor:
    """Return the total norm of gradients, the same bits whether they are whole or sharded along their rows.

    Squares are added up within each row, on the process that has it, and then over all rows in their order.

    Args:
        ranks: the processes that have the rows
    """
    by_sharding: dict[_Sharding | None, list[torch.Tensor]] = {}
    places: list[tuple[_Sharding | None, int]] = []
    for gradient in gradients:
        sums, sharding = _sums_of_rows(gradient)
        alike = by_sharding.setdefault(sharding, [])
        places.append((sharding, len(alike)))
        alike.append(sums)
    for sharding, parts in by_sharding.items():
        if sharding is not None:  # the others have zeros in the rows of this process
            summed = ranks.repeat_if_process_lost(partial(_add_up, sharding, parts))
            by_sharding[sharding] = list(summed.split([len(part) for part in parts]))  # type: ignore[no-untyped-call]
    rows = [by_sharding[sharding][index] for sharding, index in places]
    return torch.cat(rows).sum().sqrt() if rows else torch.zeros(())


def _add_up(sharding: _Sharding, parts: list[torch.Tensor]) -> torch.Tensor:
    """Add up the parts of all shards, also if some of the processes in the mesh are lost."""
    mesh, dim = sharding
    summed = torch.cat(parts)
    holders = current_holders()
    if holders is None:
        dist.all_reduce(summed, group=mesh.get_group(dim))
        return summed
    shards = [int((mesh.mesh == position).nonzero()[0, dim]) for position in holders.positions]
    own = holders.ranks.rank
    if shards.index(shards[own]) < own:  # another one adds the same
        summed.zero_()
    holders.ranks.sum_on_device(summed)
    return summed


def _sums_of_rows(gradient: torch.Tensor) -> tuple[torch.Tensor, _Sharding | None]:
    """Return the sum of the squares in each row, zero in rows of other processes, and how these are sharded."""
    shard = local_shard(gradient.detach())
    shard = torch.view_as_real(shard) if shard.is_complex() else shard
    dtype = torch.float32 if shard.dtype.itemsize < 4 else shard.dtype
    squares = shard.to(dtype).square()
    sums = squares.sum(dim=[*range(1, squares.ndim)]) if squares.ndim > 1 else squares.reshape(-1)
    dims = [dim for dim, placement in enumerate(getattr(gradient, "placements", ())) if placement.is_shard()]
    if not dims:
        return sums, None
    mesh: DeviceMesh = cast(Any, gradient).device_mesh
    rows = gradient.shape[0]
    start = min(-(-rows // mesh.size(dims[0])) * (mesh.get_coordinate() or ())[dims[0]], rows)
    whole = sums.new_zeros(rows)
    whole[start : start + len(sums)] = sums
    return whole, (mesh, dims[0])
