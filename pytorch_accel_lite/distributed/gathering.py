"""Gathering nested outputs from all processes: the contents of tensors as they are, everything else pickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pytorch_accel_lite.distributed.messages import Message, read_message
from pytorch_accel_lite.distributed.ranks import Ranks


def gather_outputs(
    ranks: Ranks, mine: Any, numbers: Sequence[int], only_first: bool = False
) -> tuple[list[list[int]], list[Any]]:
    """Return the numbers and the nested outputs of all ranks, in rank order.

    Received tensors are views of a buffer. They are sent from the CPU, without their gradients.

    :param numbers: as many on every rank; returned with the number of bytes sent appended
    :param only_first: return the outputs on the first rank only, and an empty list on the others
    """
    is_sent = not (only_first and ranks.rank == 0)
    buffer = _as_bytes(mine) if is_sent else torch.empty(0, dtype=torch.uint8)
    given = ranks.all_gather_numbers([*numbers, len(buffer)])
    received = ranks.all_gather_bytes(buffer, [of_rank[-1] for of_rank in given], only_first)
    outputs = [mine if rank == ranks.rank else read_message(sent, keeps=True)[1] for rank, sent in enumerate(received)]
    return given, outputs


def _as_bytes(value: Any) -> torch.Tensor:
    message = Message(value, of_all_tensors=True)
    buffer = torch.empty(message.size, dtype=torch.uint8)
    message.write(buffer)
    return buffer
