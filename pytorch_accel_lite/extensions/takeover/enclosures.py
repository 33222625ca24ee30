"""Small values of each process that travel at the end of a message that all gather anyway."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_HEADER = 8  # bytes that say how long a value is
_ROOM = 1 << 10


class Enclosures:
    """Puts a value of each process at the end of the messages that they gather.

    Attributes:
        room: bytes that are left for it there, the same on all processes
    """

    def __init__(self) -> None:
        self.room = _ROOM

    def enclose(self, message: torch.Tensor, value: bytes) -> None:
        """Write a value to the end of a message of bytes; if it is too long, only how long it is."""
        content = len(value).to_bytes(_HEADER, "little")
        if _HEADER + len(value) <= self.room:
            content += value
        start = len(message) - self.room
        message[start : start + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def read(self, messages: torch.Tensor) -> Sequence[bytes] | None:
        """Return the values of all processes, from the rows of a matrix.

        Returns:
            ``None`` if one was too long, on all processes; there is more room then
        """
        contents = [bytes(row.numpy()) for row in messages[:, messages.shape[1] - self.room :]]
        ends = [_HEADER + int.from_bytes(content[:_HEADER], "little") for content in contents]
        if max(ends) > self.room:
            self.room = 1 << max(ends).bit_length()
            return None
        return [content[_HEADER:end] for content, end in zip(contents, ends, strict=True)]
