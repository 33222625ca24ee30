"""Small values of each process, sent at the end of a message that is gathered anyway."""

from __future__ import annotations

from collections.abc import Sequence

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
        message.numpy().data[start : start + len(content)] = content

    def tails(self, messages: torch.Tensor) -> list[bytes]:
        """Return copies of the ends of messages, with the flags and values.

        Args:
            messages: the messages of all processes, in rows
        """
        return [tail.tobytes() for tail in messages.numpy()[:, messages.shape[1] - self.room :]]

    def read_flags(self, tails: Sequence[bytes]) -> bool | None:
        """Return whether any process has set its flag.

        Returns:
            ``None``, on all processes, if a value was too long; ``room`` has been increased, so send again
        """
        flags = max(tail[0] for tail in tails)
        if flags >= _TOO_LONG:
            self.room = 1 << (_HEADER + max(map(_length, tails))).bit_length()
            return None
        return flags == _FLAGGED


def value_of(tail: bytes) -> bytes:
    """Return the value in the end of a message."""
    return tail[_HEADER : _HEADER + _length(tail)]


def _length(tail: bytes) -> int:
    return int.from_bytes(tail[1:_HEADER], "little")
