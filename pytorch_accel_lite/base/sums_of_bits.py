"""Sums of the bits of tensors, which any flipped bit and any other order changes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 18  # elements that are weighed at once
_LOW = 1 << 64


def sums_of_bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a number for each tensor that any flipped bit, and any other order of its elements, changes.

    Its lower 64 bits are the sum over the elements, interpreted as integers, and the rest is the same sum with a weight
    for each position. The numbers of parts may be added.
    """
    sums: list[torch.Tensor] = []
    weights: dict[torch.device, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.device not in weights:
            weights[tensor.device] = _mixed(torch.arange(_CHUNK, device=tensor.device))
        total = _plain_and_weighted_sum(tensor.detach(), weights[tensor.device])
        sums.append(total.to(sums[0].device) if sums else total)
    read = torch.stack(sums).tolist() if sums else []  # a single read from the device
    return [plain + weighted * _LOW for plain, weighted in read]


def is_same_sum(number: int, stored: int) -> bool:
    """Whether a sum equals a stored one, which may be of a version that did not weigh positions."""
    has_weights = abs(stored) >= _LOW * 4
    return number == stored if has_weights else (number - stored) % _LOW == 0


def _plain_and_weighted_sum(data: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if data.is_complex():
        data = torch.view_as_real(data)
    sums: list[torch.Tensor] = []
    elements = data.view(_INTEGERS[data.element_size()]).reshape(-1)
    for number, chunk in enumerate(torch.split(elements, _CHUNK)):
        bits = chunk.to(torch.int64)  # sums of shorter integers are slower
        sums += [bits.sum(), (bits * weights[: bits.numel()]).sum() * _factor(number)]
    return torch.stack(sums).view(-1, 2).sum(0)


@cache
def _factor(number: int) -> int:
    return int(_mixed(torch.tensor(-1 - number)).item())


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return odd numbers without a pattern, by the finaliser of SplitMix64 (Steele et al., 2014)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers = (numbers ^ (numbers >> shift)) * factor
    return (numbers ^ (numbers >> 31)) | 1
