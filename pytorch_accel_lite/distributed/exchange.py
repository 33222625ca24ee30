"""Objects that each rank gives to all: short ones through the first rank, long ones from each rank to the next.

Torch's ``all_gather_object`` has every rank send every other rank's object on, twice (lengths, then objects): with many
ranks, that many messages for each of them, one after another. Most of what ranks tell each other is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pytorch_accel_lite.base.inspection import distinct_elements
from pytorch_accel_lite.distributed.messages import Message, read_message

_LENGTH = 8  # bytes in which a row begins with the length of its object
_SHORT = 1024 - _LENGTH


def copy_from(giver: int, tensor: torch.Tensor, group: Any) -> None:
    """Copy a rank's values of a tensor to all ranks of a group, in place.

    They are sent as bytes, as gloo knows few types, and from contiguous memory, or it would write beside the elements.
    """
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        dist.broadcast(tensor, giver, group)
        return
    tensor = distinct_elements(tensor)
    is_dense = tensor.is_contiguous() and 0 not in tensor.stride()
    dense = tensor if is_dense else tensor.clone(memory_format=torch.contiguous_format)
    dist.broadcast(dense.reshape(-1).view(torch.uint8), giver, group)
    if dense is not tensor:
        tensor.copy_(dense)


def encode(value: Any) -> torch.Tensor:
    """Return a picklable value as bytes; of a view, its own elements rather than all that it is a view of."""
    message = Message(value)
    encoded = torch.zeros(message.size, dtype=torch.uint8)
    message.write(encoded)
    return encoded


def all_gather_encoded(own: torch.Tensor, members: Sequence[int], place: int, group: Any) -> list[Any]:
    """Return the values that all ranks of a group have encoded, in their order.

    :param members: the ranks of the group in the job
    :param place: the place of this rank among them
    """
    row = torch.zeros(_LENGTH + _SHORT, dtype=torch.uint8)
    row[:_LENGTH] = torch.tensor([len(own)]).view(torch.uint8)
    if len(own) <= _SHORT:
        row[_LENGTH : _LENGTH + len(own)] = own
    table = torch.empty(len(members), len(row), dtype=torch.uint8)
    dist.gather(row, [*table] if place == 0 else None, members[0], group)
    dist.broadcast(table, members[0], group)
    lengths = table[:, :_LENGTH].contiguous().view(torch.int64).flatten().tolist()
    given = [part[_LENGTH : _LENGTH + length] for part, length in zip(table, lengths, strict=True)]
    longer = [other for other, length in enumerate(lengths) if length > _SHORT]
    if len(longer) == 1:  # such as a batch that the first rank has read
        (giver,) = longer
        given[giver] = own if giver == place else torch.empty(lengths[giver], dtype=torch.uint8)
        dist.broadcast(given[giver], members[giver], group)
    elif longer:
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in members]
        dist.all_gather(parts, padded, group)
        given = [part[:length] for part, length in zip(parts, lengths, strict=True)]
    return [read_message(part.clone())[1] for part in given]  # each with memory of its own, aligned for any type
