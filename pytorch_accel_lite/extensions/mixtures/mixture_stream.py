"""Mixtures of streams."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from torch.utils.data import IterableDataset

from pytorch_accel_lite.extension_tools.data_and_batches import (
    Sample,
    Source,
    SourceState,
    check_are_named,
    early_end_error,
)
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extension_tools.random_numbers import preserving_generators
from pytorch_accel_lite.extensions.mixtures.mixture_weights import check_mixture_weights
from pytorch_accel_lite.extensions.streams import can_return, open_stream, part_of

_END = object()  # of a stream


class MixtureStream(IterableDataset[Sample]):
    """Several streams to train on, by name, each with a share of the samples in every part of an epoch.

    A resumed run continues stateful streams at their states. It rereads the current pass of other streams up to the
    next sample. If a stream has ``set_epoch``, it is called before each pass.

    Args:
        streams: iterable datasets by name
        weights: the shares of the samples that come from each stream, relative to each other; by default equal
        repeat: whether a stream that ends is repeated. The mixture is then endless, and ``train`` needs
            ``max_num_train_steps``. Otherwise, an epoch ends with the stream that ends first.

    Attributes:
        names: the names of the streams, in order

    Raises:
        ValueError: if there are no streams, or a name or a weight is wrong; when it is read, if one is empty
    """

    #: The state is complete, because streams with incomplete states (those with shuffle buffers) are reread.
    has_complete_state = True

    def __init__(
        self, streams: Mapping[str, Source], weights: Mapping[str, float] | None = None, *, repeat: bool = True
    ) -> None:
        check_are_named(streams)
        for name, stream in streams.items():
            if not isinstance(stream, IterableDataset):
                raise TypeError(
                    f"The stream {name!r} ({type(stream).__name__}) is not an IterableDataset. Mix datasets that can "
                    "be indexed with Mixture."
                )
        self.names = list(streams)
        self.streams = list(streams.values())
        if len(set(map(id, self.streams))) < len(self.streams):
            raise ValueError("A stream has several names here, but only one position. Create one for each name.")
        self.weights = check_mixture_weights(dict.fromkeys(streams, 1.0) if weights is None else weights, self.names)
        self.repeat = repeat
        self._epoch = 0
        self._state: StateDict = {}  # where the next iteration begins
        self._passes: list[_Passes] = []

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, counting from 0."""
        self._epoch = epoch

    def change_weights(self, weights: Mapping[str, float]) -> None:
        """Change the weights of this mixture and its parts, for samples read from now on.

        Within an epoch, batches that were read ahead must be read again: ``trainer.train_dataloader.read_again()``.

        Args:
            weights: as in the constructor, but some may be 0
        """
        self.weights.update(check_mixture_weights(weights, self.names, may_be_zero=True))

    def __iter__(self) -> Iterator[Sample]:
        state, self._state = self._state, {}
        self._passes = passes = [
            _Passes(name, stream, self.weights[name], self._epoch, **state.get(name, {}))
            for name, stream in zip(self.names, self.streams, strict=True)
        ]
        _change_shares(passes)
        while True:
            sample = min(passes, key=_Passes.time_of_next).read(self.repeat)
            if sample is _END:
                return
            yield sample

    def shard(self, rank: int, world_size: int) -> MixtureStream | None:
        """Return a mixture of a part of each stream; ``None`` if one cannot be divided."""
        parts = {name: part_of(stream, rank, world_size) for name, stream in zip(self.names, self.streams, strict=True)}
        if any(part is None for part in parts.values()):
            return None
        mixture = MixtureStream(parts, repeat=self.repeat)
        mixture.weights = self.weights  # which change in all parts
        return mixture

    def state_dict(self) -> StateDict:
        """Return the position in each stream by name, and its state if it has one."""
        return {passes.name: passes.state_dict() for passes in self._passes}

    def load_state_dict(self, state: StateDict) -> None:
        """Make the next iteration begin at a state.

        Raises:
            ValueError: if it belongs to other streams
        """
        if state and list(state) != self.names:
            raise ValueError(f"it holds the streams {list(state)} instead of {self.names}")
        self._state = state


@dataclass(eq=False, repr=False)
class _Passes:
    """A stream of a mixture, which is read once or repeatedly.

    Args:
        name: the name of the stream, for errors
        stream: the source of the samples
        weight: the present weight of the stream
        epoch: the number passed to ``set_epoch`` in the first pass
        given: number of samples read from the stream
        given_in_pass: number of samples read in the current pass
        completed: number of passes completed
        state: the state of the stream
        since: number of samples of all streams that had been read when the weights changed last
        due: number of samples of this stream that were due at that change, with its fraction
        weight_since: the weight of the stream after that change; ``None`` if it is the present weight
        reader: an iterator over the current pass; ``None`` before the first sample is read
        returns: whether the stream can return to its states
    """

    name: str
    stream: Source
    weight: float
    epoch: int
    given: int = 0
    given_in_pass: int = 0
    completed: int = 0
    state: SourceState = None
    since: int = 0
    due: float = 0.0
    weight_since: float | None = None
    reader: Iterator[Sample] | None = None
    returns: bool = False

    def time_of_next(self) -> float:
        """Return when the next sample is due; each stream yields ``weight`` samples per unit of time."""
        return (self.given + 0.5 - self.due) / self.weight if self.weight else math.inf

    def read(self, repeat: bool) -> Sample:
        """Return the next sample."""
        if self.reader is None:
            self.reader = self._open()
        sample = next(self.reader, _END)
        if sample is _END and repeat:
            self.completed += 1
            self.given_in_pass = 0
            self.state = None
            self.reader = self._open()
            sample = next(self.reader, _END)
        if sample is not _END:
            self.given += 1
            self.given_in_pass += 1
        elif repeat or not self.given:
            again = ", or cannot be read more than once: pass repeat=False" if self.given else ""
            raise ValueError(f"The stream {self.name!r} is empty{again}.")
        return sample

    def _open(self) -> Iterator[Sample]:
        """Start reading the current pass at the next sample."""
        self.returns = can_return(self.stream)
        with preserving_generators():
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(self.epoch + self.completed)
            return open_stream(self.stream, self.state, self._skip)

    def _skip(self, reader: Iterator[Sample]) -> None:
        skipped = sum(1 for _ in islice(reader, self.given_in_pass))
        if skipped < self.given_in_pass:
            raise early_end_error(f"stream {self.name!r}", f"{skipped} samples", self.given_in_pass)

    def state_dict(self) -> StateDict:
        """Return the constructor arguments of an instance that continues."""
        if self.reader is not None and self.returns:
            self.state = self.stream.state_dict()
        names = ("given", "given_in_pass", "completed", "state", "since", "due")
        return {name: getattr(self, name) for name in names} | {"weight_since": self.weight}


def _change_shares(passes: list[_Passes]) -> None:
    """Apply new weights from the end of a state on, so that no stream catches up on samples that were not due."""
    before = [each.weight if each.weight_since is None else each.weight_since for each in passes]
    if before == [each.weight for each in passes]:
        return
    given, total = sum(each.given for each in passes), math.fsum(before)
    for each, weight in zip(passes, before, strict=True):
        each.due += weight / total * (given - each.since)
        each.since = given
