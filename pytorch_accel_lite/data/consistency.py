"""Checking that map datasets and the orders of samplers are the same on all processes, and in a resumed run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, Subset

from pytorch_accel_lite.base.batches import tensors_in
from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.data.plan import WrongLengthError
from pytorch_accel_lite.distributed import Ranks

_PIECE = 1 << 16  # indices


class OtherOrderError(WrongLengthError):
    """A sampler gives another order than it must. Never skipped, like one of another length."""


def check_same_data(dataset: Any, ranks: Ranks) -> None:
    """Check that a map dataset has the same samples on all processes, as far as that can be told without reading them.

    Compares lengths, the indices of subsets, and a few rows of Hugging Face's tables, also of datasets that are
    attributes of others. Call it on every process.

    :raises ValueError: on all processes, for example after a ``random_split`` that was not seeded
    """
    found = ranks.all_gather_object(_identity(dataset))
    if any(other != found[0] for other in found):
        raise ValueError(
            f"The processes have datasets with different rows, of lengths {[length for length, _ in found]}. Each "
            "would read only a share of its own rows, so most of the data would be lost. Pass the same dataset on "
            "every process: call torch.manual_seed before random_split, and do not split by rank, as "
            "split_dataset_by_node and shard() do: the trainer shards the data. If each process should read all of its "
            "own rows, return OwnShard(DataLoader(...)) from create_train_dataloader or create_eval_dataloader."
        )


def check_own_batches(source: Any, ranks: Ranks) -> None:
    """Check that not every process reads the same samples from batches that are taken to be its own.

    Nothing divides a ``DataLoader`` of a subclass that reads by a method ``__iter__`` of its own. Raises only if its
    order is one of torch's, over data that are the same on all processes. Call it on every process.

    :raises ValueError: on all processes
    """
    if ranks.world_size == 1:
        return
    found = ranks.all_gather_object(_identity(source.dataset) if _reads_all(source) else None)
    if found[0] is not None and all(other == found[0] for other in found):
        raise ValueError(
            f"{type(source).__name__} has an __iter__ of its own, by which every process would read all samples of its "
            f"DataLoader: each sample would be used {ranks.world_size} times. Return a plain DataLoader, which the "
            "trainer shards. If each process reads its own part, return OwnShard(...) of it from "
            "create_train_dataloader or create_eval_dataloader."
        )


def check_same_order(sampler: Any, order: list[Any], ranks: Ranks) -> int:
    """Check that a sampler has drawn the same order, or piece of one, on all processes, and return its checksum.

    :raises OtherOrderError: on all processes, for example if it has a generator of its own, or gives a part by rank
    """
    mine = len(order), checksum(order)
    found = ranks.all_gather_object(mine)
    if any(other != mine for other in found):
        raise OtherOrderError(
            f"The sampler {type(sampler).__name__} gives another order on each process, of lengths "
            f"{[length for length, _ in found]}. Each would read only a share of its own order, so samples would be "
            "lost and others repeated. Draw it from torch's, NumPy's or Python's global generators, which are seeded "
            "alike for each epoch, or from the epoch that set_epoch(epoch) is given. If each process should read its "
            "own part, return OwnShard(DataLoader(...)) from create_train_dataloader or create_eval_dataloader."
        )
    return mine[1]


def check_order(
    sampler: Any, order: list[Any] | None, ranks: Ranks, drawn: dict[str, Any], resumed: dict[str, Any] | None
) -> None:
    """Check the order of an epoch, which each process has drawn itself, and note in ``drawn`` what identifies it.

    :param order: that of a user's sampler; ``None`` for others, which are functions of their length
    :param resumed: what the training state holds, if the epoch is resumed
    """
    if order is not None:
        drawn["checksum"] = check_same_order(sampler, order, ranks)
        drawn["batch_size"] = getattr(sampler, "batch_size", None)
    if resumed is not None:
        _check_order_of_state(sampler, drawn, resumed)


def _check_order_of_state(sampler: Any, drawn: dict[str, Any], saved: dict[str, Any]) -> None:
    """Check that the order of an epoch that is resumed in its middle is the one of the run that saved the state.

    :param drawn: ``"length"`` of the order, if it consists of indices; for orders of users' samplers under a seed, also
        their ``"checksum"`` and the ``"batch_size"`` of the sampler, if it has one
    :param saved: the same of the state
    :raises OtherOrderError: if the data have another length, or the sampler gives another order
    """
    before, now = saved.get("length"), drawn["length"]
    remedy = "the training state was saved in the middle of an epoch. Resume it with the data and the sampler it was "
    remedy += "saved with, or resume a state that was saved at the end of an epoch."
    if None not in (before, now) and before != now:
        raise WrongLengthError(f"An epoch now has {now} samples, but had {before} when {remedy}")
    if "checksum" not in drawn or "checksum" not in saved or drawn["batch_size"] != saved["batch_size"]:
        return  # with drop_last, the order of other batches differs at its end
    if drawn["checksum"] != saved["checksum"]:
        raise OtherOrderError(
            f"The sampler {type(sampler).__name__} now gives another order for this epoch than when {remedy} A sampler "
            "must draw its order from torch's, NumPy's or Python's global generators, which are seeded for each epoch, "
            "or from the epoch that set_epoch(epoch) is given."
        )


def checksum(indices: Any) -> int:
    """Return a number to compare indices by, also those in batches; other objects count by what they show."""
    if isinstance(indices, torch.Tensor):
        indices = indices.detach().cpu().numpy()
    if isinstance(indices, range):
        return crc32(repr(indices).encode())
    number = 0
    for begin in range(0, len(indices), _PIECE):
        number = crc32(_as_bytes(indices[begin : begin + _PIECE]), number)
    return number


def checksum_of_batches(batches: list[Any], sizes: Sequence[int] = ()) -> int:
    """Return a number to compare batches by, which is not 0: from their sizes, and a few of their values."""
    number = crc32(str(sizes).encode())
    for tensor in tensors_in(batches):
        if tensor.layout is torch.strided and not tensor.is_nested:
            few = tensor.detach().resolve_conj().flatten()[:: max(tensor.numel() // 64, 1)]
            number = crc32(few.cpu().contiguous().view(torch.uint8).numpy().tobytes(), number)
    return number or 1


def _as_bytes(indices: Any) -> bytes:
    try:
        return np.fromiter(indices, np.int64).tobytes()
    except (TypeError, ValueError, OverflowError):  # batches, or other keys of samples
        return b"".join(map(_bytes_of, indices))


def _bytes_of(index: Any) -> bytes:
    if isinstance(index, (list, tuple)) or getattr(index, "ndim", False):
        return _as_bytes(index)
    shows_address = getattr(type(index), "__repr__", None) is object.__repr__
    return (type(index).__qualname__ if shows_address else repr(index)).encode()


def _datasets_in(dataset: Any, seen: list[Any]) -> Iterator[Any]:
    """Yield a dataset and the datasets inside it, as far as they are its attributes."""
    if any(dataset is other for other in seen):
        return
    seen.append(dataset)
    yield dataset
    for value in getattr(dataset, "__dict__", {}).values():
        values = list(value.values()) if isinstance(value, dict) else value
        inner = values if isinstance(values, (list, tuple)) else [value]
        if inner and _is_dataset(inner[0]):  # do not look through long lists of other objects
            for part in inner:
                yield from _datasets_in(part, seen)


def _is_dataset(value: Any) -> bool:
    return isinstance(value, Dataset) or _is_table(value)


def _is_table(value: Any) -> bool:
    """Whether an object is a ``Dataset`` of Hugging Face."""
    return all(hasattr(type(value), name) for name in ("with_format", "num_rows"))


def _reads_all(source: Any) -> bool:
    """Whether a source is a ``DataLoader`` over a map dataset, with a sampler of torch that is known to give all."""
    dataset = getattr(source, "dataset", None)
    if not isinstance(source, DataLoader) or isinstance(dataset, (IterableDataset, range)):  # numbers of something else
        return False
    if any(base.__module__.startswith("accelerate.") for base in type(source).__mro__):
        return False
    sampler: Any = source.sampler if source.batch_sampler is None else source.batch_sampler
    while hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    return type(sampler) in (RandomSampler, SequentialSampler)


def _identity(dataset: Any) -> tuple[int | None, list[tuple[str, int]]]:
    """Return the length of a map dataset, and what identifies it and the datasets inside it."""
    return find_length(dataset), [_described(part) for part in _datasets_in(dataset, [])]


def _described(dataset: Any) -> tuple[str, int]:
    """Return the type of a dataset, and a number to compare its samples by if it is a subset or a table."""
    compared = 0
    if isinstance(dataset, Subset):
        compared = checksum(dataset.indices)
    elif _is_table(dataset):  # compared as stored, before any transform
        stored = dataset.with_format("arrow")
        places = sorted({0, len(dataset) // 2, len(dataset) - 1}) if len(dataset) else []
        compared = crc32(repr([stored[index].to_pydict() for index in places]).encode())
    return type(dataset).__qualname__, compared
