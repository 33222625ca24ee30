"""Batches of map datasets: each process reads its share of one global order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice, starmap
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from pytorch_accel_lite.base.batches import Batch, Share
from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.randomness import mix, seed_generators
from pytorch_accel_lite.data.consistency import check_order
from pytorch_accel_lite.data.loader import FailedRead, LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.order import ComputedOrder, draw_order, in_turn, indices_at, of_all_processes, wrong_length
from pytorch_accel_lite.data.reading import SeededReader, as_rows, read_rows, reader_of, tensors_in_memory
from pytorch_accel_lite.data.shares import (
    WrongLengthError,
    count_global_batches,
    global_batches,
    grouped,
    skip_samples,
    split,
    with_last,
)
from pytorch_accel_lite.distributed import Ranks

#: For each batch that is being read: the seed of its share, and the fields of its ``Batch`` after the data.
_Planned = deque[tuple[int | None, tuple[Any, ...]]]


class _EpochShares:
    """This process's share of an epoch, batch by batch: the batch sampler of a :class:`MapLoader`.

    Holds no reference to its loader: a reference cycle would keep workers alive after the loader is dropped.

    :param rows: number of rows of data in memory, whose indices are given as tensors if their order is fixed when the
        epoch begins; ``None`` for other data
    """

    def __init__(self, source: DataLoader[Any], ranks: Ranks, options: LoaderOptions, rows: int | None) -> None:
        self._divided = options.shares or (ranks.world_size, range(ranks.rank, ranks.rank + 1))
        self.is_batched = source.batch_size is None  # the user's batch sampler
        self.sampler: Any = source.batch_sampler if self.is_batched else source.sampler
        if type(self.sampler) not in (RandomSampler, SequentialSampler):
            self.sampler = of_all_processes(self.sampler, self._divided[0])
        self.per_step = (source.batch_size or 1) * self._divided[0]  # samples, or the user's batches
        self.drop_last = source.drop_last
        self._ranks = ranks
        self._seed = options.seed
        self._fill = options.fill
        self._is_logical = options.shares is not None
        self._rows = rows
        self._reported = options.reported_epoch
        self.drawn: dict[str, Any] = {}  # what identifies the order of the epoch, see check_order
        self.resumed: dict[str, Any] | None = None  # the same of the state that the next epoch resumes
        self.planned = _Planned()

    def begin(self, epoch: int, start: int, limit: int | None, min_share: int) -> _Planned:
        """Set the start of the next iteration without affecting running ones; return the queue that it will fill."""
        self.planned = _Planned()
        self._next = epoch, start, limit, min_share, self.planned
        return self.planned

    def __iter__(self) -> Iterator[Any]:
        """Yield the indices to read in each step; with a seed, as a ``SeededShare`` unless data are in memory."""
        epoch, position, limit, min_share, planned = self._next
        num_shares, numbers = self._divided
        at_least = min(min_share, self.per_step // num_shares)
        epoch_seed = None if self._seed is None else mix(self._seed, epoch)
        is_seeded = epoch_seed is not None and self._rows is None
        lengths: list[int] = []
        seed = share = None
        for group, is_last in with_last(islice(self._global_batches(epoch, position), limit)):
            indices = group
            if self.is_batched:
                indices = list(chain(*group))
                lengths = [len(batch) for batch in group]
                at_least = min(min_share, max(lengths))
            size = len(indices)
            for number in numbers:
                begin, end = (0, size) if num_shares == 1 else split(size, number, num_shares, at_least, lengths)
                count = end - begin
                if not count and (number != numbers[0] or not self._fill):
                    continue
                local = indices if count == size else indices[begin:end]
                first, to_read = (position + begin, local) if count else (position, indices[:at_least])
                if epoch_seed is not None:
                    seed = mix(first, after=epoch_seed)
                if self._is_logical:
                    ends_step = end == size or number == numbers[-1]
                    share = Share(number, mix(self._seed or 0, epoch, 0, position), ends_step)
                planned.append((seed, (count, size, is_last, local, share)))
                yield (seed, epoch_seed, first, to_read) if is_seeded else to_read
            position += size

    def _global_batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Return the indices of all processes in each step or, with the user's batches, the batches of each step."""
        order = self._draw_order(epoch)
        if self.is_batched:
            batches = skip_samples(filter(len, order), start, len, lambda batch, left: batch[-left:], "batch_sampler")
            return grouped(batches, self.per_step)
        if self._rows is not None and (isinstance(order, list) or type(order) is RandomSampler):
            drawn = np.asarray(order) if isinstance(order, list) else np.fromiter(order, dtype=np.int64)
            order = as_rows(drawn, self._rows)  # once rather than for each batch
        size = find_length(self.sampler)
        if size is None:
            return grouped(islice(order, start, None), self.per_step)
        if isinstance(order, (list, torch.Tensor)) and len(order) != size:
            raise wrong_length(self.sampler, size, len(order))
        at_least = 1 if self._fill else self._divided[0]
        bounds = global_batches(size, self.per_step, start, self.drop_last, at_least)
        if isinstance(order, list):
            return map(order.__getitem__, starmap(slice, bounds))
        if isinstance(order, (torch.Tensor, range, ComputedOrder)):
            rows = indices_at(order, bounds)
            return map(torch.Tensor.tolist, rows) if self._rows is None else rows
        return in_turn(self.sampler, order, start, [end - begin for begin, end in bounds])

    def _draw_order(self, epoch: int) -> Any:
        order = draw_order(self.sampler, self._ranks, self._seed, epoch, self._reported(epoch))
        self.drawn = {"length": None if self.is_batched else find_length(self.sampler)}
        is_own = isinstance(order, list) and self._seed is not None  # without one, all have that of the first process
        if is_own or self.resumed is not None:
            check_order(self.sampler, order if is_own else None, self._ranks, self.drawn, self.resumed)
            self.resumed = None
        return order


class MapLoader(ShardedLoader):
    """The batches of a ``DataLoader`` over a map dataset, divided among the processes.

    Each step takes the next ``batch_size`` samples for every process from one global order; a smaller remainder is
    divided evenly. With a user's ``batch_sampler``, each step takes one of its batches for every process. Tensors in
    memory are indexed a whole batch at a time.
    """

    def __init__(self, source: DataLoader[Any], ranks: Ranks, device: torch.device, options: LoaderOptions) -> None:
        super().__init__(source, ranks, device, options)
        is_plain = source.num_workers == 0 and source.collate_fn is default_collate
        self._memory = tensors_in_memory(source.dataset) if is_plain else None
        if self._memory is not None:
            self._is_placed = self._is_placed or self._memory.is_on(device)
        rows = None if self._memory is None else len(source.dataset)  # type: ignore[arg-type]
        self._shares = _EpochShares(source, ranks, options, rows)
        self._idle: DataLoader[Any] | None = None  # kept with its workers for the next iteration
        self._dataset: Any = source.dataset
        if self._memory is None:
            self._dataset = SeededReader(source.dataset) if options.seed is not None else reader_of(source.dataset)

    def _create_inner(self) -> DataLoader[Any]:
        source = self.source
        seed = self.options.seed
        return DataLoader(
            self._dataset,
            batch_sampler=self._shares,
            collate_fn=source.collate_fn,
            generator=source.generator if seed is None else torch.Generator().manual_seed(mix(seed) >> 1),
            num_workers=source.num_workers,
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=source.worker_init_fn,
            multiprocessing_context=source.multiprocessing_context,
            prefetch_factor=source.prefetch_factor,
            persistent_workers=source.persistent_workers,
        )

    def _steps(self, epoch: int, start: int) -> Iterator[Batch]:
        planned = self._shares.begin(epoch, start, self._left, self._min_share)
        for batch in self._read():
            seed, fields = planned.popleft()
            if seed is not None:
                # Reading in this process advances python's and numpy's generators, reading in workers does not. So
                # they are seeded again for the step, which must not draw the numbers that reading has drawn.
                seed_generators(~seed, with_torch=False)
            yield Batch(batch, *fields)

    def _read(self) -> Iterator[Any]:
        if self.source.num_workers:
            return self._read_in_workers()
        return self._read_here() if self._memory is None else self._read_memory()

    def _read_here(self) -> Iterator[Any]:
        """Read in this process, as a ``DataLoader`` does, but without recording each batch for profilers."""
        collate = self.source.collate_fn
        is_seeded = self.options.seed is not None
        read = self._dataset.__getitems__
        if not is_seeded:
            self._draw_seed_of_workers()
        pins = self.source.pin_memory and torch.accelerator.is_available()
        generator = torch.default_generator
        for indices in self._shares:
            state = generator.get_state() if is_seeded else None
            try:
                batch = collate(read(indices))
                batch = pin_memory(batch) if pins else batch  # type: ignore[no-untyped-call]
            except Exception as error:
                if not self.options.yields_failures:
                    raise
                batch = FailedRead(error)
            finally:
                if state is not None:
                    generator.set_state(state)
            yield batch

    def _draw_seed_of_workers(self) -> None:
        """Draw the number that a ``DataLoader`` draws, so that the generators match those of a hand-written loop."""
        torch.empty((), dtype=torch.int64).random_(generator=self.source.generator)

    def _read_in_workers(self) -> Iterator[Any]:
        """Read with a loader that is not in use: with persistent workers, torch's has a single iterator."""
        loader = self._create_inner() if self._idle is None else self._idle
        self._idle = None
        batches = self._start_reading(loader)
        try:
            while True:
                try:
                    batch = next(batches)
                except Exception as error:
                    if isinstance(error, StopIteration) and not error.args:
                        return  # the end, unlike a StopIteration of the dataset, which torch raises again with its text
                    if isinstance(error, WrongLengthError) or not self.options.yields_failures:
                        raise  # in a generator, Python makes an error of a StopIteration
                    batch = FailedRead(error)
                yield batch
        finally:
            if batches in self._with_workers:  # not stopped meanwhile
                self._idle = loader

    def _read_memory(self) -> Iterator[Any]:
        assert self._memory is not None
        if self.options.seed is None:
            self._draw_seed_of_workers()
        pin = self.source.pin_memory and self._device.type == "cuda" and self._memory.is_on(torch.device("cpu"))
        # Nothing that happens in an epoch affects the orders of torch's samplers, so that they may be drawn ahead.
        has_fixed_order = type(self._shares.sampler) in (RandomSampler, SequentialSampler)
        return read_rows(self._memory, self._shares, len(self.source.dataset), has_fixed_order, pin)

    def stop_workers(self) -> None:
        super().stop_workers()
        self._idle = None

    def next_indices(self) -> list[Any] | None:
        planned = self._shares.planned
        return list(planned[0][1][3]) if planned else None

    def position(self) -> Any:
        return {"order": self._shares.resumed or self._shares.drawn}

    def move_to(self, position: Any) -> str:
        self._shares.resumed = position.get("order") if isinstance(position, dict) else None
        return ""

    def steps_left(self, start: int) -> int | None:
        size = None if self._shares.is_batched else find_length(self._shares.sampler)
        return None if size is None else self._count_steps(max(size - start, 0))

    def _num_steps(self) -> int:
        return self._count_steps(len(self._shares.sampler))

    def _count_steps(self, size: int) -> int:
        return count_global_batches(size, self._shares.per_step, self._shares.drop_last)

    def ends_in_one_sample(self, steps: float) -> bool:
        size = None if self._shares.is_batched else find_length(self._shares.sampler)
        ends_so = size is not None and not self._shares.drop_last and size % self._shares.per_step == 1
        return ends_so and min(self.limit or steps, steps) >= self._num_steps()
