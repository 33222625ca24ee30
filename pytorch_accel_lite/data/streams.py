"""Streams: data that cannot be indexed and that belong to all processes."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from pytorch_accel_lite.base.batches import Batch, find_batch_size
from pytorch_accel_lite.base.inspection import find_length
from pytorch_accel_lite.base.randomness import mix, preserving_generators, seed_generators
from pytorch_accel_lite.base.validation import check_positive_int
from pytorch_accel_lite.data.consistency import check_own_batches, checksum_of_batches
from pytorch_accel_lite.data.iterables import PreShardedLoader, ReadInTurn
from pytorch_accel_lite.data.loader import LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.lockstep import Announced, agreed_steps
from pytorch_accel_lite.data.plan import count_global_batches, ends_in_one, grouped
from pytorch_accel_lite.data.scatter import ENDED, FAILED, Deal, Dealt
from pytorch_accel_lite.data.self_sharding import find_own_share
from pytorch_accel_lite.data.skipping import ended
from pytorch_accel_lite.data.stateful import can_return, returning_once
from pytorch_accel_lite.data.stream_shards import (
    PARTS,
    can_be_divided,
    how_divided,
    in_whole_order,
    is_divided,
    over,
    own_part_of,
    part_of,
)
from pytorch_accel_lite.distributed import Ranks

_END = object()  # of a part


class ReadByAll(IterableDataset[Any]):
    """Marks a stream that is cheap to read: every process reads all of it, and uses its own batches.

    Nothing is then sent between processes, and the batches are the same as if one process had dealt them out. The
    stream must give the same samples in the same order on every process; random numbers that it draws while it is read
    are the same under a seed. The processes compare a few values of each step, and raise an error if these differ.

    :param stream: an iterable dataset
    """

    def __init__(self, stream: Any) -> None:
        if not isinstance(stream, IterableDataset):
            raise TypeError(f"The stream must be an IterableDataset, not {type(stream).__name__}.")
        self.stream: Any = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)

    def __len__(self) -> int:
        return len(self.stream)

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.stream, name)


class StreamLoader(ReadInTurn):
    """The batches of a ``DataLoader`` that cannot be indexed: rank 0 reads them all and deals them out in turn.

    Every sample is thus seen once, even if the stream is random. What is left of an epoch in which each process read a
    part of its own is read part by part.
    """

    def __init__(self, source: Any, ranks: Ranks, device: torch.device, options: LoaderOptions) -> None:
        super().__init__(source, ranks, device, options)
        self._batches_per_step = ranks.world_size
        self._is_read_by_all = isinstance(source.dataset, ReadByAll) and ranks.world_size > 1
        if self._is_read_by_all:
            self._reader = 0
        self._collates_all = True
        self._parts: list[_Part] = []  # of a resumed epoch

    def _steps(self, epoch: int, start: int) -> Iterator[Batch]:
        if not start:
            self._parts = []
        self._set_epoch(epoch)
        if self._is_read_by_all:
            steps = self._pick_own(start)
        elif self._parts or self._ranks.world_size > 1:
            steps = self._deal_out(start)
        else:
            steps = self._steps_alone(start)
        return self._seeding(steps) if self._is_seeded else steps

    def _deal_out(self, start: int) -> Iterator[Batch]:
        """Yield the batches of this process, which it receives while it computes the step before."""
        deal = Deal(islice(self._groups(start), self._left), self._ranks, self.options.fill)
        size = self._ranks.broadcast_object(deal.prepare)
        if size != ENDED:
            receive = deal.begin(size)
        while size != ENDED:
            size, own = receive()
            if size == FAILED:
                self._ranks.run_together(deal.fail)
            if size != ENDED:
                receive = deal.begin(size)
            self._advance(own.num_batches)
            if own.num_samples or self.options.fill:
                yield Batch(own.data, own.num_samples, own.total_samples, size == ENDED)

    def _pick_own(self, start: int) -> Iterator[Batch]:
        """Read the batches of all processes, and yield those of this one."""
        name = type(self.source.dataset.stream).__name__
        unequal = ValueError(
            f"The processes read different samples from ReadByAll({name}). It must give the same samples in the same "
            f"order on every process: seed its random numbers, pass {name} without ReadByAll, which the first process "
            "then reads for all, or give it a method shard(rank, world_size)."
        )
        self._collates_all = bool(start) or not _is_collated_plainly(self.source)
        groups = map(self._own_of, islice(self._groups(start), self._left))
        for steps, _, is_last in agreed_steps(Announced(groups, self._ranks, itemgetter(1), unequal)):
            own, _ = steps.items.popleft()
            self._advance(own.num_batches)
            if own.num_samples or self.options.fill:
                yield Batch(own.data, own.num_samples, own.total_samples, is_last)

    def _own_of(self, group: list[Any]) -> tuple[Dealt, int]:
        """Return the batch of this process among those of a step, and a number to compare all of them by."""
        has_own = self._ranks.rank < len(group)
        own = group[self._ranks.rank if has_own else 0]
        if self._collates_all:
            sizes = [find_batch_size(batch) for batch in group]
            looked_at = group[:1]
        else:
            sizes = [len(samples) for samples in group]
            looked_at = [default_collate([sample]) for sample in (group[0][0], group[-1][-1])]
            own = default_collate(own)
        dealt = Dealt(own, sizes[self._ranks.rank] if has_own else 0, sum(sizes), len(group))
        return dealt, checksum_of_batches(looked_at, sizes)

    def _start_reading(self, batches: Any) -> Iterator[Any]:
        """Read samples instead of batches where those of the other processes need not be collated."""
        if self._collates_all:
            return super()._start_reading(batches)
        uncollated = copy.copy(batches)
        uncollated.collate_fn = list
        return super()._start_reading(uncollated)

    def _groups(self, start: int) -> Iterator[list[Any]]:
        """Yield the batches of all processes in each step. Reads nothing before the first is asked for."""
        batches = self._read_parts() if self._parts else self._read_from(start)
        yield from grouped(batches, self._ranks.world_size)

    def _read_parts(self) -> Iterator[Any]:
        """Yield a batch of each part in turn, after what has been seen of it."""
        self._dealt: deque[tuple[_Part, int]] = deque()
        reading = deque((part, part.begin(self._epoch)) for part in self._parts)
        while reading:
            part, batches = reading.popleft()
            batch = next(batches, _END)
            if batch is not _END:
                reading.append((part, batches))
                self._dealt.append((part, find_batch_size(batch)))
                yield batch

    def _advance(self, num_batches: int) -> None:
        """Move the position past batches that this process has read, and that are about to be used."""
        if self._parts:
            for part, size in [self._dealt.popleft() for _ in range(num_batches)]:
                part.advance(size)
        elif num_batches and self._tracker is not None:
            self._tracker.advance(num_batches)

    def position(self) -> Any:
        """Return the position in the stream, or those in its parts."""
        return {PARTS: [part.position_in_it() for part in self._parts]} if self._parts else super().position()

    def move_to(self, position: Any) -> str:
        """Make the next, resumed epoch begin at a position in the stream, or at those in its parts."""
        self._parts = []
        if not is_divided(position) or not can_be_divided(self.source.dataset):
            return super().move_to(position)
        held = position[PARTS]
        said = [
            f"This epoch was read in {len(held)} parts, one by each process. The first process reads what is left of "
            "them for all."
        ]
        for number, of_part in enumerate(held):
            part = self._create_part(number, len(held), of_part)
            said.append(part.move_to(of_part["position"]))
            self._parts.append(part)
        return " ".join(filter(None, dict.fromkeys(said)))

    def _create_part(self, number: int, count: int, held: dict[str, Any]) -> _Part:
        dataset = part_of(self.source.dataset, number, count)
        if dataset is None:
            raise ValueError(
                f"The training data, a {type(self.source.dataset).__name__}, were read in {count} parts when the state "
                "was saved, but cannot be divided into as many now. Create them as they were."
            )
        return _Part(over(self.source, dataset), self._ranks, self.device, self.options, number, held)

    def stop_workers(self) -> None:
        """Stop the workers of all parts, too."""
        super().stop_workers()
        for part in self._parts:
            part.stop_workers()

    def _num_steps(self) -> int:
        return count_global_batches(len(self.source), self._ranks.world_size)

    def _ends_in_one(self) -> bool:
        return ends_in_one(find_length(self.source.dataset), self.source.batch_size, self.source.drop_last)


class _Part(StreamLoader):
    """A part of a stream, of which a process of the interrupted run has read the beginning.

    :param number: number of the part
    :param held: the numbers of its samples and batches that have been seen in this epoch
    """

    def __init__(
        self, source: Any, ranks: Ranks, device: torch.device, options: LoaderOptions, number: int, held: dict[str, Any]
    ) -> None:
        super().__init__(source, ranks, device, options)
        self._batches_per_step = 1
        self._reader = number
        self._samples = int(held["samples"])
        self._steps_done = int(held.get("batches", 0))

    def begin(self, epoch: int) -> Iterator[Any]:
        """Begin to read what is left of it."""
        self._epoch = epoch
        self._set_epoch(epoch)
        return self._read_from(self._samples)

    def advance(self, size: int) -> None:
        """Move the position past the next batch."""
        self._samples += size
        self._steps_done += 1
        self._advance(1)

    def position_in_it(self) -> dict[str, Any]:
        """Return where it is."""
        return {"samples": self._samples, "batches": self._steps_done, "position": self.position()}


class DividedLoader(PreShardedLoader):
    """The batches of a stream that can be divided: each process reads a part.

    An epoch that is resumed by other processes, or that was not read in parts, is completed as it was begun, by a
    :class:`StreamLoader`.
    """

    has_own_position = False
    _finds_filler = True

    def __init__(
        self, source: DataLoader[Any], part: Any, ranks: Ranks, device: torch.device, options: LoaderOptions
    ) -> None:
        super().__init__(over(source, part), ranks, device, options, how_divided(source.dataset))
        self._whole = StreamLoader(source, ranks, device, options)
        self._completes_whole = False
        self._samples = self._batches = 0  # of this part, in this epoch

    def _steps(self, epoch: int, start: int) -> Iterator[Batch]:
        if start and self._completes_whole:
            self._whole.limit = self.limit
            return self._whole.steps(epoch, start, self._steps_done)
        self._completes_whole = False
        if not start:
            self._samples = self._batches = 0
        return self._counted(super()._steps(epoch, start))

    def _counted(self, steps: Iterator[Batch]) -> Iterator[Batch]:
        for step in steps:
            self._samples += step.num_samples or 0
            self._batches += bool(step.num_samples)
            yield step

    def _steps_together(self, start: int) -> Iterator[Batch]:
        return self._in_step(self._samples if start else 0)

    def _filler(self, first: Announced[Any]) -> Any:
        """Return the last batch of a part that has ended before the epoch was resumed, or one of another part."""
        (batch, *_) = [item for items in self._ranks.all_gather_object([*first.items]) for item in items]
        if self._samples and not first.items:
            with preserving_generators():
                (batch,) = deque(self._open(0), maxlen=1)
        return batch

    def stop_workers(self) -> None:
        """Stop the workers of what completes the epoch of other parts, too."""
        super().stop_workers()
        self._whole.stop_workers()

    def position(self) -> Any:
        """Return the positions in all parts. Call it on every process."""
        if self._completes_whole:
            return self._whole.position()
        own = {"samples": self._samples, "batches": self._batches, "position": super().position()}
        return {PARTS: self._ranks.all_gather_object(own)}

    def move_to(self, position: Any) -> str:
        """Make the next, resumed epoch begin at the position of this part, or complete an epoch of other parts."""
        self._completes_whole = not is_divided(position) or len(position[PARTS]) != self._ranks.world_size
        if self._completes_whole:
            return self._whole.move_to(position)
        own = position[PARTS][self._ranks.rank]
        self._samples, self._batches = int(own["samples"]), int(own.get("batches", 0))
        return super().move_to(own["position"])


def _is_collated_plainly(loader: Any) -> bool:
    """Whether a loader makes batches of samples in this process, one like the other, so that some may be left out."""
    is_plain = type(loader) is DataLoader and loader.collate_fn is default_collate and loader.batch_size is not None
    return is_plain and not (loader.num_workers or loader.pin_memory)


def create_loader(
    source: Any, ranks: Ranks, device: torch.device, options: LoaderOptions, is_torchs: bool
) -> ShardedLoader:
    """Return the loader for a source that cannot be indexed.

    :param is_torchs: whether the source is a ``DataLoader`` of torch
    """
    if not is_torchs:
        check_own_batches(source, ranks)
    elif ranks.world_size > 1 and not isinstance(source.dataset, IterableDataset):
        source = in_whole_order(source, ranks.world_size)
    share = find_own_share(source.dataset, ranks) if is_torchs else None
    if not is_torchs or share is not None:
        return PreShardedLoader(source, ranks, device, options, "" if share is None else share.shared_by)
    part = own_part_of(source.dataset, ranks) if options.divides and not options.dispatch_batches else None
    if part is not None:
        return DividedLoader(source, part, ranks, device, options)
    if options.dispatch_batches is False and ranks.world_size > 1 and not isinstance(source.dataset, ReadByAll):
        kind = type(source.dataset).__name__
        raise ValueError(
            f"dispatch_batches=False in the accelerator's DataLoaderConfiguration: {kind} would be read by the first "
            f"process for all. Pass ReadByAll({kind}(...)) to let each process read all of it and use its own batches, "
            "or give it a method shard(rank, world_size) to let each read a part."
        )
    return StreamLoader(source, ranks, device, options)


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
