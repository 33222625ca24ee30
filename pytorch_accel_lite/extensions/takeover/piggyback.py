"""Small values of each process, sent at the end of a message that is gathered anyway."""

from __future__ import annotations

import numpy as np
import torch

_LENGTH = 8  # bytes
_HEADER = 1 + _LENGTH  # a flag, and how long the value is
_ROOM = 1 << 10
_FLAGGED, _TOO_LONG = 1, 2


class Piggyback:
    """Attaches a flag and a value of each process to the end of messages that are gathered.

    Attributes:
        room: number of bytes reserved at the end of a message, the same on all processes
    """

    def __init__(self) -> None:
        self.room = _ROOM

    def attach(self, message: torch.Tensor, flag: bool, value: bytes) -> None:
        """Write a flag and a value to the end of a message. A value that is too long is replaced by its length."""
        fits = _HEADER + len(value) <= self.room
        content = bytes([flag | _TOO_LONG * (not fits)]) + len(value).to_bytes(_LENGTH, "little")
        if fits:
            content += value
        start = len(message) - self.room
        message.numpy()[start : start + len(content)] = np.frombuffer(content, np.uint8)

    def read_flags(self, messages: torch.Tensor) -> bool | None:
        """Return whether any process has set its flag.

        Args:
            messages: the messages of all processes, in rows

        Returns:
            ``None``, on all processes, if a value was too long; ``room`` has been increased, so send again
        """
        flags: list[int] = messages[:, messages.shape[1] - self.room].tolist()
        if max(flags) >= _TOO_LONG:
            longest = max(map(_length, self.tails(messages)))
            self.room = 1 << (_HEADER + longest).bit_length()
            return None
        return max(flags) == _FLAGGED

    def tails(self, messages: torch.Tensor) -> list[bytes]:
        """Return the ends of messages, with the flags and values."""
        return [bytes(row) for row in messages.numpy()[:, messages.shape[1] - self.room :]]


def value_of(tail: bytes) -> bytes:
    """Return the value in the end of a message."""
    return tail[_HEADER : _HEADER + _length(tail)]


def _length(tail: bytes) -> int:
    return int.from_bytes(tail[1:_HEADER], "little")
