"""Communication between the processes of a job, mostly on the CPU and safe for tensors of unequal length."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator

from pytorch_accel_lite.base.inspection import distinct_elements
from pytorch_accel_lite.distributed.messages import Message, read_message

T = TypeVar("T")


@cache
def _job_group(job: Any, purpose: str) -> Any:
    """Return a gloo group shared by all trainers of a job: torch never frees the threads and files of a group.

    :param job: the default process group of the job
    """
    return dist.new_group(backend="gloo", timeout=chosen_timeout(job))


def timeout_of(group: Any) -> timedelta:
    """Return how long a collective of a process group may take."""
    backend = group._get_backend(group._device_types[-1])
    options = getattr(backend, "options", None)  # not all backends show them
    return getattr(options, "_timeout", None) or dist.default_pg_timeout


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Change how long a collective of a process group may take."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout, group)
    else:  # before torch 2.15
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def chosen_timeout(job: Any) -> timedelta | None:
    """Return the timeout that the user has given the default process group of a job.

    It applies to the groups that are created here. ``None`` stands for torch's default, which depends on the backend:
    that of NCCL is too short for a group whose processes wait for files.
    """
    constants: Any = dist.distributed_c10d
    timeout = timeout_of(job)
    return None if timeout in (constants.default_pg_timeout, constants.default_pg_nccl_timeout) else timeout


class Ranks:
    """The processes of a job. With a single process, every method returns its input immediately.

    Several processes communicate through a separate gloo group, so that nothing here waits for a device or interferes
    with the collectives of the model. Creating an instance is a collective operation: all ranks must do it.

    :param purpose: name of the group; threads that communicate at the same time need different ones
    :ivar members: the processes that read different data, by their ranks in the job
    :ivar device_group: the process group of those for tensors on a device; ``None`` for that of the job
    :ivar replicas: number of processes that share each batch, as in tensor parallelism
    :ivar is_first_alike: whether this process is the first of those with which it shares batches
    """

    replicas = 1
    is_first_alike = True
    device_group: Any = None

    def __init__(self, accelerator: Accelerator, purpose: str = "control") -> None:
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self.members: Sequence[int] = range(self.world_size)
        self._group: Any = _job_group(dist.group.WORLD, purpose) if self.world_size > 1 else None

    def __repr__(self) -> str:
        return f"Ranks(rank={self.rank}, world_size={self.world_size})"

    @property
    def everyone(self) -> Ranks:
        """All processes of the job, also those that share batches with these."""
        return self

    def within(self, members: Sequence[int], group: Any) -> Ranks:
        """Return some of these processes, this one among them, which communicate through a group of their own."""
        part = copy.copy(self)
        part.members = members
        part.rank = members.index(self.rank)
        part.world_size = len(members)
        part._group = group  # noqa: SLF001
        return part

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up lists of numbers element by element, in float64."""
        return self.begin_sum(values)()

    def begin_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Begin to add up lists of numbers as :meth:`sum` does, and return a function that waits for the sums."""
        return self._begin_reducing(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Take the maximum of lists of numbers element by element, in float64."""
        return self._begin_reducing(values, dist.ReduceOp.MAX)()

    def _begin_reducing(self, values: Sequence[float], operation: Any) -> Callable[[], list[float]]:
        if self.world_size == 1:
            return lambda: list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, operation, group=self._group, async_op=True)

        def finish() -> list[float]:
            work.wait()
            return tensor.tolist()

        return finish

    def begin_scatter(self, pieces: Sequence[torch.Tensor] | None, size: int) -> Callable[[], torch.Tensor]:
        """Begin to send each rank a piece of data from rank 0, and return a function that waits for this rank's.

        All ranks must begin it. What has begun is completed even if no one waits for it.

        :param pieces: on rank 0, the bytes for each rank, all of the same length; ``None`` on the others
        :param size: that length
        """
        mine = torch.empty(size, dtype=torch.uint8) if pieces is None else pieces[0]
        sent = None if pieces is None else list(pieces)
        work = dist.scatter(mine, sent, src=0, group=self._group, async_op=True) if self.world_size > 1 else None

        def finish() -> torch.Tensor:
            if work is not None:
                work.wait()
            return mine

        return finish

    def sum_on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over the ranks in place, on its device and without waiting for the device."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.device_group)
        return tensor

    def copy_from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the first rank's values to all ranks, in place."""
        if self.world_size > 1:
            for tensor in tensors:
                copy_from(self.members[0], tensor.detach(), self.device_group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        if self.world_size == 1:
            return [value]
        return all_gather_encoded(encode(value), self.members, self.rank, self._group)

    def all_gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the integers of all ranks, in rank order. Each rank must give as many."""
        return self.begin_gathering(numbers)()

    def begin_gathering(self, numbers: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Begin to gather integers as :meth:`all_gather_numbers` does, and return a function that waits for them."""
        if self.world_size == 1:
            return lambda: [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.int64)
        of_all = [torch.empty_like(own) for _ in self.members]
        work = dist.all_gather(of_all, own, group=self._group, async_op=True)

        def finish() -> list[list[int]]:
            work.wait()
            return [of_rank.tolist() for of_rank in of_all]

        return finish

    def all_gather_bytes(
        self, own: torch.Tensor, lengths: Sequence[int], only_first: bool = False
    ) -> list[torch.Tensor]:
        """Return the bytes of all ranks, in rank order; on ranks other than the first, none if ``only_first``.

        :param lengths: the number of bytes of each rank
        """
        receives = self.rank == 0 or not only_first
        of_all = [torch.empty(length if receives else 0, dtype=torch.uint8) for length in lengths]
        of_all[self.rank] = own
        under_way: list[Any] = []
        for index, (member, length) in enumerate(zip(self.members, lengths, strict=True)):
            if index == self.rank:
                continue
            if receives and length:
                under_way.append(dist.irecv(of_all[index], member, group=self._group))
            if len(own) and (index == 0 or not only_first):
                under_way.append(dist.isend(own, member, group=self._group))
        for transfer in under_way:
            transfer.wait()
        return of_all if receives else []

    def run_together(self, action: Callable[[], T], only_first: bool = False) -> list[T]:
        """Run a function on every rank and return the results, in rank order.

        If it fails on one rank, or its result cannot be pickled there, all ranks raise: that rank its own error, the
        others one that quotes it. So no rank waits for one that has failed.

        :param only_first: whether to run it on rank 0 only
        """
        if self.world_size == 1:
            return [action()]
        failure: Exception | None = None
        try:
            encoded = encode((None if only_first and self.rank else action(), None))
        except Exception as error:
            failure = error
            kind = OSError if isinstance(error, OSError) else RuntimeError
            report = kind(f"Rank {self.members[self.rank]} failed: {type(error).__name__}: {error}")
            encoded = encode((None, report))
        outcomes = all_gather_encoded(encoded, self.members, self.rank, self._group)
        for problem in (failure, *(report for _, report in outcomes)):
            if problem is not None:
                raise problem
        return [value for value, _ in outcomes[: 1 if only_first else None]]

    def broadcast_object(self, make: Callable[[], T]) -> T:
        """Return the result of ``make`` on rank 0, the only rank that calls it."""
        return self.run_together(make, only_first=True)[0]

    def barrier(self, timeout: timedelta | None = None) -> None:
        """Wait until every rank has reached this point.

        :param timeout: raise a ``RuntimeError`` after this time, which also holds for all later collectives
        """
        if self.world_size > 1:
            if timeout is not None:
                set_timeout(self._group, timeout)
            dist.barrier(group=self._group)


_LENGTH = 8  # bytes in which a row begins with the length of its object
_SHORT = 1024 - _LENGTH


def copy_from(giver: int, tensor: torch.Tensor, group: Any) -> None:
    """Copy a rank's values of a tensor to all ranks of a group, in place.

    They are sent as bytes, as gloo knows few types, and from contiguous memory, or it would write beside the elements.
    """
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        dist.broadcast(tensor, giver, group)
        return
    tensor = distinct_elements(tensor)
    is_dense = tensor.is_contiguous() and 0 not in tensor.stride()
    dense = tensor if is_dense else tensor.clone(memory_format=torch.contiguous_format)
    dist.broadcast(dense.reshape(-1).view(torch.uint8), giver, group)
    if dense is not tensor:
        tensor.copy_(dense)


def encode(value: Any) -> torch.Tensor:
    """Return a picklable value as bytes; of a view, its own elements rather than all that it is a view of."""
    message = Message(value)
    encoded = torch.zeros(message.size, dtype=torch.uint8)
    message.write(encoded)
    return encoded


def all_gather_encoded(own: torch.Tensor, members: Sequence[int], place: int, group: Any) -> list[Any]:
    """Return the values that all ranks of a group have encoded, in their order.

    :param members: the ranks of the group in the job
    :param place: the place of this rank among them
    """
    row = torch.zeros(_LENGTH + _SHORT, dtype=torch.uint8)
    row[:_LENGTH] = torch.tensor([len(own)]).view(torch.uint8)
    if len(own) <= _SHORT:
        row[_LENGTH : _LENGTH + len(own)] = own
    table = torch.empty(len(members), len(row), dtype=torch.uint8)
    dist.gather(row, [*table] if place == 0 else None, members[0], group)
    dist.broadcast(table, members[0], group)
    lengths = table[:, :_LENGTH].contiguous().view(torch.int64).flatten().tolist()
    given = [part[_LENGTH : _LENGTH + length] for part, length in zip(table, lengths, strict=True)]
    longer = [other for other, length in enumerate(lengths) if length > _SHORT]
    if len(longer) == 1:  # such as a batch that the first rank has read
        (giver,) = longer
        given[giver] = own if giver == place else torch.empty(lengths[giver], dtype=torch.uint8)
        dist.broadcast(given[giver], members[giver], group)
    elif longer:
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in members]
        dist.all_gather(parts, padded, group)
        given = [part[:length] for part, length in zip(parts, lengths, strict=True)]
    return [read_message(part.clone())[1] for part in given]  # each with memory of its own, aligned for any type


_c10d: Any = dist.distributed_c10d if dist.is_available() else None
_stores: Any = dist  # which does not declare them as its own
_PATIENCE = timedelta(seconds=10)


def connect(name: str) -> Any:
    """Return a store of short texts by key, which all processes of the job share; ``None`` if there is none.

    It has a connection of its own to the store through which the processes met. The job's own connection is of no use
    here: a collective that waits on it would make every other user of it wait.

    :param name: prefix of all keys, the same on every process, and different from those of earlier stores
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store = _c10d._get_default_store()
    while isinstance(store, _stores.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, _stores.TCPStore):
        return None
    own = _stores.TCPStore(store.host, store.port, None, False, _PATIENCE, wait_for_workers=False)
    return _stores.PrefixStore(name, own)


class GroupTimeouts:
    """Changes how long a collective of any process group may take, and restores that."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, timedelta]] = []

    def set(self, seconds: float) -> None:
        """Let collectives fail after this many seconds."""
        if self._before or not (dist.is_available() and dist.is_initialized()):
            return
        for group in list(_c10d._world.pg_map):
            if isinstance(group, dist.ProcessGroup):
                self._before.append((group, timeout_of(group)))
                set_timeout(group, timedelta(seconds=seconds))

    def restore(self) -> None:
        """Restore what :meth:`set` has changed."""
        for group, timeout in self._before:
            set_timeout(group, timeout)
        self._before.clear()
