"""Batches of datasets that can be indexed: one global order, of which each process reads its share."""

from __future__ import annotations

import signal
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, starmap
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset, default_collate

from pytorch_accel_lite.data.loader import (
    Batch,
    FailedRead,
    LoaderOptions,
    ShardedLoader,
    WrongLengthError,
    ended,
    with_last,
)
from pytorch_accel_lite.data.order import BatchReader, EpochOrder, Share, identity, of_all_processes, take
from pytorch_accel_lite.data.plan import count_global_batches, global_batches, split
from pytorch_accel_lite.data.workers import ignore_in_worker
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.randomness import mix, seed_python
from pytorch_accel_lite.utils import find_length


class _Iteration(NamedTuple):
    """Where an iteration over an epoch begins, and how many steps it has at most.

    :param counts: for each batch that was handed out and not yet taken, the samples of this process, of all
        processes, whether it is the last step, and the indices of the samples
    """

    epoch: int
    start: int
    limit: int | None
    counts: deque[tuple[int, int, bool, Any]]


class _EpochShares:
    """What this process reads of an epoch, batch by batch: the batch sampler of a :class:`MapLoader`.

    It knows nothing of its loader: a reference cycle would keep workers from being stopped when it is dropped.

    :ivar rows: how many rows data in memory have; indices into them are given as tensors, where their order is fixed
        when the epoch begins
    """

    def __init__(self, source: DataLoader[Any], ranks: Ranks, seed: int | None, fill: bool) -> None:
        self.own_batches = source.batch_size is None  # a batch sampler of the user's
        sampler = self.sampler = of_all_processes(source.batch_sampler if self.own_batches else source.sampler)
        self.global_batch = (source.batch_size or 1) * ranks.world_size
        self.rows: int | None = None
        self._drop_last = source.drop_last and not self.own_batches
        self._order = EpochOrder(sampler, ranks, seed)
        self._ranks = ranks
        self._seed = seed
        self._fill = fill

    def begin(self, epoch: int, start: int, limit: int | None) -> _Iteration:
        """Say where the next iteration begins. Another one may be under way, and is left alone."""
        self._next = _Iteration(epoch, start, limit, deque())
        return self._next

    def __iter__(self) -> Iterator[Any]:
        return self._keys(self._next)

    def _keys(self, iteration: _Iteration) -> Iterator[Any]:
        """Yield what the dataset is asked for: indices, with their place under a seed."""
        place = None if self._seed is None else mix(self._seed, iteration.epoch)
        for indices, first in self.shares(iteration):
            listed = indices if type(indices) is list else list(indices)
            yield listed if place is None else Share(place, first, listed)

    def shares(self, iteration: _Iteration) -> Iterator[tuple[Any, int]]:
        """Yield this process's indices of every step and their first position; note their counts."""
        rank = self._ranks.rank
        world_size = self._ranks.world_size
        epoch, position, limit, counts = iteration
        for group, is_last in with_last(islice(self._global_batches(epoch, position), limit)):
            flat = list(chain(*group)) if self.own_batches else group
            size = len(flat)
            if world_size == 1:
                counts.append((size, size, is_last, flat))
                yield flat, position
                position += size
                continue
            begin, end = split(0, size, rank, world_size)
            if self.own_batches and len(group) == world_size:
                begin = sum(map(len, group[:rank]))
                end = begin + len(group[rank])
            if end > begin or self._fill:
                mine = flat[begin:end]
                counts.append((end - begin, size, is_last, mine))
                yield (mine, position + begin) if end > begin else (flat[:1], position)
            position += size

    def _global_batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Return the indices of all processes in each step; with own batches, the batches of each step."""
        order = self._order.draw(epoch, self.rows is not None)
        world_size = self._ranks.world_size
        if self.rows is not None and (isinstance(order, list) or type(order) in (RandomSampler, range)):
            order = _from_front(np.fromiter(order, dtype=np.int64), self.rows)  # once, not for each batch
        if self.own_batches:
            batches = _batches_from(order, start)
            return iter(lambda: list(islice(batches, world_size)), [])
        size = find_length(self.sampler)
        if size is None:
            next_indices = take(order, start)
            return iter(lambda: next_indices(self.global_batch), [])
        if isinstance(order, (list, torch.Tensor)) and len(order) != size:
            raise _wrong_length(self.sampler, size, len(order))
        at_least = 1 if self._fill else world_size
        bounds = global_batches(size, self.global_batch, start, self._drop_last, at_least)
        if isinstance(order, (list, range)):
            return map(order.__getitem__, starmap(slice, bounds))
        sizes = [end - begin for begin, end in bounds]
        if isinstance(order, torch.Tensor):
            return iter(order[start : start + sum(sizes)].split(sizes))  # type: ignore[no-untyped-call]
        return self._in_turn(order, start, sizes, size)

    def _in_turn(self, order: Any, start: int, sizes: list[int], size: int) -> Iterator[Any]:
        """Yield the indices of each step in turn; check the length that the sampler claimed."""
        next_indices = take(order, start)
        position = start
        for count in sizes:
            indices = next_indices(count)
            position += len(indices)
            if len(indices) < count:
                raise _wrong_length(self.sampler, size, position)
            yield indices
        if position == size and next_indices(1):  # it may have no end
            warnings.warn(
                f"The sampler {type(self.sampler).__name__} gives more indices than its length, {size}, at which an "
                "epoch ends.",
                stacklevel=2,
            )

    def num_steps(self) -> int:
        """Return how many steps a whole epoch has."""
        per_step = self._ranks.world_size if self.own_batches else self.global_batch
        return count_global_batches(len(self.sampler), per_step, self._drop_last)


class MapLoader(ShardedLoader):
    """The batches of a ``DataLoader`` over a map dataset, shared out over the processes.

    Each step takes the next ``batch_size`` samples for every process from one global order; a smaller rest is
    shared out evenly. With a ``batch_sampler`` of the user's, a step takes its next batch for every process.
    Tensors in memory are indexed a whole batch at a time.
    """

    def __init__(self, source: DataLoader[Any], ranks: Ranks, device: torch.device, options: LoaderOptions) -> None:
        super().__init__(source, ranks, device, options)
        self._shares = _EpochShares(source, ranks, options.seed, options.fill)
        self._memory = None
        if source.num_workers == 0 and source.collate_fn is default_collate:
            self._memory = tensors_in_memory(source.dataset)
            if self._memory is not None and not self._shares.own_batches:
                self._shares.rows = len(source.dataset)  # type: ignore[arg-type]
        self._seed = options.seed
        self._idle: DataLoader[Any] | None = None  # and its workers, for the next iteration

    def _create_inner(self, source: DataLoader[Any]) -> DataLoader[Any]:
        dataset = source.dataset
        collate_fn = source.collate_fn
        generator = source.generator
        if self._seed is not None:
            dataset = BatchReader(dataset, collate_fn)
            collate_fn = identity
            generator = torch.Generator().manual_seed(mix(self._seed) >> 1)
        return DataLoader(
            dataset,
            batch_sampler=self._shares,
            collate_fn=collate_fn,
            generator=generator,
            num_workers=source.num_workers,
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=self._worker_init_fn(source),
            multiprocessing_context=source.multiprocessing_context,
            prefetch_factor=source.prefetch_factor,
            persistent_workers=source.persistent_workers,
        )

    def _worker_init_fn(self, source: DataLoader[Any]) -> Any:
        """While a run ends in order at signals, its workers must not die of them first."""
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            return source.worker_init_fn
        return partial(ignore_in_worker, source.worker_init_fn)

    def _steps(self, epoch: int, start: int) -> Iterator[Batch]:
        iteration = self._shares.begin(epoch, start, self._left)
        batches = self._read() if self._memory is None else self._read_memory(iteration)
        if self._seed is None:
            for batch in batches:
                yield Batch(batch, *iteration.counts.popleft())
            return
        # Reading here changes python's and numpy's generators, reading in workers does not: so each step begins with
        # them seeded from its place.
        place = mix(self._seed, epoch, self._ranks.rank)
        for batch in batches:
            own, total, is_last, indices = iteration.counts.popleft()
            seed_python(mix(start, after=place))
            start += total
            yield Batch(batch, own, total, is_last, indices)

    def _read(self) -> Iterator[Any]:
        """Read with a loader that nobody reads with: torch's has a single iterator when its workers persist."""
        loader = self._create_inner(self.source) if self._idle is None else self._idle
        self._idle = None
        batches = self._start_reading(loader)
        try:
            yield from _with_failures(batches) if self.options.yields_failures else batches
        finally:
            if not loader.num_workers or batches in self._with_workers:  # they were not stopped meanwhile
                self._idle = loader

    def _read_memory(self, iteration: _Iteration) -> Iterator[list[torch.Tensor]]:
        assert self._memory is not None
        tensors, subset = self._memory
        rows = len(self.source.dataset)
        on_host = all(tensor.is_cpu for tensor in tensors)
        pin = self.source.pin_memory and self._device.type == "cuda"
        if self._seed is None:  # as a DataLoader does: random numbers go on as in a hand-written loop
            torch.empty((), dtype=torch.int64).random_(generator=self.source.generator)
        for indices, _ in self._shares.shares(iteration):
            chosen = indices if isinstance(indices, torch.Tensor) else _from_front(indices, rows)
            if subset is not None:
                chosen = subset[chosen]
            if on_host:
                batch = [tensor.index_select(0, chosen) for tensor in tensors]
            else:
                batch = [tensor.index_select(0, chosen.to(tensor.device, non_blocking=True)) for tensor in tensors]
            yield [tensor.pin_memory() if tensor.is_cpu else tensor for tensor in batch] if pin else batch

    def stop_workers(self) -> None:
        super().stop_workers()
        self._idle = None

    def _num_steps(self) -> int:
        return self._shares.num_steps()


def _with_failures(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return
        except WrongLengthError:
            raise
        except Exception as error:
            yield FailedRead(error)


def tensors_in_memory(dataset: Any) -> tuple[Sequence[torch.Tensor], torch.Tensor | None] | None:
    """Return the tensors of a ``TensorDataset``, with the indices into them of a ``Subset`` of one; else nothing."""
    if type(dataset) is TensorDataset:
        return dataset.tensors, None
    if type(dataset) is Subset:
        inner = tensors_in_memory(dataset.dataset)
        if inner is not None:
            tensors, chosen = inner
            indices = _from_front(dataset.indices, len(dataset.dataset))  # type: ignore[arg-type]
            return tensors, indices if chosen is None else chosen[indices]
    return None


def _wrong_length(sampler: Any, size: int, given: int) -> WrongLengthError:
    found = f"{given} or more" if given > size else given
    return WrongLengthError(
        f"The sampler {type(sampler).__name__} gives {found} indices, but its length is {size}. Make its __len__ "
        "return as many as it gives."
    )


def _batches_from(batches: Iterable[Any], start: int) -> Iterator[Any]:
    """Yield the batches of a batch sampler after ``start`` samples; of the one that these end in, the rest."""
    left = start
    for batch in batches:
        if left >= len(batch):
            left -= len(batch)
            continue
        yield batch[left:] if left else batch
        left = 0
    if left:
        raise ended("batch_sampler", f"{start - left} samples", start)


def _from_front(indices: Any, rows: int) -> torch.Tensor:
    """Return indices as ``index_select`` takes them: those below zero, which count from the end, from the front."""
    tensor = torch.as_tensor(indices, dtype=torch.int64)
    return torch.where(tensor < 0, tensor + rows, tensor)
