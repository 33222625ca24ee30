"""Small values of each process that travel at the end of a message that all gather anyway."""

from __future__ import annotations

import numpy as np
import torch

_LENGTH = 8  # bytes
_HEADER = 1 + _LENGTH  # a flag, and how long the value is
_ROOM = 1 << 10
_FLAGGED, _TOO_LONG = 1, 2


class Enclosures:
    """Puts a flag and a value of each process at the end of the messages that they gather.

    Attributes:
        room: number of bytes at the end of a message for the flag and the value, the same on all processes
    """

    def __init__(self) -> None:
        self.room = _ROOM

    def enclose(self, message: torch.Tensor, flag: bool, value: bytes) -> None:
        """Write a flag and a value to the end of a message of bytes; if it is too long, only how long it is."""
        fits = _HEADER + len(value) <= self.room
        content = bytes([flag | _TOO_LONG * (not fits)]) + len(value).to_bytes(_LENGTH, "little")
        if fits:
            content += value
        start = len(message) - self.room
        message.numpy()[start : start + len(content)] = np.frombuffer(content, np.uint8)

    def read_flags(self, messages: torch.Tensor) -> bool | None:
        """Return whether a process has set its flag.

        Args:
            messages: those of all processes, in rows

        Returns:
            ``None``, on all processes, if a value was too long; there is more room now
        """
        flags: list[int] = messages[:, messages.shape[1] - self.room].tolist()
        if max(flags) >= _TOO_LONG:
            longest = max(map(_length, self.cut(messages)))
            self.room = 1 << (_HEADER + longest).bit_length()
            return None
        return max(flags) == _FLAGGED

    def cut(self, messages: torch.Tensor) -> list[bytes]:
        """Return what is at the ends of messages."""
        return [bytes(row) for row in messages.numpy()[:, messages.shape[1] - self.room :]]


def read(enclosed: bytes) -> bytes:
    """Return the value in what was cut off a message."""
    return enclosed[_HEADER : _HEADER + _length(enclosed)]


def _length(enclosed: bytes) -> int:
    return int.from_bytes(enclosed[1:_HEADER], "little")
