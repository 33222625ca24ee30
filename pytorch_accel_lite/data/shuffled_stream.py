"""Streams in random order that a run can resume."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from pytorch_accel_lite.base.randomness import mix, preserving_generators, seed_generators
from pytorch_accel_lite.base.validation import check_positive_int
from pytorch_accel_lite.data.skipping import ended
from pytorch_accel_lite.data.stateful import can_return, returning_once
from pytorch_accel_lite.data.stream_shards import part_of


class ShuffledStream(IterableDataset[Any]):
    """A stream whose samples are shuffled block by block, so that a resumed run need only read one block again.

    The order is a function of (seed, epoch, number of the block), and so are random numbers drawn while a block is
    read. A stream that is not stateful is read again from its beginning.

    :param stream: an iterable dataset; its ``set_epoch``, if any, is called with the epoch
    :param block_size: number of samples that are read and shuffled together
    :param seed: seed of the orders
    """

    def __init__(self, stream: Any, block_size: int = 1000, seed: int = 0) -> None:
        if not isinstance(stream, IterableDataset):
            raise TypeError(f"The stream must be an IterableDataset, not {type(stream).__name__}.")
        self.stream: Any = stream
        self.block_size = check_positive_int("block_size", block_size)
        self.seed = seed
        self._epoch = 0
        self._state: Mapping[str, Any] = {}  # where the next iteration begins
        self._at: dict[str, Any] = {}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, counting from 0."""
        self._epoch = epoch
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        start, self._state = self._state, {}
        place = mix(self.seed, self._epoch)
        number = start.get("block", 0)
        given = start.get("given", 0)
        state = start.get("stream")
        returns = can_return(self.stream)
        reader = self._open(state, number)
        while True:
            order, block = self._read_block(reader, mix(number, after=place))
            for index in order[given:]:
                given += 1
                self._at = {"block": number, "given": given, "stream": state}
                yield block[index]
            if len(block) < self.block_size:
                return
            number, given = number + 1, 0
            state = copy.deepcopy(self.stream.state_dict()) if returns else None

    def _open(self, state: Any, blocks: int) -> Iterator[Any]:
        """Begin to read the stream from a state or, without one, after a number of blocks."""
        with preserving_generators():
            if state is not None:
                self.stream.load_state_dict(state)
            reader: Iterator[Any] = iter(self.stream)
            if state is not None:
                return returning_once(self.stream, reader)
            for number in range(blocks):
                _, block = self._read_block(reader, mix(number, after=mix(self.seed, self._epoch)))
                if len(block) < self.block_size:
                    given = number * self.block_size + len(block)
                    raise ended("stream", f"{given} samples", blocks * self.block_size)
            return reader

    def _read_block(self, reader: Iterator[Any], seed: int) -> tuple[list[int], list[Any]]:
        """Return the next samples, and the order in which to give them."""
        with preserving_generators():
            seed_generators(seed)
            block = list(islice(reader, self.block_size))
        return torch.randperm(len(block), generator=torch.Generator().manual_seed(seed >> 1)).tolist(), block

    def shard(self, rank: int, world_size: int) -> ShuffledStream | None:
        """Return a part, shuffled on its own, of the stream inside; ``None`` if that cannot be divided."""
        part = part_of(self.stream, rank, world_size)
        return None if part is None else ShuffledStream(part, self.block_size, mix(self.seed, rank))

    def __len__(self) -> int:
        return len(self.stream)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the block, how much of it has been given, and the state at which it begins."""
        return dict(self._at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin at a state."""
        self._state = state
