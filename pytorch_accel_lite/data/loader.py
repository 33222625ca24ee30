"""What all loaders have in common: batches with their counts, on the device, from any position of an epoch."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from accelerate.utils import recursively_apply, send_to_device

from pytorch_accel_lite.data.workers import start_reading
from pytorch_accel_lite.distributed import Ranks


class Batch(NamedTuple):
    """A batch of this process, with what it needs to know about the same step on the others.

    :param data: on the device
    :param num_samples: samples of this process; 0 when the batch only keeps it in step with the others (a sample
        of another process, to be given no weight); ``None`` when only the step that uses the batch can tell
    :param total_samples: samples of all processes in this step; ``None`` like ``num_samples``
    :param is_last: whether it is the last step of the epoch
    :param indices: of its samples in the dataset, a list or a tensor; ``None`` when they are not known
    """

    data: Any
    num_samples: int | None
    total_samples: int | None
    is_last: bool
    indices: Any = None

    def samples(self, output: Mapping[str, Any]) -> tuple[int, int]:
        """Return the samples of this process and of all, of which ``output`` tells what is not known without it."""
        own = int(output["batch_size"]) if self.num_samples is None else self.num_samples
        return own, own if self.total_samples is None else self.total_samples

    @property
    def batch(self) -> Any:
        """The data, by the name that they had in version 0.1."""
        return self.data


LoadedBatch = Batch


@dataclass(frozen=True)
class LoaderOptions:
    """How the batches of a source are shared out and handed over.

    :param seed: the order of the data and the randomness in the dataset follow from it; ``None``: from the generators
    :param fill: give a process that has no samples left in a step a batch without weight, so that all processes make
        equally many steps; otherwise it has fewer
    :param limit: at most this many steps in an epoch; ``None`` for no limit
    :param channels_last: lay out batches of images, tensors of 4 dimensions, with the channels last in memory
    :param yields_failures: give a :class:`FailedRead` for a batch that cannot be read, and go on, where the source can
        be indexed
    """

    seed: int | None = None
    fill: bool = False
    limit: int | None = None
    channels_last: bool = False
    yields_failures: bool = False


@dataclass
class FailedRead:
    """Stands for a batch that could not be read."""

    error: Exception


class ShardedLoader(ABC):
    """The batches of one process. Iterating over it gives them on the device; so do :meth:`steps`, with counts.

    Attributes of the source (``dataset``, ``batch_size``, ``sampler`` ...) can be read here too.

    :ivar seconds_waited: how long the latest epoch has waited for its batches, if it was to be measured
    :ivar shared_by: what shares out a stream that is found to share itself out by rank
    """

    seconds_waited = 0.0
    shared_by = ""

    def __init__(self, source: Any, ranks: Ranks, device: torch.device, options: LoaderOptions) -> None:
        self.source = source
        self.options = options
        self.limit = options.limit  # which callbacks may lower
        self._ranks = ranks
        self._device = device
        self._epoch = 0
        self._left: int | None = None
        self._steps_done = 0
        self._min_share = 1
        self._with_workers: WeakSet[Any] = WeakSet()  # iterators

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self._device

    @abstractmethod
    def _steps(self, epoch: int, start: int) -> Iterator[Batch]: ...

    @abstractmethod
    def _num_steps(self) -> int: ...

    def _ends_in_one(self) -> bool:
        """Whether the last batch of all the data is known to have a single sample."""
        return False

    def steps_left(self, start: int) -> int | None:
        """Return how many steps an epoch still has after so many samples of the whole job, ``None`` when unknown."""
        return None

    def ends_in_one_sample(self, steps: float) -> bool:
        """Whether so many steps of an epoch, within the limit, are known to end in a batch of a single sample."""
        return self._ends_in_one() and min(self.limit or steps, steps) >= self._num_steps()

    def steps(
        self, epoch: int, start: int = 0, steps_done: int = 0, measured: bool = False, min_share: int = 1
    ) -> Iterator[Batch]:
        """Return the steps of an epoch, from the position after ``start`` samples of the whole job.

        :param epoch: with a seed, the order and the randomness in the dataset follow from it
        :param steps_done: steps that the epoch has had before, which count for the limit
        :param measured: measure, in ``seconds_waited``, how long the epoch waits for its batches, but for the first
        :param min_share: where the source can be indexed, a process gets at least so many samples of a step, or none,
            unless that is more than a full batch or than there are; the same on all processes
        """
        self._epoch = epoch
        self._steps_done = steps_done
        self._min_share = min_share
        self._left = None if self.limit is None else max(self.limit - steps_done, 0)
        steps = self._steps(epoch, start)
        if self._device.type != "cpu":  # where batches are already
            steps = (s._replace(data=send_to_device(s.data, self._device, non_blocking=True)) for s in steps)
        if self.options.channels_last:
            steps = (s._replace(data=recursively_apply(_to_channels_last, s.data)) for s in steps)
        return self._measured(steps) if measured else steps

    def _measured(self, steps: Iterator[Batch]) -> Iterator[Batch]:
        yield from islice(steps, 1)  # its time is that of starting workers
        self.seconds_waited = 0.0
        begin = time.perf_counter()
        for step in steps:
            self.seconds_waited += time.perf_counter() - begin
            yield step
            begin = time.perf_counter()

    def __iter__(self) -> Iterator[Any]:
        return (step.data for step in self.steps(self._epoch))

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


def _to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
