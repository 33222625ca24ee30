"""Which processes of a job read different data, and which share every batch because they compute it together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.distributed.ranks import chosen_timeout

T = TypeVar("T")
Peers = tuple[int, ...]
#: Names of the dimensions of a mesh along which the data are divided, as torch, Accelerate and transformers call them.
_DATA_DIMS = {"dp", "ddp", "fsdp", "data", "replicate", "shard", "dp_replicate", "dp_shard"}


class DataRanks(Ranks):
    """The processes of a job where several share each batch, as in tensor parallelism.

    Sums, gathered objects, ``rank`` and ``world_size`` are those of the processes that read different data: each batch
    counts once. What is agreed upon (maxima, broadcasts, barriers) is agreed upon by all processes.

    :param everyone: all processes
    :param peers: for each place within a group that shares batches, the processes at that place, in order
    """

    def __init__(self, everyone: Ranks, peers: tuple[Peers, ...]) -> None:
        own = next(each for each in peers if everyone.rank in each)
        self._everyone = everyone
        self.members = own
        self.rank = own.index(everyone.rank)
        self.world_size = len(own)
        self.replicas = len(peers)
        identical = tuple(zip(*peers, strict=True))
        self._places = [
            index for _, index in sorted((rank, index) for each in peers for index, rank in enumerate(each))
        ]
        self._sharers = everyone.within(identical[self.rank], _own_group(dist.group.WORLD, identical, "gloo"))
        self.is_first_alike = self._sharers.rank == 0
        self._group = _own_group(dist.group.WORLD, peers, "gloo")
        self.device_group = _own_group(dist.group.WORLD, peers, None)

    @property
    def everyone(self) -> Ranks:
        return self._everyone

    def max(self, values: Sequence[float]) -> list[float]:
        return self._everyone.max(values)

    def begin_scatter(self, pieces: Sequence[torch.Tensor] | None, size: int) -> Callable[[], torch.Tensor]:
        expanded = None if pieces is None else [pieces[place] for place in self._places]
        return self._everyone.begin_scatter(expanded, size)

    def run_together(self, action: Callable[[], T], only_first: bool = False) -> list[T]:
        return self._everyone.run_together(action, only_first)

    def barrier(self, timeout: timedelta | None = None) -> None:
        self._everyone.barrier(timeout)

    def alike(self, value: T) -> T:
        """Return the same value on all processes that share a batch: that of their first."""
        return self._sharers.broadcast_object(lambda: value)

    def read_identically(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the same items on all processes that share a batch: those of their first.

        All read their own, whose positions thus stay in step. If one fails, all raise an error.
        """

        def read() -> list[T]:
            held = list(islice(items, 1))
            return held if self.is_first_alike else []

        while held := self._sharers.run_together(read)[0]:
            yield held[0]


@cache
def _own_group(job: Any, groups: tuple[Peers, ...], backend: str | None) -> Any:
    """Return the group of this process out of disjoint ones; as torch never frees groups, they are created once."""
    timeout = chosen_timeout(job)
    created = [(ranks, dist.new_group(list(ranks), timeout, backend)) for ranks in groups]
    return next(group for ranks, group in created if dist.get_rank() in ranks)


def find_data_ranks(model: nn.Module, everyone: Ranks) -> Ranks:
    """Return the processes as the data are divided among them, for a model that is sharded. Call it on every process.

    ``fully_shard`` divides the data over its mesh. The processes of other dimensions of the weights' meshes, as in
    tensor parallelism, share their batches.

    :raises ValueError: if the weights are sharded over some of the processes and nothing connects these to the others
    """
    if everyone.world_size == 1:
        return everyone
    meshes = _meshes(model)
    if not meshes:  # Accelerate has yet to shard it
        return everyone
    by_fsdp = _largest(_fsdp_peers(model))
    found = everyone.all_gather_object((by_fsdp, _largest(map(_model_peers, meshes))))
    if found[0][0] is not None:
        peers = tuple(sorted({own for own, _ in found}))
    else:
        identical = sorted({own for _, own in found})
        peers = tuple(zip(*identical, strict=True)) if len({*map(len, identical)}) == 1 else ()
    together = {*(rank for mesh in meshes for rank in mesh.mesh.flatten().tolist())}
    if sorted(rank for each in peers for rank in each) != [*range(everyone.world_size)] or (
        by_fsdp is not None and len(peers) > 1 and together <= {*by_fsdp}
    ):
        raise ValueError(
            f"The weights of {type(model).__name__} are sharded over {len(together)} of {everyone.world_size} "
            "processes, and nothing connects these to the others. Use a mesh of all processes: one with two "
            'dimensions, such as init_device_mesh(device, (2, 4), mesh_dim_names=("dp_replicate", "dp_shard")), '
            "shards over the second and keeps copies over the first."
        )
    return everyone if len(peers) == 1 else DataRanks(everyone, peers)


def covers(parameter: Any, ranks: Ranks) -> bool:
    """Whether the mesh of a parameter has all processes that read different data, so that its gradients are averaged.

    Those of other parameters must be averaged over these processes.
    """
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and {*ranks.members} <= {*mesh.mesh.flatten().tolist()}


def _meshes(model: nn.Module) -> list[Any]:
    """Return the meshes of the weights, each once."""
    return list({mesh: None for p in model.parameters() if (mesh := getattr(p, "device_mesh", None)) is not None})


def _largest(peers: Iterable[Peers]) -> Peers | None:
    return max(peers, key=len, default=None)


def _along(mesh: Any, dims: Iterable[int]) -> Peers:
    """Return the processes of a mesh that differ from this one only along some of its dimensions, in order."""
    here = mesh.get_coordinate()
    kept = {*dims}
    index = tuple(slice(None) if dim in kept else place for dim, place in enumerate(here))
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))


def _model_peers(mesh: Any) -> Peers:
    """Return the processes with which this one shares batches, if a mesh without ``fully_shard`` is all there is."""
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    return _along(mesh, [dim for dim, name in enumerate(names) if name not in _DATA_DIMS])


def _fsdp_peers(model: nn.Module) -> Iterator[Peers]:
    """Yield the processes over which ``fully_shard`` averages gradients, for each module that it has sharded."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        for info in infos_of(module) if isinstance(module, FSDPModule) else ():
            dims = getattr(info, "replicate_mesh_dim", None), getattr(info, "shard_mesh_dim", None)
            yield _along(info.mesh, [dim for dim in dims if dim is not None])


def infos_of(module: Any) -> list[Any]:
    """Return the meshes of a module that ``fully_shard`` has sharded, with the dimensions that it uses.

    torch has no public name for them. Up to version 2.11, a module has one at most.
    """
    state = module._get_fsdp_state()  # noqa: SLF001
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups  # noqa: SLF001
    return [group.mesh_info for group in groups if group is not None]


def is_hybrid(info: Any) -> bool:
    """Whether weights are sharded over one dimension of a mesh and copied over another."""
    dims = getattr(info, "replicate_mesh_dim", None), getattr(info, "shard_mesh_dim", None)
    return None not in dims
