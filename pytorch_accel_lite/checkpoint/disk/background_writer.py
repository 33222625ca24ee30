"""Writing in the background while training continues, from copies in host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from accelerate import Accelerator

from pytorch_accel_lite.base.machine import is_asynchronous, record_event
from pytorch_accel_lite.base.nested_values import is_dense
from pytorch_accel_lite.base.types import Keys, Tree
from pytorch_accel_lite.checkpoint.disk.torch_files import map_nested
from pytorch_accel_lite.distributed.ranks import find_ranks

#: Maximum bytes of pinned memory, which the system can neither swap nor give to other programs. Torch rounds each
#: tensor up.
_MOST_PINNED = 16 * 2**30


class _Buffer(NamedTuple):
    """Memory for a copy of a tensor. Copies into pinned memory are made while the program continues."""

    tensor: torch.Tensor
    is_pinned: bool

    @property
    def pinned_bytes(self) -> int:
        return 2 ** (max(self.tensor.nbytes, 1) - 1).bit_length() if self.is_pinned else 0


class HostMemory:
    """Host memory for copies of tensors. It is reused for the next copy, because allocating takes longer than copying.

    For tensors on a GPU, the memory is pinned, unless the tensors are too large. The device copies them in the order of
    its work, before any later update, and nothing waits for it; call ``wait()`` before reading the copies.
    """

    def __init__(self) -> None:
        self._buffers: dict[object, list[_Buffer]] = {}
        self._arrival: torch.Event | None = None

    def copy(self, state: Tree) -> Tree:
        """Return a state with its tensors copied to host memory. Overwrites the previous copy."""
        self.wait()
        free, self._buffers = self._buffers, {}
        pinned = sum(buffer.pinned_bytes for buffers in free.values() for buffer in buffers)
        late: set[torch.device] = set()

        def copy_tensor(path: Keys, value: Tree) -> Tree:
            nonlocal pinned
            if not isinstance(value, torch.Tensor):
                return value
            tensor = value.detach()
            of_parts = hasattr(type(tensor), "__tensor_flatten__")  # a tensor made of tensors, such as a DTensor
            if of_parts or not is_dense(tensor):
                return tensor.to("cpu", copy=True)
            kind = tensor.device, tensor.dtype, tensor.shape, tensor.stride()
            unused = free.get(kind)
            if unused:
                buffer = unused.pop()
                buffer.tensor.copy_(tensor, non_blocking=buffer.is_pinned)
            else:
                buffer = _new_copy(tensor, _MOST_PINNED - pinned)
                pinned += buffer.pinned_bytes
            if buffer.is_pinned:
                late.add(tensor.device)
            self._buffers.setdefault(kind, []).append(buffer)
            return buffer.tensor

        copied = map_nested(copy_tensor, state)
        self._arrival = record_event(late.pop()) if late else None  # all tensors are on the current device
        return copied

    def wait(self) -> None:
        """Wait until the device has made the latest copy."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None


def _new_copy(tensor: torch.Tensor, spare: int) -> _Buffer:
    """Return a copy in new memory. If that much may be pinned, the copy does not block, and torch pins the memory."""
    device = tensor.device
    is_late = is_asynchronous(device) and torch.get_device_module(device).current_device() == device.index
    if is_late and _Buffer(tensor, True).pinned_bytes <= spare:
        return _Buffer(tensor.to("cpu", non_blocking=True), True)
    return _Buffer(torch.empty_like(tensor, device="cpu").copy_(tensor), False)


class BackgroundWriter:
    """Writes in a separate thread. Creating one is a collective operation: all ranks must do it.

    The writers of a process run one after another, in the order in which they were started. This order is the same on
    all ranks, so they can share one process group.

    Args:
        accelerator: the trainer's ``Accelerator``, which knows the processes of the job

    Attributes:
        ranks: the processes, with a group that is used only by background threads
        memory: memory for copies of the data to write
    """

    _newest: ClassVar[threading.Thread | None] = None  # the newest thread of all writers

    def __init__(self, accelerator: Accelerator) -> None:
        self.ranks = find_ranks(accelerator, "background writing")
        self.memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Start a job once the previous one is complete.

        Raises:
            Exception: the error of the previous job, if it failed
        """
        self.wait()
        # A daemon thread, so that a failing process does not wait for its peers.
        before = BackgroundWriter._newest
        self._thread = threading.Thread(target=self._run, args=(job, before), daemon=True, name="training-state-writer")
        BackgroundWriter._newest = self._thread
        self._thread.start()

    def _run(self, job: Callable[[], None], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            self.memory.wait()
            job()
        except Exception as error:
            self._failure = error

    def wait(self) -> None:
        """Wait for the current job.

        Raises:
            Exception: the error of the job, if it failed
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
