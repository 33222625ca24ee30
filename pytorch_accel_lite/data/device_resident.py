"""Data in the memory of a device, of which nothing passes through the host but the indices of the rows to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

_STEPS = 256  # whose indices are copied together


def are_on(device: torch.device, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are on a device, whose number may be left out."""
    there = torch.empty(0, device=device).device
    return all(tensor.device == there for tensor in tensors)


def read_rows(memory: InMemory, all_rows: Iterable[torch.Tensor], has_fixed_order: bool) -> Iterator[Any]:
    """Yield the batches of tensors of which some are on a device, without waiting for it.

    :param all_rows: the rows of each step, in host memory
    :param has_fixed_order: whether rows may be drawn before the step that reads them
    """
    tensors, subset, arrange = memory
    devices = {tensor.device for tensor in tensors}
    remaining = iter(all_rows)
    while steps := list(islice(remaining, _STEPS if has_fixed_order else 1)):
        chosen = steps if subset is None else [subset[rows] for rows in steps]
        copies = {device: _copied(chosen, device) for device in devices}
        for step in range(len(steps)):
            batch = [tensor.index_select(0, copies[tensor.device][step]) for tensor in tensors]
            yield batch if arrange is None else arrange(batch)


def _copied(steps: Sequence[torch.Tensor], device: torch.device) -> Sequence[torch.Tensor]:
    """Return the rows of steps on a device, copied together."""
    if device.type == "cpu":
        return steps
    together = torch.cat(list(steps))
    if device.type == "cuda":
        together = together.pin_memory()  # otherwise the copy would wait for the steps before it
    sizes = [len(rows) for rows in steps]
    return together.to(device, non_blocking=True).split(sizes)  # type: ignore[no-any-return,no-untyped-call]


class InMemory(NamedTuple):
    """Data in memory.

    :param tensors: tensors, which have a row for each sample
    :param subset: the rows of a ``Subset``; ``None`` for all
    :param arrange: makes a batch from a list of rows of each tensor; ``None`` if that list is the batch
    """

    tensors: Sequence[torch.Tensor]
    subset: torch.Tensor | None = None
    arrange: Callable[[list[torch.Tensor]], Any] | None = None
