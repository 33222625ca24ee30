"""What differs between devices: which compute on their own, and how their numbers are read without waiting for them."""

from __future__ import annotations

import os
from typing import Any

import torch


def module_of(device: torch.device) -> Any:
    """Return torch's module for a kind of device, ``torch.cuda`` say; ``None`` when it has none."""
    return getattr(torch, device.type, None)


def launched_on_cpus() -> bool:
    """Whether a launcher started several processes where there is no accelerator, of which Accelerate must be told."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available()


def is_asynchronous(device: torch.device) -> bool:
    """Whether a device goes on computing while Python does, and has events to tell how far it has come.

    That of Apple (``mps``) does too, but torch does not make its copies to host memory wait for it reliably.
    """
    return device.type not in ("cpu", "mps") and hasattr(module_of(device), "Event")


def record_event(device: torch.device, **kwargs: Any) -> Any:
    """Return an event that happens when a device has done what it was asked for so far."""
    event = module_of(device).Event(**kwargs)
    event.record()
    return event


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return float64, in which sums are exact enough; float32 where a device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def to_float(scalar: torch.Tensor) -> float:
    """Read a tensor of one element; in host memory, past the operation that waits for a device."""
    if type(scalar) is not torch.Tensor:  # a part of one that is spread over processes, say
        return float(scalar)
    number: Any = scalar.tolist() if not scalar.ndim else scalar.reshape(()).tolist()
    return float(number)


class AsyncCopy:
    """A copy of a tensor that is on its way to host memory, begun now and read later: nothing waits for the device.

    Where copies cannot be made so, it is made at once.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        is_late = is_asynchronous(tensor.device)
        self._copy = tensor.to("cpu", non_blocking=is_late)  # into pinned memory then
        self._arrival = record_event(tensor.device) if is_late else None

    @property
    def has_arrived(self) -> bool:
        """Whether it can be read without waiting."""
        return self._arrival is None or bool(self._arrival.query())

    def read(self) -> torch.Tensor:
        """Return the copy; waits for it if need be."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy
