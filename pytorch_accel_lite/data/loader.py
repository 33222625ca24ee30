"""Loaders that give each process its share of every global batch, each sample once, from any source."""

from __future__ import annotations

import signal
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from accelerate.utils import recursively_apply, send_to_device
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, TensorDataset, default_collate

from pytorch_accel_lite.batches import find_batch_size, slice_batch
from pytorch_accel_lite.data.order import (
    BatchReader,
    EpochOrder,
    find_length,
    identity,
    keep_generators,
    mix,
    of_all_processes,
    take,
)
from pytorch_accel_lite.data.plan import count_global_batches, global_batches, split
from pytorch_accel_lite.data.workers import start_reading
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.signals import ignore_in_worker

T = TypeVar("T")


class LoadedBatch(NamedTuple):
    """A batch of this process, with what it needs to know about the same step on the others.

    :param batch: on the device
    :param num_samples: samples of this process; 0 when the batch only keeps it in step with the others (a sample
        of another process, to be given no weight); ``None`` when only the step that uses the batch can tell
    :param total_samples: samples of all processes in this step; ``None`` like ``num_samples``
    :param is_last: whether it is the last step of the epoch
    :param indices: of its samples in the dataset, a list or a tensor; ``None`` when they are not known
    """

    batch: Any
    num_samples: int | None
    total_samples: int | None
    is_last: bool
    indices: Any = None


class FailedRead:
    """Stands for a batch that could not be read.

    :ivar error: what was raised
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


class OwnShard:
    """Marks batches that are this process's own, already different on every process.

    Return it from ``create_train_dataloader`` for a ``DataLoader`` over an ``IterableDataset`` that shards itself.
    Iterables that are no ``torch.utils.data.DataLoader`` are always taken to be such.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


class ShardedLoader(ABC):
    """The batches of one process. Iterating over it gives them on the device; so do :meth:`steps`, with counts.

    Attributes of the source (``dataset``, ``batch_size``, ``sampler`` ...) can be read here too.

    :param fill: give a process that has no samples left in a step a batch without weight, so that all processes
        make equally many steps; otherwise it has fewer
    """

    #: At most this many steps in an epoch; ``None`` for no limit.
    limit: int | None = None
    #: Begin a prediction after so many samples.
    start = 0
    #: Batches of images, tensors of 4 dimensions, are laid out in memory with the channels last.
    channels_last = False
    #: Give a :class:`FailedRead` for a batch that cannot be read, and go on, where the source can be indexed.
    yields_failures = False
    #: Measure, in ``seconds_waited``, how long an epoch has waited for its batches, but for the first.
    measures_waiting = False
    seconds_waited = 0.0

    def __init__(self, source: Any, ranks: Ranks, device: torch.device, fill: bool) -> None:
        self.source = source
        self._ranks = ranks
        self._device = device
        self._fill = fill
        self._epoch = 0
        self._left: int | None = None
        self._steps_done = 0
        self._with_workers: WeakSet[Any] = WeakSet()  # iterators

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self._device

    @abstractmethod
    def _steps(self, epoch: int, start: int) -> Iterator[LoadedBatch]: ...

    @abstractmethod
    def _num_steps(self) -> int: ...

    def steps(self, epoch: int, start: int = 0, steps_done: int = 0) -> Iterator[LoadedBatch]:
        """Yield the steps of an epoch, from the position after ``start`` samples of the whole job.

        :param epoch: with a seed, the order and the randomness in the dataset follow from it
        :param steps_done: steps that the epoch has had before, which count for the limit
        """
        self._epoch, self._steps_done = epoch, steps_done
        self._left = None if self.limit is None else max(self.limit - steps_done, 0)
        steps = self._steps(epoch, start)
        if self._device.type != "cpu":  # where batches are already
            steps = (s._replace(batch=send_to_device(s.batch, self._device, non_blocking=True)) for s in steps)
        if self.channels_last:
            steps = (s._replace(batch=recursively_apply(_to_channels_last, s.batch)) for s in steps)
        yield from self._measured(steps) if self.measures_waiting else steps

    def _measured(self, steps: Iterator[LoadedBatch]) -> Iterator[LoadedBatch]:
        yield from islice(steps, 1)  # its time is that of starting workers
        self.seconds_waited = 0.0
        while True:
            begin = time.perf_counter()
            step = next(steps, None)
            self.seconds_waited += time.perf_counter() - begin
            if step is None:
                return
            yield step

    def __iter__(self) -> Iterator[Any]:
        return (step.batch for step in self.steps(self._epoch))

    def _read_from(self, start: int) -> Iterator[Any]:
        """Read the source and drop what a resumed epoch had before; the generators stay where that run put them.

        Several processes count the samples of a step here, so the samples tell where to go on. One process counts what
        each step says that it had, which may be no size of the batch: there the steps tell, where the batches are
        as large as before. With another batch size the samples tell again, and a batch in which they end is split.
        """
        size = getattr(self.source, "batch_size", None)
        by_steps = self._ranks.world_size == 1 and size in (None, start / max(self._steps_done, 1))
        with keep_generators() if start else nullcontext():
            batches = self._start_reading(self.source)
            if by_steps and self._steps_done:
                rest = _skip_batches(batches, self._steps_done, start, is_certain=size is not None)
            else:
                rest = _skip_samples(batches, start)
        return chain(rest, batches) if rest else batches

    def _start_reading(self, batches: Iterable[Any]) -> Iterator[Any]:
        iterator = start_reading(batches)
        if hasattr(iterator, "_shutdown_workers"):
            self._with_workers.add(iterator)
        return iterator

    def stop_workers(self) -> None:
        """Let go of worker processes, if there are any; the next iteration starts others.

        Without this (torch has no public way) they would live on for as long as the traceback of an error does. Those
        that leave signals to their parent would then keep it from ending.
        """
        for iterator in self._with_workers:
            iterator._shutdown_workers()
        self._with_workers.clear()

    def __len__(self) -> int:
        """The number of steps in an epoch, the same on every process.

        :raises TypeError: when the source has no length
        """
        steps = self._num_steps()
        return steps if self.limit is None else min(steps, self.limit)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not yet set: while being unpickled
            raise AttributeError(name)
        return getattr(self.source, name)


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

    :ivar rows: of data in memory, so many: give indices into them as tensors, where their order is fixed when the
        epoch begins
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

    def __iter__(self) -> Iterator[list[Any]]:
        return self._keys(self._next)

    def _keys(self, iteration: _Iteration) -> Iterator[list[Any]]:
        """Yield what the dataset is asked for: indices, with epoch and position under a seed."""
        for indices, first in self.shares(iteration):
            if self._seed is None:
                yield list(indices)
            else:
                yield [(iteration.epoch, first + i, index) for i, index in enumerate(indices)]

    def shares(self, iteration: _Iteration) -> Iterator[tuple[Any, int]]:
        """Yield this process's indices of every step and their first position; note their counts."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
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
        """Yield the indices of all processes in each step; with own batches, the batches of each step."""
        order, world_size = self._order.draw(epoch, self.rows is not None), self._ranks.world_size
        if self.rows is not None and (isinstance(order, list) or type(order) in (RandomSampler, range)):
            order = _from_front(np.fromiter(order, dtype=np.int64), self.rows)  # once, not for each batch
        if self.own_batches:
            batches = _batches_from(order, start)
            yield from iter(lambda: list(islice(batches, world_size)), [])
            return
        size = find_length(self.sampler)
        if size is None:
            next_indices = take(order, start)
            yield from iter(lambda: next_indices(self.global_batch), [])
            return
        if isinstance(order, (list, torch.Tensor)) and len(order) != size:
            raise _wrong_length(self.sampler, size, len(order))
        at_least = 1 if self._fill else world_size
        bounds = global_batches(size, self.global_batch, start, self._drop_last, at_least)
        sizes = [end - begin for begin, end in bounds]
        if isinstance(order, torch.Tensor):
            yield from order[start : start + sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]
        else:
            yield from self._in_turn(order, start, sizes, size)

    def _in_turn(self, order: Any, start: int, sizes: list[int], size: int) -> Iterator[Any]:
        """Yield so many indices after one another; find out whether the length of the sampler was right."""
        next_indices, position = take(order, start), start
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

    def __init__(
        self, source: DataLoader[Any], ranks: Ranks, device: torch.device, seed: int | None, fill: bool
    ) -> None:
        super().__init__(source, ranks, device, fill)
        self._shares = _EpochShares(source, ranks, seed, fill)
        self._memory = None
        if source.num_workers == 0 and source.collate_fn is default_collate:
            self._memory = tensors_in_memory(source.dataset)
            if self._memory is not None and not self._shares.own_batches:
                self._shares.rows = len(source.dataset)  # type: ignore[arg-type]
        self._seed = seed
        self._idle: DataLoader[Any] | None = None  # and its workers, for the next iteration

    def _create_inner(self, source: DataLoader[Any]) -> DataLoader[Any]:
        dataset, collate_fn, generator = source.dataset, source.collate_fn, source.generator
        if self._seed is not None:
            dataset, collate_fn = BatchReader(dataset, collate_fn, self._seed), identity
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

    def _steps(self, epoch: int, start: int) -> Iterator[LoadedBatch]:
        iteration = self._shares.begin(epoch, start, self._left)
        for batch in self._read() if self._memory is None else self._read_memory(iteration):
            yield LoadedBatch(batch, *iteration.counts.popleft())

    def _read(self) -> Iterator[Any]:
        """Read with a loader that nobody reads with: torch's has a single iterator when its workers persist."""
        loader = self._create_inner(self.source) if self._idle is None else self._idle
        self._idle = None
        batches = self._start_reading(loader)
        try:
            yield from _with_failures(batches) if self.yields_failures else batches
        finally:
            if not loader.num_workers or batches in self._with_workers:  # they were not stopped meanwhile
                self._idle = loader

    def _read_memory(self, iteration: _Iteration) -> Iterator[list[torch.Tensor]]:
        assert self._memory is not None
        tensors, subset = self._memory
        rows, on_host = len(self.source.dataset), all(tensor.is_cpu for tensor in tensors)
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

    def stop_workers(self) -> None:  # noqa: D102
        super().stop_workers()
        self._idle = None

    def _num_steps(self) -> int:
        return self._shares.num_steps()


class StreamLoader(ShardedLoader):
    """The batches of a ``DataLoader`` that cannot be indexed: rank 0 reads them all and deals them out in turn.

    So every sample is seen once, whatever the randomness of the stream. Going on in the middle of an epoch reads
    and drops what came before.
    """

    def _steps(self, epoch: int, start: int) -> Iterator[LoadedBatch]:
        dataset = self.source.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if self._ranks.world_size == 1:
            for batch, is_last in with_last(islice(self._read_from(start), self._left)):
                yield LoadedBatch(batch, None, None, is_last)
            return
        batches = self._read_from(start)  # on rank 0
        groups = iter(lambda: list(islice(batches, self._ranks.world_size)), [])
        steps = chain(with_last(islice(groups, self._left)), [None])
        is_last = False
        while not is_last:  # then a process without a batch is done: the others may talk before they ask for another
            step = self._ranks.broadcast_object(lambda: next(steps))
            if step is None:
                return
            group, is_last = step
            sizes = [find_batch_size(batch) for batch in group]
            if self._ranks.rank < len(group):
                yield LoadedBatch(group[self._ranks.rank], sizes[self._ranks.rank], sum(sizes), is_last)
            elif self._fill:
                yield LoadedBatch(group[0], 0, sum(sizes), is_last)

    def _num_steps(self) -> int:
        return count_global_batches(len(self.source), self._ranks.world_size)


class OwnLoader(ShardedLoader):
    """The batches of any other iterable, taken to be this process's own.

    In training, the processes agree at every step on whether any has a batch left; one that has none repeats its
    last batch without weight until the others are done.
    """

    def __init__(self, source: Iterable[Any], ranks: Ranks, device: torch.device, fill: bool) -> None:
        super().__init__(source, ranks, device, fill)
        self._no_length: TypeError | None = None
        try:
            length = float(len(source))  # type: ignore[arg-type]
        except TypeError as error:
            length, self._no_length = -1.0, error
        self._length = int(ranks.max([length])[0])

    def _steps(self, epoch: int, start: int) -> Iterator[LoadedBatch]:
        if self._ranks.world_size == 1 or not self._fill:
            for batch, is_last in with_last(islice(self._read_from(start), self._left)):
                yield LoadedBatch(batch, None, None, is_last)
            return
        with keep_generators() if start else nullcontext():
            steps, samples = self._steps_together(), 0
            while samples < start:
                step = next(steps, None)
                if step is None:
                    raise _ended("data", f"{samples} samples", start)
                samples += step.total_samples or 0
            if samples > start:
                raise _cannot_split("the batches of several processes")
        yield from steps

    def _steps_together(self) -> Iterator[LoadedBatch]:
        batches = islice(self._start_reading(self.source), self.limit)
        batch, ready = None, next(batches, None)
        while True:
            batch = batch if ready is None else ready
            size = 0 if ready is None else find_batch_size(batch)
            following = None if ready is None else next(batches, None)
            total, running, empty = self._ranks.sum([size, following is not None, batch is None])
            if total and empty:
                raise ValueError(
                    f"{int(empty)} of {self._ranks.world_size} processes have no training batch at all. Give every "
                    "process at least one."
                )
            if not total:
                return
            yield LoadedBatch(batch, size, int(total), not running)
            ready = following

    def _num_steps(self) -> int:
        if self._length < 0:
            raise TypeError(f"{type(self.source).__name__} has no length.") from self._no_length
        return self._length


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


def _to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def shard(source: Any, ranks: Ranks, device: torch.device, seed: int | None, training: bool) -> ShardedLoader:
    """Return a loader that gives this process its share of any source of batches.

    :param source: a ``DataLoader``, or any other iterable of batches (see :class:`OwnShard`)
    :param training: every process makes equally many steps; in evaluation a process may have fewer
    """
    if isinstance(source, ShardedLoader):
        return source
    if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
        raise TypeError(f"A dataloader must be an iterable of batches, not {type(source).__name__}.")
    if not isinstance(source, DataLoader) or type(source).__iter__ is not DataLoader.__iter__:
        return OwnLoader(source, ranks, device, training)
    if isinstance(source.dataset, IterableDataset) or source.batch_sampler is None:
        return StreamLoader(source, ranks, device, training)
    return MapLoader(source, ranks, device, seed, training)


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


class WrongLengthError(ValueError):
    """What gives the order of an epoch has not as many indices as it said: no batch of it can be skipped."""


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
        raise _ended("batch_sampler", f"{start - left} samples", start)


def _ended(source: str, given: str, done: int) -> WrongLengthError:
    return WrongLengthError(
        f"The {source} ended after {given} of this epoch, but the run that is resumed has had {done} of them. Resume "
        "it with the data that it was saved with."
    )


def _from_front(indices: Any, rows: int) -> torch.Tensor:
    """Return indices as ``index_select`` takes them: those below zero, which count from the end, from the front."""
    tensor = torch.as_tensor(indices, dtype=torch.int64)
    return torch.where(tensor < 0, tensor + rows, tensor)


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item with whether it is the last, reading one ahead."""
    iterator = iter(items)
    held = list(islice(iterator, 1))
    for following in iterator:
        yield held.pop(), False
        held.append(following)
    if held:
        yield held.pop(), True


def _skip_batches(batches: Iterator[Any], count: int, start: int, is_certain: bool) -> list[Any]:
    """Drop so many batches. Unless the caller is certain, warn when they hold another number of samples than before."""
    skipped, samples = 0, 0
    for batch in islice(batches, count):
        skipped += 1
        try:
            samples += find_batch_size(batch)
        except ValueError:  # no size can be told
            is_certain = True
    if skipped < count:
        raise _ended("data", f"{skipped} batches", count)
    if samples != start and not is_certain:
        warnings.warn(
            f"The run that is resumed had counted {start} samples in {count} steps of this epoch; as many batches hold "
            f"{samples} now. It goes on where it was only if it had one process and the same batches.",
            stacklevel=2,
        )
    return []


def _skip_samples(batches: Iterator[Any], start: int) -> list[Any]:
    """Drop so many samples, and return the rest of a batch in which they end."""
    position = 0
    while position < start:
        batch = next(batches, None)
        if batch is None:
            raise _ended("data", f"{position} samples", start)
        size = find_batch_size(batch)
        if position + size > start:
            return [_rest(batch, start - position, size)]
        position += size
    return []


def _rest(batch: Any, begin: int, size: int) -> Any:
    rest = slice_batch(batch, begin, size, size)
    if find_batch_size(rest) != size - begin:
        raise _cannot_split(f"a batch of type {type(batch).__name__}")
    return rest


def _cannot_split(what: str) -> ValueError:
    return ValueError(
        f"The run that is resumed was saved at a sample that is now in the middle of {what}, which cannot be split. "
        "Resume it with its batch size and number of processes."
    )
