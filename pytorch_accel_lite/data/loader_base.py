"""The base class of all loaders, which yield batches on the device from any position in an epoch."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from pytorch_accel_lite.base.weak_sets import TransientSet
from pytorch_accel_lite.data.batches import Batch, to_device
from pytorch_accel_lite.data.sources import BatchData, Index, Source, SourceState, find_length
from pytorch_accel_lite.data.steps_and_shares import Shares, whole_steps
from pytorch_accel_lite.data.worker_startup import start_reading
from pytorch_accel_lite.distributed import Ranks


@dataclass(eq=False, repr=False)
class LoaderOptions:
    """Options for sharding and loading the batches of a source.

    Args:
        seed: determines the order of the data and the randomness in the dataset; ``None`` to use the global generators
        fill: give a process without samples in a step a filler batch with zero weight, so that all processes take the
            same number of steps; otherwise the process takes fewer steps
        limit: maximum number of steps per epoch; ``None`` for no limit
        channels_last: convert tensors with 4 dimensions (batches of images) to the channels-last memory format
        yields_failures: yield a ``FailedRead`` for a batch that cannot be read and continue, if the source can be
            indexed
        shares: the shares that this process reads, if a step has a fixed number of shares; ``None`` if each process has
            one batch
        divides: let each process read its own part of a divisible stream; otherwise, the batches of all processes
            follow the order of the stream
        first_epoch: the number passed to ``set_epoch`` of the user's samplers and datasets in the first epoch
        evens_shares: give a process with fewer shares in a step filler batches for the missing shares, so that all
            processes compute equally many
    """

    seed: int | None = None
    fill: bool = False
    limit: int | None = None
    channels_last: bool = False
    yields_failures: bool = False
    shares: Shares | None = None
    divides: bool = False
    first_epoch: int = 0
    evens_shares: bool = False

    def reported_epoch(self, epoch: int) -> int:
        """Return the number passed to ``set_epoch`` in an epoch; epochs count from 1, and 0 is before the first."""
        return max(epoch - 1, 0) + self.first_epoch


def shares_of(options: LoaderOptions, ranks: Ranks) -> Shares:
    """Return the shares of each step that this process reads: its own batch, unless their number is fixed."""
    return options.shares or Shares(ranks.world_size, range(ranks.rank, ranks.rank + 1))


@dataclass(eq=False, repr=False)
class FailedRead:
    """Placeholder for a batch that could not be read."""

    error: Exception


class ShardedLoader(ABC):
    """The batches of one process. Iterating yields them on the device; ``steps()`` adds their sample counts.

    Attributes of the source (``dataset``, ``batch_size``, ``sampler`` ...) are available here, too.

    Args:
        source: the loader or iterable that is read
        ranks: the processes that read different data
        device: the device of the batches
        options: how the source is read

    Attributes:
        has_own_position: whether ``position()`` differs between processes; otherwise, states keep the position of the
            first process
        seconds_waited: seconds that training has waited in the latest epoch for its batches after the first
        shared_by: name of the mechanism by which a stream shards itself by rank, if that was detected
        undivided: name of the kind of iterable, if each of several processes reads all its batches
        is_outdated: whether batches that were read ahead must be read again
        batch_size_before: in a resumed run, the source's batch size when the state was saved; ``None`` if unknown
        limit: maximum number of steps in an epoch, which callbacks may lower; ``None`` for all
    """

    has_own_position: ClassVar[bool] = False
    seconds_waited = 0.0
    shared_by = ""
    undivided = ""
    is_outdated = False
    batch_size_before: int | None = None

    def __init__(self, source: Source, ranks: Ranks, device: torch.device, options: LoaderOptions) -> None:
        self.source = source
        self.options = options
        self.limit = options.limit
        self._ranks = ranks
        self._device = device
        self._epoch = 0
        self._left: int | None = None
        self._restored_epoch: SourceState = None  # the epoch read last by the interrupted run
        self._steps_done = 0
        self._min_share = 1
        self._is_placed = device.type == "cpu"  # whether batches are on the device when they are read
        self._with_workers: TransientSet[Any] = TransientSet()  # iterators that have workers

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self._device

    @abstractmethod
    def _read_steps(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the steps of an epoch after ``start`` samples and ``_steps_done`` steps, at most ``_left`` if given."""

    @abstractmethod
    def _num_steps(self) -> int:
        """Return the number of steps of a whole epoch. Raise a ``TypeError`` if it is unknown."""

    @property
    def num_samples(self) -> int | None:
        """The number of samples in an epoch, dropped ones included; ``None`` if unknown."""
        return None

    @property
    def total_batch_size(self) -> int | None:
        """The number of samples in a full step of all processes, under Accelerate's name for it; ``None`` if unknown.

        With a user's ``batch_sampler``, the number follows from the sampler's ``batch_size``.
        """
        size = getattr(self.source, "batch_size", None)
        if size is None:
            size = getattr(getattr(self.source, "batch_sampler", None), "batch_size", None)
        return int(size) * shares_of(self.options, self._ranks).total if isinstance(size, numbers.Integral) else None

    @property
    def total_dataset_length(self) -> int | None:
        """The length of the dataset, including samples that an epoch leaves out; ``None`` if unknown."""
        return find_length(getattr(self.source, "dataset", None))

    def ends_in_one_sample(self, steps: float) -> bool:
        """Whether the first ``steps`` steps of an epoch are known to end with a batch of a single sample."""
        return False

    @property
    def num_samples_read(self) -> int | None:
        """The number of samples that are read in an epoch, which may be limited; ``None`` if unknown."""
        samples, per_step = self.num_samples, self.total_batch_size
        if self.limit is None or samples is None or per_step is None:
            return samples if self.limit is None else None
        return min(samples, self.limit * per_step)

    def steps_left(self, start: int, steps_done: int = 0) -> int | None:
        """Return the number of steps left in an epoch after ``start`` samples of all processes; ``None`` if unknown.

        Args:
            steps_done: number of steps already taken, which count towards the limit
        """
        left = self._steps_of_data_left(start)
        return left if left is None or self.limit is None else min(left, max(self.limit - steps_done, 0))

    def _steps_of_data_left(self, start: int) -> int | None:
        """Return the number of steps for the samples of an epoch after the first ``start``; ``None`` if unknown."""
        return None

    def next_indices(self) -> list[Index] | None:
        """Return the indices in the dataset of the samples being read for the next step; ``None`` if unknown."""
        return None

    @abstractmethod
    def position(self) -> SourceState:
        """Return the state that is needed to resume in the middle of an epoch, besides the count of samples."""

    @abstractmethod
    def move_to(self, position: SourceState) -> str:
        """Make the next, resumed epoch begin at a position, if the training state holds one.

        Returns:
            a message about it for the user; empty if there is none
        """

    def epoch_state(self) -> SourceState:
        """Return the state of the latest epoch that is needed to continue it, or to begin the next epoch."""
        return None

    def restore_epoch_state(self, read: SourceState) -> None:
        """Make the next epoch continue after the result of ``epoch_state()`` in the interrupted run."""
        self._restored_epoch = read

    @property
    def obstacle(self) -> str:
        """Why a resumed run would not read the same data, or only by reading an epoch again; empty if none is known."""
        return ""

    @property
    def resuming_note(self) -> str:
        """What to know, before a run is interrupted, about the data of the resumed one; empty if nothing."""
        if not self.obstacle:
            return ""
        return (
            "If this run is interrupted, the resumed one will not see the same training data as it would have without "
            f"the interruption: {self.obstacle}."
        )

    def steps(self, epoch: int, start: int = 0, steps_done: int = 0, min_share: int = 1) -> Iterator[Batch]:
        """Return the steps of an epoch, starting after ``start`` samples of all processes.

        Args:
            epoch: with a seed, determines the order and the randomness in the dataset
            steps_done: number of steps already taken in this epoch, which count towards the limit
            min_share: if the source can be indexed, the smallest number of samples, other than none, that a process
                gets in a step; capped at a full batch and at the available samples; the same on all processes
        """
        self.is_outdated = False
        self._epoch = epoch
        self._steps_done = steps_done
        self._min_share = min_share
        self._left = None if self.limit is None else max(self.limit - steps_done, 0)
        steps = self._read_steps(epoch, start)
        steps = to_device(steps, None if self._is_placed else self._device, self.options.channels_last)
        if self.options.shares is not None and self.options.fill:
            steps = whole_steps(steps)
        return steps

    def read_again(self) -> None:
        """Make training drop batches that were read ahead, and read the rest of the epoch from the present data.

        Call it after an update, on all processes.
        """
        self.is_outdated = True

    def __iter__(self) -> Iterator[BatchData]:
        return (step.data for step in self.steps(self._epoch))

    def _start_reading(self, batches: Iterable[BatchData]) -> Iterator[BatchData]:
        """Return the iterator of a loader. ``stop_workers()`` stops its workers."""
        iterator = start_reading(batches)
        if hasattr(iterator, "_shutdown_workers"):
            self._with_workers.add(iterator)
        return iterator

    def stop_workers(self) -> None:
        """Stop the worker processes, if any; the next iteration starts new ones.

        torch has no public method for this. Otherwise, workers would live as long as the traceback of an error, and
        workers that leave signals to their parent would keep the parent from exiting.
        """
        for iterator in self._with_workers:
            iterator._shutdown_workers()
        source = self.source
        if (
            isinstance(source, DataLoader)
            and source.persistent_workers
            and vars(source).get("_iterator") in self._with_workers
        ):
            vars(source)["_iterator"] = None  # torch would try to begin again with the stopped workers
        self._with_workers.clear()

    def __len__(self) -> int:
        """Return the number of steps in an epoch, the same on every process.

        Raises:
            TypeError: if the source has no length
        """
        steps = self._num_steps()
        return steps if self.limit is None else min(steps, self.limit)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # during unpickling, source is not set yet
            raise AttributeError(name)
        return getattr(self.source, name)
