"""Communication between the processes of a job, mostly on the CPU and safe for tensors of unequal length."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator

from pytorch_accel_lite.base.nested_values import distinct_elements, is_dense
from pytorch_accel_lite.distributed.control_group import CAPACITY, ControlGroup, find_purpose
from pytorch_accel_lite.distributed.errors_on_all_ranks import try_action, values_or_first_error
from pytorch_accel_lite.distributed.message_encoding import decode, leaves_device
from pytorch_accel_lite.distributed.stack_frames import MACHINERY

MACHINERY.add(__file__)
T = TypeVar("T")
_SMALL = 2**16  # bytes of a tensor that is sent together with others


@cache
def _job_group(job: dist.ProcessGroup, purpose: str) -> ControlGroup:
    """Return a gloo group shared by all trainers of a job: torch never frees the threads and files of a group.

    Args:
        job: the default process group of the job
    """
    group: Any = dist.new_group(backend="gloo", timeout=chosen_timeout(job))
    return ControlGroup(group, range(dist.get_world_size()))


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a collective of a process group may take."""
    backend = group._get_backend(group._device_types[-1])
    options = getattr(backend, "options", None)  # not all backends show their options
    return getattr(options, "_timeout", None) or dist.default_pg_timeout


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change how long a collective of a process group may take."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout, group)
    else:  # before torch 2.15
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def chosen_timeout(job: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout that the user chose for the job's default process group. Groups created here use it, too.

    ``None`` stands for torch's default, which depends on the backend. NCCL's default is too short for a group that
    waits for files.
    """
    constants: Any = dist.distributed_c10d
    timeout = timeout_of(job)
    return None if timeout in (constants.default_pg_timeout, constants.default_pg_nccl_timeout) else timeout


class Ranks:
    """The processes of a job. With a single process, every method returns its input immediately.

    Several processes communicate through a separate gloo group, so that nothing here waits for a device or interferes
    with the collectives of the model. Creating an instance is a collective operation: all ranks must do it.

    Args:
        accelerator: the trainer's ``Accelerator``, which knows the processes of the job
        purpose: name of the group; threads that communicate at the same time need different groups

    Attributes:
        replicas: number of processes that share each batch, as in tensor parallelism
        generation: how often the processes of a job that outlives them have changed, from 1; 0 in other jobs
        allows_threads: whether a thread may communicate at the same time as the main thread
        is_observed: whether the observers of jobs observe these processes
        is_first_sharer: whether this process is the first of the processes that share its batches
        device_group: the process group of ``members`` for tensors on a device; ``None`` for the group of the job
        rank: the rank of this process in the job, from 0
        world_size: the number of processes in the job
        members: the processes that read different data, by their ranks in the job
    """

    replicas = 1
    is_first_sharer = True
    device_group: dist.ProcessGroup | None = None
    _control: ControlGroup

    def __init__(self, accelerator: Accelerator, purpose: str = "control") -> None:
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self.members: Sequence[int] = range(self.world_size)
        if self.world_size > 1:
            self._control = _job_group(dist.group.WORLD, purpose)

    def __repr__(self) -> str:
        return f"Ranks(rank={self.rank}, world_size={self.world_size})"

    @property
    def everyone(self) -> Ranks:
        """All processes of the job, including those that share batches."""
        return self

    def broadcast_to_sharers(self, value: T) -> T:
        """Return the same value on all processes that share a batch: the value of the first of them."""
        return value

    def read_identically(self, items: Iterator[T]) -> Iterator[T]:
        """Return the same items on all processes that share a batch: the items of the first of them.

        Each process also reads its own items, so that positions stay in step. If one process fails, all raise an error.
        """
        return items

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._control.group

    def within(self, members: Sequence[int], group: dist.ProcessGroup) -> Ranks:
        """Return a subset of these processes, including this one, with its own group for communication."""
        part = copy.copy(self)
        part.members = members
        part.rank = members.index(self.rank)
        part.world_size = len(members)
        part._control = ControlGroup(group, members)  # noqa: SLF001
        return part

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up lists of numbers element by element, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Take the maximum of lists of numbers element by element, in float64."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        takes_max = operation == dist.ReduceOp.MAX
        if len(tensor) > CAPACITY:
            digest = hashlib.blake2b(tensor.numpy().tobytes(), digest_size=7).digest()
            sent = self._exchange([len(tensor), int.from_bytes(digest, "little")])
            if takes_max and sent.count(sent[0]) == len(sent):
                return list(values)
            if len({length for length, _ in sent}) > 1:  # gloo would end the processes
                raise RuntimeError(f"The processes reduce lists of unlike lengths: {[length for length, _ in sent]}.")
            dist.all_reduce(tensor, operation, group=self._group)
        else:
            all_values = self._control.begin(tensor.view(torch.int64), find_purpose())().view(torch.float64)
            tensor = all_values.amax(0) if takes_max else all_values.sum(0)
        reduced: list[float] = tensor.tolist()
        return reduced

    def begin_gathering(self, numbers: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Start gathering a few integers, equally many from each rank; return a function that waits for them."""
        if self.world_size == 1:
            return lambda: [list(numbers)]
        finish = self._control.begin(torch.tensor(numbers, dtype=torch.int64), find_purpose())
        return lambda: finish().tolist()

    def _exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        return self.begin_gathering(numbers)()

    def begin_scatter(self, pieces: Sequence[torch.Tensor] | None, size: int) -> Callable[[], torch.Tensor]:
        """Start sending each rank a piece of data from rank 0, and return a function that waits for this rank's piece.

        This is a collective operation, which completes even if this rank does not wait for its result.

        Args:
            pieces: on rank 0, the bytes for each rank, all of the same length; ``None`` on the other ranks
            size: the length of each piece
        """
        piece = torch.empty(size, dtype=torch.uint8) if pieces is None else pieces[0]
        sent = None if pieces is None else list(pieces)
        work = dist.scatter(piece, sent, src=0, group=self._group, async_op=True) if self.world_size > 1 else None

        def finish() -> torch.Tensor:
            if work is not None:
                work.wait()
            return piece

        return finish

    def sum_on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over the ranks in place, on its device and without waiting for the device."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.device_group)
        return tensor

    def copy_from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the first rank's values to all ranks, in place: small tensors, such as buffers, all at once."""
        if self.world_size == 1:
            return
        small: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in (tensor.detach() for tensor in tensors):
            # torch does not copy to tensors of inference mode outside of it.
            if _is_plain(tensor) and tensor.nbytes <= _SMALL and not tensor.is_inference():
                small.setdefault(tensor.device, []).append(distinct_elements(tensor))
            else:
                _broadcast_in_place(self.members[0], tensor, self.device_group)
        for together in small.values():
            _broadcast_together(self.members[0], together, self.device_group)

    def all_gather_object(self, value: T, only_first: bool = False) -> list[T]:
        """Return the values of all ranks, in rank order; with ``only_first``, only on the first rank."""
        if self.world_size == 1:
            return [value]
        attempt = try_action(lambda: value, self.members[self.rank])  # a value that cannot be pickled fails on all
        return values_or_first_error(attempt, self._gather(attempt.outcome, attempt.encoded, only_first))

    def _gather(self, value: T, encoded: torch.Tensor, only_first: bool = False) -> list[T]:
        """Return the values of all ranks: this rank's value itself, and decoded copies of the others.

        If this rank's value has tensors on a device, it is decoded, too: a list has tensors of one device.

        Each rank broadcasts its value: gloo's ``all_gather`` takes three times as long for large values of two ranks.
        """
        lengths = [length for (length,) in self._exchange([len(encoded)])]
        if only_first and self.rank:
            dist.send(encoded, self.members[0], self._group)
            return []
        parts = [torch.empty(length, dtype=torch.uint8) for length in lengths]
        parts[self.rank] = encoded
        senders = list(zip(self.members, parts, strict=True))
        if only_first:
            transfers = [dist.irecv(part, member, self._group) for member, part in senders if part is not encoded]
        else:
            transfers = [dist.broadcast(part, member, self._group, async_op=True) for member, part in senders]
        for transfer in transfers:
            transfer.wait()  # type: ignore[union-attr]
        return [value if part is encoded and not leaves_device(part) else decode(part) for part in parts]

    def _broadcast(self, encoded: torch.Tensor) -> Any:
        """Return the value that the first rank has encoded."""
        length = self._exchange([len(encoded)])[0][0]
        encoded = encoded if self.rank == 0 else torch.empty(length, dtype=torch.uint8)
        dist.broadcast(encoded, self.members[0], self._group)
        return decode(encoded)

    def run_together(self, action: Callable[[], T], only_first: bool = False) -> list[T]:
        """Run a function on every rank and return the results, in rank order.

        If the function fails on a rank, or its result cannot be pickled, that rank raises its error, and the others
        raise an error that quotes it. So no rank waits for one that has failed.

        Args:
            only_first: whether to run the function on rank 0 only
        """
        if self.world_size == 1:
            return [action()]
        attempt = try_action(action if not only_first or self.rank == 0 else lambda: None, self.members[self.rank])
        encoded = attempt.encoded
        outcomes = [self._broadcast(encoded)] if only_first else self._gather(attempt.outcome, encoded)
        return values_or_first_error(attempt, outcomes)

    def result_of_first(self, make: Callable[[], T]) -> T:
        """Return the result of ``make`` on rank 0, the only rank that calls it."""
        return self.run_together(make, only_first=True)[0]

    def barrier(self, timeout: timedelta | None = None) -> None:
        """Wait until every rank has reached this point.

        Args:
            timeout: raise a ``RuntimeError`` after this time; also applies to all later collectives
        """
        if self.world_size > 1:
            if timeout is not None:
                set_timeout(self._group, timeout)
            self._exchange([])

    # ------------------------------------------------------------------ for jobs that outlive their processes

    # Under ``launch``, processes may be lost and others may join. A subclass, see ``use_ranks()``, then lets the
    # remaining processes repeat the action in which one was lost. In other jobs, an action is done once.

    generation = 0
    allows_threads = True
    is_observed = True

    @property
    def is_alone(self) -> bool:
        """Whether there is a single process, and will always be."""
        return self.world_size == 1

    def repeat_if_process_lost(self, action: Callable[[], T], changes: object = None) -> T:
        """Return the result of an action in which each process has its own part. If one is lost, the others repeat it.

        Args:
            changes: the trainer, if the action is an evaluation: what it has recorded is removed before a repetition
        """
        return action()

    def state_to_join(self) -> str | None:
        """Return the training state from which this process joins a run that others have begun, or ``None``."""
        return None


def _broadcast_in_place(source: int, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Copy a rank's values of a tensor to all ranks of a group.

    The values are sent as bytes, because gloo supports few dtypes, and from contiguous memory, because it ignores
    strides.
    """
    if not _is_plain(tensor):
        dist.broadcast(tensor, source, group)
        return
    tensor = distinct_elements(tensor)
    dense = _contiguous(tensor)
    dist.broadcast(_as_bytes(dense), source, group)
    if dense is not tensor:
        tensor.copy_(dense)


def _broadcast_together(source: int, tensors: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Copy a rank's values of plain tensors of one device to all ranks of a group, in one message."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.itemsize)  # so that each part begins at a multiple of its size
    message = torch.cat([_as_bytes(tensor) for tensor in ordered])
    dist.broadcast(message, source, group)
    for tensor, part in zip(ordered, message.split_with_sizes([tensor.nbytes for tensor in ordered]), strict=True):
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    is_contiguous = tensor.is_contiguous() and 0 not in tensor.stride()
    return tensor if is_contiguous else tensor.clone(memory_format=torch.contiguous_format)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return _contiguous(tensor).reshape(-1).view(torch.uint8)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not sharded, sparse or of another unusual kind."""
    return type(tensor) is torch.Tensor and is_dense(tensor)


_kind: type[Ranks] = Ranks


def use_ranks(kind: type[Ranks]) -> None:
    """Make the trainers of this program use another kind of ``Ranks``, for example for jobs whose processes change.

    Args:
        kind: a subclass, called with the same arguments
    """
    global _kind
    _kind = kind


def find_ranks(accelerator: Accelerator, purpose: str = "control") -> Ranks:
    """Return the processes of the job, as the kind of ``Ranks`` that the program uses. All ranks must call it."""
    return _kind(accelerator, purpose)
