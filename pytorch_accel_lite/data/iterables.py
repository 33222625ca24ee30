"""Batches of sources that cannot be indexed: streams, and iterables that already differ between processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import chain, count, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from pytorch_accel_lite.batches import find_batch_size
from pytorch_accel_lite.data.loader import Batch, LoaderOptions, ShardedLoader
from pytorch_accel_lite.data.plan import count_global_batches, ends_in_one, grouped, with_last
from pytorch_accel_lite.data.self_sharding import find_own_share
from pytorch_accel_lite.data.skipping import ended, skip_samples
from pytorch_accel_lite.data.workers import start_reading
from pytorch_accel_lite.distributed import Ranks
from pytorch_accel_lite.pieces import slice_batch
from pytorch_accel_lite.randomness import mix, preserving_generators, seed_generators
from pytorch_accel_lite.utils import find_length

if TYPE_CHECKING:
    from pytorch_accel_lite.data.stateful import PositionTracker


_END = object()  # of a source


class OwnShard:
    """Marks batches as this process's own: every process already reads different ones.

    Return it from ``create_train_dataloader`` for a ``DataLoader`` over an ``IterableDataset`` that shards itself.
    Iterables other than a ``torch.utils.data.DataLoader`` are always assumed to be sharded already.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return start_reading(self.batches)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


class _ReadInTurn(ShardedLoader):
    """Reads its source in turn. To resume in the middle of an epoch, it returns to where a stateful source was.

    Otherwise it reads the source from the beginning and discards what has already been seen.
    """

    def __init__(self, source: Any, ranks: Ranks, device: torch.device, options: LoaderOptions) -> None:
        super().__init__(source, ranks, device, options)
        self._tracker = _create_tracker(source, keeps=options.fill and options.seed is not None)
        self._batches_per_step = 1  # that this process reads

    def position(self) -> Any:
        return None if self._tracker is None else self._tracker.position

    def move_to(self, position: Any) -> str:
        tracker = self._tracker
        if tracker is None:
            return ""
        tracker.position = position
        if position is not None:
            return ""
        reason = tracker.obstacle or "the training state holds no position for this process"
        return f"The samples of this epoch that the run had already seen are read again from {tracker.name}: {reason}."

    def _set_epoch(self, epoch: int) -> None:
        """Tell a stream that shuffles itself which epoch begins; otherwise it might repeat an order."""
        batches = self.source.batches if isinstance(self.source, OwnShard) else self.source
        dataset: Any = getattr(batches, "dataset", None)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)

    def _steps_alone(self, start: int) -> Iterator[Batch]:
        """Yield the batches of this process; their sizes are known only to the steps that use them."""
        tracker = self._tracker
        for batch, is_last in with_last(islice(self._read_alike(start), self._left)):
            if tracker is not None:
                tracker.advance()
            yield Batch(batch, None, None, is_last)

    def _read_from(self, start: int) -> Iterator[Any]:
        """Read the source after what a resumed epoch has already seen, without advancing the random generators."""
        tracker = self._tracker
        if tracker is None:
            return self._skip_to(start)
        position = tracker.position if start else None
        tracker.begin()
        if position is None:
            return tracker.follow(self._skip_to(start))
        with preserving_generators():
            first = self._steps_done * self._batches_per_step
            return tracker.follow(tracker.reopen(position, lambda: self._open(first)))

    def _read_alike(self, start: int) -> Iterator[Any]:
        """Read the source like :meth:`_read_from`, with the same batches on processes that share them."""
        batches = self._read_from(start)
        return self._ranks.read_alike(batches) if self._ranks.replicas > 1 else batches  # type: ignore[attr-defined]

    def _skip_to(self, start: int) -> Iterator[Any]:
        """Read the source and discard what has already been seen.

        Discards the number of samples seen, splitting the batch in which they end. A single process, however, counts
        the samples reported by each step, which may differ from the size of the batch. If the batch size is unchanged,
        it therefore discards the number of batches seen.
        """
        size = getattr(self.source, "batch_size", None)
        done = self._steps_done
        by_steps = self._ranks.world_size == 1 and done > 0 and size in (None, start / done)
        with preserving_generators() if start else nullcontext():
            batches = self._open(0)
            if by_steps:
                _skip_batches(batches, done, start, is_certain=size is not None)
                return batches
            rest = skip_samples(batches, start, find_batch_size)
            return batches if rest is None else chain([_last_samples(*rest)], batches)

    def _open(self, first: int) -> Iterator[Any]:
        """Begin to read the source, whose next batch is number ``first`` of the epoch."""
        batches = self.source.batches if isinstance(self.source, OwnShard) else self.source
        reader = self._start_reading(self.source)
        is_seeded_here = self.options.seed is not None and isinstance(batches, DataLoader) and not batches.num_workers
        return self._seeded(reader, first) if is_seeded_here else reader

    def _seeded(self, batches: Iterator[Any], first: int) -> Iterator[Any]:
        """Read each batch with generators seeded from its place, and leave torch's as it was."""
        assert self.options.seed is not None
        place = mix(self.options.seed, self._epoch, self._ranks.rank)
        for number in count(first):
            state = torch.default_generator.get_state()
            seed_generators(mix(number, after=place))
            try:
                batch = next(batches, _END)
            finally:
                torch.default_generator.set_state(state)
            if batch is _END:
                return
            yield batch


class StreamLoader(_ReadInTurn):
    """The batches of a ``DataLoader`` that cannot be indexed: rank 0 reads them all and deals them out in turn.

    Every sample is thus seen once, even if the stream is random.
    """

    def __init__(self, source: Any, ranks: Ranks, device: torch.device, options: LoaderOptions) -> None:
        super().__init__(source, ranks, device, options)
        self._batches_per_step = ranks.world_size

    def _steps(self, epoch: int, start: int) -> Iterator[Batch]:
        self._set_epoch(epoch)
        return self._steps_alone(start) if self._ranks.world_size == 1 else self._deal_out(start)

    def _deal_out(self, start: int) -> Iterator[Batch]:
        rank = self._ranks.rank
        steps = with_last(islice(self._groups(start), self._left))
        is_last = False
        while not is_last:  # a process without a batch in the last step must not wait for the others
            step = self._ranks.broadcast_object(lambda: self._next_of(steps))
            if step is None:
                return
            group, is_last = step
            if self._tracker is not None and rank == 0:
                self._tracker.advance(len(group))
            sizes = [find_batch_size(batch) for batch in group]
            if rank < len(group):
                yield Batch(group[rank], sizes[rank], sum(sizes), is_last)
            elif self.options.fill:
                yield Batch(group[0], 0, sum(sizes), is_last)

    def _next_of(self, steps: Iterator[Any]) -> Any:
        """Read the next step, without effect on the generators if others, which do not read, must have the same."""
        with preserving_generators() if self._ranks.replicas > 1 else nullcontext():
            return next(steps, None)

    def _groups(self, start: int) -> Iterator[list[Any]]:
        """Yield the batches of all processes in each step. Reads nothing before the first is asked for."""
        yield from grouped(self._read_from(start), self._ranks.world_size)

    def _num_steps(self) -> int:
        return count_global_batches(len(self.source), self._ranks.world_size)

    def _ends_in_one(self) -> bool:
        return ends_in_one(find_length(self.source.dataset), self.source.batch_size, self.source.drop_last)


class PreShardedLoader(_ReadInTurn):
    """The batches of any other iterable, assumed to be this process's own.

    In training, the processes agree at every step on whether any has a batch left. One that has none repeats its last
    batch with zero weight until the others are done.

    :param shared_by: name of the mechanism by which a stream shards itself, if that was detected
    """

    has_own_position = True

    def __init__(
        self, source: Iterable[Any], ranks: Ranks, device: torch.device, options: LoaderOptions, shared_by: str = ""
    ) -> None:
        super().__init__(source, ranks, device, options)
        self.shared_by = shared_by
        length = find_length(source)
        self._length = int(ranks.max([-1 if length is None else length])[0])

    def _steps(self, epoch: int, start: int) -> Iterator[Batch]:
        self._set_epoch(epoch)
        is_alone = self._ranks.world_size == 1 or not self.options.fill
        return self._steps_alone(start) if is_alone else self._steps_together(start)

    def _steps_together(self, start: int) -> Iterator[Batch]:
        done = 0
        if start and not self._ranks.max([self.position() is None])[0]:
            done = start
        with preserving_generators():
            steps = self._in_step(done)
            if skip_samples(steps, start - done, attrgetter("total_samples")) is not None:
                raise _cannot_split("the batches of several processes")
        yield from steps

    def _in_step(self, start: int) -> Iterator[Batch]:
        """Yield the steps from the position of a stateful source, or from the beginning if ``start`` is 0."""
        tracker = self._tracker
        batches = islice(self._read_alike(start), self._left if start else self.limit)
        batch = None
        ready = next(batches, None)
        while True:
            batch = batch if ready is None else ready
            size = 0 if ready is None else find_batch_size(batch)
            following = None if ready is None else next(batches, None)
            total, running, empty = self._ranks.sum([size, following is not None, batch is None])
            if total and empty:
                raise ValueError(
                    f"{int(empty)} of {self._ranks.world_size} processes have no training batch at all. Give every "
                    "process at least one."
                )
            if not total:
                return
            if tracker is not None and ready is not None:
                tracker.advance()
            elif tracker is not None:
                tracker.position = None  # to resume, the last batch must be read again
            yield Batch(batch, size, int(total), not running)
            ready = following

    def _num_steps(self) -> int:
        return self._length if self._length >= 0 else len(self.source)  # raises the source's own error


def create_loader(
    source: Any, ranks: Ranks, device: torch.device, options: LoaderOptions, is_torchs: bool
) -> ShardedLoader:
    """Return the loader for a source that cannot be indexed.

    :param is_torchs: whether the source is a ``DataLoader`` of torch
    """
    share = find_own_share(source.dataset, ranks) if is_torchs else None
    if is_torchs and share is None:
        return StreamLoader(source, ranks, device, options)
    return PreShardedLoader(source, ranks, device, options, "" if share is None else share.shared_by)


def _create_tracker(source: Any, keeps: bool) -> PositionTracker | None:
    """Return what tracks the position in a source, if that can report it.

    :param keeps: whether a training state may ask for it: only in training whose order follows from a seed
    """
    batches = source.batches if isinstance(source, OwnShard) else source
    if not any(hasattr(item, "load_state_dict") for item in (batches, getattr(batches, "dataset", None))):
        return None
    from pytorch_accel_lite.data.stateful import PositionTracker, can_track  # rarely needed

    return PositionTracker(batches, keeps) if can_track(batches) else None


def _cannot_split(what: str) -> ValueError:
    return ValueError(
        f"The resumed run was saved at a sample that is now in the middle of {what}, which cannot be split. Resume it "
        "with its original batch size and number of processes."
    )


def _last_samples(batch: Any, count: int) -> Any:
    size = find_batch_size(batch)
    rest = slice_batch(batch, size - count, size, size)
    if find_batch_size(rest) != count:
        raise _cannot_split(f"a batch of type {type(batch).__name__}")
    return rest


def _skip_batches(batches: Iterator[Any], count: int, start: int, is_certain: bool) -> None:
    """Skip the first ``count`` batches; unless ``is_certain``, warn if they do not hold ``start`` samples."""
    skipped = 0
    samples = 0
    for batch in islice(batches, count):
        skipped += 1
        try:
            samples += find_batch_size(batch)
        except ValueError:  # the size of the batch is unknown
            is_certain = True
    if skipped < count:
        raise ended("data", f"{skipped} batches", count)
    if samples != start and not is_certain:
        warnings.warn(
            f"The resumed run had counted {start} samples in {count} steps of this epoch, but the same number of "
            f"batches now holds {samples}. It resumes at the right place only if it had one process and the same "
            "batches.",
            stacklevel=2,
        )
