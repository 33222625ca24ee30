"""Data that are read in turn: their random numbers, their workers, and where a resumed epoch continues."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from typing import ClassVar, TypeVar
from zlib import crc32

import torch
from torch.utils.data import DataLoader, IterableDataset

from pytorch_accel_lite.extension_tools.arguments_and_errors import warn_outside
from pytorch_accel_lite.extension_tools.data_and_batches import (
    Batch,
    BatchData,
    LoaderOptions,
    Marks,
    ShardedLoader,
    Source,
    SourceState,
    copy_loader,
    infer_batch_size,
    marks_of,
    skip_samples,
    with_last,
)
from pytorch_accel_lite.extension_tools.processes import Ranks
from pytorch_accel_lite.extension_tools.random_numbers import (
    RandomGenerator,
    derive_seed,
    find_held_generators,
    modules_with_generators,
    preserving_generators,
    seed_all,
    seed_generators,
    seed_held_generators,
    state_of_generator,
)
from pytorch_accel_lite.extensions.streams.discarding_seen_batches import last_samples, skip_batches
from pytorch_accel_lite.extensions.streams.first_batches import (
    comparing_workers,
    identity_of,
    warn_if_single_sample,
    warn_of_other_batches,
    warn_of_other_workers,
    workers_and_batch_size,
)
from pytorch_accel_lite.extensions.streams.stream_positions import track_position

T = TypeVar("T")

#: Key, in the position of a source without a state, of the identity of the epoch's first batch.
_FIRST_BATCH = "first_batch_of_the_epoch"
#: Key, in the state of an epoch, of the number of workers and the batch size.
_READING = "workers_and_batch_size"


class SequentialLoader(ShardedLoader):
    """Reads its source sequentially. To resume in the middle of an epoch, it restores the state of a stateful source.

    A source without a state is read from the beginning, and samples that the run has already seen are discarded.
    """

    _compares_generators: ClassVar[bool] = True
    _has_checked_item = False  # whether the first of ready batches has been examined

    def __init__(self, source: Source, ranks: Ranks, device: torch.device, options: LoaderOptions) -> None:
        super().__init__(source, ranks, device, options)
        self._may_resume = options.fill and options.seed is not None
        self._tracker = track_position(source, keeps=self._may_resume)
        self._first_batch: list[int] | None = None  # identity of the first batch of the epoch
        self._resumed_first_batch: list[int] | None = None  # the same in the state that the next epoch resumes
        self._batches_per_step = 1  # number of batches that this process reads
        self._marks: Marks | None = None  # marks of the data that persistent workers have
        # If generators differ between the processes, each process draws its own numbers.
        self._draws_own = self._may_resume and self._compares_generators and _generators_differ(source, ranks)
        self._reader = ranks.rank  # the random numbers in a stream differ between readers

    def position(self) -> SourceState:
        return {_FIRST_BATCH: self._first_batch} if self._tracker is None else self._tracker.position

    def move_to(self, position: SourceState) -> str:
        tracker = self._tracker
        if tracker is None:
            self._resumed_first_batch = position.get(_FIRST_BATCH) if isinstance(position, dict) else None
            return ""
        if isinstance(position, dict) and _FIRST_BATCH in position:  # the source had no state_dict when saved
            position = None
        tracker.position = position
        if position is not None:
            return ""
        reason = tracker.obstacle or "the training state holds no position for this process"
        return f"The samples of this epoch that the run had already seen are read again from {tracker.name}: {reason}."

    def read_again(self) -> None:
        """Also check that the epoch can continue from its current position.

        Raises:
            RuntimeError: if the position is unknown
        """
        super().read_again()
        reads = self._reads_alone or self._ranks.rank == 0
        if self.options.seed is None:
            reason = "the run has no seed. Pass Trainer(seed=...)"
        elif self._tracker is not None and self._tracker.position is None and reads:
            reason = self.obstacle or "something else has read them meanwhile"
        else:
            return
        raise RuntimeError(f"The training data cannot be read again from where this epoch is: {reason}.")

    def _read_steps(self, epoch: int, start: int) -> Iterator[Batch]:
        if start:
            self._check_workers()
            self._restored_epoch = None
        self._set_epoch(epoch)
        if self._left == 0:  # a limit has ended the epoch: opened here, a stream would begin the next at its position
            return iter(())
        steps = self._steps_alone(start) if self._reads_alone else self._steps_together(start)
        return self._seed_steps(steps) if self._is_seeded else steps

    @property
    @abstractmethod
    def _reads_alone(self) -> bool:
        """Whether this process reads on its own, without waiting for the others."""

    @abstractmethod
    def _steps_together(self, start: int) -> Iterator[Batch]: ...

    def _set_epoch(self, epoch: int) -> None:
        """Pass the epoch to a stream or a sampler that shuffles itself, so that it does not repeat an order."""
        source = self.source
        samplers = [getattr(source, name, None) for name in ("sampler", "batch_sampler")]
        inner = [getattr(sampler, "sampler", None) for sampler in samplers]
        parts = [source, getattr(source, "dataset", None), *samplers, *inner]
        for part in {id(part): part for part in parts if hasattr(part, "set_epoch")}.values():
            part.set_epoch(self.options.reported_epoch(epoch))

    def _steps_alone(self, start: int) -> Iterator[Batch]:
        """Yield the batches of this process, whose sizes are known only to the steps that use them."""
        tracker = self._tracker
        for batch, is_last in with_last(islice(self._read_identically(start), self._left)):
            if tracker is not None:
                tracker.advance()
            yield Batch(batch, None, None, is_last)

    def _read_from(self, start: int) -> Iterator[BatchData]:
        """Read the source after the samples that a resumed epoch has already seen, without advancing the generators."""
        tracker = self._tracker
        if tracker is None:
            return self._skip_to(start)
        position = tracker.position if start else None
        tracker.begin()
        if position is None:
            return tracker.follow(self._skip_to(start))
        with preserving_generators():
            first = self._steps_done * self._batches_per_step
            self._seed_held()  # a state may hold states of its generators
            return tracker.follow(tracker.reopen(position, lambda: self._start_seeded(first)))

    def _read_identically(self, start: int) -> Iterator[BatchData]:
        """Read the source like ``_read_from()``, with the same batches on processes that share them."""
        return self._ranks.read_identically(self._read_from(start))

    def _skip_to(self, start: int) -> Iterator[BatchData]:
        """Read the source, and discard the samples that the run has already seen.

        This discards as many samples as were seen, and splits the batch in which they end. A single process, however,
        counts the samples that each step reports, which may differ from the size of the batch. If the batch size is
        unchanged, a single process therefore discards as many batches as were seen.
        """
        if not start:
            self._check_finished_epoch()
            return self._check_first_batch(self._open(0))
        size = getattr(self.source, "batch_size", None)
        done = self._steps_done
        by_batches = self._ranks.world_size == 1 and done > 0 and size in (None, self.batch_size_before, start / done)
        with preserving_generators():
            batches = self._check_first_batch(self._open(0))
            if by_batches:
                skip_batches(batches, done, start, is_certain=size is not None)
                return batches
            return skip_samples(batches, start, infer_batch_size, last_samples)

    def _check_first_batch(self, batches: Iterator[BatchData]) -> Iterator[BatchData]:
        """Remember the identity of the first batch, and warn if a resumed epoch began with a different one."""
        if not self._may_resume or not self._is_seeded or self._tracker is not None:
            return batches
        first = list(islice(batches, 1))
        before, self._resumed_first_batch = self._resumed_first_batch, None
        self._first_batch = identity_of(first)
        if before is not None:
            when = "in the middle of this epoch, so some samples will be seen twice in it and others not at all"
            warn_of_other_batches(self.source, self._first_batch, before, when)
        return chain(first, batches)

    @property
    def _reads_again(self) -> bool:
        """Whether a resumed epoch is read from its beginning, as its position is not known."""
        return self._tracker is None or self._tracker.position is None

    def _check_workers(self) -> None:
        """Warn if workers now give a resumed epoch in another order: each gives a batch in turn."""
        read = self._restored_epoch if isinstance(self._restored_epoch, dict) else {}
        is_known = read.get(_READING) and self._reads_again and self._ranks.rank == 0
        if is_known and warn_of_other_workers(self.source, read[_READING]):
            self._resumed_first_batch = None  # whose warning would name another cause

    def _check_finished_epoch(self) -> None:
        """Warn if an epoch that the interrupted run had finished would now begin with another batch.

        Then the source depends on more than the epoch, for example because it shuffles a list in place, and the next
        epoch differs, too.
        """
        read, self._restored_epoch = self._restored_epoch, None
        is_comparable = self._may_resume and self._is_seeded and self._tracker is None and not self.obstacle
        if not is_comparable or not isinstance(read, dict) or not read.get(_FIRST_BATCH):
            return
        epoch = self._epoch
        with preserving_generators():
            self._epoch = read["epoch"]
            self._set_epoch(self._epoch)
            first = list(islice(self._open(0), 1))
            self._epoch = epoch
            self._set_epoch(epoch)
        when = f"for epoch {read['epoch']}, which it had finished"
        warn_of_other_batches(self.source, identity_of(first), read[_FIRST_BATCH], when)

    def epoch_state(self) -> SourceState:
        """Return the number of the epoch, the identity of its first batch, and how it is read."""
        reading = workers_and_batch_size(self.source)
        return self._restored_epoch or {"epoch": self._epoch, _FIRST_BATCH: self._first_batch, _READING: reading}

    @property
    def obstacle(self) -> str:
        """Why a resumed run would not read the same data, as far as that is known before reading."""
        if self._tracker is not None:
            return self._tracker.obstacle
        for part in (self.source, getattr(self.source, "dataset", None)):
            if hasattr(part, "__next__"):
                return f"{type(part).__name__} is an iterator, which gives each batch once and cannot begin again"
        return ""

    @property
    def resuming_note(self) -> str:
        if self._tracker is None or not self._tracker.obstacle:
            return super().resuming_note
        return (
            "If this run is interrupted, the resumed one will first read again what its epoch has seen, from "
            f"{self._tracker.name}: {self._tracker.obstacle}."
        )

    def _open(self, first: int) -> Iterator[BatchData]:
        """Start reading the source; its next batch is number ``first`` of the epoch."""
        self._seed_held()
        return self._start_seeded(first)

    @property
    def _seed_of_epoch(self) -> int:
        return derive_seed(self.options.seed or 0, self._epoch, self._reader)

    def _seed_held(self) -> None:
        """Seed the generators that the source holds itself when an epoch begins.

        Generators that were alike on all processes stay alike: the source may divide a common order.
        """
        if self._is_seeded:
            held = find_held_generators([self.source], in_loaders=True)
            readers = (self._reader,) if self._draws_own else ()
            seed_held_generators(held, derive_seed(self.options.seed or 0, self._epoch, *readers))

    def _start_seeded(self, first: int) -> Iterator[BatchData]:
        if not self._is_seeded:
            self._renew_workers()
            return self._start_checked_reading(self.source)
        seed = self._seed_of_epoch
        source = self.source
        if isinstance(source, DataLoader):
            if source.generator is not None:
                source.generator.manual_seed(seed >> 1)
            if source.num_workers and source.persistent_workers and not hasattr(source, "state_dict"):
                # Persistent workers would not be seeded, and would not know the epoch.
                source = copy_loader(source, persistent_workers=False)
        with preserving_generators():
            seed_all(seed)  # the seeds of workers follow from it
            reading = self._start_checked_reading(source)
        return self._drawn_with_seeds((derive_seed(number, after=seed) for number in count(first)), reading)

    def _drawn_with_seeds(self, seeds: Iterable[int], batches: Iterator[BatchData]) -> Iterator[BatchData]:
        """Yield batches, each drawn with a seed for all generators, and for those of the collate function.

        Torch's generators are restored after each.
        """
        default = torch.default_generator
        devices = [module for name, module in modules_with_generators(only_used=True).items() if name != "torch"]
        collate = getattr(self.source, "collate_fn", None)
        held = find_held_generators([collate])
        has_searched_again = False
        for seed in seeds:
            state, states = default.get_state(), [module.get_rng_state() for module in devices]
            seed_generators(seed)
            seed_held_generators(held, seed)
            for module in devices:
                module.manual_seed(seed >> 1)
            try:
                batch = list(islice(batches, 1))
            finally:
                default.set_state(state)
                for module, of_device in zip(devices, states, strict=True):
                    module.set_rng_state(of_device)
            if not batch:
                return
            yield batch[0]
            if not has_searched_again:
                _warn_of_new_generators(collate, held)
                has_searched_again = True

    def _start_checked_reading(self, batches: Iterable[BatchData]) -> Iterator[BatchData]:
        iterator = self._start_reading(batches)
        if isinstance(batches, DataLoader) and batches.batch_size is None and batches.batch_sampler is None:
            return self._checking_first_item(iterator)
        reads_stream = isinstance(getattr(batches, "dataset", None), IterableDataset)
        if not reads_stream or getattr(batches, "num_workers", 0) < 2 or hasattr(batches, "state_dict"):
            return iterator
        return comparing_workers(iterator, self.source)

    def _checking_first_item(self, items: Iterator[BatchData]) -> Iterator[BatchData]:
        for item in items:
            if not self._has_checked_item:
                warn_if_single_sample(item)
            self._has_checked_item = True
            yield item

    def _renew_workers(self) -> None:
        """Stop persistent workers if the data have changed since they started: workers have copies of the data."""
        source = self.source
        if not isinstance(source, DataLoader) or not source.persistent_workers:
            return
        marks, before = marks_of([source.dataset, source.collate_fn, source.worker_init_fn]), self._marks
        self._marks = marks
        if before not in (None, marks):
            self.stop_workers()

    @property
    def _is_seeded(self) -> bool:
        """Whether generators are seeded for each batch of the source: not for a list, whose reading draws nothing."""
        return self.options.seed is not None and type(self.source) not in (list, tuple)

    def _seed_steps(self, steps: Iterator[Batch]) -> Iterator[Batch]:
        """Seed Python's and NumPy's generators for each step, because reading ahead draws from them or reseeds them."""
        epoch_seed = derive_seed(self.options.seed or 0, self._epoch, self._ranks.rank)
        for number, step in enumerate(steps, start=self._steps_done):
            seed_generators(~derive_seed(number, after=epoch_seed), with_torch=False)
            yield step


def _generators_differ(source: Source, ranks: Ranks) -> bool:
    """Whether the generators that a source holds differ between processes. Call it on every process."""
    if ranks.world_size == 1 or type(source) in (list, tuple):
        return False
    local = [crc32(repr(state_of_generator(held)).encode()) for held in find_held_generators([source], in_loaders=True)]
    return any(other != local for other in ranks.all_gather_object(local))


def _warn_of_new_generators(collate: object, before: list[RandomGenerator]) -> None:
    """Warn if a collate function has made a generator in its first call, whose batch then had no seed."""
    known = {*map(id, before)}
    if any(id(held) not in known for held in find_held_generators([collate])):
        warn_outside(
            f"{type(collate).__name__}, the collate_fn, makes a random generator in its first call: a run that is "
            "resumed draws other numbers. Let it make the generator when it is created, or call it once before."
        )
