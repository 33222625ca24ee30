"""This machine: cores, signals, devices and how to read from them without waiting, torch's settings for kernels."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

#: The signals that end a run in order. Workers of dataloaders leave them to their parent.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_per_process(processes: int) -> int:
    """Return the number of cores of this machine available to each process, at least one.

    Args:
        processes: number of processes in the job, assumed to be on this machine unless the launcher says otherwise
    """
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return max(available_cores() // max(local_processes, 1), 1)


_CUDNN = torch.backends.cudnn
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic_kernels(wanted: bool | None) -> Iterator[None]:
    """Set ``torch.use_deterministic_algorithms`` for a block; if true, cuDNN does not choose kernels by their speed.

    Args:
        wanted: ``None`` leaves the user's own settings as they are
    """
    with ExitStack() as undo:
        if wanted is not None:
            before = torch.are_deterministic_algorithms_enabled()
            warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
            undo.callback(torch.use_deterministic_algorithms, before, warn_only=warns_only)
            torch.use_deterministic_algorithms(bool(wanted), warn_only=before and warns_only)
        if wanted:
            undo.callback(setattr, _CUDNN, "benchmark", _CUDNN.benchmark)
            _CUDNN.benchmark = False
            if _WORKSPACE not in os.environ:
                os.environ[_WORKSPACE] = ":4096:8"  # otherwise, torch refuses to multiply matrices on a GPU
                undo.callback(os.environ.pop, _WORKSPACE, None)
        yield


def kernel_settings(is_cuda: bool) -> dict[str, object]:
    """Return the current settings that affect the last bits of a computation, in JSON types."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the precision was set per operation, by torch's newer interface
        precision = {"tf32": "high", "bf16": "medium"}.get(torch.backends.cuda.matmul.fp32_precision, "highest")
    settings: dict[str, object] = {
        "precision of float32 products": precision,
        "deterministic kernels": torch.are_deterministic_algorithms_enabled(),
    }
    if is_cuda:
        settings["cudnn.benchmark"] = _CUDNN.benchmark
    return settings


def module_of(device: torch.device) -> ModuleType | None:
    """Return torch's module for a kind of device, for example ``torch.cuda``; ``None`` if torch has no such module."""
    return getattr(torch, device.type, None)


def launched_on_cpus() -> bool:
    """Whether several processes were launched without a GPU or similar device, of which Accelerate must be told."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available()


def is_asynchronous(device: torch.device) -> bool:
    """Whether a device computes asynchronously and has events to track its progress.

    Apple's ``mps`` does, too, but it does not count: torch's copies to host memory do not wait for it reliably.
    """
    return device.type not in ("cpu", "mps") and hasattr(module_of(device), "Event")


def record_event(device: torch.device, enable_timing: bool = False) -> torch.Event:
    """Return an event that is reached once a device has completed all work queued so far."""
    event: torch.Event = torch.get_device_module(device).Event(enable_timing=enable_timing)
    event.record()
    return event


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for accumulating sums: float64, or float32 on devices without float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def to_float(scalar: torch.Tensor) -> float:
    """Return the value of a tensor with one element, without the overhead of waiting for a device."""
    if type(scalar) is not torch.Tensor:  # the tensor is a DTensor, for example
        return float(scalar)
    number: Any = scalar.tolist() if not scalar.ndim else scalar.reshape(()).tolist()  # torch types it as a list
    return float(number)


def await_processes(tensor: torch.Tensor) -> torch.Tensor:
    """Wait until a tensor that other processes contribute to has its values, and return it as a plain tensor.

    Models with tensor parallelism return such tensors. They wait by themselves in torch's operations, but not when they
    are viewed, pickled, or copied to the device where they are.
    """
    wait: Callable[[], torch.Tensor] | None = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


class AsyncCopy:
    """A copy of a tensor to host memory, started now and read later without waiting for the device.

    If the device does not support this, the tensor is copied immediately.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        is_late = is_asynchronous(tensor.device)
        self._copy = tensor.to("cpu", non_blocking=is_late)  # into pinned memory if late
        self._arrival = record_event(tensor.device) if is_late else None

    @property
    def has_arrived(self) -> bool:
        """Whether the copy can be read without waiting."""
        return self._arrival is None or bool(self._arrival.query())

    def read(self) -> torch.Tensor:
        """Return the copy, waiting for it if necessary."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy
