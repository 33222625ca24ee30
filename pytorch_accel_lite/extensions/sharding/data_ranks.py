"""Which processes of a job read different data, and which compute every batch together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pytorch_accel_lite.extending import Ranks
from pytorch_accel_lite.extension_tools.processes import MACHINERY, ControlGroup, chosen_timeout

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

MACHINERY.add(__file__)
T = TypeVar("T")
Peers = tuple[int, ...]
#: Names of mesh dimensions that divide the data, in torch, Accelerate and transformers.
_DATA_DIMS = {"dp", "ddp", "fsdp", "data", "replicate", "shard", "dp_replicate", "dp_shard"}


class MeshInfo(Protocol):
    """torch's own description of the mesh of a sharded module. Dimensions that it lacks are missing."""

    @property
    def mesh(self) -> DeviceMesh: ...


class DataRanks(Ranks):
    """The processes of a job where several share each batch, as in tensor parallelism.

    Sums, gathered objects, ``rank`` and ``world_size`` cover only the processes that read different data, so each batch
    counts once. Maxima, broadcasts and barriers cover all processes.

    Args:
        everyone: all processes
        peers: for each position within a group that shares batches, the processes at that position, in order
    """

    def __init__(self, everyone: Ranks, peers: tuple[Peers, ...]) -> None:
        self._everyone = everyone
        self.members = next(group for group in peers if everyone.rank in group)
        self.rank = self.members.index(everyone.rank)
        self.world_size = len(self.members)
        self.replicas = len(peers)
        self._data_ranks = {rank: index for group in peers for index, rank in enumerate(group)}
        sharers = tuple(zip(*peers, strict=True))
        self._sharers = everyone.within(sharers[self.rank], _group_of_rank(dist.group.WORLD, sharers, "gloo"))
        self.is_first_sharer = self._sharers.rank == 0
        self._control = ControlGroup(_group_of_rank(dist.group.WORLD, peers, "gloo"), self.members)
        self.device_group = _group_of_rank(dist.group.WORLD, peers, None)

    @property
    def everyone(self) -> Ranks:
        return self._everyone

    def max(self, values: Sequence[float]) -> list[float]:
        return self._everyone.max(values)

    def begin_scatter(self, pieces: Sequence[torch.Tensor] | None, size: int) -> Callable[[], torch.Tensor]:
        expanded = None if pieces is None else [pieces[index] for _, index in sorted(self._data_ranks.items())]
        return self._everyone.begin_scatter(expanded, size)

    def run_together(self, action: Callable[[], T], only_first: bool = False) -> list[T]:
        return self._everyone.run_together(action, only_first)

    def barrier(self, timeout: timedelta | None = None) -> None:
        self._everyone.barrier(timeout)

    def broadcast_to_sharers(self, value: T) -> T:
        return self._sharers.result_of_first(lambda: value)

    def read_identically(self, items: Iterator[T]) -> Iterator[T]:
        def read() -> list[T]:
            item = list(islice(items, 1))
            return item if self.is_first_sharer else []

        while item := self._sharers.run_together(read)[0]:
            yield item[0]


@cache
def _group_of_rank(job: dist.ProcessGroup, groups: tuple[Peers, ...], backend: str | None) -> dist.ProcessGroup:
    """Return this process's group among several disjoint groups. They are created once: torch never frees groups."""
    timeout = chosen_timeout(job)
    created: list[tuple[Peers, Any]] = [(ranks, dist.new_group(list(ranks), timeout, backend)) for ranks in groups]
    own: dist.ProcessGroup = next(group for ranks, group in created if dist.get_rank() in ranks)
    return own


def find_data_ranks(model: nn.Module, everyone: Ranks) -> Ranks:
    """Return the processes among which the data of a sharded model are divided. Call it on every process.

    ``fully_shard`` divides the data over its mesh. Processes along other dimensions of the weights' meshes, as in
    tensor parallelism, share their batches.

    Raises:
        ValueError: if the weights are sharded over some of the processes, and no mesh connects these to the others
    """
    if everyone.world_size == 1:
        return everyone
    meshes = list({mesh: None for p in model.parameters() if (mesh := getattr(p, "device_mesh", None)) is not None})
    if not meshes:  # Accelerate has not sharded the model yet
        return everyone
    fsdp_peers = _largest(_fsdp_peers(model))
    gathered = everyone.all_gather_object((fsdp_peers, max(map(_model_peers, meshes), key=len)))
    if gathered[0][0] is not None:
        peers = tuple(sorted({group for group, _ in gathered if group is not None}))
    else:
        sharers = sorted({group for _, group in gathered})
        peers = tuple(zip(*sharers, strict=True)) if len({*map(len, sharers)}) == 1 else ()
    sharded_over = {*(rank for mesh in meshes for rank in mesh.mesh.flatten().tolist())}
    is_partition = sorted(rank for group in peers for rank in group) == [*range(everyone.world_size)]
    if not is_partition or (fsdp_peers is not None and len(peers) > 1 and sharded_over <= {*fsdp_peers}):
        raise ValueError(
            f"The weights of {type(model).__name__} are sharded over {len(sharded_over)} of {everyone.world_size} "
            "processes, and nothing connects these to the others. Use a mesh of all processes: one with two "
            'dimensions, such as init_device_mesh(device, (2, 4), mesh_dim_names=("dp_replicate", "dp_shard")), '
            "shards over the second and keeps copies over the first."
        )
    return everyone if len(peers) == 1 else DataRanks(everyone, peers)


def covers(parameter: nn.Parameter, ranks: Ranks) -> bool:
    """Whether the mesh of a parameter has all processes that read different data, so that torch averages its gradients.

    The gradients of other parameters must be averaged here.
    """
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and {*ranks.members} <= {*mesh.mesh.flatten().tolist()}


def _largest(peers: Iterable[Peers]) -> Peers | None:
    return max(peers, key=len, default=None)


def _along(mesh: DeviceMesh, dims: Iterable[int]) -> Peers:
    """Return the processes of a mesh that differ from this process only along some dimensions, in order."""
    coordinate = mesh.get_coordinate() or ()
    along = {*dims}
    index = tuple(slice(None) if dim in along else position for dim, position in enumerate(coordinate))
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))


def _model_peers(mesh: DeviceMesh) -> Peers:
    """Return the processes with which this process shares batches, from the mesh dimensions without ``fully_shard``."""
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    return _along(mesh, [dim for dim, name in enumerate(names) if name not in _DATA_DIMS])


def _fsdp_peers(model: nn.Module) -> Iterator[Peers]:
    """Yield, for each module sharded by ``fully_shard``, the processes over which gradients are averaged."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        for info in mesh_infos(module) if isinstance(module, FSDPModule) else ():
            yield _along(info.mesh, [dim for dim in _dims(info) if dim is not None])


def mesh_infos(module: FSDPModule) -> list[MeshInfo]:
    """Return the meshes of a module sharded by ``fully_shard``, with the dimensions in use.

    torch has no public name for them. Up to version 2.11, a module has at most one.
    """
    state = module._get_fsdp_state()  # noqa: SLF001
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups  # noqa: SLF001
    return [group.mesh_info for group in groups if group is not None]


def is_hybrid(info: MeshInfo) -> bool:
    """Whether weights are sharded over one dimension of a mesh and copied over another."""
    return None not in _dims(info)


def shard_dim(info: MeshInfo) -> int:
    """Return the dimension of a mesh over which weights are sharded."""
    _, dim = _dims(info)
    return dim or 0


def _dims(info: MeshInfo) -> tuple[int | None, int | None]:
    """Return the dimensions of a mesh over which weights are copied and sharded."""
    return getattr(info, "replicate_mesh_dim", None), getattr(info, "shard_mesh_dim", None)
