"""The position in an epoch of sequential data, as the source itself reports it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from importlib.metadata import version
from inspect import signature
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

from torch.utils.data import DataLoader

from pytorch_accel_lite.extension_tools.data_and_batches import Sample, Source, SourceState
from pytorch_accel_lite.extension_tools.random_numbers import preserving_generators
from pytorch_accel_lite.extensions.streams.stream_shards import package_of, streams_in

#: Key of the state after the last batch of an epoch, when some sources are at their start again.
_ENDED = "after the last batch"
#: The tracker of the loader that started to read a source last, by the identity of the source.
_latest: WeakValueDictionary[int, PositionTracker] = WeakValueDictionary()


def can_return(stream: Source) -> bool:
    """Whether a stream reports its position, and yields the same samples after returning to it."""
    return _is_stateful(stream) and not _has_shuffle_buffer(stream) and not _skips_samples(stream)


def _is_stateful(source: Source) -> bool:
    if not all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    try:
        signature(source.state_dict).bind()
    except TypeError:  # only the library's own loader knows the arguments (litdata, MosaicML)
        return False
    except ValueError:  # a method written in C has no signature
        pass
    return True


def track_position(batches: Source, keeps: bool) -> PositionTracker | None:
    """Return a tracker if a loader, or the stream that a ``DataLoader`` reads, reports its position."""
    dataset = batches.dataset if isinstance(batches, DataLoader) else None
    return PositionTracker(batches, keeps) if _is_stateful(batches) or _is_stateful(dataset) else None


class PositionTracker:
    """Keeps the state of a source after the batch used last, while later batches are read ahead.

    Args:
        batches: a stateful loader, or a ``DataLoader`` over a stateful dataset
        keeps: whether to keep states, which takes time

    Attributes:
        name: the class name of the stateful object
        obstacle: why the state cannot be known; empty if it can
        position: the state; ``None`` if unknown
    """

    def __init__(self, batches: Source, keeps: bool) -> None:
        dataset = getattr(batches, "dataset", None)
        self._source: Source = batches if _is_stateful(batches) else dataset
        self._objects = [id(item) for item in (batches if dataset is None else dataset, *streams_in(dataset))]
        self.name = type(self._source).__name__
        self.obstacle = ""
        if not getattr(dataset, "has_complete_state", False) and _has_shuffle_buffer(dataset):
            self.obstacle = (
                "the samples in its shuffle buffer are not part of its state_dict. To shuffle without a buffer, use "
                "pytorch_accel_lite.data.ShuffledStream"
            )
        elif _skips_samples(dataset):
            self.obstacle = "before version 5.0, datasets skips samples when it returns to a position"
        elif self._source is not batches and batches.num_workers:
            self.obstacle = "a DataLoader does not report the states of its workers, but torchdata's StatefulDataLoader"
        self._keeps = keeps and not self.obstacle
        self.position: SourceState = None
        self._ahead: deque[SourceState] = deque()
        self._has_ended = False

    def begin(self) -> None:
        """Start reading. Another loader that is still reading the same object no longer knows its position."""
        self.position = None
        self._ahead.clear()
        _latest.update(dict.fromkeys(self._objects, self))

    def reopen(self, position: SourceState, start: Callable[[], Iterator[Sample]]) -> Iterator[Sample]:
        """Return to a position and call ``start``, which starts reading."""
        has_ended = isinstance(position, dict) and position.keys() == {_ENDED}
        state = position[_ENDED] if has_ended else position
        try:
            self._source.load_state_dict(state)
            batches = start()
            if has_ended and [*islice(batches, 1)]:
                self._source.load_state_dict(state)
                batches = iter(())
        except OSError:  # the source cannot be opened
            raise
        except Exception as error:
            raise ValueError(
                f"The position in the training state does not fit the training data, a {self.name} "
                f"({type(error).__name__}: {error}). Create it as it was when the state was saved."
            ) from error
        return _forget_position(getattr(self._source, "dataset", self._source), batches)

    def follow(self, batches: Iterator[Sample]) -> Iterator[Sample]:
        """Yield batches, keeping the state of the source after each."""
        self._has_ended = False
        for batch in batches:
            is_known = self._keeps and all(_latest.get(item) is self for item in self._objects)
            self._ahead.append(copy.deepcopy(self._source.state_dict()) if is_known else None)
            yield batch
        self._has_ended = True
        if self._ahead and self._ahead[-1] is not None:
            self._ahead[-1] = {_ENDED: self._ahead[-1]}

    @property
    def is_used_up(self) -> bool:
        """Whether the batch used last was the last batch that has been read from the source."""
        return self._has_ended and not self._ahead

    def advance(self, num_batches: int = 1) -> None:
        """Advance the position past the batches that are about to be used."""
        for _ in range(num_batches):
            self.position = self._ahead.popleft()


def open_stream(stream: Source, state: SourceState, skip: Callable[[Iterator[Sample]], None]) -> Iterator[Sample]:
    """Start reading a stream from a state or, without a state, after skipping the samples that have been seen.

    Does not advance the random generators.
    """
    with preserving_generators():
        if state is not None:
            stream.load_state_dict(state)
            return _forget_position(stream, iter(stream))
        reader: Iterator[Sample] = iter(stream)
        skip(reader)
        return reader


def _forget_position(stream: Source, items: Iterator[Sample]) -> Iterator[Sample]:
    """Yield the items of a stream that has returned to a position, and make it forget the position.

    Hugging Face's streams would otherwise return to the position whenever they are read in the same epoch, for example
    in an evaluation.

    Args:
        items: the iterator of the stream, from which nothing has been read yet
    """
    first = list(islice(items, 1))
    for inner in streams_in(stream):
        if "_starting_state_dict" in vars(inner):
            inner.__dict__["_starting_state_dict"] = None
    yield from first
    yield from items


def _skips_samples(dataset: Source) -> bool:
    """Whether a stream, or one inside it, is from a version of Hugging Face datasets that resumes at the next shard."""
    packages = {package_of(type(stream)) for stream in streams_in(dataset)}
    return "datasets" in packages and int(version("datasets").partition(".")[0]) < 5


def _has_shuffle_buffer(dataset: Source) -> bool:
    """Whether a stream, or one inside it, has a shuffle buffer of Hugging Face datasets, which is not in its state."""
    stages: list[Any] = [getattr(stream, "_ex_iterable", None) for stream in streams_in(dataset)]
    for stage in stages:  # grows in the loop
        if type(stage).__name__ == "BufferShuffledExamplesIterable":
            return True
        stages += [stage.ex_iterable] if hasattr(stage, "ex_iterable") else getattr(stage, "ex_iterables", ())
    return False
