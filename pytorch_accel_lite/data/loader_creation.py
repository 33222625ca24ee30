"""Creating the loader of a dataset, and choosing how it divides the batches of a source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from pytorch_accel_lite.base.machine import cores_per_process
from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.data.loader_base import LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.map_loader import MapLoader
from pytorch_accel_lite.data.named_datasets import NamedDatasets
from pytorch_accel_lite.data.reading import inner_datasets, reads_batches, tensors_in_memory
from pytorch_accel_lite.data.sources import CollateFunction, OwnShard, Source, TrainingOrder, is_loader
from pytorch_accel_lite.data.worker_startup import start_method
from pytorch_accel_lite.distributed import Ranks

#: Keyword arguments of a ``DataLoader``.
LoaderKwargs: TypeAlias = dict[str, Any]
#: The batch size of ``train()`` and ``evaluate()`` if none is passed.
DEFAULT_BATCH_SIZE = 8
#: Arguments with a user-defined order.
_ORDER_ARGUMENTS = {"sampler", "batch_sampler"}
#: Options of a ``DataLoader`` that a run config reports.
_REPORTED = ("batch_size", "drop_last", "num_workers", "persistent_workers", "pin_memory")


def torch_loader(
    dataset: Source, collate_fn: CollateFunction | None, defaults: LoaderKwargs, arguments: LoaderKwargs | None
) -> tuple[Source, LoaderKwargs]:
    """Return a dataloader of a dataset, and its arguments. The user may have passed one in place of a dataset.

    Args:
        arguments: the user's arguments, which override the defaults
    """
    if is_loader(dataset):
        return dataset, options_of(dataset)
    if not isinstance(defaults, dict):
        raise TypeError(
            f"get_default_train_dl_kwargs() or get_default_eval_dl_kwargs() returned {defaults!r}: return the dict of "
            "arguments."
        )
    merged = _merged(dataset, defaults, arguments)
    kwargs: LoaderKwargs = {"collate_fn": collate_fn} | merged
    return DataLoader(dataset, **kwargs), merged


def options_of(loader: Source) -> LoaderKwargs:
    """Return the options with which a loader reads its dataset, if it has any."""
    batches = loader.batches if isinstance(loader, OwnShard) else loader
    return {name: getattr(batches, name) for name in _REPORTED if hasattr(batches, name)}


def default_loader_kwargs(dataset: Source, batch_size: int, shuffle: bool, accelerator: Accelerator) -> LoaderKwargs:
    """Return the default arguments of a dataloader."""
    workers = default_num_workers(dataset, accelerator.num_processes)
    inner = dataset
    while type(inner) is Subset:  # converting a subset's indices takes time
        inner = inner.dataset
    memory = tensors_in_memory(inner)
    can_be_pinned = memory is None or memory.is_on(torch.device("cpu"))
    kwargs: LoaderKwargs = {
        "batch_size": batch_size,
        "num_workers": workers,
        "persistent_workers": workers > 0,
        "pin_memory": accelerator.device.type == "cuda" and can_be_pinned,
    }
    if isinstance(dataset, NamedDatasets):
        kwargs["sampler"] = dataset.create_sampler(shuffle)
    elif not isinstance(dataset, IterableDataset):
        kwargs["shuffle"] = shuffle
    return kwargs


def default_num_workers(dataset: Source, processes: int) -> int:
    """Return the default number of worker processes of a dataloader, given the number of processes in the job.

    The default is 0 for data in memory, for data that are read a whole batch at a time, for iterable datasets (each
    worker would repeat the stream), and where workers are new interpreters rather than forks. Otherwise it is the
    number of this process's cores, up to eight.
    """
    is_fast = _is_in_memory(dataset) or reads_batches(dataset)
    if is_fast or isinstance(dataset, IterableDataset) or start_method() != "fork":
        return 0
    per_process = cores_per_process(processes)
    return min(per_process, 8) if per_process > 1 else 0


def _is_in_memory(dataset: Source) -> bool:
    if type(dataset) in (TensorDataset, torch.Tensor):
        return True
    inner = inner_datasets(dataset)
    return bool(inner) and all(map(_is_in_memory, inner))


def _merged(dataset: Source, defaults: LoaderKwargs, arguments: LoaderKwargs | None) -> LoaderKwargs:
    """Return the user's arguments, with all defaults that are compatible with them."""
    arguments = dict(arguments or {})
    if isinstance(arguments.get("batch_size"), np.integer):
        arguments["batch_size"] = int(arguments["batch_size"])
    has_order = bool(arguments.keys() & _ORDER_ARGUMENTS)
    if isinstance(dataset, NamedDatasets) and "shuffle" in arguments and not has_order:
        arguments["sampler"] = dataset.create_sampler(arguments.pop("shuffle"))
    elif isinstance(dataset, TrainingOrder) and defaults.get("shuffle") and not has_order:
        arguments["sampler"] = dataset.create_training_sampler(arguments.pop("shuffle", True))
    excluded = set()
    if arguments.keys() & _ORDER_ARGUMENTS:
        excluded = {"shuffle"}
    if "batch_sampler" in arguments:
        excluded |= {"batch_size", "drop_last", "sampler"}
    if not (defaults | arguments).get("num_workers"):
        excluded |= {"persistent_workers", "prefetch_factor"}
    elif not defaults.get("num_workers"):  # the user's workers, where there would be none
        defaults = {**defaults, "persistent_workers": True}
    return {name: value for name, value in defaults.items() if name not in excluded} | arguments


#: Checks of a dataset that can be indexed, before each of several processes reads its share: called on all of them. An
#: extension adds its own.
SHARED_DATA_CHECKS: list[Callable[[Source, Ranks], None]] = []
#: Returns the loader for a source that is read in turn.
SequentialReader: TypeAlias = Callable[[Source, Ranks, torch.device, LoaderOptions], ShardedLoader]
#: What reads data in turn: streams, and batches that are ready.
SEQUENTIAL_READER: Slot[SequentialReader] = Slot("streams")


def shard(
    source: Source, ranks: Ranks, device: torch.device, seed: int | None, training: bool, **options: Any
) -> ShardedLoader:
    """Return a loader that yields this process's share of any source of batches.

    Args:
        source: a ``DataLoader``, or any other iterable of batches (see ``OwnShard``)
        training: whether every process must take the same number of steps; in evaluation, a process may take fewer
        options: further ``LoaderOptions``
    """
    return sharded_loader(source, ranks, device, LoaderOptions(seed, training, **options))


def sharded_loader(source: Source, ranks: Ranks, device: torch.device, options: LoaderOptions) -> ShardedLoader:
    """Return the loader for a source of batches; a source that is already such a loader is returned unchanged."""
    if isinstance(source, ShardedLoader):
        return source
    if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
        raise TypeError(
            f"A dataloader must be an iterable of batches, not {type(source).__name__}: see what your "
            "create_train_dataloader or create_eval_dataloader returns."
        )
    if not _is_indexed(source):
        kind = type(getattr(source, "dataset", source)).__name__
        if options.shares is not None:
            raise ValueError(
                f"{options.shares.argument}={options.shares.total} needs data that can be indexed, in a DataLoader, "
                f"to give each {options.shares.owner} its own share; {kind} is read in turn. Use a "
                "dataset with __len__ and __getitem__."
            )
        read = SEQUENTIAL_READER.get(f"Reading {kind} in turn, rather than by index,")
        return read(source, ranks, device, options)
    if ranks.world_size > 1:
        for check in SHARED_DATA_CHECKS:
            check(source.dataset, ranks)
    return MapLoader(source, ranks, device, options)


def _is_indexed(source: Source) -> bool:
    """Whether a source is a ``DataLoader`` that reads samples by their indices, in batches."""
    has_batches = is_loader_of_torch(source) and source.batch_sampler is not None
    return has_batches and not isinstance(source.dataset, IterableDataset)


def is_loader_of_torch(source: Source) -> bool:
    """Whether a source is a ``DataLoader`` that reads as torch's does: its class has no ``__iter__`` of a user."""
    if not isinstance(source, DataLoader):
        return False
    # torchdata's StatefulDataLoader has the same options.
    package = str(type(source).__iter__.__module__).partition(".")[0]
    return type(source) is DataLoader or package in ("torch", "torchdata")
