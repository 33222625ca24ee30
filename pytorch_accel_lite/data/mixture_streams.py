"""Mixtures of streams, which cannot be indexed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from pytorch_accel_lite.base.randomness import preserving_generators
from pytorch_accel_lite.data.mixtures import check_weights
from pytorch_accel_lite.data.skipping import ended
from pytorch_accel_lite.data.stateful import can_return, returning_once
from pytorch_accel_lite.data.stream_shards import part_of

_END = object()  # of a stream


class MixtureStream(IterableDataset[Any]):
    """Several streams to train on, by name, each with a share of the samples in every part of an epoch.

    A resumed run continues stateful streams at their states; of each of the others, it reads the current pass again up
    to the next sample. If a stream has ``set_epoch``, it is called before each pass.

    :param streams: iterable datasets by name
    :param weights: the shares of the samples that come from each stream, relative to each other; by default equal
    :param repeat: whether a stream that ends begins again. The mixture then has no end, and ``train`` needs
        ``max_num_train_steps``. Otherwise, an epoch ends with the stream that ends first.
    :raises ValueError: if there are no streams, or a name or a weight is wrong; when it is read, if one is empty
    """

    #: Its streams with shuffle buffers, whose states are incomplete, are read again, so its own state is complete.
    has_complete_state = True

    def __init__(
        self, streams: Mapping[str, Any], weights: Mapping[str, float] | None = None, *, repeat: bool = True
    ) -> None:
        if not isinstance(streams, Mapping):
            raise TypeError(f"A mixture needs a dict of streams by name, not {type(streams).__name__}.")
        if not streams:
            raise ValueError("A mixture needs at least one stream.")
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
        self.weights = check_weights(dict.fromkeys(streams, 1.0) if weights is None else weights, self.names)
        self.repeat = repeat
        self._epoch = 0
        self._state: Mapping[str, Any] = {}  # where the next iteration begins
        self._passes: list[_Passes] = []

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, counting from 0."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        state, self._state = self._state, {}
        self._passes = all_passes = [
            _Passes(name, stream, weight, self._epoch, **state.get(name, {}))
            for (name, weight), stream in zip(self.weights.items(), self.streams, strict=True)
        ]
        while True:
            chosen = min(all_passes, key=_Passes.time_of_next)
            sample = chosen.read(self.repeat)
            if sample is _END:
                return
            yield sample

    def shard(self, rank: int, world_size: int) -> MixtureStream | None:
        """Return a mixture of a part of each stream; ``None`` if one cannot be divided."""
        parts = {name: part_of(stream, rank, world_size) for name, stream in zip(self.names, self.streams, strict=True)}
        is_whole = all(part is not None for part in parts.values())
        return MixtureStream(parts, self.weights, repeat=self.repeat) if is_whole else None

    def state_dict(self) -> dict[str, Any]:
        """Return, by name, how much of each stream has been given, and its state if it has one."""
        return {passes.name: passes.state_dict() for passes in self._passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin at a state.

        :raises ValueError: if it is that of other streams
        """
        if state and list(state) != self.names:
            raise ValueError(f"it holds the streams {list(state)} instead of {self.names}")
        self._state = state


class _Passes:
    """A stream of a mixture, which is read once or again and again.

    :param given: number of samples that it has given
    :param given_in_pass: those of the current pass
    :param completed: number of passes completed
    :param state: the state of the stream
    """

    def __init__(
        self,
        name: str,
        stream: Any,
        weight: float,
        epoch: int,
        given: int = 0,
        given_in_pass: int = 0,
        completed: int = 0,
        state: Any = None,
    ) -> None:
        self.name = name
        self._stream = stream
        self._weight = weight
        self._epoch = epoch
        self._given = given
        self._given_in_pass = given_in_pass
        self._completed = completed
        self._state = state
        self._can_return = can_return(stream)
        self._reader: Iterator[Any] | None = None

    def time_of_next(self) -> float:
        """Return when the next sample is due; each stream gives ``weight`` samples in a unit of time."""
        return (self._given + 0.5) / self._weight

    def read(self, repeat: bool) -> Any:
        """Return the next sample."""
        if self._reader is None:
            self._reader = self._open()
        sample = next(self._reader, _END)
        if sample is _END and repeat:
            self._completed += 1
            self._given_in_pass = 0
            self._state = None
            self._reader = self._open()
            sample = next(self._reader, _END)
        if sample is _END and (repeat or not self._given):
            again = ", or cannot be read more than once: pass repeat=False" if self._given else ""
            raise ValueError(f"The stream {self.name!r} is empty{again}.")
        if sample is _END:
            return _END
        self._given += 1
        self._given_in_pass += 1
        return sample

    def _open(self) -> Iterator[Any]:
        """Begin to read the current pass, after what it has given."""
        with preserving_generators():
            if hasattr(self._stream, "set_epoch"):
                self._stream.set_epoch(self._epoch + self._completed)
            if self._state is not None:
                self._stream.load_state_dict(self._state)
            reader: Iterator[Any] = iter(self._stream)
            if self._state is not None:
                return returning_once(self._stream, reader)
            given = sum(1 for _ in islice(reader, self._given_in_pass))
            if given < self._given_in_pass:
                raise ended(f"stream {self.name!r}", f"{given} samples", self._given_in_pass)
            return reader

    def state_dict(self) -> dict[str, Any]:
        """Return the arguments with which to continue."""
        if self._reader is not None and self._can_return:
            self._state = self._stream.state_dict()
        return {
            "given": self._given,
            "given_in_pass": self._given_in_pass,
            "completed": self._completed,
            "state": self._state,
        }
