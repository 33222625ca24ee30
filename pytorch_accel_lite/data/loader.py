"""What all loaders have in common: batches with their counts, on the device, from any position of an epoch."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from accelerate.utils import recursively_apply, send_to_device

from pytorch_accel_lite.batches import find_batch_size, slice_batch
from pytorch_accel_lite.data.workers import start_reading
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.randomness import preserving_generators

T = TypeVar("T")


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
    """

    seconds_waited = 0.0

    def __init__(self, source: Any, ranks: Ranks, device: torch.device, options: LoaderOptions) -> None:
        self.source = source
        self.options = options
        self.limit = options.limit  # which callbacks may lower
        self._ranks = ranks
        self._device = device
        self._epoch = 0
        self._left: int | None = None
        self._steps_done = 0
        self._with_workers: WeakSet[Any] = WeakSet()  # iterators

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self._device

    @abstractmethod
    def _steps(self, epoch: int, start: int) -> Iterator[Batch]: ...

    @abstractmethod
    def _num_steps(self) -> int: ...

    def steps(self, epoch: int, start: int = 0, steps_done: int = 0, measured: bool = False) -> Iterator[Batch]:
        """Return the steps of an epoch, from the position after ``start`` samples of the whole job.

        :param epoch: with a seed, the order and the randomness in the dataset follow from it
        :param steps_done: steps that the epoch has had before, which count for the limit
        :param measured: measure, in ``seconds_waited``, how long the epoch waits for its batches, but for the first
        """
        self._epoch = epoch
        self._steps_done = steps_done
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
        while True:
            begin = time.perf_counter()
            step = next(steps, None)
            self.seconds_waited += time.perf_counter() - begin
            if step is None:
                return
            yield step

    def __iter__(self) -> Iterator[Any]:
        return (step.data for step in self.steps(self._epoch))

    def _steps_alone(self, start: int) -> Iterator[Batch]:
        """Yield what this process reads of the source; only the steps that use the batches can tell their sizes."""
        for batch, is_last in with_last(islice(self._read_from(start), self._left)):
            yield Batch(batch, None, None, is_last)

    def _read_from(self, start: int) -> Iterator[Any]:
        """Read the source and drop what a resumed epoch had before; the generators stay where that run put them.

        Several processes count the samples of a step here, so the samples tell where to resume. One process counts what
        each step says that it had, which may be no size of the batch: there the steps tell, where the batches are
        as large as before. With another batch size the samples tell again, and a batch in which they end is split.
        """
        size = getattr(self.source, "batch_size", None)
        done = self._steps_done
        by_steps = self._ranks.world_size == 1 and done > 0 and size in (None, start / done)
        with preserving_generators() if start else nullcontext():
            batches = self._start_reading(self.source)
            if by_steps:
                _skip_batches(batches, done, start, is_certain=size is not None)
                return batches
            return after_samples(batches, start, find_batch_size, _last_samples)

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


class WrongLengthError(ValueError):
    """What gives the order of an epoch has not as many indices as it said: no batch of it can be skipped."""


def ended(source: str, given: str, done: int) -> WrongLengthError:
    """Return the error for data that end before the place at which a run is resumed."""
    return WrongLengthError(
        f"The {source} ended after {given} of this epoch, but the run that is resumed has had {done} of them. Resume "
        "it with the data that it was saved with."
    )


def cannot_split(what: str) -> ValueError:
    """Return the error for a place to resume at that lies within a batch."""
    return ValueError(
        f"The run that is resumed was saved at a sample that is now in the middle of {what}, which cannot be split. "
        "Resume it with its batch size and number of processes."
    )


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item with whether it is the last, reading one ahead."""
    iterator = iter(items)
    held = list(islice(iterator, 1))
    for following in iterator:
        yield held.pop(), False
        held.append(following)
    if held:
        yield held.pop(), True


def in_groups(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield lists of so many items; the last may be shorter."""
    return iter(lambda: list(islice(items, size)), [])


def after_samples(
    batches: Iterator[T], start: int, size_of: Callable[[T], int], last: Callable[[T, int], T], source: str = "data"
) -> Iterator[T]:
    """Drop so many samples; return the batches after them, first the ``last`` samples of one in which they end."""
    position = 0
    while position < start:
        batch = next(batches, None)
        if batch is None:
            raise ended(source, f"{position} samples", start)
        position += size_of(batch)
        if position > start:
            return chain([last(batch, position - start)], batches)
    return batches


def _last_samples(batch: Any, count: int) -> Any:
    size = find_batch_size(batch)
    rest = slice_batch(batch, size - count, size, size)
    if find_batch_size(rest) != count:
        raise cannot_split(f"a batch of type {type(batch).__name__}")
    return rest


def _skip_batches(batches: Iterator[Any], count: int, start: int, is_certain: bool) -> None:
    """Drop so many batches. Unless the caller is certain, warn when they hold another number of samples than before."""
    skipped = 0
    samples = 0
    for batch in islice(batches, count):
        skipped += 1
        try:
            samples += find_batch_size(batch)
        except ValueError:  # no size can be told
            is_certain = True
    if skipped < count:
        raise ended("data", f"{skipped} batches", count)
    if samples != start and not is_certain:
        warnings.warn(
            f"The run that is resumed had counted {start} samples in {count} steps of this epoch; as many batches hold "
            f"{samples} now. It goes on where it was only if it had one process and the same batches.",
            stacklevel=2,
        )
