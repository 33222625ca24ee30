"""Writing in the background while training continues, from copies in host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from accelerate import Accelerator

from pytorch_accel_lite.checkpoint.files import map_nested
from pytorch_accel_lite.distributed import Ranks


class HostMemory:
    """Host memory for copies of tensors, reused for the next copy: allocating it takes longer than copying."""

    def __init__(self) -> None:
        self._buffers: dict[Any, list[torch.Tensor]] = {}

    def copy(self, state: Any) -> Any:
        """Return a state with its tensors copied to host memory. Overwrites the previous copy."""
        free, self._buffers = self._buffers, {}

        def copy_tensor(path: tuple[Any, ...], value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            tensor = value.detach()
            if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
                return tensor.to("cpu", copy=True)
            kind = tensor.dtype, tensor.shape, tensor.stride()
            unused = free.get(kind)
            buffer = unused.pop() if unused else torch.empty_like(tensor, device="cpu")
            self._buffers.setdefault(kind, []).append(buffer)
            return buffer.copy_(tensor)

        return map_nested(copy_tensor, state)


class BackgroundWriter:
    """Writes in a separate thread. Creating one is a collective operation: all ranks must do it.

    The writers of a process run one after another, in the order in which they were started. This order is the same on
    all ranks, so they can share one process group.

    :ivar ranks: the processes, with a group that is used only by background threads
    :ivar memory: memory for copies of what is to be written
    """

    _newest: ClassVar[threading.Thread | None] = None  # of all writers

    def __init__(self, accelerator: Accelerator) -> None:
        self.ranks = Ranks(accelerator, "background writing")
        self.memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Start a job once the previous one is complete.

        :raises Exception: the error of the previous job, if it failed
        """
        self.wait()
        # A daemon, so that a failing process does not wait for its peers.
        before = BackgroundWriter._newest
        self._thread = threading.Thread(target=self._run, args=(job, before), daemon=True, name="training-state-writer")
        BackgroundWriter._newest = self._thread
        self._thread.start()

    def _run(self, job: Callable[[], None], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            job()
        except Exception as error:
            self._failure = error

    def wait(self) -> None:
        """Wait for the current job.

        :raises Exception: the error of the job, if it failed
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
