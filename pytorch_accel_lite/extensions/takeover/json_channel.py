"""A connection between two processes that carries messages in JSON.

It connects the supervisor of a job with the fork server of each machine. The keys of a message tell its kind:

| from the supervisor | |
|---|---|
| the fields of an ``Order`` | start a process |
| ``kill``, ``signal`` | send a signal to this process |
| ``wake`` | wake the connection closers of all processes: a generation begins |
| ``lease`` | end all processes after this number of seconds without a message |
| ``beat`` | heartbeat of the supervisor |
| ``code`` | the job ends with this exit code |

| from a fork server | |
|---|---|
| ``processes``, ``name`` | this machine joins, with this number of processes |
| ``ended``, ``code`` | this process has ended |
| ``computed`` | the CPU time of each process in seconds; also the heartbeat of the machine |
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

SECONDS_BETWEEN_BEATS = 0.25


class Channel:
    """One end of a connection.

    Args:
        connection: the socket
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""

    @property
    def is_open(self) -> bool:
        """Whether this end has not been closed."""
        return self._connection.fileno() >= 0

    def fileno(self) -> int:
        """Return the descriptor, to wait for messages."""
        return self._connection.fileno()

    def send(self, **message: Any) -> None:
        """Send a message. It is dropped if the other end is gone, which ``receive()`` notices."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for messages and return them, or ``None`` if the other end is closed."""
        received = self._connection.recv(1 << 16)
        if not received:
            return None
        *lines, self._received = (self._received + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
