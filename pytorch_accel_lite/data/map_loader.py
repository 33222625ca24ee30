"""Batches of map datasets: each process reads its share of one global order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, starmap
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from pytorch_accel_lite.base.random_generators import derive_seed, draw_seed, seed_generators
from pytorch_accel_lite.base.reachable_objects import nested_in
from pytorch_accel_lite.base.slots import Slot
from pytorch_accel_lite.base.warnings_and_errors import warn_outside
from pytorch_accel_lite.data.batches import Batch, Share
from pytorch_accel_lite.data.epoch_orders import EpochOrders
from pytorch_accel_lite.data.loader_base import FailedRead, LoaderOptions, ShardedLoader, shares_of
from pytorch_accel_lite.data.order_checks import WrongLengthError
from pytorch_accel_lite.data.reading import InMemory, add_missing_note, as_rows, read_rows, reader_of, tensors_in_memory
from pytorch_accel_lite.data.sample_order import ComputedOrder
from pytorch_accel_lite.data.sources import BatchData, CollateFunction, Index, Sample, SourceState
from pytorch_accel_lite.data.steps_and_shares import (
    count_global_batches,
    global_batches,
    grouped,
    in_turn,
    indices_at,
    length_error,
    share_bounds,
    skip_samples,
    with_last,
)
from pytorch_accel_lite.data.worker_and_sample_seeds import SeededReader, as_collated, generator_of_loader
from pytorch_accel_lite.distributed import Ranks


class _PlannedStep(NamedTuple):
    """A step whose indices have been handed out, for the reader of its batch.

    Args:
        seed: the seed of this process's share
        num_samples: the number of samples on this process
        total_samples: the number of samples on all processes
        is_last: whether it is the last step of the epoch
        indices: the indices of this process's samples
        share: the share, if the number of shares is fixed
    """

    seed: int | None
    num_samples: int
    total_samples: int
    is_last: bool
    indices: Sequence[Index] | torch.Tensor
    share: Share | None


class _EpochShares:
    """This process's share of an epoch, batch by batch: the batch sampler of a ``MapLoader``.

    It has no reference to its loader: a reference cycle would keep workers alive after the loader is dropped.

    Args:
        source: the user's ``DataLoader``, or one that the trainer has created
        orders: the orders of the epochs, from its sampler
        ranks: the processes that read different data
        options: how the source is read
        rows: number of rows of data in memory; their indices are tensors if the order is fixed when the epoch begins.
            ``None`` for other data.

    Attributes:
        per_step: number of samples in a step of all processes, or of the user's batches
        drop_last: whether a last step with fewer samples is left out
        planned: the queue of the steps whose indices have been handed out, for the reader of their batches
    """

    def __init__(
        self, source: DataLoader[Sample], orders: EpochOrders, ranks: Ranks, options: LoaderOptions, rows: int | None
    ) -> None:
        self._orders = orders
        self._shares = shares_of(options, ranks)
        self.per_step = (source.batch_size or 1) * self._shares.total
        self.drop_last = source.drop_last
        self._ranks = ranks
        self._options = options
        self.rows = rows
        self.planned = deque[_PlannedStep]()

    def begin(self, epoch: int, start: int, limit: int | None, min_share: int) -> deque[_PlannedStep]:
        """Set what the next iteration reads, without affecting running ones; return the queue that it will fill.

        Args:
            start: the number of samples before the first step
            limit: the largest number of steps
            min_share: the smallest share of a process
        """
        self.planned = deque()
        self._next_iteration = epoch, start, limit, min_share, self.planned
        return self.planned

    def __iter__(self) -> Iterator[Any]:
        """Return the indices to read in each step; with a seed, as a ``SeededShare`` unless data are in memory."""
        epoch, start, *_ = self._next_iteration
        steps = None
        if self._orders.is_batched and self._options.seed is None and self._ranks.world_size == 1:
            # Begun at once, as in a DataLoader, since a batch sampler may draw random numbers when it begins.
            steps = self._indices_of_steps(epoch, start)
        return self._shares_of_steps(steps, *self._next_iteration)

    def _shares_of_steps(
        self,
        steps: Iterator[BatchData] | None,
        epoch: int,
        position: int,
        limit: int | None,
        min_share: int,
        planned: deque[_PlannedStep],
    ) -> Iterator[Any]:
        num_shares = self._shares.total
        min_count = min(min_share, self.per_step // num_shares)
        run_seed = self._options.seed
        epoch_seed = None if run_seed is None else derive_seed(run_seed, epoch)
        is_seeded = epoch_seed is not None and self.rows is None
        lengths: list[int] = []
        seed = share = None
        steps = self._indices_of_steps(epoch, position) if steps is None else steps
        for step, is_last in with_last(islice(steps, limit)):
            indices = step
            if self._orders.is_batched:
                indices = list(chain(*step))
                lengths = [len(batch) for batch in step]
                min_count = min(min_share, max(lengths))
            size = len(indices)
            shares = [(0, 0, size)] if num_shares == 1 else self._local_shares(size, min_count, lengths)
            for nth, (number, begin, end) in enumerate(shares, start=1):
                count = end - begin
                local = indices if count == size else indices[begin:end]
                first, to_read = position + begin, local
                if not count:  # a filler batch has the first samples of the step
                    first, to_read = position, indices[:min_count]
                if epoch_seed is not None:
                    seed = derive_seed(first, after=epoch_seed)
                if self._options.shares is not None:
                    share = Share(number, derive_seed(run_seed or 0, epoch, 0, position), ends_step=nth == len(shares))
                planned.append(_PlannedStep(seed, count, size, is_last, local, share))
                yield (seed, epoch_seed, first, to_read) if is_seeded else to_read
            position += size

    def _local_shares(self, size: int, min_count: int, lengths: list[int]) -> list[tuple[int, int, int]]:
        """Return the numbers and bounds of this process's shares of a step. The bounds of a filler batch are equal."""
        every, options = self._shares, self._options
        shares = [(number, *share_bounds(size, number, every.total, min_count, lengths)) for number in every.local]
        if options.evens_shares:  # a missing share gets the number of the last one
            return shares + [(every.local[-1], size, size)] * every.lacking(self._ranks.world_size)
        has_first = shares[:1] if options.fill else []
        others = shares[len(has_first) :]
        return has_first + [(number, begin, end) for number, begin, end in others if end > begin]

    def _indices_of_steps(self, epoch: int, start: int) -> Iterator[BatchData]:
        """Return the indices of all processes in each step or, with the user's batches, the batches of each step."""
        order = self._orders.draw(epoch)
        if self._orders.is_batched:
            batches = skip_samples(filter(len, order), start, len, lambda batch, left: batch[-left:], "batch_sampler")
            return grouped(batches, self.per_step)
        if self.rows is not None and (isinstance(order, list) or type(order) is RandomSampler):
            drawn = np.asarray(order) if isinstance(order, list) else np.fromiter(order, dtype=np.int64)
            order = as_rows(drawn, self.rows)  # once rather than for each batch
        size = self._orders.num_samples
        if size is None:
            return grouped(islice(order, start, None), self.per_step)
        if isinstance(order, (list, torch.Tensor)) and len(order) != size:
            raise length_error(self._orders.sampler, size, len(order))
        min_last = 1 if self._options.fill else self._shares.total
        bounds = global_batches(size, self.per_step, start, self.drop_last, min_last)
        if isinstance(order, list):
            return map(order.__getitem__, starmap(slice, bounds))
        if isinstance(order, (torch.Tensor, range, ComputedOrder)):
            rows = indices_at(order, bounds)
            return map(torch.Tensor.tolist, rows) if self.rows is None else rows
        return in_turn(self._orders.sampler, order, start, [end - begin for begin, end in bounds])


#: Numbers and types that differ if objects, or their contents, have changed.
Marks: TypeAlias = list[object]
#: Returns the marks of objects, by which workers that stay between epochs are known to have the data as they are.
#: Without it, all count as changed, and workers are started again for each epoch.
DATA_MARKS: Slot[Callable[[Iterable[object]], Marks]] = Slot("kept_workers")


def marks_of(roots: Iterable[object]) -> Marks:
    """Return marks that differ if objects, or their contents, have changed; reads nothing from a device."""
    return [object()] if DATA_MARKS.content is None else DATA_MARKS.content(roots)


class _Idle(NamedTuple):
    """A loader that is not in use, with its workers and marks of the data from when they started."""

    loader: DataLoader[Sample]
    batches: Any
    marks: Marks


class MapLoader(ShardedLoader):
    """The batches of a ``DataLoader`` over a map dataset, divided among the processes.

    Each step takes the next ``batch_size`` samples for every process from one global order; a smaller remainder is
    divided evenly. With a user's ``batch_sampler``, each step takes one of its batches for every process. Tensors in
    memory are indexed a whole batch at a time.
    """

    def __init__(self, source: DataLoader[Sample], ranks: Ranks, device: torch.device, options: LoaderOptions) -> None:
        super().__init__(source, ranks, device, options)
        in_order = getattr(source, "in_order", True)  # older torchdata has no such option
        if source.num_workers > 1 and not in_order and ranks.rank == 0:
            warn_outside(
                "in_order=False of a DataLoader has no effect: a run reads batches in their order, so that it gives "
                "the same results each time and can be resumed. Leave it out."
            )
        self._memory = self._find_memory()
        rows = None if self._memory is None else len(source.dataset)  # type: ignore[arg-type]
        self._orders = EpochOrders(source, ranks, options)
        self._epoch_shares = _EpochShares(source, self._orders, ranks, options, rows)
        self._idle: _Idle | None = None  # kept with its workers for the next iteration
        self._times_changed = 0  # as often as callers have said that the data changed
        self._collate: CollateFunction = source.collate_fn
        if self._memory is not None or options.seed is None:
            self._reader = reader_of(source.dataset)
        else:
            self._reader, self._collate = SeededReader(source.dataset, source.collate_fn), as_collated

    def _find_memory(self) -> InMemory | None:
        """Return the data if they are in memory and are read directly, in this process."""
        if self.source.num_workers or self.source.collate_fn is not default_collate:
            return None
        memory = tensors_in_memory(self.source.dataset)
        if memory is not None:
            self._is_placed = self._device.type == "cpu" or memory.is_on(self._device)
        return memory

    def _begin_epoch(self, epoch: int) -> None:
        """Pass the epoch to the datasets, and take up what has changed in them since the last epoch."""
        dataset = self.source.dataset
        for part in nested_in(dataset, lambda value: isinstance(value, Dataset)):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.options.reported_epoch(epoch))
        if self._memory is not None:  # its tensors may have been replaced
            self._memory = self._find_memory()
            self._epoch_shares.rows = len(dataset)
        elif isinstance(self._reader, SeededReader):
            self._reader.forget_generators()

    def _read_steps(self, epoch: int, start: int) -> Iterator[Batch]:
        self._begin_epoch(epoch)
        planned = self._epoch_shares.begin(epoch, start, self._left, self._min_share)
        for batch in self._read():
            seed, count, total, is_last, indices, share = planned.popleft()
            if seed is not None:
                # Reading in this process advances python's and numpy's generators; reading in workers does not. So
                # they are seeded again for the step, which must not draw the same numbers as the reading.
                seed_generators(~seed, with_torch=False)
            yield Batch(batch, count, total, is_last, indices, share)

    def _read(self) -> Iterator[BatchData]:
        if self.source.num_workers:
            return self._read_in_workers()
        shares = iter(self._epoch_shares)
        if self.options.seed is None:
            draw_seed(self.source.generator)  # as a DataLoader does, to draw the numbers of a hand-written loop
        return self._read_here(shares) if self._memory is None else self._read_memory(self._memory, shares)

    @property
    def _pins(self) -> bool:
        """Whether batches are put into pinned memory, for the device of the run: a CPU needs none, beside a GPU too."""
        return self.source.pin_memory and self._device.type != "cpu" and torch.accelerator.is_available()

    def _read_here(self, shares: Iterator[Any]) -> Iterator[BatchData]:
        """Read in this process, as a ``DataLoader`` does, but without recording each batch for profilers."""
        read, collate = self._reader.__getitems__, self._collate
        is_collated = collate is as_collated  # saves a call in each step
        pins = self._pins
        for indices in shares:
            try:
                batch = read(indices) if is_collated else collate(read(indices))
                batch = pin_memory(batch) if pins else batch  # type: ignore[no-untyped-call]
            except Exception as error:
                add_missing_note(error, self.source.dataset, self.next_indices())
                if not self.options.yields_failures:
                    raise
                batch = FailedRead(error)
            yield batch

    def _read_in_workers(self) -> Iterator[BatchData]:
        """Read with a loader that is not in use: with persistent workers, torch's loader has only one iterator."""
        source = self.source
        marks: Marks = [self._times_changed]
        if source.persistent_workers:
            marks += marks_of([source.dataset, source.collate_fn, source.worker_init_fn])
        loader = self._idle_or_new_loader(marks)
        batches = self._start_reading(loader)
        try:
            while True:
                try:
                    batch = next(batches)
                except Exception as error:
                    if isinstance(error, StopIteration) and not error.args:
                        return  # the end, unlike a StopIteration of the dataset, which torch raises again with its text
                    add_missing_note(error, self.source.dataset, self.next_indices())
                    if isinstance(error, WrongLengthError) or not self.options.yields_failures:
                        raise  # in a generator, Python makes an error of a StopIteration
                    batch = FailedRead(error)
                yield batch
        finally:
            if batches in self._with_workers:  # the workers were not stopped meanwhile
                self._idle = _Idle(loader, batches, marks)

    def _idle_or_new_loader(self, marks: Marks) -> DataLoader[Sample]:
        """Return the idle loader, or a new one if there is none, or if its workers would read outdated data."""
        source = self.source
        idle, self._idle = self._idle, None
        if idle is not None:
            if idle.marks == marks:
                return idle.loader
            self._with_workers.discard(idle.batches)
            idle.batches._shutdown_workers()
        return DataLoader(
            self._reader,
            batch_sampler=self._epoch_shares,
            collate_fn=self._collate,
            generator=generator_of_loader(self.options.seed, source.generator),
            num_workers=source.num_workers,
            pin_memory=self._pins,
            timeout=source.timeout,
            worker_init_fn=source.worker_init_fn,
            multiprocessing_context=source.multiprocessing_context,
            prefetch_factor=source.prefetch_factor,
            persistent_workers=source.persistent_workers,
        )

    def _read_memory(self, memory: InMemory, shares: Iterator[Any]) -> Iterator[BatchData]:
        pin = self._pins and self._device.type == "cuda" and memory.is_on(torch.device("cpu"))
        # Nothing in an epoch affects the orders of torch's samplers, so they may be drawn ahead.
        return read_rows(memory, shares, len(self.source.dataset), has_fixed_order=self._orders.is_of_torch, pin=pin)

    def read_again(self) -> None:
        super().read_again()
        self._times_changed += 1

    def stop_workers(self) -> None:
        super().stop_workers()
        self._idle = None

    def next_indices(self) -> list[Index] | None:
        if not self._epoch_shares.planned:
            return None
        indices = self._epoch_shares.planned[0].indices
        return indices.tolist() if isinstance(indices, torch.Tensor) else list(indices)

    def position(self) -> SourceState:
        return {"order": self._orders.continued or self._orders.latest}

    def move_to(self, position: SourceState) -> str:
        self._orders.continued = position.get("order") if isinstance(position, dict) else None
        return ""

    def epoch_state(self) -> SourceState:
        return self._orders.interrupted_epoch or self._orders.latest_epoch

    def restore_epoch_state(self, read: SourceState) -> None:
        self._orders.interrupted_epoch = read or None

    @property
    def num_samples(self) -> int | None:
        return self._orders.num_samples

    def _steps_of_data_left(self, start: int) -> int | None:
        size = self.num_samples
        return None if size is None else self._count_steps(max(size - start, 0))

    def _num_steps(self) -> int:
        return self._count_steps(len(self._orders.sampler))

    def _count_steps(self, size: int) -> int:
        return count_global_batches(size, self._epoch_shares.per_step, self._epoch_shares.drop_last)

    def ends_in_one_sample(self, steps: float) -> bool:
        size = self.num_samples
        has_single = size is not None and not self._epoch_shares.drop_last and size % self._epoch_shares.per_step == 1
        return has_single and min(self.limit or steps, steps) >= self._num_steps()
