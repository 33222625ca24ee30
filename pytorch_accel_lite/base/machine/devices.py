"""Differences between devices: which devices compute asynchronously, and how to read from them without waiting."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


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
