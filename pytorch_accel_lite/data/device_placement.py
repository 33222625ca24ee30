"""Placing batches: onto the device, and into the memory format of the model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accelerate.utils import recursively_apply, send_to_device

from pytorch_accel_lite.data.batches import Batch


def to_device(steps: Iterator[Batch], device: torch.device | None, channels_last: bool) -> Iterator[Batch]:
    """Return steps with their data on a device, without waiting for the copies.

    Args:
        device: the device; ``None`` if the data are already on it
        channels_last: whether to convert tensors with four dimensions to the channels-last memory format
    """
    if device is not None:
        steps = (step._replace(data=send_to_device(step.data, device, non_blocking=True)) for step in steps)
    if channels_last:
        steps = (step._replace(data=recursively_apply(_to_channels_last, step.data)) for step in steps)
    return steps


def _to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
