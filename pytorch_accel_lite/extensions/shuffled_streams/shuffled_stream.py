"""Reading a stream in blocks, each in random order, and returning to a position within a block."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice

import torch
from torch.utils.data import IterableDataset

from pytorch_accel_lite.extension_tools.arguments_and_errors import check_positive_int
from pytorch_accel_lite.extension_tools.data_and_batches import Sample, Source, early_end_error
from pytorch_accel_lite.extension_tools.plain_types import StateDict
from pytorch_accel_lite.extension_tools.random_numbers import (
    derive_seed,
    generator_with,
    preserving_generators,
    seed_generators,
)
from pytorch_accel_lite.extensions.streams import can_return, open_stream, part_of


class ShuffledStream(IterableDataset[Sample]):
    """A stream whose samples are shuffled block by block, so that a resumed run rereads only one block.

    The order is a function of (seed, epoch, number of the block), and so are random numbers drawn while reading a
    block. A stream that is not stateful is read again from its beginning.

    Args:
        stream: an iterable dataset; its ``set_epoch``, if any, is called with the epoch
        block_size: number of samples that are read and shuffled together
        seed: seed of the orders
    """

    def __init__(self, stream: Source, block_size: int = 1000, seed: int = 0) -> None:
        if not isinstance(stream, IterableDataset):
            raise TypeError(f"The stream must be an IterableDataset, not {type(stream).__name__}.")
        self.stream: Source = stream
        self.block_size = check_positive_int("block_size", block_size)
        self.seed = seed
        self._epoch = 0
        self._state: StateDict = {}  # where the next iteration begins
        self._position: StateDict = {}

    def __len__(self) -> int:
        return len(self.stream)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, counting from 0."""
        self._epoch = epoch
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Sample]:
        start, self._state = self._state, {}
        epoch_seed = derive_seed(self.seed, self._epoch)
        number = start.get("block", 0)
        position = start.get("given", 0)
        state = start.get("stream")
        is_stateful = can_return(self.stream)

        def skip_blocks(reader: Iterator[Sample]) -> None:
            for skipped in range(number):
                _, block = self._read_block(reader, derive_seed(skipped, after=epoch_seed))
                if len(block) < self.block_size:
                    seen = skipped * self.block_size + len(block)
                    raise early_end_error("stream", f"{seen} samples", number * self.block_size)

        reader = open_stream(self.stream, state, skip_blocks)
        while True:
            order, block = self._read_block(reader, derive_seed(number, after=epoch_seed))
            for index in order[position:]:
                position += 1
                self._position = {"block": number, "given": position, "stream": state}
                yield block[index]
            if len(block) < self.block_size:
                return
            number, position = number + 1, 0
            state = copy.deepcopy(self.stream.state_dict()) if is_stateful else None

    def _read_block(self, reader: Iterator[Sample], seed: int) -> tuple[list[int], list[Sample]]:
        """Return the order of the next samples, and the samples."""
        with preserving_generators():
            seed_generators(seed)
            block = list(islice(reader, self.block_size))
        return torch.randperm(len(block), generator=generator_with(seed)).tolist(), block

    def shard(self, rank: int, world_size: int) -> ShuffledStream | None:
        """Return a separately shuffled part of the inner stream; ``None`` if it cannot be divided."""
        part = part_of(self.stream, rank, world_size)
        return None if part is None else ShuffledStream(part, self.block_size, derive_seed(self.seed, rank))

    def state_dict(self) -> StateDict:
        """Return the number of the block, the position in it, and the state at which it begins."""
        return dict(self._position)

    def load_state_dict(self, state: StateDict) -> None:
        """Make the next iteration begin at a state."""
        self._state = state
