"""The elements of tensors in memory: those with memory of their own, and sums of their bits."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def distinct_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the elements with memory of their own. torch writes only to such elements; see ``expand``."""
    for dimension, stride in enumerate(tensor.stride() if tensor.layout is torch.strided else ()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sums_of_bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the sum over each tensor's elements, interpreted as integers: flipping any bit changes it."""
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        data = tensor.detach()
        if data.is_complex():
            data = torch.view_as_real(data)
        total = data.view(_INTEGERS[data.element_size()]).sum(dtype=torch.int64)
        sums.append(total.to(sums[0].device) if sums else total)
    return torch.stack(sums).tolist() if sums else []  # a single read from the device
