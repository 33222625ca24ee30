"""A process that has imported everything, of which those of a job are copies: they begin in milliseconds.

It has no threads, and none of torch's: a copy of those would hang.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pytorch_accel_lite.extensions.takeover import worker
from pytorch_accel_lite.extensions.takeover.channel import Channel

#: What torch, and programs, import when they first need it, which takes seconds.
IMPORTED_LATE = "torch._dynamo", "torch.distributed.nn", "torchmetrics"


class Nursery:
    """Starts processes as told through a channel, and tells how they end.

    :param channel: the connection to the supervisor
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._children: dict[int, tuple[int, int]] = {}  # numbers and ids, by descriptors that tell when they end
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)

    def serve(self) -> dict[str, Any] | None:
        """Start processes until the supervisor ends. In each of them, return what it is to do."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._bury(descriptor)
                    continue
                orders = self._channel.receive()
                if orders is None:
                    return None
                for order in orders:
                    if self._start(order):
                        return order

    def _start(self, order: dict[str, Any]) -> bool:
        """Start a process; return whether this is it."""
        process = os.fork()
        if not process:
            os.setsid()  # so that a signal to the supervisor's group does not reach it, too
            self._channel.close()
            for descriptor in self._children:
                os.close(descriptor)
            return True
        descriptor = os.pidfd_open(process)
        self._children[descriptor] = order["number"], process
        self._poll.register(descriptor, select.POLLIN)
        self._channel.send(number=order["number"], process=process)
        return False

    def _bury(self, descriptor: int) -> None:
        number, process = self._children.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(process, 0)
        self._channel.send(number=number, code=os.waitstatus_to_exitcode(status))


def main(arguments: Sequence[str]) -> None:
    """Serve the supervisor, with the descriptor of the channel to it as the argument."""
    worker.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in IMPORTED_LATE:
        with suppress(ImportError):
            importlib.import_module(name)
    order = Nursery(Channel(socket.socket(fileno=int(arguments[0])))).serve()
    if order is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    worker.die_with_parent()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    worker.run(order["number"], order["port"], order["comes_later"], order["program"])


if __name__ == "__main__":
    main(sys.argv[1:])
